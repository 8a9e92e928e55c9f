"""The kernel's PostgreSQL: one read per call, one write per result; nothing else names `state.*`."""
