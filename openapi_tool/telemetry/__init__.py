"""Logs, traces, metrics and health; secrets are masked before anything is written."""
