"""Ids of a call for log lines and spans."""

from __future__ import annotations

from typing import Any

from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.tools.arguments import CallOwner
from openapi_tool.tools.wording import short

_ID_NAMES = ("project_id", "agent_id", "agent_turn_id", "tool_call_id")
_SHOWN_ID_CHARS = 128
"""A tool call id has any length, and JSON may need six bytes per character."""


def ids(identity: CallIdentity) -> dict[str, Any]:
    """Return the ids for log lines and spans of a call, each truncated."""
    return {name: short(getattr(identity, name), _SHOWN_ID_CHARS) for name in _ID_NAMES}


def owner_ids(owner: CallOwner) -> dict[str, Any]:
    """Return the ids of a call from any front end, without missing ones."""
    return {name: short(value, _SHOWN_ID_CHARS) for name in _ID_NAMES if (value := owner.ids.get(name)) is not None}
