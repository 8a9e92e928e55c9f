"""`openapi-tool demo`: a few calls of a simulated kernel on an embedded stack, drawn as tables or printed as JSON."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from openapi_tool.cli.embedded import executor_settings, extra_needed, running, this_program
from openapi_tool.cli.options import UpstreamChoice
from openapi_tool.cli.output import INTERRUPTED, fail, json_default, print_status
from openapi_tool.cli.tables import cell
from openapi_tool.local.database import prepare_database
from openapi_tool.local.sample_arguments import MAX_RESULT_CHARS
from openapi_tool.protocol.dialect import DEFAULT_VERSION, ProtocolVersion
from openapi_tool.protocol.printable import printable_lines
from openapi_tool.settings import PREFIX
from openapi_tool.tools.wording import counted

if TYPE_CHECKING:
    from openapi_tool.local.sample_calls import CompletedCall
    from openapi_tool.local.stack import EmbeddedStack

_DOUBLE_NOTE = (
    "The upstream is a double on loopback that answers with recorded real responses. For the real one: "
    "JINA_API_KEY=… openapi-tool demo --upstream real"
)
_ENDED = """
Stopped: the executor, PostgreSQL, NATS and the double. Their data is deleted; nothing runs any more.
Try next:
{program} dev    # the same servers until Ctrl-C, to call tools of your own (README.md, "Your own tool")
{program} --help"""


def demo(*, upstream: UpstreamChoice, protocol: ProtocolVersion | None, as_json: bool) -> None:
    """Run a few calls on an embedded stack, and show every step of each."""
    calls = _run(upstream, protocol or DEFAULT_VERSION, quiet=as_json)
    if as_json:
        for call in calls:
            sys.stdout.write(json.dumps(asdict(call), default=json_default) + "\n")
    else:
        _show(calls, upstream)
        print_status(_ENDED.format(program=shlex.join(this_program())))
    if any(call.status != "success" for call in calls):
        raise typer.Exit(1)


def _run(upstream: UpstreamChoice, protocol: ProtocolVersion, *, quiet: bool) -> list[CompletedCall]:
    with extra_needed("the demo"):
        from openapi_tool.local.sample_calls import DATABASE, play  # noqa: PLC0415 - needs the extra [local]
        from openapi_tool.local.servers import ServerFailed  # noqa: PLC0415 - the same
        from openapi_tool.local.stack import EmbeddedStack, kernel_schema  # noqa: PLC0415 - the same

    async def prepare(stack: EmbeddedStack) -> None:
        await prepare_database(stack.postgres.dsn(), DATABASE, kernel_schema(protocol))

    environment = executor_settings(upstream) | {
        f"{PREFIX}TOOLS__MAX_RESULT_CHARS": str(MAX_RESULT_CHARS),
        f"{PREFIX}PROTOCOL__VERSION": protocol.value,
    }
    stack = EmbeddedStack()
    try:
        with running(stack, DATABASE, prepare, environment, quiet=quiet) as executor:
            return asyncio.run(play(stack, executor, upstream.value, protocol))
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
        read_by_model = call.content or json.dumps(call.error)
        console.print(Panel(Text(printable_lines(read_by_model)), title="what the model reads"))
    if upstream is UpstreamChoice.DOUBLE:
        console.print(_DOUBLE_NOTE)


def _table(call: CompletedCall) -> Table:
    """Return the steps of a call, one row for each part of a step."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    output = call.tool_output
    cut = "no"
    if output.get("truncated"):
        cut = f"yes, {counted(output['artifact_ref']['chars'], 'character')} in all"
    tokens, requests = output["usage"]["tokens"], output["usage"]["requests"]
    times = {"placed": 0, **call.steps}
    rows: dict[str, Any] = {
        "arguments": dict(call.arguments),
        "command": call.command["subject"],
        "headers": call.command["headers"],
        "body": call.command["body"],
        **_request_rows(call.upstream_requests),
        "cost": f"{counted(tokens, 'token')}, {counted(requests, 'request')}",
        "cut": cut,
        "inbox row": {name: call.inbox_row[name] for name in ("inbox_id", "message_type", "status", "payload")},
        "doorbell": call.doorbell["subject"],
        # The blank at the end tells these names from those of the request above.
        "  headers ": call.doorbell["headers"],
        "  body ": call.doorbell["data"],
        "trace id": call.trace_id,
        "time": ", ".join(f"{name} {ms} ms" for name, ms in times.items()),
    }
    for name, value in rows.items():
        is_text = isinstance(value, str) or value is None
        text = value if is_text else json.dumps(value, default=json_default)
        table.add_row(name, cell(text or "-"))
    return table


def _request_rows(requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not requests:  # a cached response
        return {"upstream": "not asked"}
    first, *others = requests
    return {
        "upstream": f"{first['method']} https://{first['host']}{first['target']}",
        "  headers": {**(first["headers"] or {}), "Authorization": "Bearer (not shown)"},
        "  body": first["body"],
        **{f"  and {number}": sent["body"] or sent["target"] for number, sent in enumerate(others, start=2)},
    }
