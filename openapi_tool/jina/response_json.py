"""Parse the JSON of an upstream response in steps; count values first, and repair lone surrogates.

A parser creates all objects before their number can be checked: 3.2 million `{}` in 9.5 MB took 35 s and 860 MB.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any

import orjson

from openapi_tool.concurrency import SMALL, Steps
from openapi_tool.protocol.errors import ResponseTooLarge
from openapi_tool.protocol.jsontext import loads

MAX_VALUES = 80_000
"""Limit of values in a response. The slowest shape, a dictionary with this many keys, is parsed in 40 ms."""

_SLICE_BYTES = 256 * 1024  # of a step that only counts
_LONG_BYTES = 256 * 1024  # of a string that is decoded in slices
_PIECE_BYTES = 64 * 1024  # of a step that replaces or splits
_STRUCTURE = (b",", b"[", b"{")  # one of these precedes each value but the first
_SURROGATE = re.compile(rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[c-fC-F][0-9a-fA-F]{2})")
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_ESCAPE_BYTES = 6
_ESCAPED_BACKSLASH, _STAND_IN = rb"\\", b"\0\0"  # JSON never contains the byte 0


def count_values(body: bytearray) -> Steps[int]:
    """Return the number of values, 0 for up to SMALL bytes. Raises ResponseTooLarge for more than MAX_VALUES."""
    if len(body) <= SMALL:
        return 0
    found = 0
    for start in range(0, len(body), _SLICE_BYTES):
        found += sum(body.count(mark, start, start + _SLICE_BYTES) for mark in _STRUCTURE)
        yield
    return (yield from _count_outside_strings(body)) if found > MAX_VALUES else found


def parse(body: bytearray) -> Steps[Any]:
    """Return the value, None if it is not JSON or nested too deeply."""
    yield
    try:
        return (yield from _loads(body))
    except orjson.JSONDecodeError:
        yield
    try:
        if len(body) <= SMALL:
            return loads(body)
        repaired = yield from _without_lone_surrogates(body)
        return (yield from _loads(repaired))
    except (ValueError, RecursionError):
        return None


def _loads(body: bytearray) -> Steps[Any]:
    """Parse the body with long strings replaced by random names, then put them back, decoded in slices.

    A string of 9.5 MB takes up to 83 ms if it is parsed at once; in slices 31 ms in all.
    """
    if len(body) <= _LONG_BYTES:
        return orjson.loads(body)
    names, texts, rest, at = secrets.token_hex(8), dict[str, str](), bytearray(), 0
    for start, end in (yield from _long_strings(body)):
        name = f"{names} {len(texts)}"
        rest += body[at:start] + name.encode()
        texts[name], at = (yield from _decoded(body, start, end)), end
    rest += body[at:]
    yield
    value = orjson.loads(rest)
    return _with_texts(value, texts) if texts else value


def _long_strings(body: bytearray) -> Steps[list[tuple[int, int]]]:
    """Return begin and end of the content of each string of at least _LONG_BYTES."""
    found: list[tuple[int, int]] = []
    at, opened = 0, -1  # `opened`: where the string that is open at the end of a piece began; -1 if none is
    for escaped in _pieces(body):
        piece = escaped.replace(rb"\"", _STAND_IN)
        if opened >= 0 and (closed := piece.find(b'"')) >= 0:
            if at + closed - opened >= _LONG_BYTES:
                found.append((opened, at + closed))
            opened = -1 if piece.count(b'"', closed + 1) % 2 == 0 else at + piece.rfind(b'"') + 1
        elif opened < 0 and piece.count(b'"') % 2:
            opened = at + piece.rfind(b'"') + 1
        at += len(piece)
        yield
    return found


def _decoded(body: bytearray, start: int, end: int) -> Steps[str]:
    """Decode in slices that end neither within an escape nor a character."""
    parts: list[str] = []
    while start < end:
        piece = bytes(body[start : min(end, start + _SLICE_BYTES)]).replace(_ESCAPED_BACKSLASH, _STAND_IN)
        stop = start + len(piece)
        if stop < end:
            stop = start + _end_of_escapes(piece)
            # Cut before a character, which has at most three continuation bytes (10xxxxxx); the parser refuses others.
            stop -= next((back for back in range(4) if body[stop - back] & 0xC0 != 0x80), 0)  # noqa: PLR2004
        parts.append(orjson.loads(b'"%b"' % bytes(body[start:stop])))
        start = stop
        yield
    return "".join(parts)


def _with_texts(value: Any, texts: dict[str, str]) -> Any:
    """Replace each string or key that is a name of `texts` by its text."""
    if isinstance(value, str):
        return texts.get(value, value)
    containers = [value]
    while containers:
        container = containers.pop()
        is_dict = isinstance(container, dict)
        for key, inner in list(container.items() if is_dict else enumerate(container)):
            if isinstance(inner, str):
                container[key] = texts.get(inner, inner)
            elif isinstance(inner, dict | list):
                containers.append(inner)
            if is_dict and key in texts:
                container[texts[key]] = container.pop(key)
    return value


def _count_outside_strings(body: bytearray) -> Steps[int]:
    """Count only outside of strings: a page whose text is full of brackets and commas has few values."""
    values, strings, in_string = 0, 0, 0
    for escaped in _pieces(body):
        piece = escaped.replace(rb"\"", b"")
        quotes = piece.count(b'"')
        strings += quotes // 2
        if strings <= 2 * MAX_VALUES:  # a string is a value or a key, so more strings mean too many values
            outside = b"".join(piece.split(b'"')[in_string::2])
            values += sum(outside.count(mark) for mark in _STRUCTURE)
        if values > MAX_VALUES or strings > 2 * MAX_VALUES:
            raise ResponseTooLarge(
                f"The response holds more than {MAX_VALUES:,} values; ask for less: fewer results, no lists of links "
                "or images, a target_selector, or another page."
            )
        in_string ^= quotes & 1
        yield
    return values


def _without_lone_surrogates(body: bytearray) -> Steps[bytearray]:
    r"""Replace each escape that is half of a surrogate pair by `\ufffd`: senders cut strings there."""
    repaired = bytearray()
    for piece in _pieces(body):
        repaired += _SURROGATE.sub(_repaired, piece).replace(_STAND_IN, _ESCAPED_BACKSLASH)
        yield
    return repaired


def _repaired(escape: re.Match[bytes]) -> bytes:
    return escape[0] if escape[1] else rb"\ufffd"


def _pieces(body: bytearray) -> Iterator[bytes]:
    """Yield pieces that do not end within an escape, with escaped backslashes replaced by zero bytes."""
    start = 0
    while start < len(body):
        piece = bytes(body[start : start + _PIECE_BYTES]).replace(_ESCAPED_BACKSLASH, _STAND_IN)
        if start + len(piece) < len(body):
            piece = piece[: _end_of_escapes(piece)]
        start += len(piece)
        yield piece


def _end_of_escapes(piece: bytes) -> int:
    """Cut before an incomplete escape, or a high surrogate whose other half may follow."""
    end = len(piece)
    last = piece.rfind(b"\\", end - _ESCAPE_BYTES + 1)
    if last >= 0 and piece[last + 1 : last + 2] in (b"", b"u"):
        end = last
    return end - _ESCAPE_BYTES if _HIGH_SURROGATE.fullmatch(piece, end - _ESCAPE_BYTES, end) else end
