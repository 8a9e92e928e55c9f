"""The embedded stack for people and tests: PostgreSQL, NATS, a Jina double, and a player of the kernel."""
