"""Sample calls of `demo`: a search, a batch in which one page fails, a long page in two parts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from openapi_tool.local.caller import VERSION, Caller, PlacedCall, ResultRows, prepare_database
from openapi_tool.local.dev import log_entries
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.stack import EmbeddedStack, kernel_schema
from openapi_tool.protocol.identity import subject_in_version
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.exports import registration

Upstream = Literal["double", "real"]

PROJECT, AGENT, DATABASE = "proj_demo", "agent_demo", "demo"
MAX_RESULT_CHARS = 2_000
"""Low, so that an ordinary page is truncated."""

_RESULT_TIMEOUT_S = 60.0
_SITE = "http://site.fixture.test:8099"
CALLS: Mapping[Upstream, tuple[tuple[str, dict[str, Any]], ...]] = {
    "double": (
        ("jina_search", {"query": "hello world", "count": 3}),
        ("jina_read_many", {"urls": [f"{_SITE}/doc.pdf", f"{_SITE}/loop", f"{_SITE}/missing"]}),
        ("jina_read", {"url": f"{_SITE}/article"}),
    ),
    "real": (
        ("jina_search", {"query": "NATS JetStream pull consumers", "count": 3}),
        ("jina_read_many", {"urls": ["https://example.com/", "https://no-such-page.example.com/"]}),
        ("jina_read", {"url": "https://docs.nats.io/nats-concepts/jetstream"}),
    ),
}


@dataclass(frozen=True, slots=True)
class CompletedCall:
    """Rows and messages of one call; `steps` are milliseconds since its command was published."""

    tool_name: str
    arguments: Mapping[str, Any]
    command: Mapping[str, Any]
    upstream_requests: Sequence[Mapping[str, Any]]
    status: str
    content: str
    tool_output: Mapping[str, Any]
    error: Mapping[str, Any] | None
    inbox_row: Mapping[str, Any]
    doorbell: Mapping[str, Any]
    trace_id: str
    steps: Mapping[str, int]


async def play(
    stack: EmbeddedStack, executor: ExecutorProcess, upstream: Upstream, version: str = VERSION
) -> list[CompletedCall]:
    """Register the tools, run the calls, and read the second part of the last one, whose page is long."""
    async with Caller.connect(stack.postgres.dsn(DATABASE), stack.nats.url, version) as caller:
        await caller.set_up_project(PROJECT, AGENT, demo_tools(version))
        completed = [await _run_call(caller, executor, *call) for call in CALLS[upstream]]
        if cursor := completed[-1].tool_output.get("next_cursor"):
            completed.append(await _run_call(caller, executor, "jina_read", {"cursor": cursor}))
        return completed


async def prepare(stack: EmbeddedStack, version: str = VERSION) -> None:
    """Create the demonstration's database."""
    await prepare_database(stack.postgres.dsn(), DATABASE, kernel_schema(version))


def demo_tools(version: str = VERSION) -> Iterator[dict[str, Any]]:
    """Return a definition of each built-in tool for a kernel of this version."""
    for row in map(registration, CATALOGUE.values()):
        yield {**row, "target_subject": subject_in_version(row["target_subject"], version)}


async def _run_call(
    caller: Caller, executor: ExecutorProcess, tool_name: str, arguments: dict[str, Any]
) -> CompletedCall:
    with executor.process.log.open("rb") as log:
        log.seek(0, os.SEEK_END)
        call = await caller.place(PROJECT, AGENT, tool_name, arguments, suffix=tool_name)
        rows = await caller.result(call, _RESULT_TIMEOUT_S)
        return _completed(call, tool_name, arguments, rows, list(log_entries(log)))


def _completed(
    call: PlacedCall,
    tool_name: str,
    arguments: Mapping[str, Any],
    rows: ResultRows,
    lines: Sequence[Mapping[str, Any]],
) -> CompletedCall:
    content = rows.card["content"]
    result = content["result"]
    requests = [line for line in lines if line["action"] == "upstream.request"]
    return CompletedCall(
        tool_name=tool_name,
        arguments=arguments,
        command={"subject": call.subject, "headers": dict(call.headers), "body": dict(call.body)},
        upstream_requests=[
            {key: line.get(key) for key in ("method", "host", "target", "headers", "body")} for line in requests
        ],
        status=content["status"],
        content=result if isinstance(result, str) else "",
        tool_output=rows.card["metadata"]["tool_output"],
        error=content["error"],
        inbox_row=rows.inbox_row,
        doorbell=rows.doorbell or {},
        trace_id=call.trace_id,
        steps=_steps(call, rows, lines),
    )


def _steps(call: PlacedCall, rows: ResultRows, lines: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    requested, responded = (_logged(lines, action) for action in ("upstream.request", "upstream.response"))
    moments = {
        "upstream asked": requested[0] if requested else None,
        "upstream answered": responded[-1] if responded else None,
        "result committed": rows.inbox_row["created_at"].timestamp(),
        "doorbell received": rows.doorbell_at,
    }
    return {name: round((at - call.placed_at) * 1000) for name, at in moments.items() if at is not None}


def _logged(lines: Sequence[Mapping[str, Any]], action: str) -> list[float]:
    return [datetime.fromisoformat(line["time"]).timestamp() for line in lines if line["action"] == action]
