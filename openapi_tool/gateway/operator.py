"""How an operator reaches the running processes of a gateway through their state file: switches and statistics.

A command of the operator writes a record; each process reads the records every second. Statistics are asked for with a
new value of one record. Each process then writes its answer to a bucket of answers, in which the command looks for it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from openapi_tool.protocol.errors import Unavailable
from openapi_tool.state.change import change
from openapi_tool.state.port import Records, Stored
from openapi_tool.state.sqlite import StateFile
from openapi_tool.tools.switches import Switches, SwitchRecordInvalid, UnreadSwitches

log = logging.getLogger(__name__)

_BUCKET = "gateway"
"""Bucket of the records that all processes of a gateway read. Its records are:"""

SESSION_KEY = "session_key"
_SWITCHES = "switches"
_ASKED = "statistics_asked"  # with a random value; its revision is the number of the request for statistics

_STATISTICS_BUCKET = "statistics"
"""Bucket of the answers, one record for each process, by its name."""

_STATISTICS_TTL_S = 30.0  # after which the answers of processes that have ended are gone
_READ_S = 1.0  # between two reads of the records by a process
_ANSWERS_S = _READ_S + 0.3  # for which a command waits for the statistics of all processes
_SESSION_KEY_BYTES = 32


def shared_records(state: StateFile) -> Records:
    """Return the records that all processes of a gateway read: session key, switches, request for statistics."""
    return state.records(_BUCKET)


async def session_key(state: StateFile) -> bytes:
    """Return the key of session identities and cursors, which the first process creates.

    Raises Unavailable, also for a damaged key.
    """
    fresh = secrets.token_bytes(_SESSION_KEY_BYTES)

    def created(found: bytes | None) -> bytes | None:
        return fresh if found is None else None

    stored = await change(shared_records(state), SESSION_KEY, created)
    key = stored.value or b""
    if len(key) != _SESSION_KEY_BYTES:
        problem = f"it has {len(key)} bytes instead of {_SESSION_KEY_BYTES}"
        raise Unavailable(_damaged(state, SESSION_KEY, problem, "delete it, then sessions and cursors start anew"))
    return key


def _damaged(state: StateFile, key: str, problem: str, remedy: str) -> str:
    """Return a message that names the damaged record, and the command with which the operator deletes it."""
    delete = f"DELETE FROM records WHERE bucket = '{_BUCKET}' AND key = '{key}'"  # noqa: S608 - for the operator
    return f'{state.path}: the record {key} is damaged: {problem}; {remedy}: sqlite3 {state.path} "{delete}"'


class SwitchMonitor:
    """Passes the switches, which say what an operator has disabled, to `use` whenever they have changed.

    If they cannot be read, the last known ones stay in use. Before they have been read no tool may run.
    """

    def __init__(self, state: StateFile, use: Callable[[Switches], None]) -> None:
        self._state = state
        self._use = use
        self._known_revision = -1  # of the switches; -1 before they have been read
        self._logged_failure = ""  # of the last check, empty if it succeeded
        use(UnreadSwitches())

    async def check(self) -> None:
        """Read the switches once; log why that fails."""
        try:
            stored = await shared_records(self._state).read(_SWITCHES)
            switches = _decoded(self._state, stored)
        except (Unavailable, SwitchRecordInvalid) as error:
            self._log(str(error))
            return
        self._logged_failure = ""
        if stored.revision != self._known_revision:
            self._use(switches)
            is_first = self._known_revision < 0
            if not is_first or switches.all:
                log.warning("an operator has disabled or enabled tools", extra={"action": "tool.switched"})
            self._known_revision = stored.revision

    def _log(self, failure: str) -> None:
        if failure != self._logged_failure:
            self._logged_failure = failure
            effect = "no tool may run" if self._known_revision < 0 else "the last known ones stay disabled"
            log.error(
                "cannot read which tools are disabled, so %s: %s",
                effect,
                failure,
                extra={"action": "switches.not_read"},
            )


def _decoded(state: StateFile, stored: Stored) -> Switches:
    """Return the switches of a record. Raises SwitchRecordInvalid with the remedy."""
    try:
        return Switches() if stored.value is None else Switches.decode(stored.value)
    except SwitchRecordInvalid as error:
        remedy = "delete it, and disable again what must not run"
        raise SwitchRecordInvalid(_damaged(state, _SWITCHES, str(error), remedy)) from error


async def follow(
    state: StateFile, name: str, switches: SwitchMonitor, snapshot: Callable[[], Mapping[str, Any]]
) -> None:
    """Every second adopt changed switches, and answer a request for statistics, as the process `name`."""
    records = shared_records(state)
    statistics = state.records(_STATISTICS_BUCKET, _STATISTICS_TTL_S)
    answered = 0  # revision of the last request that was answered
    while True:
        try:
            await switches.check()
            asked = await records.read(_ASKED)
            if asked.revision != answered:
                await statistics.put(name, orjson.dumps({"asked": asked.revision, **snapshot()}, default=str))
                answered = asked.revision
        except Unavailable:
            pass  # the operator gets no answer from this process
        except Exception:  # if this task ended, no switch would take effect any more
            log.exception("internal error in the answers to an operator", extra={"action": "operator.broken"})
        await asyncio.sleep(_READ_S)


async def ask_statistics(state: StateFile) -> list[dict[str, Any]]:
    """Return the statistics of all processes that answer in time, in the order of their names. Raises Unavailable."""
    asked = await change(shared_records(state), _ASKED, lambda _: secrets.token_bytes(8))
    await asyncio.sleep(_ANSWERS_S)
    stored = await state.records(_STATISTICS_BUCKET).all()
    found = [orjson.loads(value) for value in stored.values()]
    answers = [each for each in found if each.pop("asked") == asked.revision]  # others are of earlier requests
    return sorted(answers, key=lambda answer: answer["instance"])


async def read_switches(state: StateFile) -> Switches:
    """Return which tools are disabled. Raises Unavailable, SwitchRecordInvalid."""
    return _decoded(state, await shared_records(state).read(_SWITCHES))


async def change_switches(state: StateFile, apply: Callable[[Switches], Switches]) -> tuple[Switches, Switches]:
    """Apply a change to the switches; return those before and after. Raises Unavailable, SwitchRecordInvalid."""
    before = after = Switches()

    def changed(stored: bytes | None) -> bytes | None:
        nonlocal before, after
        before = _decoded(state, Stored(stored))
        after = apply(before)
        return None if after is before else after.encode()  # None writes nothing

    await change(shared_records(state), _SWITCHES, changed)
    return before, after
