"""The kernel's PostgreSQL: one statement loads a call, one commits its result; only this package names `state.*`."""
