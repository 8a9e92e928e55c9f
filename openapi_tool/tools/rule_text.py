"""A rule of a JSON Schema in words, for the model whose argument violates it: `must be an integer from 1 to 20`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from openapi_tool.protocol.jsontext import JsonValue
from openapi_tool.tools.wording import short

_MAX_CHOICES_CHARS = 160
_NOUNS = {"boolean": "true or false", "object": "an object", "null": "null"}

# An example in a description, up to the end of its sentence: `such as de` in `Code of the country, such as de.`
_EXAMPLE = re.compile(r"such as .{1,40}?(?=;|\.(?:\s|$)|$)")


def rule_text(rule: Mapping[str, JsonValue]) -> str | None:
    """Return what a value must be, with an example of the description; None if the rule has no type."""
    choices = rule.get("enum")
    if isinstance(choices, list):
        return f"must be one of {short(', '.join(map(str, choices)), _MAX_CHOICES_CHARS)}"
    types = rule.get("type")
    if not types:
        return None
    if not isinstance(types, list):
        types = [types]
    kinds = " or ".join(_type_text(str(json_type), rule) for json_type in types)
    description = rule.get("description")
    example = _EXAMPLE.search(description) if isinstance(description, str) else None
    return f"must be {kinds}, {example[0]}" if example else f"must be {kinds}"


def _type_text(json_type: str, rule: Mapping[str, JsonValue]) -> str:
    """Return `an integer from 1 to 20`, `a number above 0 and at most 5`, `a list of 1 to 10 texts`."""
    if json_type == "integer":
        return f"an integer{_limits_text(rule)}"
    if json_type == "number":
        return f"a number{_limits_text(rule)}"
    if json_type == "string":
        size = _size_text(_number(rule, "minLength"), _number(rule, "maxLength"), "character")
        return f"a text{size}{_pattern_text(rule.get('pattern'))}"
    if json_type == "array":
        items = rule.get("items")
        noun = "text" if isinstance(items, dict) and items.get("type") == "string" else "item"
        size = _size_text(_number(rule, "minItems"), _number(rule, "maxItems"), noun)
        return f"a list{size or f' of {noun}s'}"
    return _NOUNS.get(json_type, json_type)


def _pattern_text(pattern: JsonValue) -> str:
    if pattern is None:
        return ""
    return ", not blank" if pattern == r"\S" else " that fits its pattern"


def _limits_text(rule: Mapping[str, JsonValue]) -> str:
    """Return ` from 1 to 20`, ` of at least 1`, ` above 0 and at most 5`; empty without limits."""
    above = _number(rule, "exclusiveMinimum")
    below = _number(rule, "exclusiveMaximum")
    text = ""
    if above is not None:
        text += f" above {_number_text(above)}"
        if rule.get("maximum") is not None:
            text += " and"
    if below is not None:
        text += f" below {_number_text(below)}"
    of = "of " if above is None else ""
    return text + _range_text(_number(rule, "minimum"), _number(rule, "maximum"), of, "from ")


def _size_text(minimum: float | None, maximum: float | None, noun: str) -> str:
    """Return ` of 1 to 10 texts`, ` of at least 1 text`; empty without limits."""
    limit = minimum if maximum is None else maximum  # the noun stands behind this number
    if limit is None:
        return ""
    plural = "" if limit == 1 else "s"
    return f"{_range_text(minimum, maximum, 'of ', 'of ')} {noun}{plural}"


def _range_text(minimum: float | None, maximum: float | None, of: str, of_both: str) -> str:
    """Return a range in words. `of` stands before one limit, `of_both` before two."""
    if minimum is None and maximum is None:
        return ""
    if maximum is None:
        return f" {of}at least {_number_text(minimum)}"
    if minimum is None:
        return f" {of}at most {_number_text(maximum)}"
    if minimum == maximum:
        return f" {of}{_number_text(maximum)}"
    return f" {of_both}{_number_text(minimum)} to {_number_text(maximum)}"


def _number(rule: Mapping[str, JsonValue], keyword: str) -> float | None:
    limit = rule.get(keyword)
    return limit if isinstance(limit, int | float) else None


def _number_text(number: float | None) -> str:
    """Return a number with separators, and without `.0`: `2,000`."""
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    return short(f"{number:,}")
