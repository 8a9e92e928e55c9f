"""Memory of the process: allocator and garbage collection."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress


def set_malloc_thresholds() -> None:
    """Make glibc allocate blocks of 4 MB and more with mmap, so that freeing returns them to the system.

    By default the threshold rises to the largest block freed, and responses of 10 MB then fragment the heap.
    """
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 4 * 2**20)  # M_MMAP_THRESHOLD
        mallopt(-1, 16 * 2**20)  # M_TRIM_THRESHOLD


def collect_garbage_rarely() -> None:
    """Collect less often, and never long-lived objects: calls create hardly any cycles.

    A collection blocks the event loop for about 0.8 us per young object.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)
