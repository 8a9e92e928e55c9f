"""Limits of the upstream per key and endpoint, shared by all replicas (ADR 9)."""
