"""Tool definitions, arguments and results: pure values and rules, no I/O."""
