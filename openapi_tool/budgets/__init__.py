"""Budgets of sessions, agents and projects in requests and tokens, shared by all replicas (ADR 10)."""
