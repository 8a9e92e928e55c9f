"""`openapi-tool call` and `demo`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from openapi_tool.bootstrap import NAME, build_bootstrap
from openapi_tool.bus.dead_letters import STREAM as DEAD_LETTERS
from openapi_tool.bus.options import BusOptions, NatsOptions
from openapi_tool.cli.common import INTERRUPTED, fail, json_default, print_status
from openapi_tool.cli.embedded import executor_settings, extra_needed, running
from openapi_tool.cli.kernels import connected_once
from openapi_tool.cli.options import UpstreamChoice
from openapi_tool.cli.tables import cell
from openapi_tool.concurrency import interruptible
from openapi_tool.environment import DEFAULT_AUTH_ENV
from openapi_tool.kernel.failures import located, translate_connection_errors
from openapi_tool.local.caller import ERRORS, Caller, ResultRows, open_database, prepare_database
from openapi_tool.local.dev import DevError, RequestedCall, running_dev, save_call
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.options import PoolOptions, PostgresOptions
from openapi_tool.protocol.cards import as_model_reads
from openapi_tool.protocol.dialect import DEFAULT_VERSION, ProtocolVersion
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.identity import default_durable, parse_command_subject
from openapi_tool.settings import PREFIX, load_settings
from openapi_tool.settings.loading import empty_servers
from openapi_tool.telemetry.logs import printable_lines
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.tools.placeholders import Secret
from openapi_tool.tools.problems import counted

if TYPE_CHECKING:
    from openapi_tool.local.stack import CompletedCall, EmbeddedStack


_FAILED = 1
_NO_RESULT = 3


def call(
    tool: str,
    *,
    args: str,
    project: str | None,
    agent: str | None,
    channel: str,
    protocol: ProtocolVersion | None,
    timeout: float,
    yes: bool,
    as_json: bool,
) -> None:
    """Call a tool as the kernel does, and print what the model would read."""
    requested = RequestedCall(tool, project, agent, channel, anywhere=yes)
    redactor = Redactor()
    try:
        pool, bus, redactor = _kernel(protocol)
        outcome = asyncio.run(_call(pool, bus, requested, _arguments(args), timeout))
    except DevError as error:
        fail(redactor.text(str(error)))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        typer.echo(redactor.text(json.dumps(outcome.as_object(), default=json_default)))
    elif outcome.content:
        typer.echo(printable_lines(redactor.text(as_model_reads(outcome.content))))
    _print_outcome(outcome, redactor)


def _arguments(text: str) -> dict[str, Any]:
    try:
        if text == "-":
            text = sys.stdin.read()
        elif text.startswith("@"):
            text = Path(text[1:]).read_text(encoding="utf-8")
        arguments = orjson.loads(text)
    except OSError as error:
        raise DevError(f"--args: the file {text[1:]!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DevError(f"--args: must be JSON, @FILE or -: {error}") from None
    if not isinstance(arguments, dict):
        raise DevError("--args: the arguments must be one JSON object")
    return arguments


def _kernel(protocol: ProtocolVersion | None) -> tuple[PoolOptions, BusOptions, Redactor]:
    for problem in empty_servers(os.environ):
        raise DevError(problem)
    dsn, servers = (os.environ.get(name) for name in ("PG_DSN", "NATS_SERVERS"))
    if not dsn and not servers:
        try:
            stack = running_dev(protocol)
        except DevError as error:
            raise DevError(f"{error}; start one with `openapi-tool dev`, or set PG_DSN and NATS_SERVERS") from None
        pool = PoolOptions(stack.protocol, PostgresOptions(Secret(stack.pg_dsn)))
        bus = BusOptions(NatsOptions(servers=(stack.nats_servers,)), NAME)
        return pool, bus, Redactor([os.environ.get(DEFAULT_AUTH_ENV, "")])
    if not dsn or not servers:
        raise DevError("set both PG_DSN and NATS_SERVERS, or neither for the dev stack")
    settings = load_settings({"postgres": {"dsn": dsn}, "nats": {"servers": servers}})
    bootstrap = build_bootstrap(settings.of_version(protocol), os.environ)
    return bootstrap.pool, bootstrap.bus, bootstrap.redactor


@dataclass(frozen=True, slots=True)
class _CallOutcome:
    """Outcome of a published call; `why` there is none. `times` are milliseconds since it was published."""

    placed: PlacedCall
    answer: ResultRows | None
    times: Mapping[str, int | None]
    why: str = ""

    @property
    def content(self) -> Mapping[str, Any]:
        return (self.answer.card.get("content") if self.answer else None) or {}

    @property
    def repaired(self) -> list[str]:
        result = self.content.get("result")  # an object, if the definition's `result_format` is one
        metadata = (self.answer.card.get("metadata") if self.answer else None) or {}
        output = result if isinstance(result, dict) else metadata.get("tool_output") or {}
        names: list[str] = output.get("repaired", [])
        return names

    def as_object(self) -> dict[str, Any]:
        return {
            "status": self.content.get("status"),
            "content": as_model_reads(self.content) if self.content else None,
            "result": self.content.get("result"),
            "error": self.content.get("error"),
            "repaired": self.repaired,
            "inbox_row": self.answer and self.answer.inbox_row,
            "doorbell": self.answer and self.answer.doorbell,
            "trace_id": self.placed.trace_id,
            "tool_call_id": self.placed.tool_call_id,
            "times": self.times,
        }


async def _call(
    pool: PoolOptions, bus: BusOptions, requested: RequestedCall, arguments: Any, timeout_s: float
) -> _CallOutcome:
    try:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(connected_once(bus))
            with translate_connection_errors():
                database = await stack.enter_async_context(open_database(pool.dsn, pool.postgres.timeout_s))
            caller = Caller(database, client, pool.version)
            return await _outcome(caller, await save_call(caller, requested, arguments), timeout_s)
    except Unavailable as error:
        raise DevError(located(str(error), pool)) from None
    except ERRORS as error:
        raise DevError(f"cannot use PostgreSQL or NATS: {type(error).__name__}: {error}") from None


async def _outcome(caller: Caller, placed: PlacedCall, timeout_s: float) -> _CallOutcome:
    try:
        await interruptible(caller.publish(placed))
        answer = await interruptible(caller.result_or_row(placed, timeout_s))
        saved = await caller.card(placed.project_id, placed.tool_call_id, "tool.call")
    except ERRORS as error:
        why = f"none within {timeout_s:g} s" if type(error) is TimeoutError else f"{type(error).__name__}: {error}"
        return _CallOutcome(placed, None, {"placed": 0}, why)
    committed = answer.inbox_row["created_at"] - saved["created_at"]  # both by the database's clock
    doorbell = None if answer.doorbell_at is None else round((answer.doorbell_at - placed.placed_at) * 1000)
    times = {"placed": 0, "committed": round(committed.total_seconds() * 1000), "doorbell": doorbell}
    return _CallOutcome(placed, answer, times)


def _print_outcome(outcome: _CallOutcome, redactor: Redactor) -> None:
    placed, content = outcome.placed, outcome.content
    if outcome.answer is None:
        durable = default_durable(placed.version, parse_command_subject(placed.subject).target)
        fail(
            f"no result of {placed.tool_call_id}: {redactor.text(outcome.why)}. Check that an executor consumes "
            f"{placed.subject} (default durable {durable}), its log, what calls wait for (openapi-tool top), and the "
            f"dead letters in the stream {DEAD_LETTERS}.",
            _NO_RESULT,
        )
    if outcome.answer.doorbell is None:
        print_status("no doorbell followed the result: a worker would only find it by its inbox scan")
    if outcome.repaired:
        print_status(f"arguments that were repaired or dropped: {redactor.text(', '.join(outcome.repaired))}")
    steps = " → ".join(name + (f" {ms} ms" if ms else "") for name, ms in outcome.times.items() if ms is not None)
    print_status(f"{content.get('status')}: {steps} (tool_call_id {placed.tool_call_id}, trace {placed.trace_id})")
    if content.get("status") != "success":
        error = content.get("error") or {}
        retryable = "retryable" if error.get("retryable") else "not retryable"
        fail(redactor.text(f"{error.get('code')}: {error.get('message')} ({retryable})"), _FAILED)


_DOUBLE_NOTE = (
    "The upstream is a double on loopback that answers with recorded real responses. For the real one: "
    "JINA_API_KEY=… openapi-tool demo --upstream real"
)


def demo(*, upstream: UpstreamChoice, protocol: ProtocolVersion | None, as_json: bool) -> None:
    """Run a few calls on an embedded stack, and show every step of each."""
    calls = _run(upstream, protocol or DEFAULT_VERSION, quiet=as_json)
    if as_json:
        for call in calls:
            sys.stdout.write(json.dumps(asdict(call), default=json_default) + "\n")
    else:
        _show(calls, upstream)
    if any(call.status != "success" for call in calls):
        raise typer.Exit(1)


def mcp_demo(*, upstream: UpstreamChoice, as_json: bool) -> None:
    """Run a few calls of an MCP client, and show what a model reads."""
    if not find_spec("mcp"):
        fail("the demo of this door needs two extras: pip install 'openapi-tool[local,gateway]'")
    with extra_needed("the demo"):
        from openapi_tool.local import mcp_demo as local  # noqa: PLC0415 - needs the extras [local] and [gateway]
        from openapi_tool.local.servers import ServerFailed  # noqa: PLC0415 - the same
    if upstream is UpstreamChoice.REAL and DEFAULT_AUTH_ENV not in os.environ:
        fail(f"{DEFAULT_AUTH_ENV} is not set; --upstream real needs a key")
    try:
        played = asyncio.run(local.play(upstream.value))
    except ServerFailed as failure:
        fail(str(failure))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        for call in played.calls:
            sys.stdout.write(json.dumps(asdict(call)) + "\n")
    else:
        console = Console(highlight=False)
        console.print(cell(f"MCP {played.protocol} over stdio; tools: {', '.join(played.tools)}"))
        for call in played.calls:
            title = cell(f"{call.tool} {json.dumps(dict(call.arguments))}{': an error' if call.failed else ''}")
            console.print(Panel(Text(printable_lines(call.text)), title=title, title_align="left"))
        if upstream is UpstreamChoice.DOUBLE:
            console.print(_DOUBLE_NOTE)
    if any(call.failed for call in played.calls):
        raise typer.Exit(1)


def _run(upstream: UpstreamChoice, protocol: ProtocolVersion, *, quiet: bool) -> list[CompletedCall]:
    with extra_needed("the demo"):
        from openapi_tool.local import stack as local  # noqa: PLC0415 - needs the extra [local]
        from openapi_tool.local.servers import ServerFailed  # noqa: PLC0415 - the same

    async def prepare(stack: EmbeddedStack) -> None:
        await prepare_database(stack.postgres.dsn(), local.DATABASE, local.kernel_schema(protocol))

    more = {
        f"{PREFIX}TOOLS__MAX_RESULT_CHARS": str(local.MAX_RESULT_CHARS),
        f"{PREFIX}PROTOCOL__VERSION": protocol.value,
    }
    settings = executor_settings(upstream) | more
    stack = local.EmbeddedStack()
    try:
        with running(stack, local.DATABASE, prepare, settings, quiet=quiet) as executor:
            return asyncio.run(local.play(stack, executor, upstream.value, protocol))
    except ServerFailed as failure:
        fail(str(failure))
    except TimeoutError:
        fail("a call got no result within a minute")
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _show(calls: list[CompletedCall], upstream: UpstreamChoice) -> None:
    console = Console(highlight=False)
    for call in calls:
        console.print(Panel(_table(call), title=cell(f"{call.tool_name}: {call.status}"), title_align="left"))
        console.print(
            Panel(Text(printable_lines(call.content or json.dumps(call.error))), title="what the model reads")
        )
    if upstream is UpstreamChoice.DOUBLE:
        console.print(_DOUBLE_NOTE)


def _table(call: CompletedCall) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    output = call.tool_output
    rows: dict[str, Any] = {
        "arguments": dict(call.arguments),
        "command": call.command["subject"],
        "headers": call.command["headers"],
        "body": call.command["body"],
        **_upstream_rows(call.upstream_requests),
        "cost": ", ".join(counted(output["usage"][f"{noun}s"], noun) for noun in ("token", "request")),
        "cut": f"yes, {counted(output['artifact_ref']['chars'], 'character')} in all"
        if output.get("truncated")
        else "no",
        "inbox row": {name: call.inbox_row[name] for name in ("inbox_id", "message_type", "status", "payload")},
        "doorbell": call.doorbell["subject"],
        "  headers ": call.doorbell["headers"],
        "  body ": call.doorbell["data"],
        "trace id": call.trace_id,
        "time": ", ".join(f"{name} {ms} ms" for name, ms in {"placed": 0, **call.steps}.items()),
    }
    for name, value in rows.items():
        text = value if isinstance(value, str) or value is None else json.dumps(value, default=json_default)
        table.add_row(name, cell(text or "-"))
    return table


def _upstream_rows(requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not requests:  # a cached response
        return {"upstream": "not asked"}
    first, *others = requests
    return {
        "upstream": f"{first['method']} https://{first['host']}{first['target']}",
        "  headers": {**(first["headers"] or {}), "Authorization": "Bearer (not shown)"},
        "  body": first["body"],
        **{f"  and {number}": sent["body"] or sent["target"] for number, sent in enumerate(others, start=2)},
    }
