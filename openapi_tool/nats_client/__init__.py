"""Connections to NATS: client, login, clock of the server; for the kernel door and for shared state."""
