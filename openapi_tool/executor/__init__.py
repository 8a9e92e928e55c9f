"""Executor: runs one call from command to settlement."""
