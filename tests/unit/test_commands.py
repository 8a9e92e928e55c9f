"""The command line: `check` and tables."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson
import pytest
from nats.js.api import ConsumerConfig
from rich.console import Console
from typer.testing import CliRunner, Result

from openapi_tool.assembly import upstream_transport
from openapi_tool.cli import app, serve, top
from openapi_tool.cli.common import Rows, output, redraw
from openapi_tool.local.caller import STREAM, Caller
from openapi_tool.local.executor import LoopbackResolver
from openapi_tool.local.stack import EmbeddedStack
from tests.requirements import requirement

UNREACHABLE = {"PG_DSN": "postgresql://user:the-word@127.0.0.1:1/kernel", "NATS_SERVERS": "nats://127.0.0.1:1"}


@requirement("cli.check")
def test_every_unusable_dependency_is_reported_at_once() -> None:
    result = CliRunner().invoke(app, ["check"], env={**UNREACHABLE, "JINA_API_KEY": None})
    assert result.exit_code == 1
    lines = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    assert list(lines) == ["settings", "postgres", "nats", "JINA_API_KEY"]
    assert lines["settings"] == "ok"
    assert lines["postgres"] == (
        "PostgreSQL at 127.0.0.1:1 (database kernel): connection refused; check postgres.dsn (PG_DSN)"
    )
    assert lines["nats"] == (
        "cannot connect to NATS at 127.0.0.1:1: connection refused; check nats.servers (NATS_SERVERS)"
    )
    assert lines["JINA_API_KEY"] == "is not set; set it or JINA_API_KEY_FILE"
    assert "the-word" not in result.output


@requirement("cli.check")
def test_json_has_the_same_outcomes() -> None:
    result = CliRunner().invoke(app, ["check", "--json"], env={**UNREACHABLE, "JINA_API_KEY": None})
    output = json.loads(result.stdout)
    assert (result.exit_code, output["ok"], output["remarks"]) == (1, False, [])
    assert [name for name, problem in output["checks"].items() if problem] == ["postgres", "nats", "JINA_API_KEY"]


@requirement("cli.check")
def test_a_setting_without_effect_is_a_remark() -> None:
    environment = {**UNREACHABLE, "OPENAPI_TOOL_COLOUR": "blue"}
    remark = "OPENAPI_TOOL_COLOUR is no setting and has no effect"
    assert f"openapi-tool: {remark}\n" in CliRunner().invoke(app, ["check"], env=environment).stderr
    assert json.loads(CliRunner().invoke(app, ["check", "--json"], env=environment).stdout)["remarks"] == [remark]


@requirement("cli.check")
def test_a_key_that_cannot_be_masked_is_a_remark() -> None:
    result = CliRunner().invoke(app, ["check", "--json"], env={**UNREACHABLE, "JINA_API_KEY": "ab"})
    assert json.loads(result.stdout)["remarks"] == [
        "JINA_API_KEY is too short or too common a word to be masked; set another one"
    ]


@pytest.mark.parametrize(("variable", "value"), [("PG_DSN", ""), ("OPENAPI_TOOL__EXECUTOR__CONCURENCY", "8")])
@requirement("cli.check")
def test_invalid_settings_are_reported_without_connecting(variable: str, value: str) -> None:
    environment = {**UNREACHABLE, variable: value}
    result = CliRunner().invoke(app, ["check"], env=environment)
    assert (result.exit_code, result.stdout) == (2, "")
    as_json = CliRunner().invoke(app, ["check", "--json"], env=environment)
    assert (as_json.exit_code, as_json.stderr) == (2, "")
    output = json.loads(as_json.stdout)
    assert (output["ok"], f"openapi-tool: {output['checks']['settings']}\n") == (False, result.stderr)


DURABLE = "durable_that_is_checked"
TOOL = {
    "tool_name": "bad_search",
    "target_subject": "cg.v1r4.{project_id}.{channel_id}.cmd.tool.jina.search",
    "options": {"jina": {"mode": "search", "params": {"num": 99}}},
}


@pytest.fixture
async def environment(stack: EmbeddedStack, database: str, caller: Caller) -> AsyncIterator[Mapping[str, str]]:
    """Return settings of an executor that could serve; its durable exists."""
    jetstream = caller.client.jetstream()
    filter_subject = "cg.v1r4.*.*.cmd.tool.jina.>"
    await jetstream.add_consumer(STREAM, ConsumerConfig(durable_name=DURABLE, filter_subject=filter_subject))
    yield {
        "PG_DSN": stack.postgres.dsn(database),
        "NATS_SERVERS": stack.nats.url,
        "OPENAPI_TOOL__NATS__DURABLE": DURABLE,
        "JINA_API_KEY": "a-key-of-the-test",
    }
    await jetstream.delete_consumer(STREAM, DURABLE)


async def checked(environment: Mapping[str, str], *flags: str) -> Result:
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, ["check", *flags], env=environment))


@requirement("cli.check")
async def test_usable_dependencies_are_described(environment: Mapping[str, str]) -> None:
    result = await checked(environment)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "settings: ok",
        "postgres: ok; without TLS",
        f"nats: ok; without TLS; stream {STREAM}; durable {DURABLE}, 0 pending",
        "JINA_API_KEY: ok",
    ]
    output = json.loads((await checked({**environment, "OPENAPI_TOOL__NATS__DURABLE": "new"}, "--json")).stdout)
    assert output["ok"]
    assert output["details"]["nats"][-1] == "durable new is created at the start"


@requirement("cli.check")
async def test_a_durable_that_delivers_nothing_is_named(environment: Mapping[str, str], caller: Caller) -> None:
    pause = orjson.dumps({"pause_until": "2099-01-01T00:00:00Z"})
    await caller.client.request(f"$JS.API.CONSUMER.PAUSE.{STREAM}.{DURABLE}", pause)
    result = await checked(environment)
    assert result.exit_code == 1
    assert f"nats: durable {DURABLE} is paused until 2099-01-01T00:00:00Z; resume it" in result.stdout


@requirement("cli.check")
async def test_a_definition_whose_calls_would_fail_is_named(environment: Mapping[str, str], caller: Caller) -> None:
    await caller.add_tool("proj_a", TOOL)
    await caller.add_tool("proj_b", {**TOOL, "options": {"jina": {"mode": "search"}}})
    assert (await checked(environment)).exit_code == 0  # no project is named
    result = await checked(environment, "--project", "proj_a", "--project", "proj_b")
    assert result.exit_code == 1
    assert "definitions of proj_b: ok; 1 definition" in result.stdout
    problem = "bad_search: options.jina.params.num: must be an integer from 1 to 20"
    assert f"definitions of proj_a: {problem}" in result.stdout
    own = {"OPENAPI_TOOL__PROTOCOL__PROJECT": "proj_a"}
    assert f"definitions of proj_a: {problem}" in (await checked({**environment, **own})).stdout


@requirement("cli.check")
@pytest.mark.parametrize(("trusted", "port"), [(True, None), (False, None), (True, 1)])
async def test_the_upstream_option_connects_as_calls_do(
    stack: EmbeddedStack,
    environment: Mapping[str, str],
    monkeypatch: pytest.MonkeyPatch,
    trusted: bool,  # noqa: FBT001
    port: int | None,
) -> None:
    def transport(bootstrap: Any, _: None) -> Any:
        return upstream_transport(bootstrap, LoopbackResolver(port or stack.upstream.port))

    monkeypatch.setattr(serve, "upstream_transport", transport)
    stack.upstream.clear_requests()
    trust = {"SSL_CERT_FILE": str(stack.certificates.ca)} if trusted else {}
    result = await checked({**environment, **trust}, "--upstream")
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("upstream: ")]
    if trusted and port is None:
        assert (result.exit_code, line) == (0, "upstream: ok; r.jina.ai; s.jina.ai")
        assert {request["headers"].get("authorization") for request in stack.upstream.requests()} <= {None}
    else:
        kind, remedy = ("ConnectError", "DNS") if port else ("certificate", "egress.ca_file (SSL_CERT_FILE)")
        assert result.exit_code == 1
        assert f".jina.ai cannot be reached ({kind}); check {remedy}" in line


NAMES = ("jina_search_of_the_documents", "jina_search_of_the_products", "x")
NUMBERS = ("20,006", "1", "126,000")
WHY = "options.jina.params.num: must be at most 20"
REPLICA = {
    "instance": "vm-19346",
    "rate": 12.5,
    "p50_ms": 96,
    "p95_ms": 126,
    "failed": 0,
    "running": 3,
    "waiting": 0,
    "held": 0,
    "oldest_held_s": 0.0,
}


def drawn(rows: Rows, width: int) -> str:
    written = io.StringIO()
    Console(file=written, width=width).print(rows)
    return written.getvalue()


def table() -> Rows:
    rows = Rows("tool", "tokens", "cache_hits", "what is wrong", title="calls", numbers=0, footed=True)
    for name, number in zip(NAMES, NUMBERS, strict=True):
        rows.add(name, number, number, WHY)
    return rows


def without_folds(text: str) -> str:
    """Return the joined text of each column: the cell parts between the same two bars."""
    lines = [line.split("│") for line in text.splitlines() if line.startswith("│")]
    return " ".join("".join(cell.strip() for cell in column) for column in zip(*lines, strict=True))


@pytest.mark.parametrize("width", [30, 40, 50, 60, 70, 80, 100, 120, 200])
@requirement("cli.help")
def test_no_width_truncates_a_cell(width: int) -> None:
    text = drawn(table(), width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert all(number in text for number in NUMBERS)
    whole = without_folds(text) if "│" in text else text.replace("\n", "")
    assert all(name in whole for name in NAMES)
    assert WHY.replace(" ", "") in whole.replace(" ", "")


@requirement("cli.help")
def test_a_very_narrow_terminal_gets_a_line_for_each_cell() -> None:
    lines = drawn(table(), 40).splitlines()
    assert lines[:4] == ["calls", f"tool: {NAMES[0]}", "tokens: 20,006", "cache_hits: 20,006"]


@requirement("cli.help")
def test_output_to_a_file_is_not_folded_unless_columns_is_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    output().print(table())
    natural = capsys.readouterr().out
    assert all(f" {name} " in natural for name in NAMES)
    assert len(natural.splitlines()) == 9
    monkeypatch.setenv("COLUMNS", "40")
    output().print(table())
    assert capsys.readouterr().out == drawn(table(), 40)


@pytest.mark.parametrize("width", [40, 80, 120])
@requirement("cli.top")
def test_top_folds_no_number_and_no_short_name(width: int) -> None:
    written = io.StringIO()
    Console(file=written, width=width).print(top.shown([REPLICA]))
    words = re.split(r"[\s│┃:]+", written.getvalue())
    assert {"vm-19346", "126", "12.5", "running"} <= set(words)


def of_kernel(protocol: str, unacknowledged: int) -> dict[str, Any]:
    return {"protocol": protocol, "pending": 7, "unacknowledged": unacknowledged, "max_unacknowledged": 100}


@requirement("cli.top", "dialects.isolated")
def test_top_shows_each_kernel_of_a_process() -> None:
    calls = [{"protocol": protocol, "project": "p", "tool": "t", "calls": 3} for protocol in ("v1r3", "v1r4")]
    replica = {**REPLICA, "tools": calls, "kernels": [of_kernel("v1r3", 100), of_kernel("v1r4", 2)]}
    written = io.StringIO()
    Console(file=written, width=120).print(top.shown([replica, {**replica, "instance": "vm-2"}]))
    shown = written.getvalue()
    rows = [line.split() for line in shown.replace("│", " ").splitlines() if " p " in line]
    assert rows == [["v1r3", "p", "t", "6"], ["v1r4", "p", "t", "6"]]
    assert "durable of v1r3: 7 commands not delivered, 100 not settled" in shown
    assert "durable of v1r4: 7 commands not delivered, 2 not settled" in shown
    assert top.problems([replica]) == [
        "the durable of v1r3 has 100 unsettled commands, its maximum: see durable.full in the log"
    ]


@requirement("cli.limits")
def test_problems_name_the_limits_for_which_calls_wait() -> None:
    limit = {"variable": "KEY", "endpoint": "search", "waiting": 2, "paused_s": 3.5, "offline": True}
    warning = {"action": "key.blocked", "count": 1, "message": "blocked", "ago_s": 61.0}
    assert top.problems([{**REPLICA, "upstream_limits": [limit], "warnings": [warning]}]) == [
        "vm-19346: the search limit of KEY cannot be shared: see limits.not_shared in the log",
        "vm-19346: the upstream answered 429: search requests with KEY pause for 3.5 s",
        "vm-19346: 2 calls wait for the search limit of KEY: see openapi-tool limits",
        "vm-19346: key.blocked, 1 time, last 61 s ago: blocked",
    ]


@requirement("cli.limits", "cli.top")
async def test_updates_are_printed_one_after_the_other_into_a_file_until_sigterm() -> None:
    file, drawn = io.StringIO(), iter(["second", "third"])

    async def draw() -> str:
        if (text := next(drawn, None)) is None:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(9)
        return str(text)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a background job of a shell
    try:
        with pytest.raises(KeyboardInterrupt):
            await redraw(Console(file=file), "first", draw, 0.01)
    finally:
        signal.signal(signal.SIGINT, before)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    assert file.getvalue().split() == ["first", "second", "third"]
