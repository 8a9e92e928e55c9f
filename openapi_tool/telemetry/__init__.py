"""Logs, traces and metrics, each behind the redactor."""
