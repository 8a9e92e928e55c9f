"""The kernel's NATS: commands in, doorbells and dead letters out."""
