"""Benchmark: the cost of a call, compared with a minimal program (docs/performance.md)."""
