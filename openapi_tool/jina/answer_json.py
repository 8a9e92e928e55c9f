"""The JSON of an upstream answer, in steps: counted before it is parsed, mended where a strict parser refuses it.

A parser makes objects of every value before anything can refuse them: 3.2 million `{}` in 9.5 MB took 35 s and 860 MB.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson

from openapi_tool.protocol.errors import ResponseTooLarge
from openapi_tool.protocol.jsontext import loads
from openapi_tool.steps import SMALL, Steps

MOST_VALUES = 80_000
"""Values of one answer: so many keys of a dictionary are parsed in 40 ms, the longest time of all shapes."""

_SLICE_BYTES = 256 * 1024
_PIECE_BYTES = 64 * 1024
_STRUCTURE = (b",", b"[", b"{")  # a value stands behind each of them
_SURROGATE = re.compile(rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[c-fC-F][0-9a-fA-F]{2})")
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_ESCAPE_BYTES = 6
_TWO_BACKSLASHES, _INSTEAD = rb"\\", b"\0\0"  # no JSON holds the byte 0


def counted(body: bytearray) -> Steps[int]:
    """How many values an answer has, 0 for one of up to SMALL bytes.

    Raises ResponseTooLarge for more than MOST_VALUES.
    """
    if len(body) <= SMALL:
        return 0
    found = 0
    for start in range(0, len(body), _SLICE_BYTES):
        found += sum(body.count(mark, start, start + _SLICE_BYTES) for mark in _STRUCTURE)
        yield
    return (yield from _counted_closely(body)) if found > MOST_VALUES else found


def decoded(body: bytearray) -> Steps[Any]:
    """The value of an answer, None where it is no JSON or nested too deeply to be parsed."""
    yield
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        yield
    try:
        if len(body) <= SMALL:
            return loads(body)
        mended = yield from _without_lone_surrogates(body)
        return orjson.loads(mended)
    except (ValueError, RecursionError):
        return None


def _counted_closely(body: bytearray) -> Steps[int]:
    """Count only what stands outside of texts: a page whose text is full of brackets and commas is a few values."""
    values, texts, inside = 0, 0, 0
    for escaped in _pieces(body):
        piece = escaped.replace(rb"\"", b"")
        quotes = piece.count(b'"')
        texts += quotes // 2
        if texts <= 2 * MOST_VALUES:  # each text is a value or the key of one, so it is known without another look
            outside = b"".join(piece.split(b'"')[inside::2])
            values += sum(outside.count(mark) for mark in _STRUCTURE)
        if values > MOST_VALUES or texts > 2 * MOST_VALUES:
            raise ResponseTooLarge(
                f"The answer holds more than {MOST_VALUES:,} values; ask for less: fewer results, no lists of links or "
                "images, a target_selector, or another page."
            )
        inside ^= quotes & 1
        yield
    return values


def _without_lone_surrogates(body: bytearray) -> Steps[bytearray]:
    r"""The body with the replacement character for each `\ud800` that is half of a pair: senders cut texts there."""
    mended = bytearray()
    for piece in _pieces(body):
        mended += _SURROGATE.sub(_mended, piece).replace(_INSTEAD, _TWO_BACKSLASHES)
        yield
    return mended


def _mended(escape: re.Match[bytes]) -> bytes:
    return escape[0] if escape[1] else rb"\ufffd"


def _pieces(body: bytearray) -> Iterator[bytes]:
    """The body in pieces, none of which ends within an escape; pairs of backslashes are taken out of the way."""
    start = 0
    while start < len(body):
        piece = bytes(body[start : start + _PIECE_BYTES]).replace(_TWO_BACKSLASHES, _INSTEAD)
        if start + len(piece) < len(body):
            piece = piece[: _end_of_escapes(piece)]
        start += len(piece)
        yield piece


def _end_of_escapes(piece: bytes) -> int:
    """Where the last escape that is complete ends, or begins where another may belong to it."""
    end = len(piece)
    last = piece.rfind(b"\\", end - _ESCAPE_BYTES + 1)
    if last >= 0 and piece[last + 1 : last + 2] in (b"", b"u"):
        end = last
    return end - _ESCAPE_BYTES if _HIGH_SURROGATE.fullmatch(piece, end - _ESCAPE_BYTES, end) else end
