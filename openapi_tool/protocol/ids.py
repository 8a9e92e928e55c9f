"""Which ids the database can store and index."""

from __future__ import annotations

MAX_ID_BYTES = 512
"""Limit of the ids of project, agent, turn and step in UTF-8.

They are in B-tree indexes, whose rows are limited to 2,704 bytes. With a longer id the database would refuse the
result, after the call was billed. A tool call id, which a model provider may choose, may be longer: indexes contain
only its hash.
"""


def is_too_long(value: str) -> bool:
    """Return whether a text exceeds MAX_ID_BYTES."""
    if len(value) * 4 <= MAX_ID_BYTES:  # UTF-8 has at most four bytes per character
        return False
    return len(value) > MAX_ID_BYTES or len(value.encode(errors="replace")) > MAX_ID_BYTES


def is_storable_id(value: object) -> bool:
    """Return whether an indexed column takes a value: None or a short text."""
    return value is None or (isinstance(value, str) and not is_too_long(value))
