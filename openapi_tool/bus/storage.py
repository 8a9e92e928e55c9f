"""Streams and buckets of the executor in NATS, and the records of limits, refused keys and budgets (ADR 9)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import KeyValueConfig, StreamInfo
from nats.js.errors import (
    BadRequestError,
    BucketNotFoundError,
    KeyNotFoundError,
    KeyWrongLastSequenceError,
    NoStreamResponseError,
    NotFoundError,
)
from nats.js.kv import KeyValue

from openapi_tool.budgets.budgets import Budgets
from openapi_tool.bus import dead_letters, kv_stores, leases
from openapi_tool.bus.client import BusClient, Denied
from openapi_tool.bus.connection import outage_as_unavailable
from openapi_tool.limits.limiter import Limiter
from openapi_tool.options import BudgetOptions, LimitOptions
from openapi_tool.protocol.errors import ToolError, Unavailable
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.health import JETSTREAM, Health
from openapi_tool.telemetry.metrics import Counter

log = logging.getLogger(__name__)

OnChange = Callable[[str, int, bytes], None]
"""Takes name, revision and value of a record that another replica wrote."""

MAX_VALUE_BYTES = 256 * 1024
_TIMEOUT_S = 2.0
_MAX_DIGITS = 20  # of a revision
_NAME_BYTES = 5  # of a replica in the records of limits, which contain up to 1,000 names
_SUFFIX_BYTES = 3


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """Bucket of records. Their keys match `keys`; they expire `ttl_s` seconds after their last change.

    Each change is published on the subject `CHANGES.RECORD`; the message contains the revision and the record. The
    metric `operations` counts reads, writes and conflicts.
    """

    bucket: str
    keys: str
    changes: str
    ttl_s: int
    max_bytes: int
    operations: Counter


LIMITS = BucketSpec(
    "openapi_tool_limits", "*.*.*", "openapi_tool.limits", 2 * 3600, 16 * 2**20, metrics.LIMIT_OPERATIONS
)
BUDGETS = BucketSpec(
    "openapi_tool_budgets", "budget.*", "openapi_tool.budgets", 40 * 86_400, 128 * 2**20, metrics.BUDGET_OPERATIONS
)
"""The TTL is longer than the month of a budget. Accounts of sessions expire 40 days after their last call."""


class SharedRecords:
    """Records of a bucket; unavailable until NATS is connected."""

    def __init__(self, spec: BucketSpec) -> None:
        self._spec = spec
        self._store: RecordStore | None = None

    async def connect(self, client: Client, replicas: int, on_change: OnChange) -> None:
        """Use this connection from now on, and call `on_change` with each record that another replica writes."""
        self._store = RecordStore(client, replicas, self._spec)
        await self._store.subscribe(on_change)

    async def read(self, name: str) -> tuple[int, bytes | None]:
        """Return revision and value of a record; 0 and None if there is none. Raises Unavailable."""
        return await self._opened().read(name)

    async def write(self, name: str, value: bytes, revision: int) -> int | None:
        """Replace a record if it still has this revision; return the new one, None if not. Raises Unavailable."""
        return await self._opened().write(name, value, revision)

    async def put(self, name: str, value: bytes) -> None:
        """Store a record that only this replica writes; without a message to other replicas. Raises Unavailable."""
        await self._opened().put(name, value)

    def _opened(self) -> RecordStore:
        if self._store is None:
            raise Unavailable("NATS: not connected yet")
        return self._store


class SharedLimits:
    """Limiter of this process, and its store. The arguments are those of Limiter."""

    def __init__(
        self,
        options: LimitOptions,
        clock: Callable[[], float],
        failure: Callable[[int], ToolError],
        weights: Mapping[str, float],
    ) -> None:
        self._records = SharedRecords(LIMITS)
        self.limiter = Limiter(secrets.token_hex(_NAME_BYTES), options, self._records, clock, failure, weights)

    @asynccontextmanager
    async def connected(self, client: Client, replicas: int) -> AsyncIterator[None]:
        """Share the limits over this connection; at the end the limiter gives back its unused permits."""
        await self._records.connect(client, replicas, self.limiter.on_change)
        with contextlib.suppress(Unavailable):  # blocked keys are then detected by their next refusal
            await self.limiter.keys.load()
        try:
            yield
        finally:
            await self.limiter.aclose()


class SharedBudgets:
    """Budgets of this process, and their store.

    `instance` names the process; a restarted one may have the same name, and is another replica. `clock` is the
    server's, in seconds since the epoch.
    """

    def __init__(self, instance: str, options: BudgetOptions, clock: Callable[[], float]) -> None:
        self._records = SharedRecords(BUDGETS)
        self.budgets = Budgets(f"{instance}-{secrets.token_hex(_SUFFIX_BYTES)}", options, self._records, clock)

    @asynccontextmanager
    async def connected(self, client: Client, replicas: int) -> AsyncIterator[None]:
        """Share the budgets over this connection; at the end report all uses and give back blocks."""
        await self._records.connect(client, replicas, self.budgets.on_change)
        try:
            yield
        finally:
            await self.budgets.aclose()


class RecordStore:
    """Reads and writes records of a bucket by compare-and-set; all methods raise Unavailable.

    The bucket is created with `replicas` replicas when the first record is written.
    """

    def __init__(self, client: Client, replicas: int, spec: BucketSpec) -> None:
        self._client = client
        self._spec = spec
        self._replicas = replicas
        self._bucket: KeyValue | None = None

    async def read(self, name: str) -> tuple[int, bytes | None]:
        """Return revision and value of a record; 0 and None if there is none."""
        self._spec.operations.labels("read").inc()
        with outage_as_unavailable():
            try:
                entry = await (await self._opened()).get(name)
            except BucketNotFoundError:
                return 0, None
            except KeyNotFoundError as missing:  # a deleted key still has a revision
                return (missing.entry.revision or 0) if missing.entry else 0, None
            except nats.errors.Error:
                self._bucket = None
                raise
        return entry.revision or 0, entry.value

    async def write(self, name: str, value: bytes, revision: int) -> int | None:
        """Replace a record if it still has this revision; return the new one, None if not."""
        self._spec.operations.labels("write").inc()
        with outage_as_unavailable():
            try:
                written = await (await self._created()).update(name, value, last=revision)
            except KeyWrongLastSequenceError:
                self._spec.operations.labels("conflict").inc()
                return None
            except NoStreamResponseError:  # the bucket was deleted, or has no leader
                self._bucket = None
                return None
            except nats.errors.Error:
                self._bucket = None
                raise
            await self._client.publish(f"{self._spec.changes}.{name}", b"%d\n%b" % (written, value))
        return written

    async def put(self, name: str, value: bytes) -> None:
        """Store a record of this replica in an existing bucket, without a message to other replicas.

        Does not wait for a confirmation: so the write takes a fifth of the CPU. A record that was sent survives a kill
        of this process.
        """
        self._spec.operations.labels("write").inc()
        with outage_as_unavailable():
            await self._client.publish(f"$KV.{self._spec.bucket}.{name}", value)

    async def subscribe(self, on_change: OnChange) -> None:
        """Call `on_change` with each record that a replica writes from now on."""

        async def received(message: Msg) -> None:
            number, _, value = message.data.partition(b"\n")
            if number.isdigit() and len(number) < _MAX_DIGITS and len(value) <= MAX_VALUE_BYTES:
                on_change(message.subject.removeprefix(f"{self._spec.changes}."), int(number), value)

        try:
            await self._client.subscribe(f"{self._spec.changes}.>", cb=received)
        except (nats.errors.Error, OSError) as error:
            log.warning(
                "cannot subscribe to changes of %s: %s",
                self._spec.bucket,
                error,
                extra={"action": "limits.not_followed"},
            )

    async def _opened(self) -> KeyValue:
        if self._bucket is None:
            self._bucket = await self._client.jetstream(timeout=_TIMEOUT_S).key_value(self._spec.bucket)
        return self._bucket

    async def _created(self) -> KeyValue:
        try:
            return await self._opened()
        except BucketNotFoundError:
            config = KeyValueConfig(
                bucket=self._spec.bucket,
                ttl=self._spec.ttl_s,
                max_bytes=self._spec.max_bytes,
                max_value_size=MAX_VALUE_BYTES,
                replicas=self._replicas,
            )
            with contextlib.suppress(BadRequestError):  # another executor created it first, with other limits
                await self._client.jetstream(timeout=_TIMEOUT_S).create_key_value(config)
            return await self._opened()


_CHECK_INTERVAL_S = 4.0
_MIN_FREE_BYTES = 1024
_LEASES, _SESSIONS, _PARKED = (
    f"KV_{leases.BUCKET}",
    f"KV_{kv_stores.BUCKET}",
    f"KV_{kv_stores.PARKED_BUCKET}",
)
_STORED = (_LEASES, _SESSIONS, _PARKED, f"KV_{LIMITS.bucket}", f"KV_{BUDGETS.bucket}", dead_letters.STREAM)


async def denied(client: BusClient) -> list[str]:
    """Return for which streams and buckets of the executor this user lacks permission. Raises nats.errors.Error."""
    return [str(refusal) for refusal in await asyncio.gather(*(_denied(client, name) for name in _STORED)) if refusal]


async def _denied(client: BusClient, stream: str) -> Denied | None:
    try:
        await client.jetstream(timeout=_TIMEOUT_S).stream_info(stream)
    except NotFoundError:
        return None  # it is created when it is needed
    except Denied as refusal:
        return refusal
    return None


@dataclass(slots=True)
class Storage:
    """Creates missing streams and buckets, and records in `health` which are full or do not answer.

    `session_key` is stored again after its bucket was deleted, so that executors which start later use the same; None
    if it is not stored in NATS. Streams and buckets are created with `replicas` replicas; fewer cause a warning.
    """

    client: BusClient
    leases: leases.Leases
    parked: kv_stores.ParkedResultStore
    dead_letter_stream: dead_letters.DeadLetters
    session_key: bytes | None
    replicas: int
    health: Health
    _warned: set[str] = field(default_factory=set)

    async def run(self) -> None:
        """Check every few seconds until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(_CHECK_INTERVAL_S)

    async def check(self) -> None:
        """Check once, and create what is missing."""
        creators: dict[str, Callable[[], Awaitable[object]]] = {
            _LEASES: self.leases.ensure,
            _SESSIONS: self._restore_session_key,
            _PARKED: self.parked.ensure,
            dead_letters.STREAM: self.dead_letter_stream.ensure,
        }
        problems = await asyncio.gather(*(self._problem(stream, create) for stream, create in creators.items()))
        reason = "; ".join(problem for problem in problems if problem)
        self.health.record(JETSTREAM, ok=not reason, reason=reason)

    async def _restore_session_key(self) -> None:
        await kv_stores.ensure_bucket(self.client, self.replicas)
        if self.session_key is not None:
            await kv_stores.restore_session_key(self.client, self.session_key, self.replicas)

    async def _problem(self, stream: str, create: Callable[[], Awaitable[object]]) -> str:
        """Return why a stream cannot be used, empty if it can; create a missing one."""
        jetstream = self.client.jetstream(timeout=_TIMEOUT_S)
        try:
            try:
                info = await jetstream.stream_info(stream)
            except NotFoundError:
                await create()
                log.info("created %s", stream, extra={"action": "storage.created", "stream": stream})
                return ""
        except Denied as denied:
            return f"{stream}: {denied}"
        except Unavailable as unusable:
            return str(unusable)
        except (nats.errors.Error, OSError) as error:
            return f"{stream} does not answer: {type(error).__name__}"
        self._warn_of_replicas(stream, info)
        return f"{stream} is full ({info.state.bytes} of {info.config.max_bytes} bytes)" if _is_full(info) else ""

    def _warn_of_replicas(self, stream: str, info: StreamInfo) -> None:
        replicas = info.config.num_replicas or 1
        if replicas < self.replicas and stream not in self._warned:
            self._warned.add(stream)
            log.warning(
                "%s has fewer replicas than the command stream: if its servers fail, redelivered calls wait; run: "
                "nats stream edit %s --replicas %s --force",
                stream,
                stream,
                self.replicas,
                extra={"action": "storage.replicas", "stream": stream, "copies": replicas},
            )


def _is_full(info: StreamInfo) -> bool:
    """Return whether the next record may not fit; the server counts some overhead per record."""
    bytes_limit, messages_limit = info.config.max_bytes or 0, info.config.max_msgs or 0
    if bytes_limit > 0 and info.state.bytes + _MIN_FREE_BYTES > bytes_limit:
        return True
    return messages_limit > 0 and info.state.messages >= messages_limit
