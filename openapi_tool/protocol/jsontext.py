"""Parse and write JSON, look into it, and make values that jsonb accepts (protocol sections 3 and 10)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NoReturn, TypeAlias, TypeVar, cast

import orjson

# Not pydantic's type: worker processes (`isolation/`) import this module, and must import nothing that they do not
# need.
JsonValue: TypeAlias = "dict[str, JsonValue] | list[JsonValue] | str | bool | int | float | None"
JsonObject = dict[str, JsonValue]
_WHOLE_NUMBER = re.compile(r"[0-9]{1,12}")

_MAX_FALLBACK_BYTES = 1_000_000  # of a text that the slower parser reads, in some 20 ms
_MAX_DEPTH = 1_024  # levels that orjson parses; the limit of `json` depends on the version of Python
_TOO_DEEP = "JSON is nested too deeply"

# Integers that orjson can write.
MIN_INTEGER = -(2**63)
MAX_INTEGER = 2**64 - 1

T = TypeVar("T")


def loads(text: bytes | bytearray | str) -> JsonValue:
    r"""Parse JSON in UTF-8. Raises ValueError.

    What orjson refuses may still be JSON: with a lone surrogate (`"\ud800"`) or a huge number. A slower parser reads
    it, up to _MAX_FALLBACK_BYTES.
    """
    try:
        return cast("JsonValue", orjson.loads(text))
    except orjson.JSONDecodeError:
        if len(text) > _MAX_FALLBACK_BYTES:
            raise
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except RecursionError:
            raise ValueError(_TOO_DEEP) from None
        if is_deeper_than(value, _MAX_DEPTH):
            raise ValueError(_TOO_DEEP) from None
        return cast("JsonValue", value)


def whole_number(value: object) -> int | None:
    """Return a value as a whole number, also `3.0` or `"3"`; None for others."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value):
        return int(value)
    return None


def as_object(value: object) -> JsonObject:
    """Return an object as it is, an empty one for any other value."""
    return value if isinstance(value, dict) else {}


def object_at(value: object, *path: str | int) -> Mapping[str, JsonValue]:
    """Return the object at a path of keys and indexes, such as `"data", 0, "usage"`; empty if there is none."""
    for step in path:
        if isinstance(value, dict):
            value = value.get(str(step))
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            return {}
    return as_object(value)


def levels(root: object) -> Iterator[list[object]]:
    """Yield the members at each level below a JSON value: of `{"a": [1, 2]}` first `[[1, 2]]`, then `[1, 2]`.

    A level is built only when it is asked for.
    """
    level = _members([root])
    while level:
        yield level
        level = _members(level)


def _members(values: list[object]) -> list[object]:
    """Return the members of all objects and arrays among some values."""
    members: list[object] = []
    for value in values:
        if isinstance(value, dict):
            members.extend(value.values())
        elif isinstance(value, list):
            members.extend(value)
    return members


def is_deeper_than(value: object, limit: int) -> bool:
    """Return whether a value has more than `limit` levels; the value itself is one."""
    levels_below = list(islice(levels(value), limit))
    return len(levels_below) == limit


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


dumps = orjson.dumps
"""Serialize to JSON. Raises TypeError for values that are not JSON."""


def storable_text(text: str) -> str:
    """Return `text` with U+FFFD in place of NUL, which jsonb cannot hold, and lone surrogates, which UTF-8 cannot."""
    clean = text.replace("\x00", "\N{REPLACEMENT CHARACTER}")
    if clean.isascii():
        return clean
    try:
        clean.encode()  # a test, as the replacement below takes ten times as long, and four times the text's memory
    except UnicodeEncodeError:
        return clean.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return clean


def storable(value: T) -> T:
    """Return `value` as jsonb accepts it, and orjson writes it.

    Its texts become storable, infinity and NaN null, and an integer beyond 64 bits a text with its digits.
    """
    if _is_storable(value):
        return value
    return cast("T", _made_storable(value))


def _is_storable(value: object) -> bool:
    """Return whether a value stays the same if it is written and parsed; much faster than a check of each member."""
    try:
        text = orjson.dumps(value)
    except TypeError:
        return False
    return b"\\u0000" not in text and bool(orjson.loads(text) == value)


def _made_storable(value: object) -> object:
    if isinstance(value, str):
        return storable_text(value)
    if isinstance(value, dict):
        return {storable_text(str(key)): _made_storable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_made_storable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int) and not MIN_INTEGER <= value <= MAX_INTEGER:
        return str(value)
    return value
