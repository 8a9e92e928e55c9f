"""`openapi-tool call`: call a tool as a kernel does: the one of the settings, or that of `dev`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import typer
from pydantic import ValidationError
from pydantic_settings import SettingsError as UnreadableVariable

from openapi_tool.bootstrap import NAME, build_bootstrap
from openapi_tool.cli.call_outcome import CallOutcome, print_outcome
from openapi_tool.cli.dev_choice import is_dev_named, is_given, settings_name_servers
from openapi_tool.cli.given_names import check_given
from openapi_tool.cli.nats_connection import connected_once
from openapi_tool.cli.output import INTERRUPTED, fail
from openapi_tool.concurrency.cancellation import interruptible
from openapi_tool.environment import DEFAULT_AUTH_ENV
from openapi_tool.kernel.postgres.failures import located, translate_connection_errors
from openapi_tool.local.caller import ERRORS, Caller
from openapi_tool.local.database import open_database
from openapi_tool.local.dev_state import DevError, SeveralStacks, running_dev
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.local.requested_call import RequestedCall, publish_call, save_call
from openapi_tool.nats_client.options import BusOptions, NatsOptions
from openapi_tool.options.postgres import PoolOptions, PostgresOptions
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.jsontext import is_deeper_than
from openapi_tool.settings import given_values, load_settings
from openapi_tool.settings.model import with_values
from openapi_tool.settings.sources import SourceUnreadable
from openapi_tool.settings.variables import empty_servers
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.tools.problems import Path as Place
from openapi_tool.tools.problems import argument_path
from openapi_tool.tools.secret_variables import Secret

_INBOX = "_INBOX"  # of clients without one of their own
_MAX_DEPTH = 200  # of what can be written as a card


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
    for option, value, kind in (
        ("TOOL", tool, "name of a tool"),
        ("--project", project, "project id"),
        ("--agent", agent, "agent id"),
        ("--channel", channel, "channel id"),
    ):
        check_given(option, value, kind)
    requested = RequestedCall(tool, project, agent, channel, real_kernel_allowed=yes)
    redactor = Redactor()
    try:
        kernel = _kernel()
        redactor = kernel.redactor
        outcome = asyncio.run(_call(kernel, requested, _arguments(args), timeout))
    except DevError as error:
        fail(redactor.text(str(error)))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    print_outcome(outcome, redactor, kernel.program, as_json=as_json)


class _Kernel(NamedTuple):
    """How to connect to the servers of a kernel, and what masks their secrets.

    `program` is the beginning of a command line about this kernel.
    """

    pool: PoolOptions
    bus: BusOptions
    redactor: Redactor
    program: str = "openapi-tool"


def _kernel() -> _Kernel:
    """Return the kernel of the settings, or the running `dev`. Raises DevError, SettingsError."""
    for problem in empty_servers(os.environ):
        raise DevError(problem)
    with suppress(SourceUnreadable, UnreadableVariable):  # reported when the settings are loaded
        if is_dev_named() or not settings_name_servers():
            return _kernel_of_dev()
        configured = given_values()
        if not (is_given(configured, "postgres", "dsn") and is_given(configured, "nats", "servers")):
            raise DevError("set both PG_DSN and NATS_SERVERS, or neither for the dev stack")
    bootstrap = build_bootstrap(load_settings(), os.environ)
    # The kernel's login, to which the inbox of the executor is denied (docs/least-privilege.md).
    bus = replace(bootstrap.bus, nats=with_values(bootstrap.bus.nats, inbox_prefix=_INBOX), listed_by="")
    return _Kernel(bootstrap.pool, bus, bootstrap.redactor)


def _kernel_of_dev() -> _Kernel:
    try:
        stack = running_dev()
    except SeveralStacks:
        raise
    except DevError as error:
        raise DevError(f"{error}; start one with `openapi-tool dev`, or set PG_DSN and NATS_SERVERS") from None
    try:
        pool = PoolOptions(stack.protocol, PostgresOptions(Secret(stack.pg_dsn)))
    except ValidationError:
        raise DevError(f"the state of the dev stack {stack.name!r} has no usable database; start it again") from None
    bus = BusOptions(NatsOptions(servers=(stack.nats_servers,)), NAME)
    return _Kernel(pool, bus, Redactor([os.environ.get(DEFAULT_AUTH_ENV, "")]), f"openapi-tool --dev {stack.name}")


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments in the option --args: JSON, @FILE, or - for standard input. Raises DevError."""
    try:
        if text == "-":
            text = sys.stdin.read()
        elif text == "@":
            raise DevError("--args: names no file; give it as @FILE")
        elif text.startswith("@"):
            text = Path(text[1:]).read_text(encoding="utf-8")
        arguments = orjson.loads(text)
    except OSError as error:
        raise DevError(f"--args: the file {text[1:]!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DevError(f"--args: must be JSON, @FILE or -: {error}") from None
    if not isinstance(arguments, dict):
        raise DevError("--args: the arguments must be one JSON object")
    if is_deeper_than(arguments, _MAX_DEPTH):
        raise DevError(f"--args: the arguments are nested deeper than {_MAX_DEPTH} levels; flatten them")
    place = _place_of_nul(arguments)
    if place is not None:
        raise DevError(f"--args: {argument_path(place)}: contains NUL, which PostgreSQL cannot store; leave it out")
    return arguments


def _place_of_nul(value: Any, path: Place = ()) -> Place | None:
    """Return the path of the first name or text with NUL; None if there is none. The depth of `value` is limited."""
    if isinstance(value, str):
        return path if "\0" in value else None
    members: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, dict):
        members = value.items()
    elif isinstance(value, list):
        members = enumerate(value)
    for name, member in members:
        place = (*path, name) if isinstance(name, str) and "\0" in name else _place_of_nul(member, (*path, name))
        if place is not None:
            return place
    return None


async def _call(kernel: _Kernel, requested: RequestedCall, arguments: Any, timeout_s: float) -> CallOutcome:
    """Make the call, and wait for its result. Raises DevError if nothing was sent."""
    try:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(connected_once(kernel.bus))
            with translate_connection_errors():
                database = await stack.enter_async_context(
                    open_database(kernel.pool.dsn, kernel.pool.postgres.timeout_s)
                )
            caller = Caller(database, client, kernel.pool.version)
            call = await save_call(caller, requested, arguments, kernel.bus.where)
            try:
                await interruptible(publish_call(caller, call, kernel.bus.where))
            except Unavailable as error:
                return CallOutcome(call, None, {}, str(error))
            return await _outcome(caller, call, timeout_s)
    except Unavailable as error:
        raise DevError(located(str(error), kernel.pool)) from None
    except ERRORS as error:
        raise DevError(f"cannot use PostgreSQL or NATS: {type(error).__name__}: {error}") from None


async def _outcome(caller: Caller, call: PlacedCall, timeout_s: float) -> CallOutcome:
    """Wait for the result of a published call."""
    try:
        result = await interruptible(caller.committed_result(call, timeout_s))
        call_card = await caller.card(call.project_id, call.tool_call_id, "tool.call")
    except ERRORS as error:
        why = f"{type(error).__name__}: {error}"
        if type(error) is TimeoutError:  # none of its subclasses, which drivers raise
            why = f"none within {timeout_s:g} s"
        return CallOutcome(call, None, {"placed": 0}, why)
    committed_after = result.inbox_row["created_at"] - call_card["created_at"]  # both by the database's clock
    times: dict[str, int | None] = {"placed": 0, "committed": round(committed_after.total_seconds() * 1000)}
    times["doorbell"] = None
    if result.doorbell_at is not None:
        times["doorbell"] = round((result.doorbell_at - call.placed_at) * 1000)
    return CallOutcome(call, result, times)
