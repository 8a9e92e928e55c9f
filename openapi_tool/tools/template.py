"""ID-only templates in `defaults` and `fixed` (protocol section 5)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from openapi_tool.protocol.cards import MAX_ARGUMENT_DEPTH, ToolCall
from openapi_tool.protocol.errors import ToolMisconfigured
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.tools.problems import short

PLACEHOLDERS = (
    "project_id",
    "channel_id",
    "agent_id",
    "agent_turn_id",
    "step_id",
    "tool_call_id",
    "parent_step_id",
    "trace_id",
    "turn_epoch",
    "context_box_id",
)
_MAX_ID_CHARS = 1_000  # a card of 256 kB may hold 29,000 placeholders, and a call id may have any length
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


class MissingValue(ToolMisconfigured):
    """A known placeholder has no value in this call."""


def placeholder_values(identity: CallIdentity) -> dict[str, str | None]:
    """The values of this call; `context_box_id` never travels in v1r4, so it has none."""
    return {
        "project_id": identity.project_id,
        "channel_id": identity.channel_id,
        "agent_id": identity.agent_id,
        "agent_turn_id": identity.agent_turn_id,
        "step_id": identity.step_id,
        "tool_call_id": identity.tool_call_id,
        "parent_step_id": identity.parent_step_id,
        "trace_id": identity.trace_id,
        "turn_epoch": str(identity.turn_epoch),
        "context_box_id": None,
    }


def render(value: Any, values: Mapping[str, str | None], where: str, depth: int = 0) -> Any:
    """Render every string of `value`, which is `depth` levels inside its option, in one pass.

    Raises ToolMisconfigured for an unknown placeholder and for what is nested too deeply, MissingValue
    for a known one without value; all name `where` (the option's path).
    """
    if isinstance(value, str):
        return _PLACEHOLDER.sub(lambda match: _value(match[1], values, where), value)
    if isinstance(value, dict | list) and depth >= MAX_ARGUMENT_DEPTH:
        raise ToolMisconfigured(
            f"The tool's definition is nested deeper than {MAX_ARGUMENT_DEPTH} levels in {short(where)}; "
            "an operator must flatten it."
        )
    if isinstance(value, dict):
        return {key: render(item, values, f"{where}.{short(key)}", depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [render(item, values, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    return value


def _value(name: str, values: Mapping[str, str | None], where: str) -> str:
    if name not in values:
        raise ToolMisconfigured(
            f"The tool's definition uses the unknown placeholder {{{short(name, 40)}}} in {short(where)}; "
            f"an operator must correct it (known: {', '.join(PLACEHOLDERS)})."
        )
    value = values[name]
    if value and len(value) > _MAX_ID_CHARS:
        raise ToolMisconfigured(
            f"{{{name}}} has more than {_MAX_ID_CHARS:,} characters in this call and is not put into {short(where)}; "
            "an operator must take it out of the definition."
        )
    if not value:
        raise MissingValue(
            f"The tool's definition needs {{{name}}} in {short(where)}, which this call does not have; "
            "an operator must correct the definition."
        )
    return value


def render_default(name: str, template: Any, call: ToolCall, values: Mapping[str, str | None]) -> Any:
    """A default's value: what the worker left of it, rendered again, else the definition's own."""
    return render(call.arguments.get(name, template), values, f"options.args.defaults.{short(name)}")


def render_fixed(name: str, template: Any, call: ToolCall, values: Mapping[str, str | None]) -> Any:
    """A fixed value: the definition's, or the card's where a placeholder has no value here."""
    where = f"options.args.fixed.{short(name)}"
    try:
        return render(template, values, where)
    except MissingValue:
        if name not in call.fixed_applied or name not in call.arguments:
            raise
        return render(call.arguments[name], values, where)
