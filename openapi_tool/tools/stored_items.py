"""Items of a stored text: where each begins, and how far the model has seen it.

The whole text of a truncated result is stored, so that the model can read on in it (`later_parts.py`) and search in it
(`stored_search.py`). All positions are in characters of the stored text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from openapi_tool.protocol.records import StoredFields


class StoredItem(NamedTuple):
    """Web content of one item in a stored text, from `start` to `end`.

    - `shown`: the end of what the first part showed of it.
    - `block_start`: the start of the code block or table that contains `shown`, None outside of one.
    - `title`: the lines that identify the item, to repeat before later parts of it.
    - `label`, `after`: as in `output.Item`.

    The order of the fields is that of `StoredFields`, in which they are stored.
    """

    start: int
    shown: int
    end: int
    block_start: int | None = None
    title: str = ""
    label: str = ""
    after: str = ""


class Place(NamedTuple):
    """Where a part of a stored text begins, and the start of the code block or table that contains this place."""

    start: int
    block_start: int | None = None


def stored_items_of(stored: Sequence[StoredFields] | None, chars: int) -> list[StoredItem]:
    """Return the items of a stored text of `chars` characters; one item if it was stored without its items."""
    return [StoredItem(*fields) for fields in stored] if stored else [StoredItem(0, 0, chars)]


def where_in(item: StoredItem, start: int, number: int, count: int, repeated: str) -> str:
    """Describe where a part begins that starts with `repeated` lines; its item is the one with `number` of `count`.

    For example `item 2 of 3, from character 1,001 of 5,000; its first line is repeated`.
    """
    name = item.label
    if not name and count > 1:
        name = f"item {number} of {count}"
    prefix = f"{name}, " if name else ""
    repeated_lines = repeated.count("\n")
    remark = ""
    if repeated_lines == 1:
        remark = "; its first line is repeated"
    elif repeated_lines:
        remark = f"; its first {repeated_lines} lines are repeated"
    return f"{prefix}from character {start - item.start + 1:,} of {item.end - item.start:,}{remark}"
