"""Calls as a kernel of each protocol version saves and sends them (protocol sections 2, 6 and 9).

A command says which turn of which agent makes the call. In version v1r3 these ids are in the body of the command; later
versions have them in headers, which they also save in an inbox row, the *anchor*.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import asyncpg
from nats.aio.msg import Msg

from openapi_tool.protocol.dialect import DEFAULT_VERSION, ProtocolVersion
from openapi_tool.protocol.tracing import parse_traceparent

VERSION = DEFAULT_VERSION.value
SENDER = "kernel"
# Headers that the kernel adds only when it publishes; its anchor row does not have them.
_PUBLISHER_HEADERS = ("CG-Timestamp", "CG-Version", "CG-Msg-Type", "CG-Sender")


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """Ids of the rows of a call, and its command; `doorbell_key` is the id by which its doorbell names it."""

    project_id: str
    channel_id: str
    agent_id: str
    agent_turn_id: str
    turn_epoch: int
    step_id: str
    tool_call_id: str
    card_id: str
    trace_id: str
    subject: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    doorbell_key: str
    placed_at: float = field(default_factory=time.time)

    @property
    def version(self) -> str:
        """Protocol version."""
        return _version_of(self.subject)


def _version_of(subject: str) -> str:
    return subject.split(".")[1]  # cg.VERSION.PROJECT.CHANNEL.cmd.tool.TARGET.SUFFIX


def new_call(project_id: str, channel_id: str, agent_id: str, subject: str, body: Mapping[str, Any]) -> PlacedCall:
    """Return a call of a new turn; `body` has `tool_name` and `after_execution`."""
    turn_id = f"turn_{uuid.uuid4().hex}"
    card_id = uuid.uuid4().hex
    trace_id = secrets.token_hex(16)
    headers = {"CG-Recursion-Depth": "0", "traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"}
    ids: dict[str, Any] = {
        "project_id": project_id,
        "channel_id": channel_id,
        "agent_id": agent_id,
        "agent_turn_id": turn_id,
        "step_id": f"step_{uuid.uuid4().hex}",
        "tool_call_id": f"tc_{uuid.uuid4().hex}",
    }
    full_body = {"tool_call_card_id": card_id, **body}
    if _version_of(subject) == ProtocolVersion.V1R3:
        full_body = {"tool_call_card_id": card_id, **_identity_fields(ids), **body}
        doorbell_key = trace_id
    else:
        headers |= _context_headers(ids)
        doorbell_key = turn_id
    return PlacedCall(
        **ids,
        turn_epoch=1,
        card_id=card_id,
        trace_id=trace_id,
        doorbell_key=doorbell_key,
        subject=subject,
        headers=headers,
        body=full_body,
    )


def _context_headers(ids: Mapping[str, str]) -> dict[str, str]:
    return {
        "CG-Project-Id": ids["project_id"],
        "CG-Channel-Id": ids["channel_id"],
        "CG-Agent-Id": ids["agent_id"],
        "CG-Turn-Id": ids["agent_turn_id"],
        "CG-Turn-Epoch": "1",
        "CG-Step-Id": ids["step_id"],
        "CG-Tool-Call-Id": ids["tool_call_id"],
        "CG-Timestamp": str(time.time_ns() // 1_000_000),
        "CG-Version": VERSION,
        "CG-Msg-Type": "dict",
        "CG-Sender": SENDER,
    }


def _identity_fields(ids: Mapping[str, str]) -> dict[str, Any]:
    return {
        "tool_call_id": ids["tool_call_id"],
        "agent_turn_id": ids["agent_turn_id"],
        "turn_epoch": 1,
        "agent_id": ids["agent_id"],
        "project_id": ids["project_id"],
        "channel": ids["channel_id"],
        "step_id": ids["step_id"],
        "context_box_id": str(uuid.uuid4()),
        "dispatch_requested_at": datetime.now(UTC).isoformat(),
    }


def doorbell_key(message: Msg) -> str:
    """Return the `doorbell_key` of the call that a doorbell is for: its turn or else its trace; empty without both."""
    headers = message.headers or {}
    if turn_id := headers.get("CG-Turn-Id"):
        return turn_id
    try:
        return parse_traceparent(headers.get("traceparent", "")).trace_id
    except ValueError:
        return ""


async def save_rows(database: asyncpg.Connection, call: PlacedCall) -> None:
    """Save the edge of the request, and the anchor of its turn if the version has one.

    The target of the edge is the caller, as the kernel knows no id of an executor.
    """
    await database.execute(
        "insert into state.execution_edges (edge_id, project_id, channel_id, primitive, edge_phase, "
        "source_agent_id, source_agent_turn_id, source_step_id, target_agent_id, target_agent_turn_id, "
        "correlation_id, recursion_depth, trace_id) "
        "values ($1, $2, $3, 'tool_call', 'request', $4, $5, $6, $4, $5, $7, $8, $9)",
        f"edge_{uuid.uuid4().hex}",
        call.project_id,
        call.channel_id,
        call.agent_id,
        call.agent_turn_id,
        call.step_id,
        call.tool_call_id,
        int(call.headers["CG-Recursion-Depth"]),
        call.trace_id,
    )
    if call.version == ProtocolVersion.V1R3:
        return
    await database.execute(
        "insert into state.agent_inbox (inbox_id, project_id, agent_id, channel_id, message_type, enqueue_mode, "
        "correlation_id, agent_turn_id, turn_epoch, context_headers, payload, status) "
        "values ($1, $2, $3, $4, 'command_anchor', 'call', $5, $6, $7, $8, $9, 'consumed')",
        f"inbox_cmd_anchor_{uuid.uuid4().hex}",
        call.project_id,
        call.agent_id,
        call.channel_id,
        call.tool_call_id,
        call.agent_turn_id,
        call.turn_epoch,
        {name: value for name, value in call.headers.items() if name not in _PUBLISHER_HEADERS},
        {"kind": "command_anchor", "subject": call.subject, "correlation_id": call.tool_call_id},
    )
