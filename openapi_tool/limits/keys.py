"""Keys that the upstream refuses: marked for all replicas by a shared record, tried again every few minutes (ADR 9)."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from pydantic import SecretStr

from openapi_tool.limits import key_record
from openapi_tool.limits.key_record import STATES, KeyRecord
from openapi_tool.limits.store import RACES, Store
from openapi_tool.protocol.errors import ToolError, Unavailable
from openapi_tool.shielding import in_background
from openapi_tool.telemetry import metrics
from openapi_tool.tools.secrets import Secrets

log = logging.getLogger(__name__)

PREFIX = "key."
_HASH_BYTES = 4
Change = Callable[[KeyRecord], bool]
"""Changes a record; returns whether it did."""


def record_name(variable: str, value: str) -> str:
    """Return the name of a key's record. It has 32 bits of a hash of the key: another value is another key."""
    digest = hashlib.blake2b(value.encode(), digest_size=_HASH_BYTES, person=b"openapi_tool_key")
    return f"{PREFIX}{variable}.{digest.hexdigest()}"


class Keys:
    """State of the keys of this process. `marks` has the records of the marked ones by variable.

    `name` is the replica's; `clock` the server's, in seconds since the epoch, which is `now` here. `failure` returns
    the error of a call whose key is refused with a status. `changed` is called with a variable that was marked, or
    whose mark was taken off.
    """

    def __init__(
        self, name: str, store: Store, clock: Callable[[], float], failure: Callable[[int], ToolError]
    ) -> None:
        self.marks: dict[str, KeyRecord] = {}
        self._states: dict[str, str | None] = {}
        self.changed: Callable[[str], None] = lambda _: None
        self.now = clock
        self._name, self._store, self._failure = name, store, failure
        self._secrets = Secrets({}, ())
        self._variables: dict[str, str] = {}  # by name of the record
        self._records: dict[str, tuple[int, KeyRecord]] = {}  # revision and record by name
        self._tasks: set[asyncio.Task[Any]] = set()
        self._one_by_one = asyncio.Lock()

    def use(self, secrets: Secrets) -> None:
        """Use these values from now on; a new one begins without a mark."""
        self._secrets = secrets
        before = self._variables
        self._variables = {record_name(variable, value): variable for variable, value in secrets.values().items()}
        for name in before.keys() - self._variables.keys():
            self._records.pop(name, None)
            self._show(before[name], KeyRecord())
        if before and (new := self._variables.keys() - before.keys()):
            self._begin(self._load(sorted(new)))

    async def load(self) -> None:
        """Read the records of all keys."""
        await self._load(sorted(self._variables))

    def get(self, variable: str) -> SecretStr | None:
        """Return the value of a variable, None if it is not set."""
        return self._secrets.get(variable)

    def error(self, variable: str) -> ToolError:
        """Return the error of a call whose key is marked."""
        error = self._failure(self.marks[variable].status)
        error.key_variable = variable
        return error

    def is_due(self, variable: str) -> bool:
        """Return whether a marked key may be tried again."""
        return self.marks[variable].again_at <= self.now()

    async def may_try(self, variable: str) -> bool:
        """Return whether this call may try a marked key again: one of all replicas, every few minutes."""
        now, name = self.now(), self._name_of(variable)
        if not key_record.try_again(self.marks[variable], now):  # here at once: no other call of this replica may
            return False
        try:
            return await self._apply(name, partial(key_record.try_again, now=now)) or variable not in self.marks
        except Unavailable:
            return True

    def refused(self, variable: str, key: SecretStr, status: int, call: int) -> None:
        """Enter a refusal of the key that was sent; the status is one of `STATES`."""
        name = record_name(variable, key.get_secret_value())
        if name not in self._variables:
            return  # it has been replaced since
        if variable not in self.marks or self.marks[variable].state != STATES[status]:
            who = f"{self._name}/{call}"
            self._begin(self._apply(name, partial(key_record.refuse, status=status, call=who, now=self.now())))

    def works(self, variable: str) -> None:
        """Take the mark off a key that has been tried again with success."""
        if variable in self.marks:
            self._begin(self._apply(self._name_of(variable), key_record.clear))

    def news(self, name: str, revision: int, value: bytes) -> None:
        """Adopt a record that another replica wrote."""
        if name in self._variables and revision > self._records.get(name, (0, None))[0]:
            self._adopt(name, revision, key_record.decode(value))

    def shown(self) -> list[dict[str, Any]]:
        """Return the marked keys, for `openapi-tool limits` and /readyz."""
        now = self.now() if self.marks else 0.0  # the server's time may not be known yet
        return [
            {
                "variable": variable,
                "state": record.state,
                "status": record.status,
                "for_s": round(max(0.0, now - record.since), 1),
                "tried_again_s": round(max(0.0, record.again_at - now), 1),
            }
            for variable, record in sorted(self.marks.items())
        ]

    async def aclose(self) -> None:
        """Write what is begun, or stop after the time limit of the store."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _name_of(self, variable: str) -> str:
        return next(name for name, one in self._variables.items() if one == variable)

    def _begin(self, work: Coroutine[Any, Any, object]) -> None:
        task = in_background(self._tried(work), "keys")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tried(self, work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
        except Unavailable as outage:
            log.warning(
                "cannot share the state of keys: %s; this replica goes by its own calls",
                outage,
                extra={"action": "key.not_shared"},
            )

    async def _load(self, names: list[str]) -> None:
        for name in names:
            revision, value = await self._store.read(name)
            if value is not None:
                self._adopt(name, revision, key_record.decode(value))

    async def _apply(self, name: str, change: Change) -> bool:
        """Change a record, this replica's own while the store is unavailable. Raises Unavailable then."""
        async with self._one_by_one:
            try:
                return await self._change(name, change)
            except Unavailable:
                revision, record = self._records.get(name, (0, KeyRecord()))
                change(record)
                self._adopt(name, revision, record)
                raise

    async def _change(self, name: str, change: Change) -> bool:
        """Change the shared record by compare-and-set; return whether it was changed, and adopt it in any case."""
        for _ in range(RACES):
            revision, value = await self._store.read(name)
            if value is None:  # never written, or forgotten by the store
                self._records.pop(name, None)
            record = key_record.decode(value)
            changed = change(record)
            written = await self._store.write(name, key_record.encode(record), revision) if changed else revision
            if written is not None:
                self._adopt(name, written, record)
                return changed
        return False

    def _adopt(self, name: str, revision: int, record: KeyRecord) -> None:
        if name in self._variables and revision >= self._records.get(name, (0, None))[0]:
            self._records[name] = revision, record
            self._show(self._variables[name], record)

    def _show(self, variable: str, record: KeyRecord) -> None:
        """Mark a variable or take its mark off; log and count a change."""
        self.marks.pop(variable, None)
        if record.status:
            self.marks[variable] = record
        if record.state == self._states.get(variable):
            return
        self._states[variable] = record.state
        for state in set(STATES.values()):
            metrics.KEY_UNUSABLE.labels(variable, state).set(state == record.state)
        if record.state:
            log.warning(
                "the key of %s is %s (%s): its calls are answered without a request; it is tried again in %.0f s",
                variable,
                record.state,
                record.status,
                max(0.0, record.again_at - self.now()),
                extra={"action": "key.marked", "variable": variable, "state": record.state, "status": record.status},
            )
        else:
            log.info("the key of %s is used again", variable, extra={"action": "key.used_again", "variable": variable})
        self.changed(variable)
