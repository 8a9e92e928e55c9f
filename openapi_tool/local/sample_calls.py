"""The sample calls of `demo`, made as a kernel makes them; the executor's log tells when each step of a call was."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, BinaryIO

from openapi_tool.local.caller import Caller, ResultRows
from openapi_tool.local.dev import log_entries
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.placed_call import VERSION, PlacedCall
from openapi_tool.local.sample_arguments import SAMPLE_CALLS
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.protocol.subjects import subject_in_version
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.stored_rows import registration

PROJECT, AGENT, DATABASE = "proj_demo", "agent_demo", "demo"
_POLL_S = 0.01
_RESULT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class CompletedCall:
    """One call; `steps` are milliseconds since its command was published."""

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


async def play(stack: EmbeddedStack, executor: ExecutorProcess, upstream: str, version: str) -> list[CompletedCall]:
    """Register the tools, run the calls, and read the second part of the last result."""
    async with Caller.connect(stack.postgres.dsn(DATABASE), stack.nats.url, version) as caller:
        await caller.set_up_project(PROJECT, AGENT, demo_tools(version))
        completed = [await _run_call(caller, executor, *call) for call in SAMPLE_CALLS[upstream]]
        cursor = completed[-1].tool_output.get("next_cursor")
        if cursor:
            completed.append(await _run_call(caller, executor, "jina_read", {"cursor": cursor}))
        return completed


def demo_tools(version: str = VERSION) -> Iterator[dict[str, Any]]:
    """Yield the definition of each built-in tool, as a kernel with this protocol version stores it."""
    for tool in CATALOGUE.values():
        row = registration(tool)
        yield {**row, "target_subject": subject_in_version(str(row["target_subject"]), version)}


async def _run_call(
    caller: Caller, executor: ExecutorProcess, tool_name: str, arguments: dict[str, Any]
) -> CompletedCall:
    with executor.process.log.open("rb") as log:
        log.seek(0, os.SEEK_END)  # the lines of this call will follow
        call = await caller.place(PROJECT, AGENT, tool_name, arguments, suffix=tool_name)
        rows = await caller.result(call, _RESULT_TIMEOUT_S)
        lines = await _lines_of(call, log)
    content = rows.card["content"]
    result = content["result"]
    return CompletedCall(
        tool_name=tool_name,
        arguments=arguments,
        command={"subject": call.subject, "headers": dict(call.headers), "body": dict(call.body)},
        upstream_requests=[
            {key: line.get(key) for key in ("method", "host", "target", "headers", "body")}
            for line in lines
            if line["action"] == "upstream.request"
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


async def _lines_of(call: PlacedCall, log: BinaryIO) -> list[dict[str, Any]]:
    """Return the log lines of a call that has a result; the last one may be written a moment later."""
    lines: list[dict[str, Any]] = []
    async with asyncio.timeout(_RESULT_TIMEOUT_S):
        while not any(line["action"] == "call.finished" for line in lines):
            await asyncio.sleep(_POLL_S)
            lines += (line for line in log_entries(log) if line.get("tool_call_id") == call.tool_call_id)
    return lines


def _steps(call: PlacedCall, rows: ResultRows, lines: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the milliseconds from the command to each step: the first request, the last response, and so on."""
    moments: dict[str, float | None] = {}
    for line in lines:
        at = datetime.fromisoformat(line["time"]).timestamp()
        if line["action"] == "upstream.request":
            moments.setdefault("upstream asked", at)
        elif line["action"] == "upstream.response":
            moments["upstream answered"] = at
    moments |= {"result committed": rows.inbox_row["created_at"].timestamp(), "doorbell received": rows.doorbell_at}
    return {name: round((at - call.placed_at) * 1000) for name, at in moments.items() if at is not None}
