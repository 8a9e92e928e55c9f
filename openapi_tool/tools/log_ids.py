"""Ids of a call for log lines and spans."""

from __future__ import annotations

from typing import Any

from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.tools.wording import short

_NAMES = ("project_id", "agent_id", "agent_turn_id", "tool_call_id")
_SHOWN_CHARS = 128
"""A tool call id may be longer, and may need six bytes per character as JSON: `\\u00e9`."""


def log_ids(identity: CallIdentity) -> dict[str, Any]:
    """Return the ids that the call has, each truncated."""
    ids = {name: getattr(identity, name) for name in _NAMES}
    return {name: short(value, _SHOWN_CHARS) for name, value in ids.items() if value}
