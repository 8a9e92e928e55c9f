"""Fuzz targets by name; each takes bytes and raises an exception for a failure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.fuzz import address, answer, arguments, command, socket, whole
from tests.fuzz.corpora import mutate

Mutate = Callable[[bytes, int, int, Callable[[bytes, int], bytes]], bytes]

TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "command": command.check,
    "arguments": arguments.check,
    "address": address.check,
    "answer": answer.check,
    "whole": whole.check,
    "socket": socket.check,
}
MAX_BYTES: Mapping[str, int] = dict.fromkeys(TARGETS, 4_096) | {"whole": whole.MAX_BYTES, "socket": socket.MAX_BYTES}
"""Maximum size of an input."""

MUTATORS: Mapping[str, Mutate] = {"whole": mutate}
"""Targets whose inputs are mutated by structure."""

REPLAYED: Mapping[str, tuple[Callable[[], None], Callable[[], float]]] = {"whole": (whole.forget, whole.spent_s)}
"""Targets whose slow and large inputs are measured without instrumentation, with functions that clear caches and return
the CPU time."""
