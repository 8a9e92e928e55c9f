"""Formats and rules of the kernel; no I/O."""
