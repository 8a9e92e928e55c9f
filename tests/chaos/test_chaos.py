"""Short runs of the chaos profiles, and tests of their checker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from openapi_tool.local.caller import Caller
from openapi_tool.local.database import prepare_database
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.stack import EmbeddedStack, kernel_schema
from openapi_tool.protocol.dialect import ProtocolVersion
from tests.chaos.checker import (
    DEADLINE_S,
    Journal,
    Outage,
    Probe,
    delays,
    discarded_letters,
    faults_during,
    late_calls,
    most_in_a_minute,
    reactions,
    read_journal,
    readiness,
    refused,
    requested_too_late,
    unready_otherwise,
    waited,
)
from tests.chaos.faults import FAULTS, record_discarded, schedule
from tests.chaos.harness import DATABASE, NotInstalled, PgBouncer, Switch
from tests.chaos.load import AGENT, PROJECT, TOOL
from tests.chaos.load import Journal as JournalFile
from tests.chaos.profiles import start_bouncer
from tests.chaos.run import Options, chaos
from tests.requirements import requirement
from tests.support import dsn_of, make_role


@requirement("chaos.nothing_lost")
async def test_under_every_fault_nothing_is_lost_and_nothing_doubled() -> None:
    options = Options(calls=300, seed=3, every_s=(0.4, 1.2), hit_all_within_s=120)
    with EmbeddedStack() as stack:
        findings = await chaos(stack, options)
    assert (findings["lost"], findings["doubled"], findings["doorbells_missing"]) == ([], [], 0), findings
    assert findings["calls"] >= 300
    assert {kind for kind, fault in findings["faults"].items() if fault["hit"]} == set(FAULTS), findings["faults"]


@pytest.mark.thorough
@requirement("chaos.nothing_lost", "dialects.behaviour")
async def test_a_kernel_of_the_older_protocol_loses_nothing() -> None:
    options = Options(
        calls=60, per_second=30, replicas=2, every_s=(0.1, 0.3), kinds=("kill", "kill_after_upstream", "nats_restart"),
        version=ProtocolVersion.V1R3,
    )  # fmt: skip
    with EmbeddedStack() as stack:
        findings = await chaos(stack, options)
    assert findings["failed"] == [], findings
    assert findings["calls"] >= 30, findings
    assert any(fault["hit"] for fault in findings["faults"].values()), findings["faults"]


@pytest.mark.thorough
@requirement("chaos.nothing_lost", "limits.window")
async def test_under_a_limit_and_a_flood_nothing_is_lost_and_the_limit_holds() -> None:
    options = Options(
        calls=120, per_second=12, replicas=2, every_s=(3.0, 4.0), kinds=("kill", "drain_full"), profile="limits",
        hit_all_within_s=60,
    )  # fmt: skip
    with EmbeddedStack() as stack:
        findings = await chaos(stack, options)
    assert findings["failed"] == [], json.dumps(findings)
    assert findings["calls"] > 500
    assert {kind for kind, fault in findings["faults"].items() if fault["hit"]} == {"kill", "drain_full"}


def test_most_in_a_minute_counts_every_window_of_60_s() -> None:
    assert most_in_a_minute([]) == 0
    assert most_in_a_minute([10.0, 69.9, 70.0, 0.0, 129.8]) == 3
    assert most_in_a_minute([0.0, 60.0]) == 1


@pytest.mark.thorough
@requirement("chaos.nothing_lost")
async def test_the_checker_detects_a_build_that_acknowledges_first() -> None:
    options = Options(
        calls=120,
        every_s=(0.3, 0.6),
        kinds=("kill_before_upstream", "kill_after_upstream"),
        executor="tests.chaos.ack_first",
    )
    with EmbeddedStack() as stack:
        findings = await chaos(stack, options)
    assert findings["lost"], findings


@requirement("chaos.nothing_lost")
def test_delay_after_a_crash_excludes_the_time_that_the_upstream_held_requests() -> None:
    call = {"kind": "call", "query": "quick 1", "upstream_s": 0.5, "placed_at": 100.0}
    rows = {"tc": {"cards": [{"card_id": "c"}], "rows": [{"card_id": "c", "at": 130.0}], "edges": [{}]}}
    held = {"quick 1": [(101.0, 112.0), (105.0, 114.0), (120.0, 123.0)], "quick 2": [(100.0, 130.0)]}
    faults = [{"fault": "freeze", "began": 102.0, "ended": 102.1}, {"fault": "early", "began": 90.0, "ended": 91.0}]
    [killed] = delays(Journal({"tc": call}, [(102.0, 102.0)], faults), rows, held)
    [frozen] = delays(Journal({"tc": call}, [(102.0, 110.0)], faults), rows, held)
    assert (killed.delay_s, killed.held_s, killed.crashes) == (28 - 0.5 - 15, 15.0, 1)
    assert (frozen.delay_s, frozen.held_s) == (28 - 0.5 - 7, 7.0)
    assert killed.faults == ["freeze +0.0 s"]
    [] = delays(Journal({"tc": call}, [(99.0, 99.0), (131.0, 131.0)], faults), rows, held)


@requirement("chaos.nothing_lost")
def test_a_seed_determines_the_schedule_of_faults() -> None:
    def first(seed: int) -> list[tuple[float, str]]:
        return list(islice(schedule(random.Random(seed), (1, 2), tuple(FAULTS)), 40))  # noqa: S311 - no secret

    assert first(5) == first(5)
    assert first(5) != first(6)


# The checker must detect what is wrong in forged journals.


OUTAGE = {"outage": "read-only", "began": 99.0, "since": 100.0, "until": 115.0, "over": 116.0, "deliveries": 7}
CALL = {"tool_call_id": "tc", "doorbell": "t", "kind": "call", "query": "q", "placed_at": 100.0, "published": True}


def _probes(*states: tuple[float, float, bool], replica: int = 0) -> list[dict[str, Any]]:
    """Return a probe every quarter of a second; a state is from, to and the response of `/readyz`."""
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


@requirement("chaos.nothing_lost")
def test_a_replica_that_reacts_in_time_is_not_late(tmp_path: Path) -> None:
    found = _readiness(tmp_path, [OUTAGE, *_probes((90, 105, True), (105, 120, False), (120, 130, True))])
    assert found == {"judged": 1, "slowest_unready_s": 4.75, "slowest_ready_s": 4.0, "late": []}


@requirement("chaos.nothing_lost")
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
def test_a_replica_whose_readiness_is_wrong_is_late(tmp_path: Path, states: list[tuple[float, float, bool]]) -> None:
    good = _probes((90, 101, True), (101, 117, False), (117, 130, True), replica=1)
    [late] = _readiness(tmp_path, [OUTAGE, *good, *_probes(*states)])["late"]
    assert late.startswith("read-only: replica 0 ")


@requirement("chaos.nothing_lost")
def test_a_replica_that_is_ready_only_after_the_next_outage_is_late(tmp_path: Path) -> None:
    second = OUTAGE | {"outage": "second", "began": 118.0, "since": 118.0, "until": 120.0, "over": 120.0}
    found = _readiness(tmp_path, [second, OUTAGE, *_probes((90, 101, True), (101, 120, False), (120, 130, True))])
    assert found["judged"] == 1
    assert found["late"] == ["read-only: replica 0 unready after 0.75 s, not ready again"]


@requirement("chaos.nothing_lost")
def test_readiness_in_an_outage_of_ten_seconds_is_not_judged(tmp_path: Path) -> None:
    found = _readiness(tmp_path, [OUTAGE | {"until": 110.0}, *_probes((90, 130, True))])
    assert (found["judged"], found["late"]) == (0, [])


@requirement("chaos.nothing_lost")
def test_unready_time_outside_of_outages_is_reported() -> None:
    outage = Outage("read-only", 99.0, 100.0, 115.0, 116.0)
    answers = [Probe(0, 90.0, ready=False), Probe(0, 93.0, ready=True), Probe(0, 100.0, ready=False)]
    answers += [Probe(0, 124.0, ready=True), Probe(1, 90.0, ready=True), Probe(1, 130.0, ready=True)]
    assert unready_otherwise([outage], answers) == 3.0 + 2.0


@requirement("chaos.nothing_lost")
def test_only_outages_stop_the_clock_of_a_call(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    again = OUTAGE | {"began": 110.0, "over": 120.0}
    path.write_text("\n".join(json.dumps(line) for line in ({"call": CALL}, OUTAGE, again)))
    journal = read_journal(path)
    assert waited(journal.outages, 100.0, 150.0) == DEADLINE_S
    assert late_calls(journal, {"tc": 150.0}, DEADLINE_S) == set()
    assert late_calls(journal, {"tc": 150.1}, DEADLINE_S) == {"tc"}
    assert late_calls(journal, {}, DEADLINE_S) == set()


@requirement("chaos.nothing_lost")
def test_calls_with_an_early_failure_or_only_a_dead_letter_are_refused() -> None:
    def answered(status: str, after_s: float) -> dict[str, list[dict[str, Any]]]:
        row = {"card_id": "c", "at": 100 + after_s}
        return {"cards": [{"card_id": "c", "status": status}], "rows": [row], "edges": [{}]}

    assert refused(CALL, answered("timeout", 1.0))
    assert not refused(CALL, answered("timeout", 27.0))
    assert not refused(CALL, answered("success", 1.0))
    assert refused(CALL, {"cards": [], "rows": [], "edges": []})
    assert not refused(CALL | {"kind": "unanswerable"}, {"cards": [], "rows": [], "edges": []})


@requirement("chaos.nothing_lost")
def test_a_request_after_the_watchdog_reported_is_too_late() -> None:
    calls = {"tc": CALL, "other": CALL | {"tool_call_id": "other", "query": "r"}}
    requests = [{"body": '{"q": "q"}', "at": 130.5}, {"body": '{"q": "r"}', "at": 129.5}]
    assert requested_too_late(calls, requests) == {"tc"}


@requirement("chaos.nothing_lost")
def test_lost_calls_are_counted_by_the_faults_that_they_met(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    faults = [{"fault": "early", "began": 98.0, "ended": 99.5}, {"fault": "met", "began": 120.0, "ended": 121.0}]
    path.write_text("\n".join(json.dumps(line) for line in ({"call": CALL}, *faults)))
    assert faults_during(read_journal(path), ["tc"]) == {"met": 1}


FULL = OUTAGE | {"outage": "openapi_tool_dead_letters full"}
UNANSWERABLE = CALL | {"kind": "unanswerable", "sequence": 7}
DISCARDED = {
    "time": "1970-01-01T00:01:45.500+00:00",
    "action": "dead_letters.discarded",
    "cause": "full",
    "stream_sequence": 7,
}


def _discarded(folder: Path, call: dict[str, Any], *more: dict[str, Any], line: dict[str, Any]) -> dict[str, float]:
    """Return the calls whose dead letter the checker considers discarded if an executor logged `line`."""
    path = folder / "journal"
    path.write_text("".join(json.dumps(recorded) + "\n" for recorded in ({"call": call}, *more)))
    log = "\n".join(["no JSON", json.dumps({"action": "answered"}), json.dumps(line)])
    record_discarded([log], JournalFile(path))
    return discarded_letters(read_journal(path))


@requirement("chaos.nothing_lost")
def test_a_dead_letter_discarded_for_a_full_stream_is_not_lost(tmp_path: Path) -> None:
    assert _discarded(tmp_path, UNANSWERABLE, FULL, line=DISCARDED) == {"tc": 105.5}


@requirement("chaos.nothing_lost")
@pytest.mark.parametrize(
    ("call", "outage", "line"),
    [
        (UNANSWERABLE | {"kind": "call"}, FULL, DISCARDED),
        (UNANSWERABLE | {"sequence": 8}, FULL, DISCARDED),
        (UNANSWERABLE, OUTAGE, DISCARDED),
        (UNANSWERABLE, FULL, DISCARDED | {"cause": "unavailable"}),
        (UNANSWERABLE, FULL, DISCARDED | {"time": "1970-01-01T00:02:05.000+00:00"}),
    ],
    ids=["answerable", "another command", "nothing was full", "another cause", "after it was full"],
)
def test_a_dead_letter_discarded_for_another_reason_is_lost(
    tmp_path: Path, call: dict[str, Any], outage: dict[str, Any], line: dict[str, Any]
) -> None:
    assert _discarded(tmp_path, call, outage, line=line) == {}


# Short forms of the chaos profiles.


SHORT = Options(replicas=2, calls=8, per_second=4, outage_s=11, rest_s=5, settle_s=10)
SHORT_FORMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cluster": ("cluster", ("quorum_lost",)),
    "failover": ("failover", ("read_only",)),
    "failover, two hosts": ("failover-hosts", ("promotion",)),
    "pgbouncer": ("pgbouncer", ("restart", "stopped")),
    "pgbouncer, paused": ("pgbouncer", ("long_pause",)),
    "clocks": ("clocks", ("kill",)),
    "admin": ("admin", ("durable_deleted", "paused")),
    "shape": ("shape", ("column", "indexes")),
    "files": ("files", ("all", "jina_key")),
}
_LOG_TIMEOUT_S, _POLL_S = 10.0, 0.1


def run_short_form(form: str) -> dict[str, Any] | NotInstalled:
    """Run a short form on its own servers, in its own event loop."""
    profile, kinds = SHORT_FORMS[form]
    with EmbeddedStack() as stack:
        try:
            return asyncio.run(chaos(stack, replace(SHORT, profile=profile, kinds=kinds)))
        except NotInstalled as missing:
            return missing


@requirement("chaos.nothing_lost")
def test_partial_failures_lose_nothing_and_readiness_is_right(subtests: pytest.Subtests) -> None:
    """Runs all short forms at once, as each waits most of its time; beside heavier tests readiness would be late."""
    with ThreadPoolExecutor(len(SHORT_FORMS)) as threads:
        runs = dict(zip(SHORT_FORMS, threads.map(run_short_form, SHORT_FORMS), strict=True))
    for form, findings in runs.items():
        with subtests.test(form):
            if isinstance(findings, NotInstalled):
                pytest.skip(str(findings))
            assert findings["failed"] == [], json.dumps(findings)  # as text: pytest shortens other values
            assert findings["calls"] > 0
            assert all(fault["fired"] for fault in findings["faults"].values()), findings["faults"]


@pytest.mark.thorough
@pytest.mark.skipif(PgBouncer.missing() is not None, reason=str(PgBouncer.missing()))
async def test_prepared_statements_behind_pgbouncer_are_reported_in_one_line() -> None:
    with EmbeddedStack() as stack:
        await prepare_database(stack.postgres.dsn(), DATABASE, kernel_schema())
        await make_role(stack.postgres.dsn(DATABASE))
        settings = {"PG_DSN": dsn_of(stack, DATABASE, at=f"127.0.0.1:{start_bouncer(stack).port}")}
        replicas = [stack.executor(f"replica-{number}", DATABASE, settings) for number in range(2)]
        async with Caller.connect(stack.postgres.dsn(DATABASE), stack.nats.url) as caller:
            await caller.set_up_project(PROJECT, AGENT, [TOOL])
            for number in range(40):
                await caller.place(PROJECT, AGENT, "jina_search", {"query": f"quick {number}"})
        for replica in replicas:
            replica.process.start(lambda: True)  # it may never become ready behind PgBouncer
        lines = await asyncio.gather(*(asyncio.to_thread(_lines_naming_the_setting, replica) for replica in replicas))
        logs = [replica.log_text() for replica in replicas]
    assert any(lines), logs
    assert max(lines) == 1, logs


def _lines_naming_the_setting(replica: ExecutorProcess) -> int:
    """Return the number of log lines that name the setting, once there is one, 0 after 10 s."""
    give_up = time.monotonic() + _LOG_TIMEOUT_S
    while not (lines := replica.log_text().count("postgres.prepared_statements")) and time.monotonic() < give_up:
        time.sleep(_POLL_S)
    return lines


# The switch that stands before PostgreSQL in the failover profile.


@asynccontextmanager
async def _echo(name: bytes) -> AsyncIterator[int]:
    """Start a server that answers every byte with its name; yield its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1):
            writer.write(name)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _server_name(streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bytes:
    """Return the name of the server at the other end, nothing if the connection has ended."""
    streams[1].write(b"?")
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionError):
            return await streams[0].read(1)
    return b""


async def test_a_switch_keeps_open_connections_unless_it_drops_them() -> None:
    async with AsyncExitStack() as exits:
        first, second = [await exits.enter_async_context(_echo(name)) for name in (b"1", b"2")]
        switch = await exits.enter_async_context(Switch(first).listening())
        old = await asyncio.open_connection("127.0.0.1", switch.port)
        assert await _server_name(old) == b"1"
        switch.move(second, drop=False)
        new = await asyncio.open_connection("127.0.0.1", switch.port)
        assert (await _server_name(old), await _server_name(new)) == (b"1", b"2")
        switch.move(first, drop=True)
        assert (await _server_name(old), await _server_name(new)) == (b"", b"")
        for _, writer in (old, new):
            writer.close()
