"""How a shared record is changed although other processes change it at the same time (compare and set).

All shared records are changed by this one function, so that they all wait in the same way after conflicts.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from openapi_tool.state.port import Contended, Records, Stored

_MAX_ATTEMPTS = 16  # for some 2 s at most, with the pauses below
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.005, 0.2
"""Longest pause after the first conflict, and after later ones. The longest pause doubles with each conflict, and the
real one is random, so that many processes that write the same record do not meet again and again."""


async def change(
    records: Records, key: str, apply: Callable[[bytes | None], bytes | None], known: Stored | None = None
) -> Stored:
    """Apply a change to a record, again after each conflict; return the record as it is then.

    `apply` maps the stored value to the new one; if it returns None, nothing is written. It must cause no second change
    if its result is stored already, as an earlier write that seemed to fail may have been stored.

    `known` is what the caller takes for the stored record: if it is so, it saves the first read. If not, the first
    write is a conflict. Raises Contended, Unavailable.
    """
    stored = known
    for attempt in range(_MAX_ATTEMPTS):
        if stored is None:
            stored = await records.read(key)
        value = apply(stored.value)
        if value is None:
            return stored
        revision = await records.write(key, value, stored.revision)
        if revision is not None:
            return Stored(value, revision)
        stored = None
        longest_s = min(_FIRST_PAUSE_S * 2**attempt, _MAX_PAUSE_S)
        await asyncio.sleep(random.uniform(0, longest_s))  # noqa: S311
    raise Contended(key)
