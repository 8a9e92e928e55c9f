"""The compare-and-set loop, with the one retry policy of all shared records."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from openapi_tool.state.port import Contended, Records, Stored

_MAX_ATTEMPTS = 16
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.005, 0.2
"""Range of the random pauses after conflicts; each is up to twice as long as the last, so that storms calm down."""


async def change(
    records: Records, key: str, apply: Callable[[bytes | None], bytes | None], known: Stored | None = None
) -> Stored:
    """Apply a change to a record, again after each conflict; return the record as it is then.

    `apply` maps the stored value to the new one; None writes nothing. It must have the same effect if its result was
    stored already, as a failed write may have been. `known` saves the first read, if it is still current.
    Raises Contended, Unavailable.
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
        await asyncio.sleep(random.uniform(0, min(_FIRST_PAUSE_S * 2**attempt, _MAX_PAUSE_S)))  # noqa: S311
    raise Contended(key)
