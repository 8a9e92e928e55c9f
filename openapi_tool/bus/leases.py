"""One owner for a command that is delivered again, and an honest count of what became of it before.

The first delivery of a command needs no lease: JetStream gives a message to nobody else while its
AckWait is kept up by heartbeats. From the second delivery on something has gone wrong already, so a
record in KV says who works on it now, and how many runs of it never came to an end: those were lost
together with their executor (ADR 0004).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import orjson
from nats.aio.client import Client
from nats.js.api import KeyValueConfig
from nats.js.errors import BucketNotFoundError, KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from openapi_tool.protocol.command import Delivery

BUCKET = "openapi_tool_leases"
KEYS = "command.*"
_VERSION = 1
_FORGET_S = 3600
_RACES = 8


@dataclass(frozen=True, slots=True)
class Record:
    """What KV holds of one command.

    `lost` counts runs that began and did not end, the one that `owner` does now included;
    `expires_at` is in seconds since the epoch, 0 where nobody owns the command.
    """

    version: int = _VERSION
    owner: str = ""
    lost: int = 0
    expires_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on a redelivered command, of which `lost` runs did not come to an end."""

    key: str
    lost: int


@dataclass(frozen=True, slots=True)
class Busy:
    """Another executor holds the lease for `retry_in_s` more seconds."""

    retry_in_s: float


class LeaseLost(Exception):
    """So many executors want the same record at once that this one gave up; the command comes again."""


class Leases:
    """Compare-and-set on records in KV, one per command; all methods raise nats.errors.Error in an outage.

    The bucket is made with so many `replicas` where it is missing.
    """

    def __init__(self, client: Client, duration_s: float, replicas: int = 1) -> None:
        self._client = client
        self._duration_s = duration_s
        self._replicas = replicas
        self._owner = secrets.token_hex(8)
        self._bucket: KeyValue | None = None

    async def take(self, delivery: Delivery) -> Lease | Busy:
        """The lease of a redelivered command, unless somebody else has it."""
        key = _key(delivery)
        for _ in range(_RACES):
            revision, record = await self._read(key, delivery.attempt)
            busy_s = record.expires_at - time.time()
            if busy_s > 0 and record.owner != self._owner:
                return Busy(busy_s)
            if await self._write(key, self._owned(record), revision):
                return Lease(key, record.lost)
        raise LeaseLost(key)

    async def begin(self, lease: Lease) -> None:
        """Count a run that begins now; until it ends or is given back it is a lost one."""
        await self._change(lease.key, lambda record: self._owned(replace(record, lost=record.lost + 1)))

    async def renew(self, lease: Lease) -> None:
        """Hold the lease for another while; whoever took it meanwhile keeps it."""
        await self._change(lease.key, lambda record: self._owned(record) if record.owner == self._owner else None)

    async def give_back(self, delivery: Delivery, *, began: bool) -> None:
        """Let a command go on purpose: the run that `began`, if one did, is not a lost one."""

        def free(record: Record) -> Record:
            return replace(record, owner="", lost=max(0, record.lost - began), expires_at=0.0)

        await self._change(_key(delivery), free)

    async def forget(self, lease: Lease) -> None:
        """The command is settled: nothing need be known of it any more."""
        await (await self._opened()).delete(lease.key)

    def _owned(self, record: Record) -> Record:
        return replace(record, owner=self._owner, expires_at=time.time() + self._duration_s)

    async def _change(self, key: str, change: Callable[[Record], Record | None]) -> None:
        """Read, change and write back, again where somebody else was quicker; None leaves it as it is."""
        for _ in range(_RACES):
            revision, record = await self._read(key)
            changed = change(record)
            if changed is None or await self._write(key, changed, revision):
                return
        raise LeaseLost(key)

    async def _read(self, key: str, attempt: int = 2) -> tuple[int, Record]:
        """Where nothing is written, the first delivery is the one run that began."""
        unwritten = Record(lost=min(attempt - 1, 1))
        try:
            entry = await (await self._opened()).get(key)
        except KeyNotFoundError as missing:
            return (missing.entry.revision or 0) if missing.entry else 0, unwritten
        return entry.revision or 0, _record(entry.value) or unwritten

    async def _write(self, key: str, record: Record, revision: int) -> bool:
        try:
            await (await self._opened()).update(key, orjson.dumps(asdict(record)), last=revision)
        except KeyWrongLastSequenceError:
            return False
        return True

    async def _opened(self) -> KeyValue:
        if self._bucket is None:
            jetstream = self._client.jetstream()
            try:
                self._bucket = await jetstream.key_value(BUCKET)
            except BucketNotFoundError:
                config = KeyValueConfig(bucket=BUCKET, ttl=_FORGET_S, replicas=self._replicas)
                self._bucket = await jetstream.create_key_value(config)
        return self._bucket


def _key(delivery: Delivery) -> str:
    return f"command.{delivery.stream_sequence}"


def _record(value: bytes | None) -> Record | None:
    """A record as it was written; anything else, one of another version too, counts as none."""
    try:
        record = Record(**orjson.loads(value or b"null"))
    except (TypeError, ValueError):
        return None
    return record if record.version == _VERSION else None
