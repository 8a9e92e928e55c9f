"""Limit of open files (`ulimit -n`) of this process, and how many connections fit in it.

If the limit is too low for the settings, fewer connections are used, and a warning says so.
"""

from __future__ import annotations

import resource

from openapi_tool.settings import Settings
from openapi_tool.settings.model import with_values
from openapi_tool.telemetry.health_server import MAX_CONNECTIONS
from openapi_tool.tools.operations import OPERATIONS

_HOSTS = len({operation.host for operation in OPERATIONS})
"""Each host has idle connections of its own, up to `egress.max_connections`."""

_OTHER_FILES = 128  # NATS, traces, DNS, files, pipes


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # the system-wide limit was lowered below the hard limit
        return soft
    return hard


def file_limit_problem(settings: Settings, limit: int) -> str | None:
    """Return a message if the settings may need more files than the limit."""
    needed_by = {
        f"egress.max_connections for each of {_HOSTS} hosts": _HOSTS * settings.egress.max_connections,
        "postgres.pool_size": settings.postgres.pool_size,
        "health server": MAX_CONNECTIONS if settings.health.port else 0,
        "reserve": _OTHER_FILES,
    }
    needed = sum(needed_by.values())
    if limit == resource.RLIM_INFINITY or needed <= limit:
        return None
    demand = ", ".join(f"{name} {number}" for name, number in needed_by.items())
    fitted = fit_to_file_limit(settings, limit)
    return (
        f"this process may open {limit} files and its settings may need {needed} ({demand}), so it opens at most "
        f"{fitted.egress.max_connections} connections to the upstream, {fitted.postgres.pool_size} to the database and "
        f"{health_connections(limit)} to the health server: raise the limit (ulimit -Hn) or lower "
        "egress.max_connections"
    )


def fit_to_file_limit(settings: Settings, limit: int) -> Settings:
    """Return the settings with as many connections as the limit of open files allows; calls wait for one of them.

    Without this, whatever opens a file next would fail: a probe, a name's resolution, any call.
    """
    if limit == resource.RLIM_INFINITY:
        return settings
    # An eighth for the database, another one for the health server, and at most half for the rest; what is left is for
    # connections to the upstream.
    pool = min(settings.postgres.pool_size, max(1, limit // 8))
    reserved = min(_OTHER_FILES, limit // 2) + health_connections(limit) + pool
    connections = max(1, min(settings.egress.max_connections, (limit - reserved) // _HOSTS))
    return settings.model_copy(
        update={
            "egress": with_values(settings.egress, max_connections=connections),
            "postgres": with_values(settings.postgres, pool_size=pool),
        }
    )


def health_connections(limit: int) -> int:
    """Return how many connections the health server may have with this limit of open files."""
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, limit // 8))
