"""Values drawn from bytes: the same bytes give the same values, no bytes give the plainest ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

import orjson

Item = TypeVar("Item")

_MAX_DEPTH = 4
_LIST, _OBJECT = 6, 7
_CHAINS = (30, 100, 300)
_NUMBERS = (0, 1, -1, 7, 20_000, 2**63, -(2**64), 10**400, 0.5, -0.0, 1e308, float("inf"))


class Source:
    """Reader of values from `data`, followed by zeros. With `stored` only values that jsonb accepts."""

    def __init__(self, data: bytes, *, stored: bool = False) -> None:
        self._data = data
        self._stored = stored
        self._at = 0

    def byte(self) -> int:
        """Return a number from 0 to 255."""
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def below(self, count: int) -> int:
        """Return a number below `count`; uses two bytes if that is over 256."""
        number = self.byte() if count <= 1 << 8 else self.byte() << 8 | self.byte()
        return number % count

    def pick(self, items: Sequence[Item]) -> Item:
        """Return one of several items."""
        return items[self.below(len(items))]

    def take(self, count: int) -> bytes:
        """Return at most this many bytes."""
        self._at += count
        return self._data[self._at - count : self._at]

    def text(self, most: int = 40) -> str:
        """Return any text; unless `stored`, with lone surrogates for bytes that are no UTF-8."""
        data = self.take(self.below(most))
        return data.replace(b"\0", b"0").decode("utf-8", "replace" if self._stored else "surrogateescape")

    def rest(self) -> bytes:
        """Return the remaining bytes."""
        return self.take(len(self._data))

    def value(self, texts: Sequence[str], depth: int = 0) -> Any:
        """Return a JSON value with odd numbers, and with texts and keys from `texts` or any others."""
        kind = self.below(8 if depth < _MAX_DEPTH else 6)
        if kind == _LIST:
            return [self.value(texts, depth + 1) for _ in range(self.below(5))]
        if kind == _OBJECT:
            return self.object(texts, depth + 1)
        return self._scalar(kind, texts)

    def _scalar(self, kind: int, texts: Sequence[str]) -> Any:
        """Return a scalar, or one nested in many lists."""
        match kind:
            case 2:
                return self.text()
            case 3:
                return self.pick((None, True, False, [], {}, ""))
            case 4:
                return self.pick(_NUMBERS[: -1 if self._stored else None])
            case 5:
                return self._chain() if self.byte() > 1 << 7 else self.below(1 << 16)
            case _:
                return self.pick(texts)

    def object(self, texts: Sequence[str], depth: int = 0) -> dict[str, Any]:
        """Return a JSON object of up to seven members."""
        return {
            self.pick(texts) if self.byte() < 1 << 7 else self.text(12): self.value(texts, depth + 1)
            for _ in range(self.below(8))
        }

    def _chain(self) -> Any:
        """Return deeply nested lists or objects."""
        inner: Any = self.pick(("x", 1, None))
        wrap = self.below(2)
        for _ in range(self.pick(_CHAINS)):
            inner = {"a": inner} if wrap else [inner]
        return inner


# Values that jsonb accepts, checked independently of the code that converts them.


def assert_storable(value: Any) -> None:
    """Assert JSON of finite numbers, in UTF-8, without NUL, with integers of 64 bits."""
    orjson.dumps(value)  # as the driver does, which limits the depth
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
