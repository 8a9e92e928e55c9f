"""Limits of a worker process and of one task: memory, CPU, time and sizes.

Most follow from the setting `egress.max_response_bytes`, the size of the largest response that a task reads. The Helm
chart repeats `pod_bytes` for the memory limit of the pod.
"""

from __future__ import annotations

from math import ceil

_MB = 2**20

_INTERPRETER_BYTES = 64 * _MB
"""Address space of a worker without a task, 35 MB, and what a task on a definition needs."""

_BYTES_PER_BODY_BYTE = 20
"""Address space that the longest response takes, read and rendered, per byte of it.

A page whose text has one emoji takes four bytes a character; `tests/unit/test_isolation.py` reads such ones."""

_UNSHARED_BYTES = 16 * _MB
"""Memory of a worker that it shares with no child."""

_MESSAGE_BYTES = 8 * _MB
"""Size of a task or an answer without the text of a response: a call card, a definition and facts are smaller."""

_MASKED_FACTOR = 2
"""Masking makes a text longer: from 6 characters, the shortest secret, to 10."""

_BODY_BYTES_PER_CPU_S = 5_000_000
"""A third of the rate at which the costliest legitimate response found is read: 10 MB in 0.6 s."""

_MIN_CPU_S = 2  # of any task
_CPU_FACTORS = {"search_text": 2}
"""By what the CPU time of some tasks is multiplied: a question in a stored text of 10 MB takes 2 s."""

_WALL_FACTOR = 5
"""Longest time of a task per CPU second that it may take, the start of a worker included.

Only a worker that gets hardly any CPU, or is stopped, exceeds it."""

OPEN_FILES = 16
"""Open files of a worker."""


def cpu_s(max_response_bytes: int, task: str = "") -> int:
    """Return the CPU seconds of one task (RLIMIT_CPU, whole seconds)."""
    return _CPU_FACTORS.get(task, 1) * max(_MIN_CPU_S, ceil(max_response_bytes / _BODY_BYTES_PER_CPU_S))


def wall_s(max_response_bytes: int) -> float:
    """Return the seconds from sending a task to its answer, after which the worker is killed."""
    return float(_WALL_FACTOR * cpu_s(max_response_bytes))


def memory_bytes(max_response_bytes: int) -> int:
    """Return the address space (RLIMIT_AS) of a worker that reads responses of this size."""
    return _INTERPRETER_BYTES + _BYTES_PER_BODY_BYTE * max_response_bytes


def pod_bytes(max_response_bytes: int) -> int:
    """Return the pod's memory limit per worker: its child's address space, and its own unshared pages."""
    return memory_bytes(max_response_bytes) + _UNSHARED_BYTES


def task_bytes(max_response_bytes: int) -> int:
    """Return the maximum of a task's argument."""
    return max_response_bytes + _MESSAGE_BYTES


def answer_bytes(max_response_bytes: int) -> int:
    """Return the maximum of a task's result."""
    return _MASKED_FACTOR * max_response_bytes + _MESSAGE_BYTES
