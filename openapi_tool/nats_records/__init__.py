"""Records in NATS that executors and gateways share: limits, budgets, session key, switches, statistics."""
