"""NATS: receives commands, publishes doorbells and dead letters."""
