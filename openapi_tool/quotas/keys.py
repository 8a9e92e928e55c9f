"""Keys that an endpoint refuses: blocked there for all replicas by a shared record, and tried again (ADR 9).

`Limiter` asks `Keys` before a request, and `KeyPermit` tells it the outcome. The record and its rules are in
`key_record`. Records are written by background tasks: only a call that may try a blocked key waits for a write.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import SecretStr

from openapi_tool.concurrency.background import in_background
from openapi_tool.protocol.errors import ToolError, Unavailable
from openapi_tool.quotas import key_record
from openapi_tool.quotas.key_record import STATES, KeyRecord, KeyUse, decode, encode, record_name
from openapi_tool.state.change import change as change_record
from openapi_tool.state.port import Records, Stored
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.recent_warnings import RECENT_WARNINGS
from openapi_tool.tools.operations import OPERATIONS
from openapi_tool.tools.secret_variables import Secrets

log = logging.getLogger(__name__)

_REMEDIES: Mapping[str, str] = MappingProxyType(  # by state, as part of a sentence about a key
    {
        "invalid": "is not valid, so an operator must set another one",
        "exhausted": "has no balance left, so an operator must top it up or set another one",
    }
)

Change = Callable[[KeyRecord], KeyRecord]


class _Known(NamedTuple):
    """Record of a key as it was `stored`, and as this process uses it: also with changes that could not be stored."""

    stored: Stored
    record: KeyRecord


_UNKNOWN = _Known(Stored(), KeyRecord())


class Keys:
    """State of the keys of this process, which is named `replica`.

    `blocked` has the records of the blocked keys by variable and endpoint. `on_state_change` is called for a key that
    was blocked or unblocked. `clock` returns the NATS server's time in seconds since the epoch. `failure` returns the
    error of a call whose key is refused, from the upstream's five-digit status.
    """

    def __init__(
        self, replica: str, store: Records, clock: Callable[[], float], failure: Callable[[int], ToolError]
    ) -> None:
        self.replica = replica
        self.now = clock
        self.on_state_change: Callable[[KeyUse], None] = lambda _: None
        self.blocked: dict[KeyUse, KeyRecord] = {}
        self._suspected: set[KeyUse] = set()  # refused once, not blocked
        self._failure = failure
        self._secrets = Secrets({}, ())
        self._uses: dict[str, KeyUse] = {}  # of the present values, by name of the record
        self._known: dict[str, _Known] = {}  # by name of the record
        self._store = store
        self._write_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()  # that write or read records

    def set_secrets(self, secrets: Secrets) -> None:
        """Use these values of keys from now on."""
        self._secrets = secrets
        before = self._uses
        self._uses = {}
        for variable, value in secrets.values().items():
            for operation in OPERATIONS:
                use = KeyUse(variable, operation.name)
                self._uses[record_name(use, value)] = use
        for name in before.keys() - self._uses.keys():
            self._known.pop(name, None)
            self._set_state(before[name], KeyRecord())
        # At the start, who sets the first values calls `load` once the store is connected.
        has_new_records = bool(self._uses.keys() - before.keys())
        if before and has_new_records:
            self._start(self.load())

    async def load(self) -> None:
        """Read the records of the keys that have none in memory."""
        for name in sorted(self._uses.keys() - self._known.keys()):
            stored = await self._store.read(name)
            if stored.value is not None:
                self._adopt(name, stored, decode(stored.value, self.now()))

    def get(self, variable: str) -> SecretStr | None:
        """Return the key in a variable; None if the variable is not set."""
        return self._secrets.get(variable)

    def error(self, use: KeyUse) -> ToolError:
        """Return the error of a call whose key is blocked; it says when the key is tried again."""
        record = self.blocked[use]
        error = self._failure(record.status)
        error.key_variable = use.variable
        seconds = max(1, math.ceil(record.retry_at - self.now()))
        why = _REMEDIES[STATES[record.status]]
        error.message = (
            f"The service refuses {use.endpoint} requests with this tool's key, which {why}; "
            f"the next call after {seconds} s tries it again."
        )
        error.detail = {"retry_after_s": seconds}
        return error

    async def claim_trial(self, use: KeyUse) -> bool:
        """Return whether this call may try a blocked key: one call of all replicas may, once it is due."""
        now = self.now()
        record = self.blocked[use]
        if record.retry_at > now:
            return False
        change = partial(key_record.claim_trial, now=now)
        self.blocked[use] = change(record)  # before any `await`, so that other calls of this process claim none
        try:
            # True if this replica has claimed the trial in the shared record, and no other one. A key that another
            # replica has unblocked meanwhile may be tried, too.
            return await self._apply(self._name_of(use), change) or use not in self.blocked
        except Unavailable:
            return True  # without the store, one call of each replica may
        except asyncio.CancelledError:
            self.end_trial(use)  # the claim may be stored: without this, no call would try the key for a while
            raise

    def record_refusal(self, use: KeyUse, key: SecretStr, status: int, call_number: int) -> None:
        """Record that the upstream refused the `key` that was sent, with a status of `STATES`.

        `call_number` is the number of the call in this process. A key that is blocked for the same reason stays as it
        is: `claim_trial` has already set when it may be tried again.
        """
        name = record_name(use, key.get_secret_value())
        if name not in self._uses:
            return  # the key was rotated after the request was sent
        if use not in self.blocked or self.blocked[use].state != STATES[status]:
            call = f"{self.replica}/{call_number}"
            change = partial(key_record.record_refusal, status=status, call=call, now=self.now())
            self._start(self._apply(name, change))

    def record_success(self, use: KeyUse, *, trial: bool) -> None:
        """Record that the upstream accepted a key: after a `trial` of a blocked key, unblock it.

        If the key was refused once and is not blocked, forget the refusal: as the key is good, the refused call must
        have been the cause. If such refusals added up, one project could block the key for all (ADR 9).
        """
        if use in self.blocked:
            if trial:
                self._start(self._apply(self._name_of(use), key_record.unblock))
        elif use in self._suspected:
            self._suspected.discard(use)
            self._start(self._apply(self._name_of(use), key_record.forget_refusals))

    def end_trial(self, use: KeyUse) -> None:
        """Let the next call try a blocked key, as the trial got no response that depends on the key."""
        if use in self.blocked:
            self._start(self._apply(self._name_of(use), partial(key_record.end_trial, now=self.now())))

    def on_change(self, name: str, stored: Stored) -> None:
        """Adopt a record that another replica wrote."""
        if name in self._uses and stored.revision > self._known.get(name, _UNKNOWN).stored.revision:
            self._adopt(name, stored, decode(stored.value, self.now()))

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the blocked keys, for statistics."""
        now = self.now() if self.blocked else 0.0  # the server's time may not be known yet
        return [
            {
                "variable": use.variable,
                "endpoint": use.endpoint,
                "state": record.state,
                "status": record.status,
                "for_s": round(max(0.0, now - record.since), 1),
                "tried_again_s": round(max(0.0, record.retry_at - now), 1),
            }
            for use, record in sorted(self.blocked.items())
        ]

    async def aclose(self) -> None:
        """Wait for pending writes, which end by the time limit of the store."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _name_of(self, use: KeyUse) -> str:
        """Return the name of the record of a key's present value."""
        return next(name for name, one in self._uses.items() if one == use)

    def _start(self, work: Coroutine[Any, Any, object]) -> None:
        """Read or write records in the background."""
        task = in_background(self._log_outage(work), "keys")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _log_outage(self, work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
        except Unavailable as outage:
            log.warning(
                "cannot share the state of keys: %s; this replica goes by its own calls",
                outage,
                extra={"action": "key.not_shared"},
            )

    async def _apply(self, name: str, change: Change) -> bool:
        """Change the shared record; return whether `change` has changed anything in it.

        Without the store, change this replica's copy, and raise Unavailable.
        """
        async with self._write_lock:
            try:
                return await self._change(name, change)
            except Unavailable:
                stored, record = self._known.get(name, _UNKNOWN)
                self._adopt(name, stored, change(record))
                raise

    async def _change(self, name: str, change: Change) -> bool:
        before = after = KeyRecord()

        def changed(value: bytes | None) -> bytes | None:
            nonlocal before, after
            if value is None:  # never written, or expired
                self._known.pop(name, None)
            known = self._known.get(name, _UNKNOWN)
            # A record that is known is not decoded again: `decode` caps a forged `retry_at` at some minutes after now.
            # If it did so each time, that moment would never come.
            is_known = value is not None and value == known.stored.value
            before = known.record if is_known else decode(value, self.now())
            after = change(before)
            return encode(after) if after != before else None

        stored = await change_record(self._store, name, changed)
        self._adopt(name, stored, after)
        return after != before

    def _adopt(self, name: str, stored: Stored, record: KeyRecord) -> None:
        """Use a record from now on, unless a newer one is known or the key was rotated."""
        if name in self._uses and stored.revision >= self._known.get(name, _UNKNOWN).stored.revision:
            self._known[name] = _Known(stored, record)
            self._set_state(self._uses[name], record)

    def _set_state(self, use: KeyUse, record: KeyRecord) -> None:
        """Block or unblock a key as its record says; log and tell it if that is a change."""
        before = self.blocked.pop(use, KeyRecord())
        self._suspected.discard(use)
        if record.status:
            self.blocked[use] = record
        elif record.refusals:
            self._suspected.add(use)
        if record.state == before.state:
            return
        for state in set(STATES.values()):
            metrics.KEY_UNUSABLE.labels(*use, state).set(state == record.state)
        if record.state:
            self._log_blocked(use, record)
        else:
            log.info(
                "the key of %s is used for %s requests again", *use, extra={"action": "key.unblocked", **use._asdict()}
            )
            RECENT_WARNINGS.solve("key.refused", **use._asdict())
        self.on_state_change(use)

    def _log_blocked(self, use: KeyUse, record: KeyRecord) -> None:
        log.warning(
            "the key of %s is %s (%s) for %s requests: they use another key of its pool or fail; "
            "it is tried again in %.0f s",
            use.variable,
            record.state,
            record.status,
            use.endpoint,
            max(0.0, record.retry_at - self.now()),
            extra={"action": "key.blocked", **use._asdict(), "state": record.state, "status": record.status},
        )
