"""Held commands, received but not settled, with their heartbeats; leases of those that were redelivered (ADR 4).

JetStream delivers a message to no other executor while heartbeats extend its AckWait, so a first delivery needs no
lease. After a redelivery the first run may still be in progress in a stalled process, so a KV record names the owner of
the lease, and counts runs that began and never ended.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from sys import getsizeof
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import quote

import nats.errors
import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from openapi_tool.bus.connection import INSTANCE
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.dialect import claimed_identity
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.identity import AGENT, MAX_ID_BYTES
from openapi_tool.state.change import change as change_record
from openapi_tool.state.nats_kv import Bucket, NatsKvRecords
from openapi_tool.tools.problems import short

log = logging.getLogger(__name__)

BUCKET = "openapi_tool_leases"
KEYS = "command.*.*"
_TTL_S = 3600  # of a record after its last change
_MAX_EVENTS = 20
_Count = Annotated[int, Field(ge=0, lt=2**63)]  # which can be written again


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Event of a run, for `openapi-tool inspect`: `began`, `handed_back` or `settled`, in seconds since the epoch."""

    event: str
    delivery: _Count
    executor: str
    at: float


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """KV record of one command; `lost` counts runs that began and did not end, that of `owner` included.

    `expires_at` is in seconds since the epoch, 0 without an owner. `runs` are the last events, oldest first.
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
    """Ownership of a redelivered command in its delivery number `delivery`."""

    key: str
    lost: int
    delivery: int


@dataclass(frozen=True, slots=True)
class LeaseTaken:
    """Another executor holds the lease."""

    retry_in_s: float


class Leases:
    """Leases by compare-and-set on KV records, one per command. All methods raise Unavailable.

    A lease lasts `duration_s` seconds on `clock` (seconds since the epoch), the same for all executors.
    """

    def __init__(
        self, client: Client, duration_s: float, replicas: int = 1, clock: Callable[[], float] = time.time
    ) -> None:
        self.duration_s = duration_s
        self._clock = clock
        self._owner = secrets.token_hex(8)
        self.records = NatsKvRecords(client, Bucket(BUCKET, ttl_s=_TTL_S, replicas=replicas))

    async def take(self, delivery: Delivery) -> Lease | LeaseTaken:
        """Take the lease of a redelivered command, unless another executor holds it."""
        key, now = lease_key(delivery.stream, delivery.stream_sequence), self._clock()

        def taken(record: LeaseRecord) -> LeaseRecord | None:
            return None if record.expires_at > now and record.owner != self._owner else self._owned(record)

        record, own = await self._change(key, taken, delivery.attempt)
        if own is None:
            return LeaseTaken(min(record.expires_at - now, self.duration_s))  # more is damaged or of other settings
        return Lease(key, record.lost, delivery.attempt)

    async def begin(self, lease: Lease) -> None:
        """Count a run as lost from its start until it ends or is handed back."""

        def begun(record: LeaseRecord) -> LeaseRecord:
            return self._with_event(self._owned(replace(record, lost=record.lost + 1)), "began", lease.delivery)

        await self._change(lease.key, begun)

    async def renew(self, lease: Lease) -> None:
        """Extend the lease, unless another executor took it meanwhile."""
        await self._change(lease.key, lambda record: self._owned(record) if record.owner == self._owner else None)

    async def release(self, lease: Lease) -> None:
        """Release a lease that was just taken; no other executor can have it yet."""
        await self._change(lease.key, _without_owner)

    async def hand_back(self, delivery: Delivery, *, forgive: bool) -> None:
        """Release the lease of a command that is not settled; `forgive` takes its run off the lost ones."""

        def released(record: LeaseRecord) -> LeaseRecord:
            record = replace(record, lost=max(0, record.lost - int(forgive)))
            if record.owner in ("", self._owner):  # a first run has no lease
                record = _without_owner(record)
            return self._with_event(record, "handed_back", delivery.attempt)

        await self._change(lease_key(delivery.stream, delivery.stream_sequence), released)

    async def settle(self, lease: Lease) -> None:
        """Release the lease of a settled command; its record stays for `inspect`."""

        def released(record: LeaseRecord) -> LeaseRecord | None:
            if record.owner != self._owner:
                return None
            return self._with_event(_without_owner(replace(record, lost=0)), "settled", lease.delivery)

        await self._change(lease.key, released)

    def _with_event(self, record: LeaseRecord, event: str, delivery: int) -> LeaseRecord:
        run_event = RunEvent(event, delivery, INSTANCE, round(self._clock(), 3))
        return replace(record, runs=(*record.runs, run_event)[-_MAX_EVENTS:])

    def _owned(self, record: LeaseRecord) -> LeaseRecord:
        return replace(record, owner=self._owner, expires_at=self._clock() + self.duration_s)

    async def _change(
        self, key: str, change: Callable[[LeaseRecord], LeaseRecord | None], attempt: int = 2
    ) -> tuple[LeaseRecord, LeaseRecord | None]:
        """Return the record before and after `change`, None for no change.

        `attempt` is the delivery count, by default that of a command that was run.
        """
        # A redelivered command without a record has one lost run: its first, which writes none. In delivery 1 it has
        # none: `take` also gets commands that were never run, if they arrive after a stall.
        before = unwritten = LeaseRecord(lost=min(attempt - 1, 1))
        after: LeaseRecord | None = None

        def changed(stored: bytes | None) -> bytes | None:
            nonlocal before, after
            try:
                before = unwritten if stored is None else _RECORD.validate_json(stored)
            except ValidationError:
                before = unwritten
            after = change(before)
            return None if after is None else orjson.dumps(after)

        await change_record(self.records, key, changed)
        return before, after


def lease_key(stream: str, sequence: int) -> str:
    """Return the key of a command; `stream` is quoted: keys allow fewer characters."""
    return f"command.{quote(stream, safe='').replace('~', '%7E').replace('%', '=')}.{sequence}"


def _without_owner(record: LeaseRecord) -> LeaseRecord:
    return replace(record, owner="", expires_at=0.0)


_IDS = ("agent_id", "agent_turn_id", "tool_call_id")
_MAX_PARSED_BYTES = 16_384  # of a body; a valid one has 1 kB
_MAX_LOGGED_CHARS = 128
_OVERHEAD_BYTES = 1_024
"""Memory of a held command besides subject, headers and body: objects, reply subject, queue entries."""


class FetchMode(Enum):
    """Limit of fetching; PROBE is one command that tests the database."""

    UNLIMITED = auto()
    PROBE = auto()
    NONE = auto()


@dataclass(slots=True)
class Held:
    """Received command; times are on the monotonic clock, in seconds.

    `started_at` (of its run) and `last_progress_ack` (last heartbeat) begin as the time of its delivery. `flow` is
    (project, agent).
    """

    message: Msg
    delivery: Delivery
    started_at: float
    last_progress_ack: float
    stale: bool = False  # the server may have redelivered it elsewhere
    forgive_on_hand_back: bool = True  # handing it back takes this run off the count of lost runs
    settling: bool = False  # its settlement is decided
    probe: bool = False  # it tests whether calls can be committed again
    lease: Lease | None = None
    flow: tuple[str, str] = field(init=False)
    memory_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        subject, headers = self.delivery.subject, self.delivery.headers
        self.flow = project_of(subject), headers.get(AGENT, "")[:MAX_ID_BYTES]
        # getsizeof, not len: one wide character makes CPython store the whole header in four bytes per character.
        texts = len(subject) + sum(map(getsizeof, headers)) + sum(map(getsizeof, headers.values()))
        self.memory_bytes = _OVERHEAD_BYTES + len(self.delivery.data) + texts

    @property
    def never_run(self) -> bool:
        """Return whether no delivery of the command was ever run, as far as is known here."""
        return self.delivery.attempt == 1 and not self.stale


def project_of(subject: str) -> str:
    """Return the project in a command's subject, empty if it has none."""
    return [*subject.split(".", 3), "", ""][2]  # cg.VERSION.PROJECT.…


def ids_of(command: Delivery | Msg) -> dict[str, Any]:
    """Return the ids that a command claims, each truncated, for log lines; not of a held message, which is empty."""
    subject, headers, data = command.subject, command.headers or {}, command.data
    sequence = command.stream_sequence if isinstance(command, Delivery) else command.metadata.sequence.stream
    claimed = claimed_identity(subject, headers, data if len(data) <= _MAX_PARSED_BYTES else b"")
    ids = {"protocol": subject.removeprefix("cg.").partition(".")[0], "project_id": project_of(subject)}
    ids |= {name: getattr(claimed, name) or "" for name in _IDS}
    if claimed.trace is not None:
        ids["trace_id"] = claimed.trace.trace_id
    return {"stream_sequence": sequence, **{name: short(value, _MAX_LOGGED_CHARS) for name, value in ids.items()}}


# Fractions of AckWait: after the last acknowledged progress, between two checks, timeout of one heartbeat. A failed
# heartbeat is retried at the next check; two attempts fit: 0.45 + 2 * (1/12 + 1/10) is less than 1.
_DUE_SHARE = 0.45
_CHECK_SHARE = 1 / 12
_TIMEOUT_SHARE = 1 / 10

_MAX_CONCURRENT = 64
"""Hundreds are due together after a stall; sent one by one, the last would be too late."""


class Heartbeats:
    """Sends progress acknowledgements and renews leases."""

    def __init__(self, leases: Leases, ack_wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.ack_wait_s = ack_wait_s
        self._leases = leases
        self._clock = clock

    @property
    def check_every_s(self) -> float:
        """Seconds between two checks."""
        return self.ack_wait_s * _CHECK_SHARE

    async def send(self, held: Iterable[Held]) -> None:
        """Send the heartbeats that are due, longest overdue first."""
        due_before = self._clock() - self.ack_wait_s * _DUE_SHARE
        due = [work for work in held if work.last_progress_ack <= due_before and not work.message.is_acked]
        due.sort(key=lambda work: work.last_progress_ack)
        permits = asyncio.Semaphore(_MAX_CONCURRENT)
        await asyncio.gather(*(self._beat(work, permits) for work in due))

    async def _beat(self, work: Held, permits: asyncio.Semaphore) -> None:
        try:
            async with asyncio.timeout(self.ack_wait_s * _TIMEOUT_SHARE), permits:
                sent_at = self._clock()
                await work.message.in_progress()
                if work.lease is not None:
                    await self._leases.renew(work.lease)
                work.last_progress_ack = sent_at  # only on success: a failed heartbeat must stay due
        except (nats.errors.Error, OSError, Unavailable) as error:
            log.warning(
                "cannot send a heartbeat; retrying",
                extra={"action": "heartbeat.failed", "error": f"{type(error).__name__}: {error}"}
                | ids_of(work.delivery),
            )
