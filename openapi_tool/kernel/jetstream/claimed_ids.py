"""Ids that a command claims, unverified: its project, and the ids that its log lines show."""

from __future__ import annotations

from typing import Any

from nats.aio.msg import Msg

from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.dialect import claimed_identity
from openapi_tool.tools.wording import short

_PROJECT = 2  # index of the project in `cg.VERSION.PROJECT.…`
_MAX_PARSED_BYTES = 16_384  # of a body; a valid one has 1 kB
_MAX_LOGGED_CHARS = 128


def project_of(subject: str) -> str:
    """Return the project in a command's subject, empty if it has none."""
    tokens = subject.split(".", _PROJECT + 1)
    return tokens[_PROJECT] if len(tokens) > _PROJECT else ""


def ids_of(command: Delivery | Msg) -> dict[str, Any]:
    """Return the ids that a command claims, each truncated, for log lines.

    For a held command pass its delivery: its message was emptied (`deliveries.py`).
    """
    sequence = command.stream_sequence if isinstance(command, Delivery) else command.metadata.sequence.stream
    subject = command.subject
    body = command.data if len(command.data) <= _MAX_PARSED_BYTES else b""
    claimed = claimed_identity(subject, command.headers or {}, body)
    ids = {
        "protocol": subject.removeprefix("cg.").partition(".")[0],
        "project_id": project_of(subject),
        "agent_id": claimed.agent_id or "",
        "agent_turn_id": claimed.agent_turn_id or "",
        "tool_call_id": claimed.tool_call_id or "",
    }
    if claimed.trace is not None:
        ids["trace_id"] = claimed.trace.trace_id
    shortened = {name: short(value, _MAX_LOGGED_CHARS) for name, value in ids.items()}
    return {"stream_sequence": sequence, **shortened}
