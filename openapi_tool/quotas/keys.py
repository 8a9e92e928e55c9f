"""Keys that an endpoint refuses: blocked there for all replicas by a shared record, and tried again (ADR 9)."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

import orjson
from pydantic import Field, SecretStr, TypeAdapter, ValidationError

from openapi_tool.concurrency.background import in_background
from openapi_tool.protocol.errors import ToolError, Unavailable
from openapi_tool.quotas.amounts import Time
from openapi_tool.state.change import change as change_record
from openapi_tool.state.port import Records, Stored
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.recent_warnings import RECENT_WARNINGS
from openapi_tool.tools.catalogue import OPERATIONS
from openapi_tool.tools.secret_variables import Secrets

log = logging.getLogger(__name__)

STATES: Mapping[int, str] = MappingProxyType({40102: "invalid", 40201: "exhausted", 40203: "exhausted"})
"""State of a blocked key by the upstream's status. 40103, 40104 and 40202 are caused by the call, not by the key."""

_REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "invalid": "is not valid, so an operator must set another one",
        "exhausted": "has no balance left, so an operator must top it up or set another one",
    }
)

RETRIES_S = 10.0, 30.0, 60.0, 180.0
"""Seconds until one call may try a blocked key again: after the refusal, the first trial, … A balance is often
topped up, and a key accepted again, within seconds."""

_SECOND_REFUSAL_S = 600.0  # maximum between two refusals that block a key


@dataclass(frozen=True, slots=True)
class Refusal:
    """First refusal with a status: its call and time."""

    call: Annotated[str, Field(max_length=100)]
    at: Time


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """State of one key at one endpoint: with a `status` of `STATES` blocked since `since`.

    It may be tried again at `retry_at`. `trials` is how often it was tried since then.
    """

    version: Literal[3] = 3
    status: int = 0
    since: Time = 0.0
    retry_at: Time = 0.0
    trials: Annotated[int, Field(ge=0, le=2**31)] = 0
    refusals: Annotated[dict[int, Refusal], Field(max_length=len(STATES))] = field(default_factory=dict)

    @property
    def state(self) -> str | None:
        """State of a blocked key, else None."""
        return STATES.get(self.status)


def _record_refusal(record: KeyRecord, status: int, call: str, now: float) -> KeyRecord:
    """Record a refusal; the second one, by another call, blocks the key."""
    if record.status:
        return record if STATES[status] == record.state else replace(record, status=status)
    first = record.refusals.get(status)
    if first is None or abs(now - first.at) >= _SECOND_REFUSAL_S:
        return replace(record, refusals={**record.refusals, status: Refusal(call, now)})
    if first.call == call:
        return record
    return replace(record, status=status, since=now, retry_at=now + RETRIES_S[0], trials=0, refusals={})


def _claim_trial(record: KeyRecord, now: float) -> KeyRecord:
    if not record.status or record.retry_at > now:
        return record
    trials = record.trials + 1
    return replace(record, retry_at=now + RETRIES_S[min(trials, len(RETRIES_S) - 1)], trials=trials)


def _end_trial(record: KeyRecord, now: float) -> KeyRecord:
    return replace(record, retry_at=min(record.retry_at, now)) if record.status else record


def _unblock(record: KeyRecord) -> KeyRecord:
    return replace(record, status=0, refusals={})


def _forget_refusals(record: KeyRecord) -> KeyRecord:
    return record if record.status else replace(record, refusals={})


def encode(record: KeyRecord) -> bytes:
    """Return the stored form."""
    return orjson.dumps(record, option=orjson.OPT_NON_STR_KEYS)


_RECORD = TypeAdapter(KeyRecord)


def decode(stored: bytes | None, now: float) -> KeyRecord:
    """Return a stored record, with its times corrected as it may be forged; an empty one for anything else."""
    try:
        record = _RECORD.validate_json(stored or b"")
    except ValidationError:
        return KeyRecord()
    if record.status not in (0, *STATES):
        return KeyRecord()
    return replace(record, since=min(record.since, now), retry_at=min(record.retry_at, now + RETRIES_S[-1]))


PREFIX = "key."
_HASH_BYTES = 4  # enough to tell the values of a rotation apart
_REFUSED_KEY_ADVICE = {
    401: "it is not valid; set another one",
    402: "its balance is used up; top it up or set another one",
}
_WARNING_INTERVAL_S = 60.0
Change = Callable[[KeyRecord], KeyRecord]


class KeyUse(NamedTuple):
    """Use of the key in a variable for an endpoint, the name of an operation."""

    variable: str
    endpoint: str


class _Known(NamedTuple):
    """Record as it was stored, and as this process uses it: also with changes that could not be stored."""

    stored: Stored
    record: KeyRecord


_UNKNOWN = _Known(Stored(), KeyRecord())


def record_name(use: KeyUse, value: str) -> str:
    """Return the name of a key's record; the hash of its value gives a rotated key another record.

    Records of an earlier version had names without the endpoint; they expire unread.
    """
    digest = hashlib.blake2b(value.encode(), digest_size=_HASH_BYTES, person=b"openapi_tool_key")
    return f"{PREFIX}{use.variable}.{use.endpoint}-{digest.hexdigest()}"


class Keys:
    """State of the keys of this process. `blocked` has the records of the blocked ones by variable and endpoint.

    `replica` is its name. `clock` returns the NATS server's time in seconds since the epoch. `failure` returns the
    error of a call whose key is refused with a five-digit status. `on_state_change` is called with the variable and
    endpoint of a key that was blocked or unblocked.
    """

    def __init__(
        self, replica: str, store: Records, clock: Callable[[], float], failure: Callable[[int], ToolError]
    ) -> None:
        self.blocked: dict[KeyUse, KeyRecord] = {}
        self._suspected: set[KeyUse] = set()  # refused once, not blocked
        self.on_state_change: Callable[[KeyUse], None] = lambda _: None
        self.now = clock
        self.replica = replica
        self._store = store
        self._failure = failure
        self._secrets = Secrets({}, ())
        self._uses: dict[str, KeyUse] = {}  # by name of the record
        self._known: dict[str, _Known] = {}  # by name of the record
        self._tasks: set[asyncio.Task[Any]] = set()
        self._write_lock = asyncio.Lock()

    def set_secrets(self, secrets: Secrets) -> None:
        """Use these values from now on."""
        self._secrets = secrets
        before = self._uses
        values = secrets.values().items()
        uses = [(KeyUse(name, operation.name), value) for name, value in values for operation in OPERATIONS]
        self._uses = {record_name(use, value): use for use, value in uses}
        for name in before.keys() - self._uses.keys():
            self._known.pop(name, None)
            self._set_state(before[name], KeyRecord())
        # `assemble` loads the first ones, after it has connected the store.
        if before and self._uses.keys() - before.keys():
            self._start(self.load())

    async def load(self) -> None:
        """Read the records of the keys that have none in memory."""
        for name in sorted(self._uses.keys() - self._known.keys()):
            stored = await self._store.read(name)
            if stored.value is not None:
                self._adopt(name, stored, decode(stored.value, self.now()))

    def get(self, variable: str) -> SecretStr | None:
        """Return the value of a variable."""
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
        change = partial(_claim_trial, now=now)
        self.blocked[use] = change(record)  # before any `await`, so that other calls of this process claim none
        try:
            # A key that another replica has unblocked meanwhile may be tried, too.
            return await self._apply(self._name_of(use), change) or use not in self.blocked
        except Unavailable:
            return True  # without the store each replica tries
        except asyncio.CancelledError:
            self.end_trial(use)  # nobody knows whether it is claimed
            raise

    def record_refusal(self, use: KeyUse, key: SecretStr, status: int, call_number: int) -> None:
        """Record a refusal of the sent key with a status of `STATES`; `call_number` as `PermitRequest.call`."""
        name = record_name(use, key.get_secret_value())
        if name not in self._uses:
            return  # the key was rotated after the request was sent
        if use not in self.blocked or self.blocked[use].state != STATES[status]:
            call = f"{self.replica}/{call_number}"
            self._start(self._apply(name, partial(_record_refusal, status=status, call=call, now=self.now())))

    def record_success(self, use: KeyUse, *, trial: bool) -> None:
        """Unblock a key after a trial; else forget its first refusal: one project's calls may cause two (ADR 9)."""
        if use in self.blocked:
            if trial:
                self._start(self._apply(self._name_of(use), _unblock))
        elif use in self._suspected:
            self._suspected.discard(use)
            self._start(self._apply(self._name_of(use), _forget_refusals))

    def end_trial(self, use: KeyUse) -> None:
        """Let the next call try a blocked key: this one got no response that depends on the key."""
        if use in self.blocked:
            self._start(self._apply(self._name_of(use), partial(_end_trial, now=self.now())))

    def on_change(self, name: str, stored: Stored) -> None:
        """Adopt a record that another replica wrote."""
        if name in self._uses and stored.revision > self._known.get(name, _UNKNOWN).stored.revision:
            self._adopt(name, stored, decode(stored.value, self.now()))

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the blocked keys."""
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
        return next(name for name, one in self._uses.items() if one == use)

    def _start(self, work: Coroutine[Any, Any, object]) -> None:
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
        """Change the shared record; without the store change this replica's copy and raise Unavailable."""
        async with self._write_lock:
            try:
                return await self._change(name, change)
            except Unavailable:
                stored, record = self._known.get(name, _UNKNOWN)
                self._adopt(name, stored, change(record))
                raise

    async def _change(self, name: str, change: Change) -> bool:
        """Change the shared record; return whether it differs."""
        before = after = KeyRecord()

        def changed(value: bytes | None) -> bytes | None:
            nonlocal before, after
            if value is None:  # never written, or expired
                self._known.pop(name, None)
            # Not decoded again: `decode` caps a forged `retry_at` relative to now, so it would never be reached.
            known = self._known.get(name, _UNKNOWN)
            before = known.record if value is not None and value == known.stored.value else decode(value, self.now())
            after = change(before)
            return encode(after) if after != before else None

        stored = await change_record(self._store, name, changed)
        self._adopt(name, stored, after)
        return after != before

    def _adopt(self, name: str, stored: Stored, record: KeyRecord) -> None:
        if name in self._uses and stored.revision >= self._known.get(name, _UNKNOWN).stored.revision:
            self._known[name] = _Known(stored, record)
            self._set_state(self._uses[name], record)

    def _set_state(self, use: KeyUse, record: KeyRecord) -> None:
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
            log.warning(
                "the key of %s is %s (%s) for %s requests: they use another key of its pool or fail; "
                "it is tried again in %.0f s",
                use.variable,
                record.state,
                record.status,
                use.endpoint,
                max(0.0, record.retry_at - self.now()),
                extra={
                    "action": "key.blocked",
                    **use._asdict(),
                    "state": record.state,
                    "status": record.status,
                },
            )
        else:
            log.info(
                "the key of %s is used for %s requests again", *use, extra={"action": "key.unblocked", **use._asdict()}
            )
            RECENT_WARNINGS.solve("key.refused", **use._asdict())
        self.on_state_change(use)


class RefusedKeys:
    """Counts requests whose key the upstream refused; warns of each key, endpoint and status once a minute.

    The warnings of a key and endpoint are over once the upstream accepts it there.
    """

    def __init__(self) -> None:
        self._warned_at: dict[tuple[KeyUse, int], float] = {}

    def record(self, use: KeyUse, http_status: int | None) -> None:
        """Record the HTTP status of a failed request with a key."""
        if http_status is None or http_status not in _REFUSED_KEY_ADVICE:
            return
        metrics.KEYS_REFUSED.labels(*use).inc()
        now = time.monotonic()
        if now - self._warned_at.get((use, http_status), -_WARNING_INTERVAL_S) < _WARNING_INTERVAL_S:
            return
        self._warned_at[use, http_status] = now
        log.warning(
            "the upstream refused the key of %s for a %s request (HTTP %s): %s",
            *use,
            http_status,
            _REFUSED_KEY_ADVICE[http_status],
            extra={"action": "key.refused", **use._asdict(), "http_status": http_status},
        )

    def record_success(self, use: KeyUse) -> None:
        """Record a successful request with a key."""
        if not self._warned_at:
            return
        for warned in [warned for warned in self._warned_at if warned[0] == use]:
            del self._warned_at[warned]
            RECENT_WARNINGS.solve("key.refused", **use._asdict())
