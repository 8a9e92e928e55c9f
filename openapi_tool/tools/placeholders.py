"""Templates: texts of a definition with placeholders, and the ids of a call that replace them (protocol section 5).

`{project_id}/{agent_id}` becomes `proj_1/agent_2` in a call of that agent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from operator import attrgetter

from openapi_tool.protocol.cards import MAX_ARGUMENT_DEPTH, ToolCall
from openapi_tool.protocol.errors import ToolMisconfigured
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.jsontext import JsonValue
from openapi_tool.tools.problems import Path
from openapi_tool.tools.wording import short

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
    "context_box_id",  # the kernel's box with the agent's context
)
PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
"""Whatever stands between two braces: `{project_id}`, `{unknown}`, `{}`."""

_MAX_ID_CHARS = 1_000  # a tool call id may have any length, and a value of 256 kB may contain it 29,000 times
_ids_of = attrgetter(*PLACEHOLDERS)


def texts_in(value: object, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield path and text of every string in a value."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from texts_in(item, (*path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from texts_in(item, (*path, index))


def is_template(value: object) -> bool:
    """Return whether a text in a value contains a placeholder, known or not."""
    return any(PLACEHOLDER.search(text) for _, text in texts_in(value, ()))


def placeholder_values(identity: CallIdentity) -> dict[str, str | None]:
    """Return the values of PLACEHOLDERS, empty or None for an id that the call does not have."""
    values = dict(zip(PLACEHOLDERS, _ids_of(identity), strict=True))
    values["turn_epoch"] = str(identity.turn_epoch) if identity.agent_turn_id else None
    return values


class MissingValue(ToolMisconfigured):
    """A placeholder has no value in this call."""


def render(value: JsonValue, values: Mapping[str, str | None], where: str, depth: int = 0) -> JsonValue:
    """Replace the placeholders in every string of `value`; rendered text is not searched again.

    `where` is the path that errors name, `depth` the level of `value` in the option. Raises MissingValue for an id that
    the call does not have, else ToolMisconfigured.
    """
    if isinstance(value, str):
        return PLACEHOLDER.sub(lambda match: _value_of(match[1], values, where), value)
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


def _value_of(name: str, values: Mapping[str, str | None], where: str) -> str:
    if name not in values:
        raise ToolMisconfigured(
            f"The tool's definition uses the unknown placeholder {{{short(name, 40)}}} in {short(where)}; "
            f"an operator must correct it (known: {', '.join(PLACEHOLDERS)})."
        )
    value = values[name]
    if not value:
        raise MissingValue(
            f"The tool's definition needs {{{name}}} in {short(where)}, which this call does not have; "
            "an operator must correct the definition."
        )
    if len(value) > _MAX_ID_CHARS:
        raise ToolMisconfigured(
            f"{{{name}}} has more than {_MAX_ID_CHARS:,} characters in this call, too many for {short(where)}; "
            "an operator must remove it from the definition."
        )
    return value


def render_fixed(name: str, template: JsonValue, call: ToolCall, values: Mapping[str, str | None]) -> JsonValue:
    """Return a rendered fixed value: the definition's, or the card's if a placeholder has no value here.

    The kernel's worker, which wrote the card, may know ids that the command does not carry. Render its value
    again: the worker leaves unknown placeholders and those below the top level as they are.
    """
    where = f"options.args.fixed.{short(name)}"
    try:
        return render(template, values, where)
    except MissingValue:
        if name not in call.fixed_applied or name not in call.arguments:
            raise
        return render(call.arguments[name], values, where)
