"""The rule of a JSON Schema for one argument, in words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from openapi_tool.tools.problems import short

_MAX_CHOICES_CHARS = 160
_PATTERNS: Mapping[Any, str] = {None: "", r"\S": ", not blank"}
_EXAMPLE = re.compile(r"such as .{1,40}?(?=;|\.(?:\s|$)|$)")
_NOUNS = {"boolean": "true or false", "object": "an object", "null": "null"}


def rule_text(rule: Mapping[str, Any]) -> str | None:
    """Return what a value must be, such as `must be an integer from 1 to 20`; None if the rule has no type.

    Append an example from the argument's description (`such as de`).
    """
    choices, types = rule.get("enum"), rule.get("type")
    if isinstance(choices, list):
        return f"must be one of {short(', '.join(map(str, choices)), _MAX_CHOICES_CHARS)}"
    wanted = types if isinstance(types, list) else [types] if types else []
    kinds = [_type_text(str(wanted_type), rule) for wanted_type in wanted]
    description = rule.get("description")
    example = _EXAMPLE.search(description) if isinstance(description, str) else None
    return f"must be {' or '.join(kinds)}{f', {example[0]}' if example else ''}" if kinds else None


def _type_text(wanted: str, rule: Mapping[str, Any]) -> str:
    if wanted in ("integer", "number"):
        above, below = rule.get("exclusiveMinimum"), rule.get("exclusiveMaximum")
        return f"{'an' if wanted == 'integer' else 'a'} {wanted}" + (
            (f" above {_shown(above)}" if above is not None else "")
            + (" and" if None not in (above, rule.get("maximum")) else "")
            + (f" below {_shown(below)}" if below is not None else "")
            + _span(rule.get("minimum"), rule.get("maximum"), "of " if above is None else "")
        )
    if wanted == "string":
        size = _span(rule.get("minLength"), rule.get("maxLength"), "of ", "character")
        return f"a text{size}{_PATTERNS.get(rule.get('pattern'), ' that fits its pattern')}"
    if wanted == "array":
        items = rule.get("items")
        noun = "text" if isinstance(items, dict) and items.get("type") == "string" else "item"
        size = _span(rule.get("minItems"), rule.get("maxItems"), "of ", noun)
        return f"a list{size or f' of {noun}s'}"
    return _NOUNS.get(wanted, wanted)


def _span(minimum: float | None, maximum: float | None, of: str, noun: str = "") -> str:
    """Return the range of a number (without a noun) or of a size."""
    if minimum is None and maximum is None:
        return ""
    if maximum is None:
        limit, words = minimum, f" {of}at least {_shown(minimum)}"
    elif minimum is None:
        limit, words = maximum, f" {of}at most {_shown(maximum)}"
    elif minimum == maximum:
        limit, words = maximum, f" {of}{_shown(maximum)}"
    else:
        limit, words = maximum, f" {of if noun else 'from '}{_shown(minimum)} to {_shown(maximum)}"
    return f"{words} {noun}{'' if limit == 1 else 's'}" if noun else words


def _shown(number: float | None) -> str:
    return short(f"{int(number) if isinstance(number, float) and number.is_integer() else number:,}")
