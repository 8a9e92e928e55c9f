"""Test case: an attack, the upstream's responses to it, and the limits that the executor must keep."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from openapi_tool.protocol.identity import VERSIONS
from tests.hostile.scene import Scene

MEMORY_BYTES = 512 * 1024 * 1024
"""The memory limit of the chart."""

LAG_S = 0.25
"""Limit of the event loop's lag; generous, since a slow machine multiplies CPU time. The aim is 0.05 s."""

LOG_BYTES = 200_000
LATENCY_S = 15.0
"""Limit of the victim's slowest call; generous, too. `make hostile` limits how much slower it gets."""

Attack = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Case:
    """One attack. `answers` returns complete HTTP responses by name; it is called before any measurement.

    `attack` raises if the attacker sees what it must not; it may run repeatedly. `versions`: protocol versions to which
    it applies.
    """

    name: str
    item: str
    attack: Attack
    answers: Callable[[], Mapping[str, bytes]]
    memory_bytes: int
    lag_s: float
    log_bytes: int
    latency_s: float
    versions: Sequence[str] = VERSIONS


class Cases(dict[str, Case]):
    """Cases by name."""

    def case(
        self,
        item: str,
        answers: Callable[[], Mapping[str, bytes]] = dict,
        *,
        memory_bytes: int = MEMORY_BYTES,
        lag_s: float = LAG_S,
        log_bytes: int = LOG_BYTES,
        latency_s: float = LATENCY_S,
        versions: Sequence[str] = VERSIONS,
    ) -> Callable[[Attack], Attack]:
        """Return a decorator that adds a function as a case; `item` is the number of its finding, or `own`."""

        def add(attack: Attack) -> Attack:
            name = attack.__name__
            self[name] = Case(name, item, attack, answers, memory_bytes, lag_s, log_bytes, latency_s, versions)
            return attack

        return add
