"""Limit of open files, and the demand of the settings."""

from __future__ import annotations

import resource

from openapi_tool.settings import Settings
from openapi_tool.telemetry.health_server import MAX_CONNECTIONS

_RESERVE = 128
"""Descriptors for everything else: NATS, traces, DNS, files, pipes."""


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard limit, and return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # the system-wide limit was lowered below the hard limit
        return soft
    return hard


def shortage(settings: Settings, limit: int) -> str | None:
    """Return a message with demand and remedy if the settings may need more files than the limit, else None."""
    parts = {
        "egress.max_connections": settings.egress.max_connections,
        "postgres.pool_size": settings.postgres.pool_size,
        "health server": MAX_CONNECTIONS if settings.health.port else 0,
        "reserve": _RESERVE,
    }
    needed = sum(parts.values())
    if limit == resource.RLIM_INFINITY or needed <= limit:
        return None
    demand = ", ".join(f"{name} {number}" for name, number in parts.items())
    return (
        f"this process may open {limit} files and its settings may need {needed} ({demand}): "
        "raise the limit (ulimit -Hn) or lower egress.max_connections"
    )
