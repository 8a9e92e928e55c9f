"""Case: an attack, the upstream's answers to it, and the bounds that it may not break."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from openapi_tool.protocol.subject import VERSIONS
from tests.hostile.scene import Scene

MEMORY_BYTES = 512 * 1024 * 1024
"""The chart's limit."""

LAG_S = 0.25
"""Wide, since a machine that is busy or slow multiplies CPU time; the aim is 0.05 s, and `make hostile` says how long
it was."""

LOG_BYTES = 200_000
LATENCY_S = 15.0
"""Of the victim's slowest call; wide for the same reason. How much slower it may get is what `make hostile` judges."""

Attack = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Case:
    """One attack. `answers` are whole HTTP responses by name, made before anything is measured.

    `attack` raises where the attacker itself sees what it must not. It may be made more than once. `versions` are the
    protocol versions that have what is attacked.
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
        """Take in a function under its name; `item` is its place in the list of what was found."""

        def take(attack: Attack) -> Attack:
            name = attack.__name__
            self[name] = Case(name, item, attack, answers, memory_bytes, lag_s, log_bytes, latency_s, versions)
            return attack

        return take
