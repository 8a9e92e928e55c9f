"""Tool calls without a kernel: tools, callers, stored texts and usage of the doors that agents call directly."""
