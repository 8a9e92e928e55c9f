"""Limits of a worker and of one task; the chart computes the pod's memory limit from the first (`helm/`)."""

from __future__ import annotations

MEMORY_BYTES = 128 * 2**20
"""Address space (RLIMIT_AS) of a worker. 35 MB of it are the interpreter and its libraries."""

POD_BYTES = MEMORY_BYTES + 16 * 2**20
"""Memory limit of the pod per worker: its child's address space, and its own unshared pages."""

CPU_S = 1
"""CPU seconds of one task (RLIMIT_CPU, whole seconds). The largest valid definition takes a hundredth of it."""

WALL_S = 5.0
"""Seconds from sending a task to its answer, the start of a worker included, then the worker is killed.

Five times the CPU limit, so that a task fails by it only if the worker is stopped or gets no CPU."""

OPEN_FILES = 16
"""Open files of a worker."""
