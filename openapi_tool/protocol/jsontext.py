"""JSON in and out: fast, and never a value that jsonb would refuse (protocol section 10)."""

from __future__ import annotations

import json
import math
from typing import Any

import orjson

_MOST_FALLBACK_BYTES = 1_000_000
_MIN_INTEGER, _MAX_INTEGER = -(2**63), 2**64 - 1


def loads(text: bytes | bytearray | str) -> Any:
    """Parse JSON; also what orjson refuses but senders produce: lone surrogates, huge numbers.

    The slower parser that takes those gets 1 MB at most, which is 20 ms of its time. Raises ValueError when the text is
    no JSON at all (invalid UTF-8 included).
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        if len(text) > _MOST_FALLBACK_BYTES:
            raise
        try:
            return json.loads(text, parse_constant=_refuse_constant)
        except RecursionError:
            raise ValueError("JSON is nested too deeply") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def dumps(value: object) -> bytes:
    """Compact UTF-8 JSON. Raises TypeError for values that are not JSON."""
    return orjson.dumps(value)


def storable_text(text: str) -> str:
    """`text` without NUL and lone surrogates, which jsonb and UTF-8 cannot hold."""
    clean = text.replace("\x00", "\N{REPLACEMENT CHARACTER}") if "\x00" in text else text
    if clean.isascii():
        return clean
    try:
        clean.encode()  # a tenth of the time of what follows, which takes four times the memory of the text
    except UnicodeEncodeError:
        return clean.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return clean


def storable(value: Any) -> Any:
    """`value` with every string (keys too) made storable.

    Anything infinite or NaN becomes null, an integer beyond 64 bits its digits.
    """
    return value if _is_storable(value) else _made_storable(value)


def _is_storable(value: Any) -> bool:
    """Whether a value can stay as it is: there and back tells much faster than looking at each part."""
    try:
        text = orjson.dumps(value)
    except TypeError:
        return False
    return b"\\u0000" not in text and bool(orjson.loads(text) == value)


def _made_storable(value: Any) -> Any:
    if isinstance(value, str):
        return storable_text(value)
    if isinstance(value, dict):
        return {storable_text(str(key)): _made_storable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_made_storable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int) and not _MIN_INTEGER <= value <= _MAX_INTEGER:
        return str(value)
    return value
