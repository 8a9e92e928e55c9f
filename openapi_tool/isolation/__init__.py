"""Computations whose cost a tenant decides, in disposable processes (ADR 12 in docs/internal/decisions.md)."""
