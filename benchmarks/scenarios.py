"""Benchmark scenarios by name, and the profiles that contain them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from benchmarks.calls import Ask, Tool

Shape = Literal["closed", "open", "burst", "backlog"]
Profile = Literal["quick", "standard", "full"]
DEFAULT_CONCURRENCY = 64
IN_FLIGHT = 96
"""More calls in flight than slots, so that the executor is the bottleneck and no slot stays free."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of load, measured alternately on floor and executor.

    `closed` keeps `in_flight` calls running, `open` sends `per_second`, `burst` sends all at once,
    `backlog` sends `waiting` before anything runs and measures the first `calls` of them. The first
    `warm` calls of a process are not measured. `runs` is the maximum of rounds. `min_answer_s` is the setting;
    with 0 results are not delayed.
    """

    name: str
    shape: Shape
    calls: int
    ask: Ask = field(default_factory=Ask)
    in_flight: int = IN_FLIGHT
    per_second: float = 0.0
    concurrency: int = DEFAULT_CONCURRENCY
    replicas: int = 1
    waiting: int = 0
    warm: int = 150
    runs: int = 100
    min_answer_s: float = 0.0


CPU = Scenario("search-2k-50ms", "closed", 1000)
SINGLE = Scenario("single", "closed", 400, Ask(delay_ms=0), in_flight=1)
HELD = replace(SINGLE, name="single-held", min_answer_s=0.06)
STEADY = Scenario("steady-100", "open", 600, per_second=100)
BURST = Scenario("burst-500", "burst", 500)
IMMEDIATE = Scenario("search-2k-0ms", "closed", 600, Ask(delay_ms=0))
SLOW = Scenario("search-2k-500ms", "closed", 400, Ask(delay_ms=500))
SLOWEST = Scenario("search-2k-5s", "open", 200, Ask(delay_ms=5_000), per_second=12, warm=24, runs=2)
WAITING = Scenario(
    "search-2k-5s-400-running",
    "open",
    14_400,
    Ask(delay_ms=5_000),
    per_second=80,
    concurrency=512,
    runs=5,
)


def _sized(tool: Tool, size: int, name: str, calls: int) -> Scenario:
    return Scenario(f"{tool}-{name}-50ms", "closed", calls, Ask(tool, size=size))


SIZES = (
    _sized("reader", 2_000, "2k", 600),
    _sized("search", 50_000, "50k", 400),
    _sized("reader", 50_000, "50k", 400),
    replace(_sized("search", 1_000_000, "1m", 100), warm=64),
    replace(_sized("reader", 1_000_000, "1m", 100), warm=64),
)
REPLICAS = tuple(
    replace(CPU, name=f"replicas-{replicas}", replicas=replicas, in_flight=64 * replicas + 32, warm=300, calls=1500)
    for replicas in (1, 2, 4)
)
DEPTHS = tuple(
    Scenario(f"waiting-{waiting}", "backlog", 1_500, waiting=waiting, warm=300) for waiting in (2_500, 10_000, 100_000)
)
SHALLOW = Scenario("waiting-10", "closed", 1_500, in_flight=DEFAULT_CONCURRENCY + 10, warm=300)
PROJECTS = tuple(
    Scenario(f"projects-{projects}", "closed", 1_500, Ask(projects=projects), warm=300) for projects in (1, 100, 5_000)
)
_STANDARD = (CPU, SINGLE, HELD, STEADY, BURST, IMMEDIATE, SLOW, SLOWEST, *SIZES)

PROFILES: dict[Profile, tuple[Scenario, ...]] = {
    "quick": (replace(CPU, calls=400),),
    "standard": _STANDARD,
    "full": (
        *(replace(scenario, calls=2_000) if scenario is SINGLE else scenario for scenario in _STANDARD),
        WAITING,
        *REPLICAS,
        SHALLOW,
        *DEPTHS,
        *PROJECTS,
    ),
}
DEFAULT_RUNS: dict[Profile, int] = {"quick": 8, "standard": 5, "full": 5}
