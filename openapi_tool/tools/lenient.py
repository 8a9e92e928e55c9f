"""Repair of arguments whose intent is plain, where the schema refuses the value and takes the repaired one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from openapi_tool.protocol.jsonvalue import JsonValue
from openapi_tool.tools.schema import schema_problems

_INTEGER = re.compile(r"-?[0-9]{1,12}")
_NUMBER = re.compile(r"-?[0-9]{1,12}(?:\.[0-9]{1,12})?")
_FLAGS = {"true": True, "false": False}


def repaired(schema: Mapping[str, Any], given: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the arguments that can be repaired, by name; None for an optional one that counts as not given."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return {}
    needed = required if isinstance(required, list) else []
    found: dict[str, JsonValue] = {}
    for name, value in given.items():
        rule = properties.get(name)
        if not isinstance(rule, dict) or not _refuses(name, rule, value):
            continue
        if value in (None, ""):
            if name not in needed:
                found[name] = None
            continue
        fitting = [other for other in _readings(rule.get("type"), value) if not _refuses(name, rule, other)]
        if fitting:
            found[name] = fitting[0]
    return found


def _refuses(name: str, rule: Mapping[str, Any], value: JsonValue) -> bool:
    return bool(schema_problems({"properties": {name: rule}}, {name: value}))


def _readings(types: object, value: JsonValue) -> Iterator[JsonValue]:
    """Return what a value may be meant as where its argument is of these types."""
    wanted = types if isinstance(types, list) else [types]
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str) and "string" in wanted:
        yield value[0]
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
        yield [value]
