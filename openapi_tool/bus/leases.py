"""One owner for a command that is delivered again, and an honest count of what became of it before.

The first delivery of a command needs no lease: JetStream gives a message to nobody else while its
AckWait is kept up by heartbeats. From the second delivery on something has gone wrong already, so a
record in KV says who works on it now and how many deliveries were handed back on purpose; the others
were lost together with their executor (ADR 0004).
"""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict, dataclass, replace

import orjson
from nats.aio.client import Client
from nats.js.api import KeyValueConfig
from nats.js.errors import BucketNotFoundError, KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from openapi_tool.protocol.command import Delivery

BUCKET = "openapi_tool_leases"
_VERSION = 1
_FORGET_S = 3600
_RACES = 8


@dataclass(frozen=True, slots=True)
class Record:
    """What KV holds of one command; `expires_at` is in seconds since the epoch, 0 where nobody owns it."""

    version: int = _VERSION
    owner: str = ""
    attempt: int = 0
    given_back: int = 0
    expires_at: float = 0.0

    def lost(self, attempt: int) -> int:
        """How many earlier deliveries nobody answered or handed back, seen from delivery `attempt`."""
        return max(0, attempt - 1 - self.given_back)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on a redelivered command; `lost` deliveries before it took their executor along."""

    key: str
    lost: int


@dataclass(frozen=True, slots=True)
class Busy:
    """Another executor holds the lease for `retry_in_s` more seconds."""

    retry_in_s: float


class LeaseLost(Exception):
    """So many executors want the same record at once that this one gave up; the command comes again."""


class Leases:
    """Compare-and-set on records in KV, one per command; all methods raise nats.errors.Error in an outage."""

    def __init__(self, client: Client, duration_s: float) -> None:
        self._client = client
        self._duration_s = duration_s
        self._owner = secrets.token_hex(8)
        self._bucket: KeyValue | None = None

    async def take(self, delivery: Delivery) -> Lease | Busy:
        """The lease of a redelivered command, unless somebody else has it; that delivery then counts as handed back."""
        key = _key(delivery)
        for _ in range(_RACES):
            revision, record = await self._read(key)
            busy_s = record.expires_at - time.time()
            busy = busy_s > 0 and record.owner != self._owner
            changed = (
                replace(record, given_back=record.given_back + 1)
                if busy
                else replace(record, owner=self._owner, attempt=delivery.attempt, expires_at=self._expiry())
            )
            if await self._write(key, changed, revision):
                return Busy(busy_s) if busy else Lease(key, record.lost(delivery.attempt))
        raise LeaseLost(key)

    async def renew(self, lease: Lease) -> None:
        """Hold the lease for another while; whoever took it meanwhile keeps it."""
        revision, record = await self._read(lease.key)
        if record.owner == self._owner:
            await self._write(lease.key, replace(record, expires_at=self._expiry()), revision)

    async def give_back(self, delivery: Delivery) -> None:
        """Note that a delivery is handed back on purpose, and let the lease go."""
        key = _key(delivery)
        for _ in range(_RACES):
            revision, record = await self._read(key)
            free = replace(record, owner="", given_back=record.given_back + 1, expires_at=0.0)
            if await self._write(key, free, revision):
                return
        raise LeaseLost(key)

    async def forget(self, lease: Lease) -> None:
        """The command is settled: nothing need be known of it any more."""
        await (await self._opened()).delete(lease.key)

    def _expiry(self) -> float:
        return time.time() + self._duration_s

    async def _read(self, key: str) -> tuple[int, Record]:
        try:
            entry = await (await self._opened()).get(key)
        except KeyNotFoundError as missing:
            return (missing.entry.revision or 0) if missing.entry else 0, Record()
        return entry.revision or 0, _record(entry.value)

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
                self._bucket = await jetstream.create_key_value(KeyValueConfig(bucket=BUCKET, ttl=_FORGET_S))
        return self._bucket


def _key(delivery: Delivery) -> str:
    return f"command.{delivery.stream_sequence}"


def _record(value: bytes | None) -> Record:
    """A record as it was written; one of another version counts as none."""
    fields = orjson.loads(value) if value else {}
    return Record(**fields) if fields.get("version") == _VERSION else Record()
