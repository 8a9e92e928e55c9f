"""Memory of a process that serves for weeks: allocator and garbage collection."""

from __future__ import annotations

import contextlib
import ctypes
import gc

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _LARGE_BYTES = -3, -1, 4 * 2**20  # mallopt(3)


def give_large_memory_back() -> None:
    """Make glibc allocate blocks of 4 MB and more with mmap, so that freeing returns them to the system.

    By default glibc raises that threshold to the largest block ever freed, and responses of 10 MB then fragment the
    heap. Other C libraries do not.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, 4 * _LARGE_BYTES)


def collect_garbage_rarely() -> None:
    """Exclude long-lived objects from garbage collection and run it less often: calls create hardly any cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
