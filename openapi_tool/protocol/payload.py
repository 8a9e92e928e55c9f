"""A payload: a JSON object with long texts or bytes (*blobs*) beside it, packed into bytes.

This process and its worker processes send each other tasks and answers in this form. Format:
length of the head (4 bytes), the head, the blobs. The head is JSON: `{"value": {…}, "lengths": [5, 120]}`, where the
lengths are those of the blobs.

In JSON alone megabytes of text would be escaped and unescaped, which takes ten times as long as copying them. Pickle
must not be used: unpickling runs code, and what is unpacked may come from a worker process that an attacker controls.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import orjson

from openapi_tool.protocol.jsontext import JsonObject, JsonValue, as_object, loads

Parts = Sequence[bytes | bytearray]
"""The bytes of a payload in several parts, to be joined."""

_LENGTH = struct.Struct("!I")

_MAX_VALUES = 300_000
"""Commas and opening brackets in the JSON of a cheap payload (`is_cheap`).

Those in texts count, too. So arguments of 256 kB are always cheap, even if they are all commas."""

_MAX_BLOBS = 1_024  # a response has at most 102 items, of five texts each


class Payload(NamedTuple):
    """A JSON object, and the blobs beside it."""

    value: JsonObject
    blobs: Sequence[memoryview] = ()

    @property
    def size(self) -> int:
        """Bytes of the blobs together."""
        return sum(map(len, self.blobs))

    def texts(self) -> list[str]:
        """Return the blobs as texts. Raises ValueError if one is not UTF-8."""
        return [str(blob, "utf-8") for blob in self.blobs]


def pack(value: Mapping[str, object], blobs: Sequence[bytes | bytearray] = ()) -> bytes:
    """Return the bytes that `unpack` reads. Raises ValueError.

    The value may hold numbers beyond 64 bits and lone surrogates, which orjson refuses.
    """
    return b"".join(pack_parts(value, blobs))


def pack_parts(value: Mapping[str, object], blobs: Sequence[bytes | bytearray]) -> Parts:
    """Return the bytes that `unpack` reads in several parts, so that the blobs are not copied. Raises ValueError."""
    head = _json({"value": value, "lengths": list(map(len, blobs))})
    return [_LENGTH.pack(len(head)), head, *blobs]


def pack_texts(value: Mapping[str, object], texts: Sequence[str]) -> bytes:
    """Return the bytes that `unpack` reads, with texts as blobs. Raises ValueError, also for a lone surrogate."""
    return pack(value, list(map(str.encode, texts)))


def is_cheap(packed: bytes | bytearray) -> bool:
    """Return whether `unpack` takes at most 50 ms, judging by the number of JSON values; `packed` may be malformed."""
    begin = _LENGTH.size
    end = begin + int.from_bytes(packed[:begin])
    return sum(packed.count(mark, begin, end) for mark in (b",", b"[", b"{")) <= _MAX_VALUES


def unpack(packed: bytes | bytearray) -> Payload:
    """Return what `pack` was given; the blobs are views of `packed`. Raises ValueError."""
    view = memoryview(packed)
    if len(view) < _LENGTH.size:
        raise ValueError("the payload is too short")
    (length,) = _LENGTH.unpack_from(view)
    end_of_head = _LENGTH.size + length
    if len(view) < end_of_head:
        raise ValueError("the payload is too short")
    head = as_object(loads(bytes(view[_LENGTH.size : end_of_head])))
    value, lengths = head.get("value"), head.get("lengths")
    if not isinstance(value, dict) or not isinstance(lengths, list):
        raise ValueError("the payload's head is no JSON object")  # noqa: TRY004 - of one kind with text that is no JSON
    return Payload(value, _blobs(view[end_of_head:], lengths))


def _blobs(view: memoryview, lengths: list[JsonValue]) -> list[memoryview]:
    """Divide bytes into blobs of these lengths. Raises ValueError unless the lengths are those of all bytes."""
    if len(lengths) > _MAX_BLOBS:
        raise ValueError("the payload has too many parts")
    blobs: list[memoryview] = []
    at = 0
    for size in lengths:
        if not isinstance(size, int) or not 0 <= size <= len(view) - at:
            raise ValueError("a length of the payload is wrong")
        blobs.append(view[at : at + size])
        at += size
    if at != len(view):
        raise ValueError("the payload is longer than its lengths say")
    return blobs


def _json(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, allow_nan=False).encode()
