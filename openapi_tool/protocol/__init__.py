"""The wire of tool commands and reports (protocol v1r4): pure values and rules, no I/O."""
