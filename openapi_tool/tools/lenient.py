"""Repair of arguments that the schema rejects although their intent is plain."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from openapi_tool.protocol.jsonvalue import JsonValue
from openapi_tool.tools.schema import schema_problems

_DIGITS = re.compile(r"[0-9]{1,12}")
_INTEGER = re.compile(r"-?[0-9]{1,12}")
_NUMBER = re.compile(r"-?[0-9]{1,12}(?:\.[0-9]{1,12})?")
_FLAGS = {"true": True, "false": False}
_MAX_LIST_CHARS = 20_000  # the number of values in the arguments was checked, but not of those within a text
_LIST_STARTS = ('["', "['")
_SEPARATORS = re.compile(r"[\s,;]+")
_LABEL = r"[^\s.,;/?#:@\[\]\"'|()]++"
_NAME = rf"{_LABEL}(?:\.{_LABEL})++\.?"
_SITE = re.compile(rf"(?:site:)?(?:https?://)?{_NAME}(?:/[^\s,;]*+)?", re.IGNORECASE)
_ADDRESS = re.compile(rf"(?:https?://)?{_NAME}(?::[0-9]++)?(?:[/?#]\S*+)?", re.IGNORECASE)
_ITEM_MATCHERS = {"urls": _ADDRESS.fullmatch, "site": _SITE.fullmatch, "exclude_sites": _SITE.fullmatch}
"""Patterns of the items of lists whose items contain no blank, so that one text may hold several of them."""
_TWO_ADDRESSES = re.compile(r"[\s,;]https?://", re.IGNORECASE)


def whole_number(value: object) -> int | None:
    """Return a value as a whole number, also one that was given as `3.0` or `"3"`; None for others."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return int(value) if isinstance(value, str) and _DIGITS.fullmatch(value) else None


def repaired(schema: Mapping[str, Any], given: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the arguments that can be repaired, by name; None for an optional one that counts as not given.

    A number or flag in a text is converted even if it violates the schema: the error then names the violated rule.
    """
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return {}
    needed = required if isinstance(required, list) else []
    found: dict[str, JsonValue] = {}
    for name, value in given.items():
        rule = properties.get(name)
        if not isinstance(rule, dict) or not _refuses(name, rule, value):
            continue
        if value in (None, "", []):
            if name not in needed:
                found[name] = None
            continue
        candidates = [*_choices(rule.get("enum"), value), *_interpretations(name, rule.get("type"), value)]
        if candidates:
            found[name] = next((other for other in candidates if not _refuses(name, rule, other)), candidates[0])
    return found


def _refuses(name: str, rule: Mapping[str, Any], value: JsonValue) -> bool:
    return bool(schema_problems({"properties": {name: rule}}, {name: value}))


def _choices(choices: object, value: JsonValue) -> Iterator[JsonValue]:
    """Yield the choice that a value equals except for case and surrounding blanks."""
    if isinstance(choices, list) and isinstance(value, str) and (word := value.strip().lower()) in choices:
        yield word


def _interpretations(name: str, types: object, value: JsonValue) -> Iterator[JsonValue]:
    """Yield what a value may mean for an argument of these types, the likeliest first."""
    wanted = types if isinstance(types, list) else [types]
    if "string" in wanted:
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
            yield value[0]
        elif isinstance(value, int) and not isinstance(value, bool):
            yield str(value)
    if not isinstance(value, str):
        return
    text = value.strip()
    if "integer" in wanted and _INTEGER.fullmatch(text):
        yield int(text)
    if "number" in wanted and _NUMBER.fullmatch(text):
        yield float(text)
    if "boolean" in wanted and text.lower() in _FLAGS:
        yield _FLAGS[text.lower()]
    if "array" in wanted:
        yield from _lists(name, text, value)


def _lists(name: str, text: str, value: str) -> Iterator[JsonValue]:
    """Yield a text as a list: the JSON list that it contains, the addresses in it, or itself as the only item."""
    if text.startswith("[") and len(text) <= _MAX_LIST_CHARS:
        try:
            parsed = orjson.loads(text)
        except orjson.JSONDecodeError:
            parsed = None
        if isinstance(parsed, list):
            yield parsed
            return
    if text.startswith(_LIST_STARTS):
        return  # a list in another notation, or a truncated one
    is_item = _ITEM_MATCHERS.get(name)
    if is_item is None or len(text) > _MAX_LIST_CHARS or not _SEPARATORS.search(text):
        yield [value]
        return
    if is_item(text):
        if not _TWO_ADDRESSES.search(text):  # else it may be one address or several
            yield [value]
        return
    pieces = [piece for piece in _SEPARATORS.split(text) if piece]
    if all(map(is_item, pieces)):
        yield pieces
