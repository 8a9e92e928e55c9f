"""Formats and rules of the kernel, and the errors of every call; no I/O."""
