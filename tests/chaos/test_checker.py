"""The checker of partial failures: forged journals in which something is wrong must be found."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.checker import asked_too_late, late_calls, meanwhile, read_journal, refused
from tests.chaos.periods import DEADLINE_S, Outage, Probe, reactions, readiness, unready_otherwise, waited
from tests.promises import requirement

OUTAGE = {"outage": "read-only", "began": 99.0, "since": 100.0, "until": 115.0, "over": 116.0, "fetched": 7}
CALL = {"tool_call_id": "tc", "agent_turn_id": "t", "kind": "call", "query": "q", "placed_at": 100.0, "published": True}


def _probes(*states: tuple[float, float, bool], replica: int = 0) -> list[dict[str, Any]]:
    """Answers every quarter of a second; each state is from, to and what `/readyz` says."""
    return [
        {"probe": replica, "at": since + quarter / 4, "ready": ready, "why": ""}
        for since, until, ready in states
        for quarter in range(round((until - since) * 4))
    ]


def _readiness(folder: Path, lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    path = folder / "journal"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    journal = read_journal(path)
    return readiness(reactions(journal.outages, journal.probes))


@requirement("chaos.checker")
def test_a_replica_that_reacts_in_time_is_not_found(tmp_path: Path) -> None:
    found = _readiness(tmp_path, [OUTAGE, *_probes((90, 105, True), (105, 120, False), (120, 130, True))])
    assert found == {"judged": 1, "slowest_unready_s": 4.75, "slowest_ready_s": 4.0, "late": []}


@requirement("chaos.checker")
@pytest.mark.parametrize(
    "states",
    [
        [(90, 107, True), (107, 116, False), (116, 130, True)],
        [(90, 130, True)],
        [(90, 101, True), (101, 111, False), (111, 111.25, True), (111.25, 116, False), (116, 130, True)],
        [(90, 101, True), (101, 122.5, False), (122.5, 130, True)],
        [(90, 101, True), (101, 130, False)],
        [(90, 99, True), (117, 130, True)],
    ],
    ids=["unready too late", "never unready", "flapping", "ready too late", "never ready again", "not observed"],
)
def test_a_replica_whose_readiness_is_wrong_is_found(tmp_path: Path, states: list[tuple[float, float, bool]]) -> None:
    good = _probes((90, 101, True), (101, 117, False), (117, 130, True), replica=1)
    [late] = _readiness(tmp_path, [OUTAGE, *good, *_probes(*states)])["late"]
    assert late.startswith("read-only: replica 0 ")


@requirement("chaos.checker")
def test_what_becomes_ready_only_after_the_next_outage_began_is_found(tmp_path: Path) -> None:
    second = OUTAGE | {"outage": "second", "began": 118.0, "since": 118.0, "until": 120.0, "over": 120.0}
    found = _readiness(tmp_path, [second, OUTAGE, *_probes((90, 101, True), (101, 120, False), (120, 130, True))])
    assert found["judged"] == 1
    assert found["late"] == ["read-only: replica 0 unready after 0.75 s, not ready again"]


@requirement("chaos.checker")
def test_a_period_of_ten_seconds_is_not_judged(tmp_path: Path) -> None:
    found = _readiness(tmp_path, [OUTAGE | {"until": 110.0}, *_probes((90, 130, True))])
    assert (found["judged"], found["late"]) == (0, [])


@requirement("chaos.checker")
def test_what_is_unready_although_calls_can_be_finished_is_reported() -> None:
    outage = Outage("read-only", 99.0, 100.0, 115.0, 116.0)
    answers = [Probe(0, 90.0, ready=False), Probe(0, 93.0, ready=True), Probe(0, 100.0, ready=False)]
    answers += [Probe(0, 124.0, ready=True), Probe(1, 90.0, ready=True), Probe(1, 130.0, ready=True)]
    assert unready_otherwise([outage], answers) == 3.0 + 2.0


@requirement("chaos.checker")
def test_an_outage_stops_the_clock_of_a_call_and_nothing_else_does(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    again = OUTAGE | {"began": 110.0, "over": 120.0}
    path.write_text("\n".join(json.dumps(line) for line in ({"call": CALL}, OUTAGE, again)))
    journal = read_journal(path)
    assert waited(journal.outages, 100.0, 150.0) == DEADLINE_S
    assert late_calls(journal, {"tc": 150.0}, DEADLINE_S) == set()
    assert late_calls(journal, {"tc": 150.1}, DEADLINE_S) == {"tc"}
    assert late_calls(journal, {}, DEADLINE_S) == set()


@requirement("chaos.checker")
def test_a_failure_before_the_time_was_up_and_a_dead_letter_alone_are_refusals() -> None:
    def answered(status: str, after_s: float) -> dict[str, list[dict[str, Any]]]:
        row = {"card_id": "c", "at": 100 + after_s}
        return {"cards": [{"card_id": "c", "status": status}], "rows": [row], "edges": [{}]}

    assert refused(CALL, answered("timeout", 1.0))
    assert not refused(CALL, answered("timeout", 27.0))
    assert not refused(CALL, answered("success", 1.0))
    assert refused(CALL, {"cards": [], "rows": [], "edges": []})
    assert not refused(CALL | {"kind": "unanswerable"}, {"cards": [], "rows": [], "edges": []})


@requirement("chaos.checker")
def test_a_request_after_the_watchdog_has_answered_is_found() -> None:
    calls = {"tc": CALL, "other": CALL | {"tool_call_id": "other", "query": "r"}}
    requests = [{"body": '{"q": "q"}', "at": 130.5}, {"body": '{"q": "r"}', "at": 129.5}]
    assert asked_too_late(calls, requests) == {"tc"}


@requirement("chaos.checker")
def test_lost_calls_are_counted_by_the_faults_that_they_met(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    faults = [{"fault": "early", "began": 98.0, "ended": 99.5}, {"fault": "met", "began": 120.0, "ended": 121.0}]
    path.write_text("\n".join(json.dumps(line) for line in ({"call": CALL}, *faults)))
    assert meanwhile(read_journal(path), ["tc"]) == {"met": 1}
