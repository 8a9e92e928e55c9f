"""Cost of calls, summed up from result cards on a real PostgreSQL, and the command that shows it."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from openapi_tool.cli import app
from openapi_tool.kernel.inspection import USAGE, reader_grants
from openapi_tool.kernel.queries import By, first_card_id, statement, usage
from openapi_tool.local.caller import Caller
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.protocol.cards import Card, new_id, result_card
from openapi_tool.protocol.errors import RateLimited
from openapi_tool.protocol.records import Attempt
from openapi_tool.tools.result import Item, RenderedResult, ResultFields, ToolOutput, Usage, failure, success
from tests.conftest import AGENT, PROJECT
from tests.requirements import requirement
from tests.support import dsn_of, identity

ACTOR = "tool.openapi"
SINCE, UNTIL = datetime(2020, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)
MANY = int(os.environ.get("USAGE_CARDS", "50000"))
"""Cards in the test of the query plan; docs/performance.md has the figures of a million."""
PROJECTS = 100


def fields_of(cost: Usage, ms: int, *, cached: bool = False, truncated: bool = False, **options: Any) -> ResultFields:
    output = ToolOutput((Item("x"),), {}, cost, cached=cached)
    return success(output, RenderedResult("x", truncated), options.pop("form", "text"), ms, **options)


def limited(cost: Usage, ms: int) -> ResultFields:
    error = RateLimited("Wait.")
    error.tokens, error.requests = cost.tokens, cost.requests
    return failure(error, ms, [Attempt(0.0, "GET", "s.jina.ai", 0), Attempt(1.0, "GET", "s.jina.ai", 1)], session="s2")


def card_of(fields: ResultFields, number: int, tool: str = "jina_search", actor_id: str = ACTOR) -> Card:
    return result_card(
        actor_id=actor_id,
        function_name=tool,
        identity=identity(project_id=PROJECT, agent_id=AGENT, tool_call_id=f"tc_{number}"),
        call_card=None,
        status=fields.status,
        after_execution="suspend",
        result=fields.result,
        error=fields.error,
        tool_output=fields.tool_output,
    )


async def store(caller: Caller, card: Card, project: str = PROJECT, agent: str | None = AGENT, **columns: Any) -> None:
    await caller.database.execute(
        "insert into cards (card_id, tenant_id, content, metadata, tool_call_id, created_at) "
        "values ($1, $2, $3, $4, $5, coalesce($6, now()))",
        columns.get("card_id", card.card_id),
        project,
        card.content,
        card.metadata,
        card.tool_call_id,
        columns.get("created_at"),
    )
    if agent:
        await caller.database.execute(
            "insert into state.agent_inbox (inbox_id, project_id, agent_id, message_type, correlation_id) "
            "values ($1, $2, $3, 'tool_result', $4)",
            new_id("inbox_"),
            project,
            agent,
            card.tool_call_id,
        )


async def store_calls(caller: Caller) -> None:
    """Store three calls with costs, a cached one, and cards that must not be counted."""
    await store(caller, card_of(fields_of(Usage(100, 1), 10, session="s1"), 1))
    await store(caller, card_of(fields_of(Usage(900, 3), 30, truncated=True, form="object"), 2, "jina_read"), agent="b")
    await store(caller, card_of(limited(Usage(5, 2), 20), 3))
    await store(caller, card_of(fields_of(Usage(), 1, cached=True), 4))
    await store(caller, card_of(fields_of(Usage(7_000, 7), 1), 5, actor_id="another"))
    await store(caller, card_of(fields_of(Usage(7_000, 7), 1), 6), project="proj_other")
    old = {"card_id": first_card_id(SINCE - timedelta(days=1)) + "7" * 20}
    await store(caller, card_of(fields_of(Usage(7_000, 7), 1), 7), **old)
    ours = card_of(fields_of(Usage(7_000, 7), 1), 8)
    await store(caller, Card(ours.card_id, PROJECT, "tc_8", ours.content, {**ours.metadata, "type": "tool.call"}))


@pytest.fixture
def dsn(stack: EmbeddedStack, database: str) -> str:
    return stack.postgres.dsn(database)


async def read(dsn: str, by: By) -> list[dict[str, Any]]:
    return await usage(dsn, "v1r4", PROJECT, SINCE, UNTIL, ACTOR, by)


@requirement("usage")
async def test_usage_sums_up_the_cards_of_one_project(caller: Caller, dsn: str) -> None:
    await store_calls(caller)
    total, *rows = await read(dsn, By.TOOL)
    assert total == {
        "key": None,
        "calls": 4,
        "tokens": 1_005,
        "requests": 6,
        "cache_hits": 1,
        "errors": 1,
        "truncated": 1,
        "retries": 1,
        "p50_ms": 10,
        "p95_ms": 30,
        "total": True,
    }
    assert [(row["key"], row["calls"], row["tokens"]) for row in rows] == [
        ("jina_read", 1, 900),
        ("jina_search", 3, 105),
    ]


@requirement("usage")
@pytest.mark.parametrize(
    ("by", "calls"),
    [
        (By.AGENT, {AGENT: 3, "b": 1}),
        (By.SESSION, {"s1": 1, "s2": 1, None: 2}),
        (By.ERROR, {"rate_limited": 1, None: 3}),
        (By.DAY, {"today": 4}),
    ],
)
async def test_usage_is_summed_up_by_agent_session_error_and_day(
    caller: Caller, dsn: str, by: By, calls: dict[str | None, int]
) -> None:
    today = f"{datetime.now(UTC):%Y-%m-%d}"  # not when tests are collected, which may be before midnight
    await store_calls(caller)
    _, *rows = await read(dsn, by)
    assert {"today" if row["key"] == today else row["key"]: row["calls"] for row in rows} == calls


@requirement("usage")
async def test_a_row_with_a_null_key_is_not_the_total(caller: Caller, dsn: str) -> None:
    await store(caller, card_of(fields_of(Usage(1, 1), 1), 1))
    assert [(row["key"], row["total"]) for row in await read(dsn, By.SESSION)] == [(None, True), (None, False)]


@requirement("usage")
@pytest.mark.parametrize(
    "tool_output",
    [
        None,
        {},
        {"usage": 3},
        {"usage": {"tokens": "x"}, "latency_ms": [1], "retries": {}},
        {"usage": {"tokens": 1e30, "requests": -5}, "latency_ms": -1, "retries": 10**13},
    ],
)
async def test_a_figure_that_no_card_records_is_null_not_zero(caller: Caller, dsn: str, tool_output: Any) -> None:
    card = card_of(fields_of(Usage(1, 1), 1), 1)
    await store(
        caller, Card(card.card_id, PROJECT, "tc_1", card.content, {**card.metadata, "tool_output": tool_output})
    )
    total, *_ = await read(dsn, By.TOOL)
    unknown = ("tokens", "requests", "retries", "p50_ms", "p95_ms")
    assert (total["calls"], total["errors"], {total[name] for name in unknown}) == (1, 0, {None})


@requirement("usage")
async def test_usage_without_calls_has_only_the_total(dsn: str) -> None:
    [total] = await read(dsn, By.TOOL)
    assert (total["calls"], total["tokens"]) == (0, None)


@requirement("usage")
async def test_usage_of_a_week_uses_an_index_with_the_cards_of_many_projects(caller: Caller, dsn: str) -> None:
    """With two weeks of cards, no plan scans the whole table."""
    now = datetime.now(UTC)
    start = int((now - timedelta(days=14)).timestamp() * 1000)
    metadata = card_of(fields_of(Usage(100, 1), 10, session="s"), 1).metadata
    await caller.database.execute(
        "insert into cards (card_id, tenant_id, content, metadata, tool_call_id, created_at) "
        "select lpad(to_hex($1::bigint + n * $2::bigint), 12, '0') || lpad(to_hex(n), 20, '7'), "
        "'proj_' || n % $3, $4, $5, 'tc_' || n, to_timestamp(($1 + n * $2) / 1000.0) from generate_series(1, $6) as n",
        start,
        14 * 86_400_000 // MANY,
        PROJECTS,
        {"status": "success", "result": "x" * 200},
        metadata,
        MANY,
    )
    await caller.database.execute("analyze cards")
    values = ("proj_7", first_card_id(now - timedelta(days=7)), first_card_id(now), ACTOR, 1000)
    for by in By:
        [line] = await caller.database.fetchrow(f"explain (analyze, format json) {statement(by)}", *values)
        plan = line if isinstance(line, list) else json.loads(line)
        nodes = list(_nodes(plan[0]["Plan"]))
        assert not [node for node in nodes if node.get("Relation Name") == "cards" and node["Node Type"] == "Seq Scan"]
        if "USAGE_CARDS" in os.environ:
            print(by, round(plan[0]["Execution Time"]), "ms")  # noqa: T201 - requested by USAGE_CARDS
    total, *_ = await usage(dsn, "v1r4", "proj_7", now - timedelta(days=7), now, ACTOR, By.TOOL)
    assert total["calls"] == pytest.approx(MANY / PROJECTS / 2, rel=0.01, abs=2)


def _nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for child in plan.get("Plans", ()) for node in _nodes(child))]


@requirement("usage")
async def test_the_printed_grants_are_enough_for_usage(caller: Caller, database: str, stack: EmbeddedStack) -> None:
    role = f"reader_{database[-8:]}"
    dsn = urlsplit(dsn_of(stack, database, role))
    await caller.database.execute(f"create role {role} login password '{dsn.password}'")
    for grant in reader_grants(role, USAGE):
        await caller.database.execute(grant)
    try:
        for by in By:
            await usage(dsn.geturl(), "v1r4", PROJECT, SINCE, UNTIL, ACTOR, by)
    finally:
        await caller.database.execute(f"drop owned by {role}")
        await caller.database.execute(f"drop role {role}")


Run = Callable[..., Any]


@pytest.fixture
def run(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs the command in a thread, because it starts its own event loop."""
    monkeypatch.setenv("PG_DSN", dsn)
    monkeypatch.setenv("COLUMNS", "200")

    async def run(*arguments: str) -> Any:
        return await asyncio.to_thread(CliRunner().invoke, app, ["usage", "--project", PROJECT, *arguments])

    return run


@requirement("usage")
async def test_the_command_prints_a_table_json_and_csv(caller: Caller, run: Run) -> None:
    await store_calls(caller)
    hostile = card_of(fields_of(Usage(1, 1), 1, session="=1+1\x1b[31m[bold]"), 9)
    await store(caller, hostile)
    table = await run("--by", "session")
    assert table.exit_code == 0
    assert "1,006" in table.stdout
    assert r"=1+1\x1b[31m[bold]" in table.stdout
    assert "\N{EN DASH}" in table.stdout  # stands for calls without a session
    printed = json.loads((await run("--by", "session", "--json")).stdout)
    assert printed["total"]["tokens"] == 1_006
    assert {row["key"] for row in printed["rows"]} == {"s1", "s2", None, "=1+1\x1b[31m[bold]"}
    head, *rows = csv.reader((await run("--by", "session", "--csv")).stdout.splitlines())
    assert head[:3] == ["session", "calls", "tokens"]
    assert "'=1+1\\x1b[31m[bold]" in {row[0] for row in rows}


@requirement("usage")
async def test_the_command_accepts_durations_and_dates(caller: Caller, run: Run) -> None:
    await store_calls(caller)
    tomorrow = f"{datetime.now(UTC) + timedelta(days=1):%Y-%m-%d}"
    for arguments, calls in (
        (("--since", "30m"), 4),
        (("--since", "2020-01-01T00:00:00+02:00", "--until", tomorrow), 4),
        (("--since", "2d", "--until", "1d"), 0),
    ):
        assert json.loads((await run("--json", *arguments)).stdout)["total"]["calls"] == calls
    assert "no calls in this time" in (await run("--since", "2d", "--until", "1d")).stderr


@requirement("usage")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--since", "7 days"), "--since '7 days' is neither a span such as 7d, 24h or 30m nor a date"),
        (("--since", "99999d"), "--since '99999d' is neither"),
        (("--until", "soon"), "--until 'soon' is neither"),
        (("--since", "0001-01-01T00:00+14:00"), "--since '0001-01-01T00:00+14:00' is neither"),
        (("--until", "9999-12-31T23:59:59-14:00"), "--until '9999-12-31T23:59:59-14:00' is neither"),
        (("--project", "a\udcff"), "--project: 'a\\udcff' is no project id"),
        (("--since", "1d", "--until", "2d"), "--since must be before --until"),
        (("--json", "--csv"), "--json and --csv exclude each other"),
    ],
)
async def test_an_invalid_option_is_named(run: Run, arguments: tuple[str, ...], says: str) -> None:
    found = await run(*arguments)
    assert found.exit_code == 2
    assert says in found.stderr


@requirement("usage")
async def test_an_unreachable_database_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_DSN", "postgresql://127.0.0.1:1/kernel")
    found = await run()
    assert found.exit_code == 2
    assert "127.0.0.1:1" in found.stderr


@requirement("usage")
async def test_the_plot_is_a_png_file(caller: Caller, run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra [plot] is not installed")
    await store_calls(caller)
    file = tmp_path / "usage.png"
    assert (await run("--plot", str(file))).exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    refused = await run("--plot", str(tmp_path / "missing" / "usage.png"))
    assert (refused.exit_code, "cannot write" in refused.stderr) == (2, True)


@requirement("usage")
async def test_a_plot_without_matplotlib_names_the_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found = await run("--plot", "usage.png")
    assert (found.exit_code, "pip install 'openapi-tool[plot]'" in found.stderr) == (2, True)


def test_a_card_id_begins_with_its_time() -> None:
    assert (
        first_card_id(datetime.now(UTC) - timedelta(minutes=1))
        < new_id()
        < first_card_id(datetime.now(UTC) + timedelta(minutes=1))
    )
    assert first_card_id(datetime(1960, 1, 1, tzinfo=UTC)) == "0" * 12
