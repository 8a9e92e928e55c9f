"""Ids: which ones the database can store and index."""

from __future__ import annotations

MAX_ID_BYTES = 512
"""Limit of ids in UTF-8. Project, agent, turn and step are in B-tree indexes, whose rows are limited to 2,704 bytes:
the database would refuse the result of a longer one after the call was billed. Of a tool call id, which a model
provider may choose, indexes contain only the hash.
"""


def is_too_long(value: str) -> bool:
    """Return whether a text exceeds MAX_ID_BYTES."""
    if len(value) * 4 <= MAX_ID_BYTES:  # UTF-8 has at most four bytes per character
        return False
    return len(value) > MAX_ID_BYTES or len(value.encode(errors="replace")) > MAX_ID_BYTES


def is_storable_id(value: object) -> bool:
    """Return whether an indexed column takes a value: None or a short text."""
    return value is None or (isinstance(value, str) and not is_too_long(value))
