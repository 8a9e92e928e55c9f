"""Short forms of the chaos profiles, and proof that the checker would notice a late reaction."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from openapi_tool.local.caller import Caller, prepare_database
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.stack import EmbeddedStack, kernel_schema
from tests.chaos.harness import DATABASE, Absent
from tests.chaos.load import AGENT, PROJECT, TOOL
from tests.chaos.profiles.pgbouncer import start_bouncer
from tests.chaos.run import Options, chaos
from tests.chaos.servers import PgBouncer
from tests.role import dsn_of, make_role

SHORT = Options(replicas=2, calls=8, per_second=4, outage_s=11, rest_s=1, settle_s=10)
SHORT_FORMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cluster": ("cluster", ("quorum_lost",)),
    "failover": ("failover", ("read_only",)),
    "failover, two hosts": ("failover-hosts", ("promotion",)),
    "pgbouncer": ("pgbouncer", ("restart", "stopped")),
    "pgbouncer, paused": ("pgbouncer", ("long_pause",)),
    "clocks": ("clocks", ("kill",)),
    "admin": ("admin", ("durable_deleted", "paused")),
}
_NAMED_WITHIN_S, _POLL_S = 10.0, 0.1
WRONG_SETTING = "pgbouncer, wrong setting"

EXPECTED_FAILURES = {
    "cluster": "Silence: a probe with one round trip each second, unready after it fails",
    "failover": "Read-only: looks ready, fetches, bills, cannot answer",
    "failover, two hosts": "On 25006 the pool drops its connections",
    "pgbouncer, paused": "Unready within 6 s of its start: the health check waits twice for timeout_s",
    "clocks": "Deadlines count on the server's clock (+28 s: every call refused as too late, silently, ready)",
    "admin": "The durable's configuration is compared when something looks odd; paused means unready",
    WRONG_SETTING: "PgBouncer that refuses prepared statements: one line that names our setting",
}
"""What fails because of the executor. Whoever mends one takes its line away: an expected failure that passes fails."""


def _form(name: str) -> Any:
    reason = EXPECTED_FAILURES.get(name)
    mark = [pytest.mark.xfail(reason=reason, strict=True, raises=AssertionError)] if reason else []
    return pytest.param(name, marks=mark, id=name)


@pytest.mark.parametrize("form", [_form(name) for name in SHORT_FORMS])
async def test_partial_failure_loses_nothing_and_readiness_tells_the_truth(form: str) -> None:
    profile, kinds = SHORT_FORMS[form]
    options = replace(SHORT, profile=profile, kinds=kinds)
    with EmbeddedStack() as stack:
        try:
            findings = await chaos(stack, options)
        except Absent as absent:
            pytest.skip(str(absent))
    assert findings["failed"] == [], findings
    assert findings["calls"] > 0
    assert all(fault["fired"] for fault in findings["faults"].values()), findings["faults"]


@pytest.mark.parametrize("_", [_form(WRONG_SETTING)])
@pytest.mark.skipif(PgBouncer.missing() is not None, reason=str(PgBouncer.missing()))
async def test_prepared_statements_behind_pgbouncer_are_named_in_one_line(_: str) -> None:
    with EmbeddedStack() as stack:
        await prepare_database(stack.postgres.dsn(), DATABASE, kernel_schema())
        await make_role(stack.postgres.dsn(DATABASE))
        settings = {"PG_DSN": dsn_of(stack, DATABASE, at=f"127.0.0.1:{start_bouncer(stack).port}")}
        replicas = [stack.executor(f"replica-{number}", DATABASE, settings) for number in range(2)]
        async with Caller.connect(stack.postgres.dsn(DATABASE), stack.nats.url) as caller:
            await caller.furnish(PROJECT, AGENT, [TOOL])
            for number in range(40):
                await caller.place(PROJECT, AGENT, "jina_search", {"query": f"quick {number}"})
        for replica in replicas:
            replica.process.start(lambda: True)  # what it cannot use may keep it from serving
        lines = await asyncio.gather(*(asyncio.to_thread(_lines_naming_the_setting, replica) for replica in replicas))
        logs = [replica.log_text() for replica in replicas]
    assert any(lines), logs
    assert max(lines) == 1, logs


def _lines_naming_the_setting(replica: ExecutorProcess) -> int:
    """How many there are, as soon as there are any."""
    give_up = time.monotonic() + _NAMED_WITHIN_S
    while not (lines := replica.log_text().count("postgres.prepared_statements")) and time.monotonic() < give_up:
        time.sleep(_POLL_S)
    return lines
