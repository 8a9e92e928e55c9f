"""How an operator reaches the running processes of a gateway through their state file: switches and statistics.

*Switches* say which tools an operator has disabled. A command of the operator writes a record, and each process reads
the records every second. To ask for statistics, the command changes the record of the request. Each process then writes
its answer to another bucket, in which the command looks for the answers.
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
"""Bucket of the three records that all processes of a gateway read."""

_SESSION_KEY = "session_key"  # record with the secret that signs session identities and cursors
_SWITCHES = "switches"  # record with the disabled tools
_REQUEST = "statistics_asked"
"""Record of the last request for statistics. Its value is random, and its revision is the number of the request."""

_STATISTICS_BUCKET = "statistics"
"""Bucket of the answers, one record for each process, by its name."""

_STATISTICS_TTL_S = 30.0  # after which the answers of processes that have ended are gone
_READ_S = 1.0  # between two reads of the records by a process
_ANSWERS_S = _READ_S + 0.3  # for which a command waits for the statistics of all processes
_SESSION_KEY_BYTES = 32
_UNREAD = -1  # stands for the revision of a record that was never read


def shared_records(state: StateFile) -> Records:
    """Return the records that all processes of a gateway read: session key, switches, request for statistics."""
    return state.records(_BUCKET)


async def session_key(state: StateFile) -> bytes:
    """Return the key that signs session identities and cursors, which the first process creates.

    Raises Unavailable, also for a damaged key.
    """
    new_key = secrets.token_bytes(_SESSION_KEY_BYTES)

    def new_if_missing(stored_key: bytes | None) -> bytes | None:
        return new_key if stored_key is None else None  # None writes nothing

    stored = await change(shared_records(state), _SESSION_KEY, new_if_missing)
    key = stored.value or b""
    if len(key) != _SESSION_KEY_BYTES:
        problem = f"it has {len(key)} bytes instead of {_SESSION_KEY_BYTES}"
        raise Unavailable(_damaged(state, _SESSION_KEY, problem, "delete it, then sessions and cursors start anew"))
    return key


def _damaged(state: StateFile, key: str, problem: str, remedy: str) -> str:
    """Return a message that names the damaged record, and the command with which the operator deletes it."""
    delete = f"DELETE FROM records WHERE bucket = '{_BUCKET}' AND key = '{key}'"  # noqa: S608 - for the operator
    return f'{state.path}: the record {key} is damaged: {problem}; {remedy}: sqlite3 {state.path} "{delete}"'


class SwitchMonitor:
    """Passes the switches to `use` whenever an operator has changed them.

    If they cannot be read, the last known ones stay in use. Before they have been read no tool may run.
    """

    def __init__(self, state: StateFile, use: Callable[[Switches], None]) -> None:
        self._state = state
        self._use = use
        self._known_revision = _UNREAD  # of the switches in use
        self._logged_failure = ""  # why the last check failed, empty if it succeeded
        use(UnreadSwitches())

    async def check(self) -> None:
        """Read the switches once; log why that fails."""
        try:
            stored = await shared_records(self._state).read(_SWITCHES)
            switches = _decoded(self._state, stored)
        except (Unavailable, SwitchRecordInvalid) as error:
            self._log_once(str(error))
            return
        self._logged_failure = ""
        if stored.revision != self._known_revision:
            self._use(switches)
            is_first_read = self._known_revision == _UNREAD
            if not is_first_read or switches.all:  # at the start nothing has changed; only disabled tools are news
                log.warning("an operator has disabled or enabled tools", extra={"action": "tool.switched"})
            self._known_revision = stored.revision

    def _log_once(self, failure: str) -> None:
        if failure != self._logged_failure:
            self._logged_failure = failure
            is_unread = self._known_revision == _UNREAD
            effect = "no tool may run" if is_unread else "the last known ones stay disabled"
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
    """Every second adopt changed switches, and answer a request for statistics; `name` is that of this process.

    `snapshot` returns its statistics.
    """
    records = shared_records(state)
    statistics = state.records(_STATISTICS_BUCKET, _STATISTICS_TTL_S)
    answered = 0  # revision of the last request that was answered
    while True:
        try:
            await switches.check()
            request = await records.read(_REQUEST)
            if request.revision != answered:
                answer = {"asked": request.revision, **snapshot()}
                await statistics.put(name, orjson.dumps(answer, default=str))
                answered = request.revision
        except Unavailable:
            pass  # the operator gets no answer from this process
        except Exception:  # if this task ended, no switch would take effect any more
            log.exception("internal error in the answers to an operator", extra={"action": "operator.broken"})
        await asyncio.sleep(_READ_S)


async def ask_statistics(state: StateFile) -> list[dict[str, Any]]:
    """Return the statistics of all processes that answer in time, in the order of their names. Raises Unavailable."""
    request = await change(shared_records(state), _REQUEST, lambda _: secrets.token_bytes(8))
    await asyncio.sleep(_ANSWERS_S)
    stored = await state.records(_STATISTICS_BUCKET).all()
    answers = []
    for value in stored.values():
        answer = orjson.loads(value)
        if answer.pop("asked") == request.revision:  # others are for earlier requests
            answers.append(answer)
    return sorted(answers, key=lambda answer: answer["instance"])


async def read_switches(state: StateFile) -> Switches:
    """Return which tools are disabled. Raises Unavailable, SwitchRecordInvalid."""
    return _decoded(state, await shared_records(state).read(_SWITCHES))


async def change_switches(state: StateFile, apply: Callable[[Switches], Switches]) -> tuple[Switches, Switches]:
    """Apply a change to the switches; return those before and after. Raises Unavailable, SwitchRecordInvalid."""
    before = after = Switches()

    def apply_to(stored: bytes | None) -> bytes | None:
        nonlocal before, after
        before = _decoded(state, Stored(stored))
        after = apply(before)
        return None if after is before else after.encode()  # None writes nothing

    await change(shared_records(state), _SWITCHES, apply_to)
    return before, after
