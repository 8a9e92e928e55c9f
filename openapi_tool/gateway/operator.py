"""What an operator asks of the running processes of a gateway, through their state file: switches and statistics."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import orjson

from openapi_tool.protocol.errors import Unavailable
from openapi_tool.state.change import change
from openapi_tool.state.port import Records
from openapi_tool.state.sqlite import StateFile
from openapi_tool.tools.switches import Switches, SwitchRecordInvalid

log = logging.getLogger(__name__)

SESSION_KEY = "session_key"
_SWITCHES, _ASKED = "switches", "statistics_asked"
_READ_S = 1.0
_STATISTICS_TTL_S = 30.0
_ANSWERS_S = _READ_S + 0.3


def shared_records(state: StateFile) -> Records:
    """Return the records that all processes of a gateway read: session key, switches, requests of an operator."""
    return state.records("gateway")


async def session_key(records: Records) -> bytes:
    """Return the key of session identities and cursors, which the first process creates. Raises Unavailable."""
    fresh = secrets.token_bytes(32)
    stored = await change(records, SESSION_KEY, lambda found: None if found else fresh)
    return stored.value or fresh


async def follow(
    state: StateFile, name: str, use_switches: Callable[[Switches], None], snapshot: Callable[[], Mapping[str, Any]]
) -> None:
    """Every second adopt changed switches, and answer a request for statistics, as the process `name`.

    While the file cannot be read, the last known switches stay in use.
    """
    records, statistics = shared_records(state), state.records("statistics", _STATISTICS_TTL_S)
    known, answered = 0, (await records.read(_ASKED)).revision
    while True:
        with suppress(Unavailable, SwitchRecordInvalid):
            stored = await records.read(_SWITCHES)
            if stored.revision != known:
                use_switches(Switches.decode(stored.value or b""))
                known = stored.revision
                log.warning("an operator has disabled or enabled tools", extra={"action": "tool.switched"})
            asked = await records.read(_ASKED)
            if asked.revision != answered:
                await statistics.put(name, orjson.dumps({"asked": asked.revision, **snapshot()}, default=str))
                answered = asked.revision
        await asyncio.sleep(_READ_S)


async def ask_statistics(state: StateFile) -> list[dict[str, Any]]:
    """Return the statistics of all processes that answer within 1.3 s. Raises Unavailable."""
    asked = await change(shared_records(state), _ASKED, lambda value: b"%d" % (int(value or 0) + 1))
    await asyncio.sleep(_ANSWERS_S)
    found = (orjson.loads(value) for value in (await state.records("statistics").all()).values())
    return sorted((each for each in found if each.pop("asked") == asked.revision), key=lambda each: each["instance"])


async def read_switches(state: StateFile) -> Switches:
    """Return which tools are disabled. Raises Unavailable, SwitchRecordInvalid."""
    stored = await shared_records(state).read(_SWITCHES)
    return Switches() if stored.value is None else Switches.decode(stored.value)


async def change_switches(state: StateFile, apply: Callable[[Switches], Switches]) -> tuple[Switches, Switches]:
    """Apply a change to the switches; return those before and after. Raises Unavailable, SwitchRecordInvalid."""
    before = after = Switches()

    def changed(stored: bytes | None) -> bytes | None:
        nonlocal before, after
        before = Switches() if stored is None else Switches.decode(stored)
        after = apply(before)
        return None if after is before else after.encode()

    await change(shared_records(state), _SWITCHES, changed)
    return before, after
