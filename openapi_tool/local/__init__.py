"""Embedded stack for demonstrations and tests: PostgreSQL, NATS, a Jina double, and a simulated kernel."""
