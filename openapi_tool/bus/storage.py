"""Streams and buckets of the executor in NATS, and the records of limits, refused keys and budgets (ADR 9)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime

import nats.errors
import orjson
from nats.aio.client import Client
from nats.js.api import DiscardPolicy, StreamInfo
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError
from prometheus_client import Counter

from openapi_tool.bus import dead_letters, leases, parked_results, shared_bucket
from openapi_tool.bus.client import BusClient, Denied
from openapi_tool.bus.doorbells import WakeupPublisher
from openapi_tool.bus.server_clock import ServerClock
from openapi_tool.bus.session_key import restore_session_key
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.quotas.account_record import from_version_1
from openapi_tool.quotas.budgets import Budgets
from openapi_tool.quotas.limiter import Limiter
from openapi_tool.state.nats_kv import MAX_VALUE_BYTES, Bucket, NatsKvRecords, NatsKvTexts
from openapi_tool.state.port import AccessDenied, OnChange, Records, Stored
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.health import JETSTREAM, QUOTAS, Health

log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
_NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """Bucket of shared records whose keys match `keys`; `operations` counts reads, writes and conflicts.

    `earlier` is the bucket of an earlier version; `convert` turns its records into those of this one.
    """

    bucket: Bucket
    keys: str
    operations: Counter
    earlier: Bucket | None = None
    convert: Callable[[bytes], bytes | None] = lambda _: None


LIMITS = BucketSpec(
    Bucket("openapi_tool_key_limits", 2 * 3600, 64 * 2**20, MAX_VALUE_BYTES, "openapi_tool.key_limits"),
    "*.*.*",
    metrics.LIMIT_OPERATIONS,
)
BUDGETS = BucketSpec(
    Bucket("openapi_tool_accounts", 40 * 86_400, 256 * 2**20, MAX_VALUE_BYTES, "openapi_tool.accounts"),
    "budget.*",
    metrics.BUDGET_OPERATIONS,
    Bucket("openapi_tool_budgets"),
    from_version_1,
)
"""Its TTL is longer than the month of a budget."""


class RecordStore:
    """Records of a bucket, counted; all methods raise Unavailable, also before `shared_by`."""

    def __init__(self, spec: BucketSpec) -> None:
        self._spec = spec
        self._records: Records | None = None
        self._earlier: Records | None = None

    @asynccontextmanager
    async def shared_by(self, user: Limiter | Budgets, client: Client, replicas: int) -> AsyncIterator[None]:
        """Share the records over this connection: pass those of all replicas to `user`, and close `user` in the end."""
        self.connect(client, replicas)
        async with self.watch(user.on_change), aclosing(user):
            yield

    def connect(self, client: Client, replicas: int) -> None:
        """Use this connection from now on; the first write creates a missing bucket with `replicas` replicas."""
        self._records = NatsKvRecords(client, replace(self._spec.bucket, replicas=replicas), _TIMEOUT_S)
        self._earlier = NatsKvRecords(client, self._spec.earlier, _TIMEOUT_S) if self._spec.earlier else None

    async def read(self, key: str) -> Stored:
        """See `Records`; a record that was never written is taken over from an earlier version."""
        stored = await self._connected("read").read(key)
        if self._earlier is None or stored != Stored():
            return stored
        try:
            earlier = (await self._earlier.read(key)).value
        except AccessDenied:  # the user of NATS has only the permissions of this version
            self._earlier = None
            return stored
        return Stored(self._spec.convert(earlier), 0) if earlier is not None else stored

    async def write(self, key: str, value: bytes, revision: int) -> int | None:
        """See `Records`."""
        written = await self._connected("write").write(key, value, revision)
        if written is None:
            self._spec.operations.labels("conflict").inc()
        return written

    @asynccontextmanager
    async def watch(self, on_change: OnChange) -> AsyncIterator[None]:
        """See `Records`; if that is impossible a change is detected by the conflict of a write."""
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._connected("watch").watch(on_change))
            except Unavailable as error:
                log.warning(
                    "cannot subscribe to changes of %s: %s",
                    self._spec.bucket.name,
                    error,
                    extra={"action": "limits.not_followed"},
                )
            yield

    def _connected(self, operation: str) -> Records:
        if self._records is None:
            raise Unavailable("NATS: not connected yet")
        self._spec.operations.labels(operation).inc()
        return self._records


_CHECK_INTERVAL_S = 4.0
_RETRY_INTERVAL_S = 1.0  # while something cannot be used
_MIN_FREE_BYTES = 1024
_LEASES, _BUCKET, _PARKED = f"KV_{leases.BUCKET}", shared_bucket.STREAM, f"KV_{parked_results.PARKED_BUCKET}"
_WRITTEN_BYTES = {
    _LEASES: 4 * 1024,
    _BUCKET: 1024,
    _PARKED: 257 * 1024,
    dead_letters.STREAM: 160 * 1024,
}
"""Streams of the executor, and the size of the largest message that it writes to each."""

_QUOTA_BYTES = {LIMITS.bucket.stream: MAX_VALUE_BYTES, BUDGETS.bucket.stream: MAX_VALUE_BYTES}
"""The same for the records of quotas, which may be in another NATS."""

_DOORBELL_BYTES = 2 * 1024  # with its headers
_TEST_KEY = f"$KV.{parked_results.PARKED_BUCKET}.{parked_results.PARKED_KEYS.replace('*', 'test')}"


async def unusable(client: BusClient, command_stream: str, *, quotas: bool) -> list[str]:
    """Return which streams and buckets cannot be used, and why; `command_stream` is empty if it is missing.

    With `quotas` also the records of quotas must be usable here.

    If all can, a test record is stored, which expires: nothing else shows that the disk is full. Missing streams are no
    problem, as they are created when they are needed. Raises nats.errors.Error.
    """
    needed = {**_WRITTEN_BYTES, **(_QUOTA_BYTES if quotas else {}), command_stream: _DOORBELL_BYTES}
    found = await asyncio.gather(
        *(_unusable(client, name, size, readable=name != command_stream) for name, size in needed.items() if name)
    )
    return [problem for problem in found if problem] or await _not_stored(client)


async def unusable_quotas(client: BusClient) -> list[str]:
    """Return which records of quotas cannot be used, and why. Raises nats.errors.Error."""
    found = await asyncio.gather(*(_unusable(client, name, size, readable=True) for name, size in _QUOTA_BYTES.items()))
    return [problem for problem in found if problem]


async def _unusable(client: BusClient, stream: str, written_bytes: int, *, readable: bool) -> str:
    try:
        return _problem(await client.jetstream(timeout=_TIMEOUT_S).stream_info(stream), written_bytes)
    except Denied as refusal:
        return str(refusal) if readable else ""  # earlier versions did not read the command stream's
    except NotFoundError:
        return ""


async def _not_stored(client: BusClient) -> list[str]:
    try:
        await client.publish_to_stream(_TEST_KEY, b"", {}, _TIMEOUT_S)
    except NoStreamResponseError:  # the bucket is not created yet
        return []
    except APIError as error:
        return [f"JetStream stores no message in {_PARKED}: {error.description}; free its disk or raise the limit"]
    return []


def _problem(info: StreamInfo, written_bytes: int) -> str:
    """Return why a stream does not store what is written to it, and what to do; empty if it does."""
    config, state = info.config, info.state
    name, max_size = config.name, config.max_msg_size or -1
    max_bytes, max_messages = config.max_bytes or 0, config.max_msgs or 0
    if config.sealed:
        return f"{name} is sealed for good: delete it (nats stream rm {name}), so that it is created again"
    if 0 <= max_size < written_bytes:
        edit = f"nats stream edit {name} --max-msg-size {written_bytes} --force"
        return f"{name} takes messages of up to {max_size} bytes only, and some have {written_bytes}: run {edit}"
    if config.discard != DiscardPolicy.NEW:  # it deletes old messages instead
        return ""
    free = f"delete messages, or raise the limit (nats stream edit {name})"
    if 0 < max_bytes < state.bytes + _MIN_FREE_BYTES:  # the server counts some overhead per message
        return f"{name} is full ({state.bytes} of {max_bytes} bytes): {free}"
    if 0 < max_messages <= state.messages:
        return f"{name} is full ({state.messages} of {max_messages} messages): {free}"
    return ""


@dataclass(slots=True)
class Storage:
    """Creates missing streams and buckets, and records in `health` which cannot be written or do not answer.

    It also records if no doorbell can be stored.
    `session_key` is None if it is not stored in NATS. Fewer than `replicas` replicas cause a warning. `quotas`: the
    records of quotas are here, too.
    """

    client: BusClient
    leases: leases.Leases
    parked: NatsKvTexts
    dead_letter_stream: dead_letters.DeadLetters
    doorbells: WakeupPublisher
    session_key: bytes | None
    replicas: int
    health: Health
    quotas: bool = True
    _warned: set[str] = field(default_factory=set)
    _warned_of_keys: bool = False
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            self._wake.clear()
            await self.check()
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_INTERVAL_S if self.health.ok(JETSTREAM) else _RETRY_INTERVAL_S):
                    await self._wake.wait()

    def wake(self) -> None:
        """Check now."""
        self._wake.set()

    async def check(self) -> None:
        """Check once; again at once, without a record, if replies were lost because of a reconnect."""
        reconnects = self.client.stats["reconnects"]
        creators: dict[str, Callable[[], Awaitable[object]]] = {
            _LEASES: self.leases.records.ensure,
            _BUCKET: self._ensure_bucket,
            _PARKED: self.parked.ensure,
            dead_letters.STREAM: self.dead_letter_stream.ensure,
        }
        needed = {**_WRITTEN_BYTES, **(_QUOTA_BYTES if self.quotas else {}), self.doorbells.stream(): _DOORBELL_BYTES}
        problems = await asyncio.gather(
            self.doorbells.problem(),
            *(self._problem(stream, size, creators.get(stream)) for stream, size in needed.items() if stream),
        )
        reason = "; ".join(filter(None, problems))
        if reason and reconnects != self.client.stats["reconnects"]:
            self.wake()
            return
        self.health.record(JETSTREAM, ok=not reason, reason=reason)

    async def _ensure_bucket(self) -> None:
        if self.session_key is None:
            await NatsKvRecords(self.client, shared_bucket.shared_bucket(self.replicas)).ensure()
        else:
            await restore_session_key(self.client, self.session_key, self.replicas)

    async def _problem(self, stream: str, written_bytes: int, create: Callable[[], Awaitable[object]] | None) -> str:
        """Return why a stream cannot be used, empty if it can; one without `create` may be missing or unreadable."""
        jetstream = self.client.jetstream(timeout=_TIMEOUT_S)
        try:
            try:
                info = await jetstream.stream_info(stream)
            except NotFoundError:
                if create is not None:
                    await create()
                    log.info("created %s", stream, extra={"action": "storage.created", "stream": stream})
                return ""
        except Denied as denied:
            return f"{stream}: {denied}" if create is not None else ""
        except AccessDenied as denied:  # by `create`
            return f"{stream}: {denied}"
        except Unavailable as unusable:
            return str(unusable)
        except (nats.errors.Error, OSError) as error:
            return f"{stream} does not answer: {type(error).__name__}"
        if create is not None:
            self._warn_of_replicas(stream, info)
        if stream == _BUCKET:
            self._warn_of_readable_keys(info)
        return _problem(info, written_bytes)

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

    def _warn_of_readable_keys(self, info: StreamInfo) -> None:
        """Warn of a bucket that an earlier version created: its keys cannot be permitted one by one."""
        restricted = info.config.allow_direct and not info.config.allow_rollup_hdrs
        if not restricted and not self._warned_of_keys:
            self._warned_of_keys = True
            log.warning(
                "%s allows no direct gets, or rollups: a user who may disable tools can read or remove the session "
                "key; run: %s",
                _BUCKET,
                shared_bucket.RESTRICT,
                extra={"action": "storage.unrestricted", "stream": _BUCKET},
            )


@dataclass(slots=True)
class QuotaMonitor:
    """Creates the buckets of quotas in a NATS that is not the kernel's, and records in `health` if they cannot be used.

    `clock` is set to the time of this NATS, by which all that share the records count.
    """

    client: BusClient
    clock: ServerClock
    health: Health
    replicas: int

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(_CHECK_INTERVAL_S if self.health.ok(QUOTAS) else _RETRY_INTERVAL_S)

    async def check(self) -> None:
        """Check once."""
        if self.client.is_connected:
            reason = "; ".join(filter(None, [await self._problem(spec.bucket) for spec in (LIMITS, BUDGETS)]))
        else:
            reason = ": ".join(filter(None, ("no connection", self.client.outage)))
        self.health.record(QUOTAS, ok=not reason, reason=reason)

    async def _problem(self, bucket: Bucket) -> str:
        """Return why a bucket cannot be used, empty if it can."""
        try:
            info = await self._info(bucket.stream)
            if info is None:
                await NatsKvRecords(self.client, replace(bucket, replicas=self.replicas), _TIMEOUT_S).ensure()
                info = await self._info(bucket.stream)
        except (Denied, AccessDenied) as denied:
            return f"{bucket.stream}: {denied}"
        except Unavailable as unavailable:
            return str(unavailable)
        except (nats.errors.Error, OSError, ValueError) as error:
            return f"{bucket.stream} does not answer: {type(error).__name__}"
        return _problem(info, _QUOTA_BYTES[bucket.stream]) if info else f"{bucket.stream} is missing"

    async def _info(self, stream: str) -> StreamInfo | None:
        """Return a stream's state, and pass the server's time to `clock`; None if the stream is missing."""
        requested_at = time.monotonic()
        message = await self.client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=_TIMEOUT_S)
        replied_at, reply = time.monotonic(), orjson.loads(message.data)
        if error := reply.get("error"):
            if error.get("code") == _NOT_FOUND:
                return None
            raise APIError.from_error(error)
        if timestamp := reply.get("ts"):  # absent before nats-server 2.10
            self.clock.observe(datetime.fromisoformat(timestamp).timestamp(), requested_at, replied_at)
        info: StreamInfo = StreamInfo.from_response(reply)
        return info
