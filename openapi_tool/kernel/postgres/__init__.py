"""The kernel's rows in PostgreSQL; only this package names `state.*`."""
