"""Builders that tests share: identities, definitions, deliveries."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson
from nats.js.errors import NotFoundError

from openapi_tool.bus.dead_letters import STREAM as DEAD_LETTERS
from openapi_tool.local.caller import Caller
from openapi_tool.protocol.cards import ToolCall
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.records import (
    CallRecords,
    CardRecord,
    EarlierResult,
    RequestEdgeRecord,
    TargetRecord,
    ToolRecord,
)
from openapi_tool.protocol.trace import SpanContext
from openapi_tool.tools.definition import ToolDefinition, parse_definition

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
SUBJECT = "cg.v1r4.proj.public.cmd.tool.jina.search"

HEADERS = {
    "CG-Project-Id": "proj",
    "CG-Channel-Id": "public",
    "CG-Agent-Id": "agent",
    "CG-Turn-Id": "turn",
    "CG-Turn-Epoch": "1",
    "CG-Step-Id": "step",
    "CG-Tool-Call-Id": "call",
    "CG-Recursion-Depth": "0",
    "traceparent": TRACEPARENT,
}
BODY = {"tool_call_card_id": "card", "tool_name": "jina_search", "after_execution": "suspend"}


def delivery(
    headers: Mapping[str, str] | None = None, body: object = None, *, subject: str = SUBJECT, data: bytes | None = None
) -> Delivery:
    return Delivery(
        subject=subject,
        headers=HEADERS if headers is None else headers,
        data=data if data is not None else orjson.dumps(BODY if body is None else body),
        published_at=datetime.now(UTC),
        attempt=1,
        stream_sequence=1,
    )


def identity(**changes: Any) -> CallIdentity:
    values: dict[str, Any] = {
        "project_id": "proj",
        "channel_id": "public",
        "agent_id": "agent",
        "agent_turn_id": "turn",
        "turn_epoch": 1,
        "tool_call_id": "call",
        "step_id": "step",
        "parent_step_id": None,
        "trace_id": TRACE_ID,
        "trace": SpanContext(TRACE_ID, "b7ad6b7169203331", "01"),
        "tracestate": None,
    }
    return CallIdentity(**(values | changes))


def call_card(arguments: Any = None, **changes: Any) -> CardRecord:
    values: dict[str, Any] = {
        "card_id": "card",
        "tool_call_id": "call",
        "content": {"__type__": "ToolCallContent", "tool_name": "jina_search", "arguments": arguments or {}},
        "metadata": {"type": "tool.call", "author_id": "agent", "agent_turn_id": "turn", "step_id": "step"},
    }
    return CardRecord(**(values | changes))


def target(headers: Mapping[str, Any] | None = None, **changes: Any) -> TargetRecord:
    values: dict[str, Any] = {
        "inbox_id": "inbox_1",
        "message_type": "command_anchor",
        "channel_id": "public",
        "agent_turn_id": "turn",
        "turn_epoch": 1,
        "context_headers": HEADERS if headers is None else headers,
    }
    return TargetRecord(**(values | changes))


def records(
    *,
    card: CardRecord | None = None,
    tool: ToolRecord | None = None,
    worker_target: str | None = "worker_generic",
    target: TargetRecord | None = None,
    request_edge: RequestEdgeRecord | None = None,
    earlier: EarlierResult | None = None,
) -> CallRecords:
    return CallRecords(card, tool, worker_target, target, request_edge, earlier)


def definition(
    jina: Mapping[str, Any] | None = None, *, parameters: Mapping[str, Any] | None = None, **options: Any
) -> ToolDefinition:
    return parse_definition(
        ToolRecord(
            tool_name="jina_search",
            after_execution="suspend",
            parameters=parameters or {},
            options={"jina": jina or {"mode": "search"}, **options},
        )
    )


def tool_call(arguments: Mapping[str, Any], defaults: tuple[str, ...] = (), fixed: tuple[str, ...] = ()) -> ToolCall:
    return ToolCall(arguments, frozenset(defaults), frozenset(fixed))


async def dead_letters(caller: Caller) -> list[dict[str, Any]]:
    """Every dead letter's record, oldest first."""
    jetstream = caller.client.jetstream()
    try:
        state = (await jetstream.stream_info(DEAD_LETTERS)).state
    except NotFoundError:
        return []
    numbers = range(state.first_seq, state.last_seq + 1)
    return [orjson.loads((await jetstream.get_msg(DEAD_LETTERS, number)).data or b"") for number in numbers]


def memory_limit(kept_bytes: int, concurrency: int) -> int:
    """Bytes that a process may take: as the chart computes them from the budgets and the calls at once."""
    return 128 * 2**20 + kept_bytes * 5 // 4 + concurrency * 2**20
