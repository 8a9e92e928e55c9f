"""Templates in `defaults` and `fixed`, whose placeholders are ids of the call only (protocol section 5)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from openapi_tool.protocol.cards import MAX_ARGUMENT_DEPTH, ToolCall
from openapi_tool.protocol.errors import ToolMisconfigured
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.jsontext import JsonValue
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
_MAX_ID_CHARS = 1_000  # a tool call id may be of any length, and a card of 256 kB may contain 29,000 placeholders
PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


class MissingValue(ToolMisconfigured):
    """A known placeholder has no value in this call."""


def placeholder_values(identity: CallIdentity) -> dict[str, str | None]:
    """Return the placeholder values of a call, None if it has none; only v1r3 has a `context_box_id`."""
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
        "context_box_id": identity.context_box_id,
    }


def render(value: JsonValue, values: Mapping[str, str | None], where: str, depth: int = 0) -> JsonValue:
    """Replace the placeholders in every string of `value`; rendered text is not searched again for placeholders.

    `where` is the path of the option for errors, `depth` the level of `value` in it. Raises ToolMisconfigured for an
    unknown placeholder and for deep nesting, MissingValue for a known placeholder without a value.
    """
    if isinstance(value, str):
        return PLACEHOLDER.sub(lambda match: _value(match[1], values, where), value)
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
            f"{{{name}}} has more than {_MAX_ID_CHARS:,} characters in this call, too many for {short(where)}; "
            "an operator must remove it from the definition."
        )
    if not value:
        raise MissingValue(
            f"The tool's definition needs {{{name}}} in {short(where)}, which this call does not have; "
            "an operator must correct the definition."
        )
    return value


def render_default(name: str, template: JsonValue, call: ToolCall, values: Mapping[str, str | None]) -> JsonValue:
    """Return a rendered default: the card's value if the kernel's worker has merged one, else the definition's."""
    return render(call.arguments.get(name, template), values, f"options.args.defaults.{short(name)}")


def render_fixed(name: str, template: JsonValue, call: ToolCall, values: Mapping[str, str | None]) -> JsonValue:
    """Return a rendered fixed value: the definition's, or the card's if a placeholder has no value here.

    The kernel's worker may know ids that the command does not carry, and merge the rendered value into the card.
    """
    where = f"options.args.fixed.{short(name)}"
    try:
        return render(template, values, where)
    except MissingValue:
        if name not in call.fixed_applied or name not in call.arguments:
            raise
        return render(call.arguments[name], values, where)
