"""Commands on a gateway's state, a file or in NATS, instead of a kernel's servers."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from pydantic_settings import SettingsError as UnreadableVariable

from openapi_tool.cli.kernel import NO_DATABASE, charged_in_nats, find_dev, is_given, servers_of_named_dev, with_nats
from openapi_tool.cli.output import fail, print_json, print_line, print_status
from openapi_tool.cli.tables import output, redraw
from openapi_tool.gateway.call_row import CallRow
from openapi_tool.gateway.file_state import insert_row
from openapi_tool.gateway.opening import NATS
from openapi_tool.gateway.operator import ask_statistics
from openapi_tool.gateway.state import BUDGETS_TTL_S
from openapi_tool.gateway.usage import COLUMNS
from openapi_tool.kernel.postgres.usage_keys import By
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.options.budgets import time_zone
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.projects import quota_project
from openapi_tool.quotas.amounts import Amount
from openapi_tool.quotas.charged import WithoutResult, charged, without_result
from openapi_tool.quotas.periods import Period
from openapi_tool.settings import given_values, load_settings
from openapi_tool.settings.sources import SourceUnreadable
from openapi_tool.state.sqlite import MEMORY, StateFile
from openapi_tool.state.sqlite_file import StateUnusable, default_path
from openapi_tool.tools.switches import SwitchRecordInvalid
from openapi_tool.tools.wording import short

if TYPE_CHECKING:
    from rich.console import RenderableType

    from openapi_tool.bootstrap import Bootstrap
    from openapi_tool.gateway.nats_state import NatsRows
    from openapi_tool.nats_client.client import BusClient

T = TypeVar("T")
Rows = Callable[["NatsRows"], Awaitable[list[CallRow]]]
_NO_PROCESS = 1
_NOT_CONFIRMED = 1
_LOCAL = "local"  # project of `mcp` without --project, and of `gateway` without tokens
_PURGED = "budgets, limits, switches of tools, tokens, stored texts and results, and the rows of calls"
_KEYS: Mapping[By, str] = {
    By.TOOL: "tool",
    By.AGENT: "agent",
    By.DAY: "date(at, 'unixepoch')",
    By.SESSION: "session",
    By.ERROR: "error",
}


def chosen_state(option: Path | None) -> Path:
    """Return the state of a gateway: by default in the NATS of the settings, without one the default file."""
    if option is not None:
        return option
    try:
        return NATS if is_given(given_values(), "nats", "servers") else default_path(os.environ)
    except (SourceUnreadable, UnreadableVariable) as error:
        fail(str(error))
    except StateUnusable as error:
        fail(str(error))


def selected_state(option: Path | None) -> Path | None:
    """Return the state that a command is about, None for a kernel.

    Without the option it is in NATS if that is configured, and neither PostgreSQL is nor a `dev` named; if nothing is
    configured and no `dev` runs, it is the default file, if that exists.
    """
    if option is not None:
        return option
    try:
        configured = given_values()
    except (SourceUnreadable, UnreadableVariable):
        return None  # reported when the settings are loaded
    if "postgres" in configured or servers_of_named_dev():
        return None
    if is_given(configured, "nats", "servers"):
        return NATS
    if "nats" in configured or find_dev()[0] is not None:
        return None
    return _default_file()


def _default_file() -> Path | None:
    """Return the default state file; say so if there is none, as the command then has nothing to ask."""
    try:
        path = default_path(os.environ)
    except StateUnusable:
        return None
    if path.exists():
        return path
    print_status(f"no settings name a server, no `dev` runs, and there is no gateway's state file {path}: see --state")
    return None


def selected_file(option: Path | None) -> Path | None:
    """Return the state file that a command is about, None if it asks over NATS, as of a kernel's executors."""
    path = selected_state(option)
    return None if path == NATS else path


def project_or_default(project: str | None, path: Path | None) -> str:
    """Return the project that a command is about: without the option the default one of the gateway's doors."""
    if project is None and path is None:
        fail("--project is missing; name the project")
    return _LOCAL if project is None else project


def with_state(path: Path, work: Callable[[StateFile], Awaitable[T]], rows: Rows | None = None) -> T:
    """Return the result of `work` with an existing state file, or print why there is none and exit with 2.

    If the state is in NATS, it is a file in memory with the rows of calls that `rows` reads.
    """
    if path == NATS:
        return _with_rows(work, rows)

    async def opened() -> T:
        async with aclosing(StateFile.open(path, create=False)) as state:
            return await work(state)

    try:
        return asyncio.run(opened())
    except (StateUnusable, Unavailable, SwitchRecordInvalid) as error:
        fail(str(error))


def _with_rows(work: Callable[[StateFile], Awaitable[T]], rows: Rows | None) -> T:
    from openapi_tool.gateway.nats_state import NatsRows  # noqa: PLC0415 - drivers that a file needs not
    from openapi_tool.state.nats_texts import Patience  # noqa: PLC0415

    async def read(_: Bootstrap, client: BusClient) -> T:
        found = await rows(NatsRows(Patience(client))) if rows else []

        def insert(connection: sqlite3.Connection) -> None:
            for row in found:
                insert_row(connection, row)

        async with aclosing(StateFile.open(MEMORY)) as state:
            await state.run(insert)
            return await work(state)

    return with_nats(read, user=NatsUser.GATEWAY)


def show_statistics(
    path: Path,
    draw: Callable[[Sequence[Mapping[str, Any]]], RenderableType],
    select: Callable[[Sequence[Mapping[str, Any]]], Any],
    *,
    as_json: bool,
    every_s: float | None = None,
    lacks: str = "",
) -> None:
    """Draw the statistics of all processes of a gateway, once or every `every_s` seconds, or print them as JSON.

    `lacks` says what an executor would have shown, too.
    """

    async def work(state: StateFile) -> None:
        async def redrawn() -> RenderableType:
            return draw(await ask_statistics(state))

        processes = await ask_statistics(state)
        if not processes:
            fail(f"{path}: no process of this gateway runs; usage shows what its calls have cost", _NO_PROCESS)
        if as_json:
            print_json(select(processes))
            return
        print_status(lacks, quiet=not lacks)
        if every_s is None:
            output().print(draw(processes))
        else:
            await redraw(output(), draw(processes), redrawn, every_s)

    with_state(path, work)


def usage(
    path: Path, project: str, start: datetime, end: datetime, by: By
) -> tuple[dict[str, Any], list[dict[str, Any]], WithoutResult]:
    """Return the sum over all calls of a project, the rows by `by`, and what has no row.

    Days are ascending, other rows are ordered by tokens.
    """

    def read(connection: sqlite3.Connection) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        connection.row_factory = sqlite3.Row
        where = "FROM calls WHERE project = :project AND at >= :since AND at < :until"
        values = {"project": project, "since": start.timestamp(), "until": end.timestamp()}
        key = _KEYS[by]
        order = "key" if by is By.DAY else "tokens DESC, key"
        # The texts that are put into the statements are constants.
        [total] = connection.execute(f"SELECT {COLUMNS} {where}", values)
        rows = connection.execute(f"SELECT {key} AS key, {COLUMNS} {where} GROUP BY key ORDER BY {order}", values)
        times = connection.execute(f"SELECT {key} AS key, latency_ms {where} ORDER BY latency_ms", values)
        latencies = defaultdict[object, list[int]](list)
        everything = []
        for name, latency_ms in times:
            latencies[name].append(latency_ms)
            everything.append(latency_ms)
        found = [{**dict(row), **_quantiles(latencies[row["key"]])} for row in rows]
        zero = {name: value or 0 for name, value in dict(total).items()}
        return {**zero, **_quantiles(everything)}, found

    async def held_by(file: StateFile) -> Mapping[Period, Amount]:
        settings = load_settings(NO_DATABASE)
        records = file.records("budgets", BUDGETS_TTL_S)
        account_project = quota_project(settings.quota_namespace, project)
        return await charged(records, account_project, start, end, time_zone(settings.budgets.time_zone))

    def held_by_nats() -> Mapping[Period, Amount]:
        async def work(bootstrap: Bootstrap, _: BusClient) -> Mapping[Period, Amount]:
            return await charged_in_nats(bootstrap, project, start, end, NatsUser.GATEWAY)

        return with_nats(work, user=NatsUser.GATEWAY)

    in_nats = held_by_nats() if path == NATS else None

    async def work(state: StateFile) -> tuple[dict[str, Any], list[dict[str, Any]], WithoutResult]:
        total, rows = await state.run(read)
        held = await held_by(state) if in_nats is None else in_nats
        sums = "SELECT coalesce(sum(requests), 0), coalesce(sum(tokens), 0) FROM calls"
        stored = []
        for period in held:
            where = "WHERE project = ? AND at >= ? AND at < ?"
            [(requests, tokens)] = await state.read(f"{sums} {where}", (project, period.start, period.end))
            stored.append(Amount(requests, tokens))
        return total, rows, without_result(held, stored)

    return with_state(path, work, lambda rows: rows.of_project(project))


def _quantiles(ordered: Sequence[int]) -> dict[str, int | None]:
    return {"p50_ms": _quantile(ordered, 0.5), "p95_ms": _quantile(ordered, 0.95)}


def _quantile(ordered: Sequence[int], share: float) -> int | None:
    if not ordered:
        return None
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def inspect(path: Path, tool_call_id: str, *, project: str, as_json: bool) -> None:
    """Print what a gateway has stored of one call."""
    query = "SELECT * FROM calls WHERE project = ? AND tool_call_id = ?"

    def read(connection: sqlite3.Connection) -> dict[str, Any] | None:
        connection.row_factory = sqlite3.Row
        row = connection.execute(query, (project, tool_call_id)).fetchone()
        return dict(row) if row else None

    row = with_state(path, lambda state: state.run(read), lambda rows: rows.of_project(project, tool_call_id))
    if row is None:
        fail(f"project {short(project)!r} has no call {short(tool_call_id)!r} in {path}, or it is older than 90 days")
    attempts = orjson.loads(row.pop("details"))["attempts"]
    began = datetime.fromtimestamp(row.pop("at"), UTC)
    row["at"] = began.isoformat(timespec="milliseconds")
    if as_json:
        print_json({**row, "attempts": attempts, "no_data": "commands, cards and doorbells: a gateway has none"})
        return
    print_line(f"{row['at']}  {row['tool']} called by agent {row['agent']} of project {row['project']}")
    for attempt in attempts:
        status = attempt.get("http_status") or attempt.get("error_code") or "not answered"
        print_line(f"  +{attempt['at_ms']} ms  upstream request: {status} after {attempt.get('ms', '?')} ms")
    remark = _remark_on(row)
    shown_remark = f" ({remark})" if remark else ""
    print_line(f"  +{row['latency_ms']} ms  {row['status']}{shown_remark}, {row['tokens']:,} tokens")
    print_status("no data for arguments, texts, commands, cards and doorbells: a gateway stores none of a call")


def _remark_on(row: Mapping[str, Any]) -> str:
    """Return what the status of a call does not say about its end; may be empty."""
    if row["error"]:
        return str(row["error"]) if row["error"] != row["status"] else ""
    if row["truncated"]:
        return "truncated"
    return "from the cache" if row["cached"] else ""


def purge(option: Path | None, *, yes: bool) -> None:
    """Delete everything from the state file."""
    try:
        path = option or default_path(os.environ)
    except StateUnusable as error:
        fail(str(error))
    if path == NATS:
        fail("--state: what is in NATS is shared with others, so it is deleted there: nats kv ls lists the buckets")
    if not yes:
        fail(f"this deletes {_PURGED} from {path}: add --yes", _NOT_CONFIRMED)
    with_state(path, lambda state: state.purge())
    print_status(f"deleted {_PURGED} from {path}")
