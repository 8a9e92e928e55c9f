"""How many bytes of memory a response takes, by its body, until the result of its call is stored."""

from __future__ import annotations

from openapi_tool.tools.inline_bounds import SMALL

# Bytes of memory per byte of a body. A text is in memory several times: parsed, rendered, as JSON, and in the database
# driver. Python stores a string with one, two or four bytes per character, as its widest character needs, so one emoji
# makes 40 MB of a page of 10 MB. Measured by scripts/answer_costs.py, and rounded up.
_ASCII_FACTOR = 6
_TWO_BYTE_FACTOR = 8
_FOUR_BYTE_FACTOR = 14
_FOUR_BYTE_MARKS = (*(bytes([first]) for first in range(0xF0, 0xF5)), rb"\ud", rb"\uD")
"""Beginnings of characters that need four bytes: in UTF-8, and as escapes of JSON (half of a surrogate pair)."""


def memory_of(body: bytes | bytearray) -> int:
    """Return the bytes of memory that a response takes."""
    if body.isascii() and rb"\u" not in body:
        factor = _ASCII_FACTOR
    elif any(mark in body for mark in _FOUR_BYTE_MARKS):
        factor = _FOUR_BYTE_FACTOR
    else:
        factor = _TWO_BYTE_FACTOR
    return len(body) * factor


def memory_to_hold(body: bytes | bytearray) -> int:
    """Return the bytes to hold for a response: none for a small one, which need not be counted."""
    return memory_of(body) if len(body) > SMALL else 0


def max_call_memory(max_response_bytes: int) -> int:
    """Return the most that the responses of one call may take, if their bodies together are limited to these bytes."""
    return max_response_bytes * _FOUR_BYTE_FACTOR
