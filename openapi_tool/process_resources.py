"""Limits of a long-running process: open files and memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource

from openapi_tool.settings import Settings
from openapi_tool.telemetry.health_server import MAX_CONNECTIONS

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _LARGE_BYTES = -3, -1, 4 * 2**20  # mallopt(3)
_OTHER_FILES = 128
"""Descriptors for NATS, traces, DNS, files, pipes."""

_YOUNG_OBJECTS = 20_000


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit, and return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # the system-wide limit was lowered below the hard limit
        return soft
    return hard


def file_limit_problem(settings: Settings, limit: int) -> str | None:
    """Return a message with demand and remedy if the settings may need more files than the limit, else None."""
    parts = {
        "egress.max_connections": settings.egress.max_connections,
        "postgres.pool_size": settings.postgres.pool_size,
        "health server": MAX_CONNECTIONS if settings.health.port else 0,
        "reserve": _OTHER_FILES,
    }
    needed = sum(parts.values())
    if limit == resource.RLIM_INFINITY or needed <= limit:
        return None
    demand = ", ".join(f"{name} {number}" for name, number in parts.items())
    return (
        f"this process may open {limit} files and its settings may need {needed} ({demand}): "
        "raise the limit (ulimit -Hn) or lower egress.max_connections"
    )


def set_malloc_thresholds() -> None:
    """Make glibc allocate blocks of 4 MB and more with mmap, so that freeing returns them to the system.

    By default glibc raises that threshold to the largest block ever freed, and responses of 10 MB then fragment the
    heap. Other C libraries do not.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, 4 * _LARGE_BYTES)


def collect_garbage_rarely() -> None:
    """Exclude long-lived objects from garbage collection and run it less often: calls create hardly any cycles.

    A collection blocks the event loop for about 0.8 us per young object.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 50, 50)
