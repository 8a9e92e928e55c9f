"""Logs, traces, metrics and health."""
