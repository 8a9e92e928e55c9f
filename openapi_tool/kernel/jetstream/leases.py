"""Leases: the right of one executor to run a command that was delivered more than once (ADR 4).

An executor sends heartbeats for the commands that it runs. While they arrive, JetStream delivers a command to no other
executor, so a first delivery needs no lease. After a redelivery the first run may still be in progress, in a process
that was stopped for a while. So a redelivered command that may have run has a record in a KV bucket, which names the
executor that owns the lease. The record also counts the command's *lost* runs, which began and never ended:
`CommandRunner` no longer runs a command that has ended too many executors.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal
from urllib.parse import quote

import orjson
from nats.aio.client import Client
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from openapi_tool.kernel.jetstream.instance import INSTANCE
from openapi_tool.protocol.command import Delivery
from openapi_tool.state.change import change as change_record
from openapi_tool.state.nats_kv import Bucket, NatsKvRecords

BUCKET = "openapi_tool_leases"
KEYS = "command.*.*"  # pattern of the keys: stream and sequence
_TTL_S = 3600  # of a record after its last change; much longer than a call, and `inspect` shows it as long
_MAX_EVENTS = 20  # of a record, for `openapi-tool inspect`
_Count = Annotated[int, Field(ge=0, lt=2**63)]  # larger numbers could be read, but not be written again as JSON


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Event of a run, for `openapi-tool inspect`.

    - `event`: `began`, `handed_back` or `settled`.
    - `delivery`: number of the command's delivery that was run, from 1 on.
    - `executor`: name of the replica.
    - `at`: in seconds since the epoch.
    """

    event: str
    delivery: _Count
    executor: str
    at: float


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """Record of one command.

    - `owner`: id of the executor that has the lease, empty if none has.
    - `expires_at`: when the lease ends unless it is renewed, in seconds since the epoch; 0 without an owner.
    - `lost`: runs that began and did not end. The run of `owner` counts, too, until it ends.
    - `runs`: the last events, oldest first.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    version: Literal[1] = 1
    owner: str = ""
    lost: _Count = 0
    expires_at: float = 0.0
    runs: tuple[RunEvent, ...] = ()


_RECORD = TypeAdapter(LeaseRecord)


@dataclass(frozen=True, slots=True)
class Lease:
    """Lease that this executor has for one delivery of a command.

    - `key`: of the record.
    - `lost`: the command's lost runs before this one.
    """

    key: str
    lost: int
    delivery_number: int


@dataclass(frozen=True, slots=True)
class LeaseTaken:
    """Another executor holds the lease; it may be free after `retry_in_s` seconds."""

    retry_in_s: float


class Leases:
    """Leases by compare-and-set on KV records, one per command. All methods raise Unavailable.

    A lease lasts `duration_s` seconds on `clock`, in seconds since the epoch. Both must be the same for all executors.
    """

    def __init__(
        self, client: Client, duration_s: float, replicas: int = 1, clock: Callable[[], float] = time.time
    ) -> None:
        self.duration_s = duration_s
        self._clock = clock
        self._owner = secrets.token_hex(8)  # id of this executor in records
        self.records = NatsKvRecords(client, Bucket(BUCKET, ttl_s=_TTL_S, replicas=replicas))

    async def take(self, delivery: Delivery) -> Lease | LeaseTaken:
        """Take the lease of a redelivered command, unless another executor holds it."""
        key = lease_key(delivery.stream, delivery.stream_sequence)
        now = self._clock()

        def taken(record: LeaseRecord) -> LeaseRecord | None:
            is_held_by_other = record.owner != self._owner and record.expires_at > now
            return None if is_held_by_other else self._owned(record)

        # The first run of a command writes no record. So if there is none, deliveries from the second on count one lost
        # run: the first one may be lost. Delivery 1 counts none; it takes a lease only if its heartbeats were late
        # (`HeldCommand.stale`).
        lost_without_record = 0 if delivery.number == 1 else 1
        before, after = await self._change(key, taken, lost_without_record)
        if after is None:
            # A record that expires later than after `duration_s` is damaged, or was written with other settings.
            return LeaseTaken(min(before.expires_at - now, self.duration_s))
        return Lease(key, after.lost, delivery.number)

    async def begin(self, lease: Lease) -> None:
        """Count a run as lost from its beginning on, until `settle` or `hand_back`."""

        def begun(record: LeaseRecord) -> LeaseRecord:
            record = replace(self._owned(record), lost=record.lost + 1)
            return self._with_event(record, "began", lease.delivery_number)

        await self._change(lease.key, begun)

    async def renew(self, lease: Lease) -> None:
        """Extend the lease, unless another executor took it meanwhile."""

        def renewed(record: LeaseRecord) -> LeaseRecord | None:
            return self._owned(record) if record.owner == self._owner else None

        await self._change(lease.key, renewed)

    async def release(self, lease: Lease) -> None:
        """Release a lease without a run; it was just taken, so no other executor can have it yet."""
        await self._change(lease.key, _without_owner)

    async def hand_back(self, delivery: Delivery, *, forgive: bool) -> None:
        """Release the lease of a command that is not settled; with `forgive` its run does not count as lost."""

        def handed_back(record: LeaseRecord) -> LeaseRecord:
            if forgive:
                record = replace(record, lost=max(0, record.lost - 1))
            if record.owner in ("", self._owner):  # empty, as a first run has no lease
                record = _without_owner(record)
            return self._with_event(record, "handed_back", delivery.number)

        await self._change(lease_key(delivery.stream, delivery.stream_sequence), handed_back)

    async def settle(self, lease: Lease) -> None:
        """Release the lease of a settled command; its record stays for `inspect`."""

        def settled(record: LeaseRecord) -> LeaseRecord | None:
            if record.owner != self._owner:  # another executor took the lease meanwhile, and runs the command
                return None
            record = replace(_without_owner(record), lost=0)
            return self._with_event(record, "settled", lease.delivery_number)

        await self._change(lease.key, settled)

    def _with_event(self, record: LeaseRecord, event: str, delivery: int) -> LeaseRecord:
        """Return a record with a further event, for `inspect`."""
        run_event = RunEvent(event, delivery, INSTANCE, round(self._clock(), 3))
        return replace(record, runs=(*record.runs, run_event)[-_MAX_EVENTS:])

    def _owned(self, record: LeaseRecord) -> LeaseRecord:
        """Return a record of which this executor has the lease, for `duration_s` from now on."""
        return replace(record, owner=self._owner, expires_at=self._clock() + self.duration_s)

    async def _change(
        self, key: str, change: Callable[[LeaseRecord], LeaseRecord | None], lost_without_record: int = 1
    ) -> tuple[LeaseRecord, LeaseRecord | None]:
        """Change a record; return it as it was before the change, and as it is after.

        If `change` returns None, the record stays as it is, and None is returned for after. If there is no record, or
        an unreadable one, `change` gets a new one with `lost_without_record` lost runs.
        """
        before = new_record = LeaseRecord(lost=lost_without_record)
        after: LeaseRecord | None = None

        # Called again if another executor changed the record at the same time; the last call is the one that counts.

        def changed(stored: bytes | None) -> bytes | None:
            nonlocal before, after
            try:
                before = new_record if stored is None else _RECORD.validate_json(stored)
            except ValidationError:
                before = new_record
            after = change(before)
            return None if after is None else orjson.dumps(after)

        await change_record(self.records, key, changed)
        return before, after


def lease_key(stream: str, sequence: int) -> str:
    """Return the key of a command. The stream's name is quoted, as keys allow fewer characters: `a b` → `a=20b`."""
    return f"command.{quote(stream, safe='').replace('~', '%7E').replace('%', '=')}.{sequence}"


def _without_owner(record: LeaseRecord) -> LeaseRecord:
    return replace(record, owner="", expires_at=0.0)
