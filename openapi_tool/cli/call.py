"""`openapi-tool call`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import typer

from openapi_tool.bootstrap import NAME, build_bootstrap
from openapi_tool.cli.kernel import connected_once
from openapi_tool.cli.output import INTERRUPTED, fail, is_terminal, json_default, print_status
from openapi_tool.concurrency.cancellation import interruptible
from openapi_tool.environment import DEFAULT_AUTH_ENV, DEV_VARIABLE
from openapi_tool.kernel.postgres.failures import located, translate_connection_errors
from openapi_tool.local.caller import ERRORS, Caller, ResultRows, open_database
from openapi_tool.local.dev_state import DevError, SeveralStacks, running_dev
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.local.requested_call import RequestedCall, publish_call, save_call
from openapi_tool.nats_client.options import BusOptions, NatsOptions
from openapi_tool.options.postgres import PoolOptions, PostgresOptions
from openapi_tool.protocol.cards import as_model_reads
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.subjects import default_durable, parse_command_subject
from openapi_tool.settings import load_settings
from openapi_tool.settings.model import with_values
from openapi_tool.settings.variables import empty_servers
from openapi_tool.telemetry.printable import printable_lines
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.tools.secret_variables import Secret

_FAILED = 1
_NO_RESULT = 3
_INBOX = "_INBOX"  # of clients without one of their own


def call(
    tool: str,
    *,
    args: str,
    project: str | None,
    agent: str | None,
    channel: str,
    timeout: float,
    yes: bool,
    as_json: bool,
) -> None:
    """Call a tool as the kernel does, and print what the model would read."""
    requested = RequestedCall(tool, project, agent, channel, anywhere=yes)
    redactor = Redactor()
    try:
        pool, bus, redactor = _kernel()
        outcome = asyncio.run(_call(pool, bus, requested, _arguments(args), timeout))
    except DevError as error:
        fail(redactor.text(str(error)))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        typer.echo(redactor.text(json.dumps(outcome.as_object(), default=json_default)))
    elif outcome.content:
        # In a terminal the text stands beside the status lines, so that none of its lines may begin like one.
        indent = "  " if is_terminal() else ""
        typer.echo(indent + printable_lines(redactor.text(as_model_reads(outcome.content)), indent))
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


def _kernel() -> tuple[PoolOptions, BusOptions, Redactor]:
    for problem in empty_servers(os.environ):
        raise DevError(problem)
    dsn = os.environ.get("PG_DSN")
    servers = os.environ.get("NATS_SERVERS")
    if os.environ.get(DEV_VARIABLE) or (not dsn and not servers):
        try:
            stack = running_dev()
        except SeveralStacks:
            raise
        except DevError as error:
            raise DevError(f"{error}; start one with `openapi-tool dev`, or set PG_DSN and NATS_SERVERS") from None
        pool = PoolOptions(stack.protocol, PostgresOptions(Secret(stack.pg_dsn)))
        bus = BusOptions(NatsOptions(servers=(stack.nats_servers,)), NAME)
        return pool, bus, Redactor([os.environ.get(DEFAULT_AUTH_ENV, "")])
    if not dsn or not servers:
        raise DevError("set both PG_DSN and NATS_SERVERS, or neither for the dev stack")
    settings = load_settings({"postgres": {"dsn": dsn}, "nats": {"servers": servers}})
    bootstrap = build_bootstrap(settings, os.environ)
    # The kernel's login, to which the inbox of the executor is denied (docs/least-privilege.md).
    bus = replace(bootstrap.bus, nats=with_values(bootstrap.bus.nats, inbox_prefix=_INBOX), listed_by="")
    return bootstrap.pool, bus, bootstrap.redactor


@dataclass(frozen=True, slots=True)
class _CallOutcome:
    """Outcome of a call; `why` there is none. `times` are milliseconds since it was published; none if that failed."""

    placed: PlacedCall
    answer: ResultRows | None
    times: Mapping[str, int | None]
    why: str = ""

    @property
    def _card(self) -> Mapping[str, Any]:
        return self.answer.card if self.answer else {}

    @property
    def content(self) -> Mapping[str, Any]:
        return self._card.get("content") or {}

    @property
    def repaired(self) -> list[str]:
        result = self.content.get("result")  # an object, if the definition's `result_format` is one
        metadata = self._card.get("metadata") or {}
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
            placed = await save_call(caller, requested, arguments, bus.where)
            try:
                await interruptible(publish_call(caller, placed, bus.where))
            except Unavailable as error:
                return _CallOutcome(placed, None, {}, str(error))
            return await _outcome(caller, placed, timeout_s)
    except Unavailable as error:
        raise DevError(located(str(error), pool)) from None
    except ERRORS as error:
        raise DevError(f"cannot use PostgreSQL or NATS: {type(error).__name__}: {error}") from None


async def _outcome(caller: Caller, placed: PlacedCall, timeout_s: float) -> _CallOutcome:
    try:
        answer = await interruptible(caller.result_or_row(placed, timeout_s))
        saved = await caller.card(placed.project_id, placed.tool_call_id, "tool.call")
    except ERRORS as error:
        why = f"{type(error).__name__}: {error}"
        if type(error) is TimeoutError:  # none of its subclasses, which drivers raise
            why = f"none within {timeout_s:g} s"
        return _CallOutcome(placed, None, {"placed": 0}, why)
    committed = answer.inbox_row["created_at"] - saved["created_at"]  # both by the database's clock
    doorbell = None if answer.doorbell_at is None else round((answer.doorbell_at - placed.placed_at) * 1000)
    times = {"placed": 0, "committed": round(committed.total_seconds() * 1000), "doorbell": doorbell}
    return _CallOutcome(placed, answer, times)


def _print_outcome(outcome: _CallOutcome, redactor: Redactor) -> None:
    placed, content = outcome.placed, outcome.content
    if outcome.answer is None and not outcome.times:
        fail(
            f"no stream has confirmed the command of {placed.tool_call_id}: {redactor.text(outcome.why)}\n"
            "openapi-tool check says what NATS lacks, openapi-tool nats durable what the stream holds. "
            "The call is saved; without its command no executor runs it.",
            _NO_RESULT,
        )
    if outcome.answer is None:
        durable = default_durable(placed.version, parse_command_subject(placed.subject).target)
        fail(
            f"no result of {placed.tool_call_id}: {redactor.text(outcome.why)}\n"
            f"openapi-tool inspect {placed.tool_call_id} --project {placed.project_id} says where it is, "
            f"openapi-tool top what calls wait for. Does an executor consume {placed.subject} (default durable "
            f"{durable})?",
            _NO_RESULT,
        )
    if outcome.answer.doorbell is None:
        print_status("no doorbell followed the result: a worker would only find it by its inbox scan")
    if outcome.repaired:
        print_status(f"arguments that were repaired or dropped: {redactor.text(', '.join(outcome.repaired))}")
    reached = {step: ms for step, ms in outcome.times.items() if ms is not None}
    steps = " → ".join(f"{step} {ms} ms" if ms else step for step, ms in reached.items())
    status = content.get("status")
    if status != "success":  # the message is on standard output
        error = content.get("error") or {}
        retryable = "retryable" if error.get("retryable") else "not retryable"
        status = redactor.text(f"{status} with {error.get('code')} ({retryable})")
    print_status(f"{status}: {steps} (tool_call_id {placed.tool_call_id}, trace {placed.trace_id})")
    if status != "success":
        raise typer.Exit(_FAILED)
