"""Memory of the process: allocator and garbage collection."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # mallopt(3)
_YOUNG_OBJECTS = 10_000  # new ones that start a collection of the youngest generation; Python's default is 700
_YOUNG_COLLECTIONS = 50  # after which the second generation is collected, too
_SECOND_COLLECTIONS = 50  # after which all generations are, unless few objects are new


def set_malloc_thresholds() -> None:
    """Make glibc allocate blocks of 4 MB and more with mmap, so that freeing returns them to the system.

    By default the threshold rises to the largest block freed, and responses of 10 MB then fragment the heap.
    """
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 4 * 2**20)
        mallopt(_M_TRIM_THRESHOLD, 16 * 2**20)  # free memory at the end of the heap, beyond which it is returned


def collect_garbage_rarely() -> None:
    """Collect less often, and never what exists now: calls create no cycles.

    A collection blocks the event loop for 0.7 to 0.8 us per object that it looks at. That is at most 8 ms for the
    youngest generation. The second one holds what was in use when the youngest was collected. In a flood it takes 10 to
    22 ms, however often it is collected.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_COLLECTIONS, _SECOND_COLLECTIONS)
