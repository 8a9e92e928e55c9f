"""The kernel's rows in PostgreSQL; only this package names the tables of the schema `state`."""
