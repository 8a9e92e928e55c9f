"""Ids of a call for its log lines and spans."""

from __future__ import annotations

from typing import Any

from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.tools.arguments import CallOwner
from openapi_tool.tools.problems import short

_NAMES = ("project_id", "agent_id", "agent_turn_id", "tool_call_id")
_SHOWN_CHARS = 128
"""Limit of an id in a log line. A tool call id has any length, and JSON may need six bytes per character."""


def ids(identity: CallIdentity) -> dict[str, Any]:
    """Return the ids for log lines and spans of a call, each truncated to 128 characters."""
    return {name: short(getattr(identity, name), _SHOWN_CHARS) for name in _NAMES}


def owner_ids(owner: CallOwner) -> dict[str, Any]:
    """Return the same ids for a call from any front end, without those that it does not have."""
    return {name: short(value, _SHOWN_CHARS) for name in _NAMES if (value := owner.ids.get(name)) is not None}
