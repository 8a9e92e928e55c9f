"""One real call of each tool, from command to doorbell, on the embedded stack."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from typing import Any, Literal

import yaml

from openapi_tool.local.caller import Answer, Caller, PlacedCall, prepare_database
from openapi_tool.local.dev import log_entries
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.stack import EmbeddedStack, kernel_schema

Upstream = Literal["double", "real"]

PROJECT, AGENT, DATABASE = "proj_demo", "agent_demo", "demo"
_ANSWER_S = 60.0
CALLS: Mapping[Upstream, tuple[tuple[str, str, dict[str, Any]], ...]] = {
    "double": (
        ("jina_search", "search", {"query": "hello world", "count": 3}),
        ("jina_reader", "read", {"url": "http://site.fixture.test:8099/article"}),
    ),
    "real": (
        ("jina_search", "search", {"query": "NATS JetStream pull consumers", "count": 3}),
        ("jina_reader", "read", {"url": "https://example.com/"}),
    ),
}


@dataclass(frozen=True, slots=True)
class Journey:
    """Everything that one call left on its way; `steps` are milliseconds since it was placed."""

    tool_name: str
    arguments: Mapping[str, Any]
    command: Mapping[str, Any]
    upstream_request: Mapping[str, Any]
    status: str
    content: str
    error: Mapping[str, Any] | None
    inbox_row: Mapping[str, Any]
    doorbell: Mapping[str, Any]
    trace_id: str
    steps: Mapping[str, int]


async def play(stack: EmbeddedStack, executor: ExecutorProcess, upstream: Upstream) -> list[Journey]:
    """Register the tools, place one call of each, and follow it."""
    async with Caller.connect(stack.postgres.dsn(DATABASE), stack.nats.url) as caller:
        await caller.furnish(PROJECT, AGENT, demo_tools())
        return [await _follow(caller, executor, *call) for call in CALLS[upstream]]


async def prepare(stack: EmbeddedStack) -> None:
    """Make the demonstration's database."""
    await prepare_database(stack.postgres.dsn(), DATABASE, kernel_schema())


def demo_tools() -> Iterator[dict[str, Any]]:
    """The definitions of a search and a reader tool."""
    folder = files(__package__) / "data" / "tools"
    for name in ("jina_search.yaml", "jina_reader.yaml"):
        yield yaml.safe_load((folder / name).read_text(encoding="utf-8"))


async def _follow(
    caller: Caller, executor: ExecutorProcess, tool_name: str, suffix: str, arguments: dict[str, Any]
) -> Journey:
    with executor.process.log.open("rb") as log:
        log.seek(0, os.SEEK_END)
        call = await caller.place(PROJECT, AGENT, tool_name, arguments, suffix=suffix)
        answer = await caller.answer(call, _ANSWER_S)
        lines = {line["action"]: line for line in log_entries(log)}
    return _journey(call, tool_name, arguments, answer, lines)


def _journey(
    call: PlacedCall,
    tool_name: str,
    arguments: Mapping[str, Any],
    answer: Answer,
    lines: Mapping[str, Mapping[str, Any]],
) -> Journey:
    content = answer.card["content"]
    sent = lines.get("upstream.request", {})
    result = content["result"]
    return Journey(
        tool_name=tool_name,
        arguments=arguments,
        command={"subject": call.subject, "headers": dict(call.headers), "body": dict(call.body)},
        upstream_request={key: sent.get(key) for key in ("method", "host", "target", "headers", "body")},
        status=content["status"],
        content=result if isinstance(result, str) else "",
        error=content["error"],
        inbox_row=answer.inbox_row,
        doorbell=answer.doorbell or {},
        trace_id=call.trace_id,
        steps=_steps(call, answer, lines),
    )


def _steps(call: PlacedCall, answer: Answer, lines: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    moments = {
        "upstream asked": _logged_at(lines, "upstream.request"),
        "upstream answered": _logged_at(lines, "upstream.response"),
        "result committed": answer.inbox_row["created_at"].timestamp(),
        "doorbell heard": answer.rung_at,
    }
    return {name: round((at - call.placed_at) * 1000) for name, at in moments.items() if at is not None}


def _logged_at(lines: Mapping[str, Mapping[str, Any]], action: str) -> float | None:
    line = lines.get(action)
    return datetime.fromisoformat(line["time"]).timestamp() if line else None
