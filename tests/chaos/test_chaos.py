"""The chaos suite's short run, and proof that its checker would notice."""

from __future__ import annotations

import random
from itertools import islice

from openapi_tool.local.stack import EmbeddedStack
from tests.chaos.checker import Journal, delays
from tests.chaos.faults import FAULTS, schedule
from tests.chaos.run import Options, chaos
from tests.promises import requirement


@requirement(
    "chaos.nothing_lost",
    "fault.kill",
    "fault.kill_before_upstream",
    "fault.kill_after_upstream",
    "fault.kill_after_commit",
    "fault.kill_after_doorbell",
    "fault.sigterm",
    "fault.sigstop",
    "fault.nats_restart",
    "fault.postgres_restart",
    "fault.backends_ended",
    "fault.upstream_429",
    "fault.upstream_503",
    "fault.upstream_hang",
    "fault.upstream_half_body",
    "fault.duplicate",
    "fault.poison",
)
async def test_under_every_fault_nothing_is_lost_and_nothing_doubled() -> None:
    options = Options(calls=650, seed=3, every_s=(0.4, 1.2), hit_all_within_s=120)
    with EmbeddedStack() as stack:
        findings = await chaos(stack, options)
    assert (findings["lost"], findings["doubled"], findings["doorbells_missing"]) == ([], [], 0), findings
    assert findings["calls"] >= 600
    assert {kind for kind, fault in findings["faults"].items() if fault["hit"]} == set(FAULTS), findings["faults"]


@requirement("chaos.checker")
async def test_a_build_that_acknowledges_first_is_found_out() -> None:
    options = Options(
        calls=120,
        every_s=(0.3, 0.6),
        kinds=("kill_before_upstream", "kill_after_upstream"),
        executor="tests.chaos.ack_first",
    )
    with EmbeddedStack() as stack:
        findings = await chaos(stack, options)
    assert findings["lost"], findings


@requirement("chaos.checker")
def test_a_delay_counts_from_the_crash_without_what_the_upstream_held_after_it() -> None:
    call = {"kind": "call", "query": "quick 1", "upstream_s": 0.5, "placed_at": 100.0}
    rows = {"tc": {"cards": [{"card_id": "c"}], "rows": [{"card_id": "c", "at": 130.0}], "edges": [{}]}}
    held = {"quick 1": [(101.0, 112.0), (105.0, 114.0), (120.0, 123.0)], "quick 2": [(100.0, 130.0)]}
    faults = [{"fault": "freeze", "began": 102.0, "ended": 102.1}, {"fault": "early", "began": 90.0, "ended": 91.0}]
    [killed] = delays(Journal({"tc": call}, [(102.0, 102.0)], faults), rows, held)
    [frozen] = delays(Journal({"tc": call}, [(102.0, 110.0)], faults), rows, held)
    assert (killed.delay_s, killed.held_s, killed.crashes) == (28 - 0.5 - 15, 15.0, 1)
    assert (frozen.delay_s, frozen.held_s) == (28 - 0.5 - 7, 7.0)
    assert killed.meanwhile == ["freeze +0.0 s"]
    [] = delays(Journal({"tc": call}, [(99.0, 99.0), (131.0, 131.0)], faults), rows, held)


@requirement("chaos.checker")
def test_a_seed_gives_the_same_schedule_again() -> None:
    def first(seed: int) -> list[tuple[float, str]]:
        return list(islice(schedule(random.Random(seed), (1, 2), tuple(FAULTS)), 40))  # noqa: S311 - no secret

    assert first(5) == first(5)
    assert first(5) != first(6)
