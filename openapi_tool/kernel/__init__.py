"""The kernel's PostgreSQL; only this package names `state.*`."""
