"""Test case: an attack, the upstream's responses to it, and the limits that the executor must keep."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from openapi_tool.protocol.dialect import ProtocolVersion
from tests.hostile.scene import Scene

MEMORY_BYTES = 512 * 1024 * 1024
"""The memory limit of the chart."""

LAG_S = 0.25
"""Limit of event-loop lag in seconds; the aim is 0.05 s, but a slow machine needs several times that."""

LOG_BYTES = 200_000
LATENCY_S = 15.0
"""Limit of the victim's slowest call in seconds; generous, too. `make hostile` also limits how much its p99 grows."""

Attack = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Case:
    """One attack. `answers` returns complete HTTP responses by name; it is called before any measurement.

    `attack` raises if the attacker sees what it must not see; it may run repeatedly. The attack applies to the protocol
    versions `versions`.
    """

    name: str
    item: str
    attack: Attack
    answers: Callable[[], Mapping[str, bytes]]
    memory_bytes: int
    lag_s: float
    log_bytes: int
    latency_s: float
    versions: Sequence[str] = tuple(ProtocolVersion)


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
        versions: Sequence[str] = tuple(ProtocolVersion),
    ) -> Callable[[Attack], Attack]:
        """Return a decorator that adds a function as a case; `item` names the kind of attack."""

        def add(attack: Attack) -> Attack:
            name = attack.__name__
            self[name] = Case(name, item, attack, answers, memory_bytes, lag_s, log_bytes, latency_s, versions)
            return attack

        return add
