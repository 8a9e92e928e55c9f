"""Limits of the upstream's keys (ADR 9), and budgets of projects, agents and sessions (ADR 10)."""
