"""Check whether the streams and buckets of the executor in NATS can be used, and create missing ones.

These are the command stream, which also stores doorbells (messages that tell the kernel of a result); dead letters
(commands without a result); and buckets for leases, parked results and shared records. The records of *quotas*, that
is, of limits and budgets, may be in another NATS.

`unusable` and `unusable_quotas` check once, for the command line. `StorageMonitor` checks while the executor runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import nats.errors
from nats.js.api import StreamInfo
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from openapi_tool.kernel.jetstream import dead_letters, leases, parked_records
from openapi_tool.kernel.jetstream.doorbell_publisher import DoorbellPublisher
from openapi_tool.kernel.jetstream.leases import Leases
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.connection_errors import Denied
from openapi_tool.nats_records import shared_bucket
from openapi_tool.nats_records.session_key import restore_session_key
from openapi_tool.nats_records.stream_problems import (
    CHECK_INTERVAL_S,
    QUOTA_BYTES,
    RETRY_INTERVAL_S,
    failure_of_stream,
    problem_of_stream,
)
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.state.nats_kv import NatsKvRecords, NatsKvTexts
from openapi_tool.state.port import AccessDenied
from openapi_tool.telemetry.health import JETSTREAM, Health

log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0  # of one request

# Streams of the executor; a bucket is a stream, too.
_LEASES = f"KV_{leases.BUCKET}"
_SHARED_BUCKET = shared_bucket.STREAM
_PARKED = f"KV_{parked_records.PARKED_BUCKET}"
_WRITTEN_BYTES = {
    _LEASES: 4 * 1024,
    _SHARED_BUCKET: 1024,
    _PARKED: 257 * 1024,
    dead_letters.STREAM: 160 * 1024,
}
"""Size of the largest message that the executor writes to each of its streams, in bytes."""

_DOORBELL_BYTES = 2 * 1024  # of the largest doorbell with its headers; doorbells go to the command stream
# Subject of a test record in the bucket of parked results.
_TEST_KEY = f"$KV.{parked_records.PARKED_BUCKET}.{parked_records.PARKED_KEYS.replace('*', 'test')}"

Create = Callable[[], Awaitable[object]]
"""Creates a missing stream."""


async def unusable(client: BusClient, command_stream: str, *, quotas: bool) -> list[str]:
    """Return which streams and buckets cannot be used, and why; `command_stream` is empty if it is missing.

    If all can be used, a test record is stored, which expires: nothing else shows that the disk is full. Missing
    streams are no problem, as they are created when they are needed. `quotas` says whether the records of quotas are
    here, too. Raises nats.errors.Error.
    """
    needed = _needed(command_stream, quotas=quotas)
    checks = [_unusable(client, stream, size, readable=stream != command_stream) for stream, size in needed.items()]
    problems = list(filter(None, await asyncio.gather(*checks)))
    if problems:
        return problems
    return await _not_stored(client)


def _needed(command_stream: str, *, quotas: bool) -> dict[str, int]:
    """Return the streams that the executor writes to, with the size of the largest message for each."""
    needed = dict(_WRITTEN_BYTES)
    if quotas:
        needed |= QUOTA_BYTES
    if command_stream:
        needed[command_stream] = _DOORBELL_BYTES
    return needed


async def unusable_quotas(client: BusClient) -> list[str]:
    """Return which records of quotas cannot be used, and why. Raises nats.errors.Error."""
    checks = [_unusable(client, stream, size, readable=True) for stream, size in QUOTA_BYTES.items()]
    return list(filter(None, await asyncio.gather(*checks)))


async def _unusable(client: BusClient, stream: str, written_bytes: int, *, readable: bool) -> str:
    """Return why a stream cannot be used, empty if it can.

    A stream whose state may not be read is a problem only if it must be `readable`: permissions of earlier versions do
    not let us read the command stream.
    """
    try:
        info = await client.jetstream(timeout=_TIMEOUT_S).stream_info(stream)
    except Denied as refusal:
        return str(refusal) if readable else ""
    except NotFoundError:
        return ""
    return problem_of_stream(info, written_bytes)


async def _not_stored(client: BusClient) -> list[str]:
    """Store a test record; return why it was not stored, empty if it was."""
    try:
        await client.publish_to_stream(_TEST_KEY, b"", {}, _TIMEOUT_S)
    except NoStreamResponseError:  # the bucket is not created yet
        return []
    except APIError as error:
        return [f"JetStream stores no message in {_PARKED}: {error.description}; free its disk or raise the limit"]
    return []


@dataclass(slots=True)
class StorageMonitor:
    """Creates missing streams and buckets, and records in `health` which cannot be written or do not answer.

    It also records if no doorbell can be stored.

    - `session_key`: the key of sessions and cursors; None if it is not stored in NATS.
    - `replicas`: a stream with fewer replicas causes a warning.
    - `quotas`: whether the records of quotas are in this NATS, too.
    """

    client: BusClient
    leases: Leases
    parked_records: NatsKvTexts
    dead_letter_stream: dead_letters.DeadLetters
    doorbells: DoorbellPublisher
    session_key: bytes | None
    replicas: int
    health: Health
    quotas: bool = True
    _warned: set[str] = field(default_factory=set)  # streams with too few replicas, each logged once
    _warned_of_keys: bool = False  # whether the warning about readable keys was logged
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            self._wake.clear()
            await self.check()
            interval_s = CHECK_INTERVAL_S if self.health.ok(JETSTREAM) else RETRY_INTERVAL_S
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._wake.wait()

    def wake(self) -> None:
        """Let `run` check again at once."""
        self._wake.set()

    async def check(self) -> None:
        """Check once; again at once, without a record, if replies were lost because of a reconnect."""
        reconnects = self.client.stats["reconnects"]
        creators: dict[str, Create] = {
            _LEASES: self.leases.records.ensure,
            _SHARED_BUCKET: self._ensure_shared_bucket,
            _PARKED: self.parked_records.ensure,
            dead_letters.STREAM: self.dead_letter_stream.ensure,
        }
        needed = _needed(self.doorbells.stream(), quotas=self.quotas)
        problems = await asyncio.gather(
            self.doorbells.problem(),
            *(self._check_stream(stream, size, creators.get(stream)) for stream, size in needed.items()),
        )
        reason = "; ".join(filter(None, problems))
        if reason and reconnects != self.client.stats["reconnects"]:
            self.wake()
            return
        self.health.record(JETSTREAM, ok=not reason, reason=reason)

    async def _ensure_shared_bucket(self) -> None:
        if self.session_key is None:
            await NatsKvRecords(self.client, shared_bucket.shared_bucket(self.replicas)).ensure()
        else:
            await restore_session_key(self.client, self.session_key, self.replicas)

    async def _check_stream(self, stream: str, written_bytes: int, create: Create | None) -> str:
        """Return why a stream cannot be used, empty if it can; one without `create` may be missing or unreadable."""
        try:
            info = await self._find_or_create(stream, create)
        except Denied as denied:
            return f"{stream}: {denied}" if create is not None else ""
        except AccessDenied as denied:  # by `create`
            return f"{stream}: {denied}"
        except Unavailable as unusable:
            return str(unusable)
        except (nats.errors.Error, OSError) as error:
            # Without the records of quotas, limits and budgets go on with this replica's part (ADR 9), so that is no
            # problem. A missing bucket of quotas is created by the first write to it.
            return f"{stream} {failure_of_stream(error)}" if stream not in QUOTA_BYTES else ""
        if info is None:
            return ""
        if create is not None:
            self._warn_of_replicas(stream, info)
        if stream == _SHARED_BUCKET:
            self._warn_of_readable_keys(info)
        return problem_of_stream(info, written_bytes)

    async def _find_or_create(self, stream: str, create: Create | None) -> StreamInfo | None:
        """Return the state of a stream; if it is missing, create it if that is possible, and return None."""
        try:
            info: StreamInfo = await self.client.jetstream(timeout=_TIMEOUT_S).stream_info(stream)
        except NotFoundError:
            if create is not None:
                await create()
                log.info("created %s", stream, extra={"action": "storage.created", "stream": stream})
            return None
        return info

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
                _SHARED_BUCKET,
                shared_bucket.RESTRICT,
                extra={"action": "storage.unrestricted", "stream": _SHARED_BUCKET},
            )
