"""What jsonb can hold, said independently of the code that makes it so."""

from __future__ import annotations

import json
from typing import Any

import orjson


def assert_storable(value: Any) -> None:
    """JSON of finite numbers, in UTF-8, without NUL; integers within 64 bits."""
    orjson.dumps(value)  # as the driver does, which knows a greatest depth
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    text.encode()
    assert "\\u0000" not in text.replace("\\\\", "")
    assert all(abs(number) <= 1 << 63 for number in _integers(value))


def _integers(value: Any) -> list[int]:
    if isinstance(value, dict):
        return [number for item in value.values() for number in _integers(item)]
    if isinstance(value, list | tuple):
        return [number for item in value for number in _integers(item)]
    return [value] if isinstance(value, int) else []
