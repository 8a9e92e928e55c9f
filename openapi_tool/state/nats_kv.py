"""Shared state in KV buckets of NATS JetStream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, StreamConfig
from nats.js.errors import (
    APIError,
    BadRequestError,
    BucketNotFoundError,
    KeyNotFoundError,
    KeyWrongLastSequenceError,
    NoStreamResponseError,
)
from nats.js.kv import KeyValue

from openapi_tool.nats_client.connection import outage_as_unavailable
from openapi_tool.nats_client.connection_errors import Denied
from openapi_tool.state.port import AccessDenied, OnChange, Stored

MAX_VALUE_BYTES = 256 * 1024
_MAX_DIGITS = 20  # of a revision


@dataclass(frozen=True, slots=True)
class Bucket:
    """Bucket with `replicas` copies, whose records expire `ttl_s` seconds after their last change (0: never).

    Limits in bytes are unlimited if -1. Each change is published as `CHANGES.KEY`, unless `changes` is empty: revision,
    line feed, value. A KV watcher would be a consumer, which the executor's NATS user may not create.
    `restricted`: the keys of the bucket can be permitted one by one. `drops_oldest`: a write to a full bucket removes
    the oldest records instead of failing.
    """

    name: str
    ttl_s: float = 0
    max_bytes: int = -1
    max_value_bytes: int = -1
    changes: str = ""
    replicas: int = 1
    restricted: bool = False
    drops_oldest: bool = False

    @property
    def stream(self) -> str:
        """Name of its stream."""
        return f"KV_{self.name}"

    async def open(self, jetstream: JetStreamContext) -> KeyValue:
        """Open the bucket; create it if it is missing. Raises nats.errors.Error."""
        try:
            return await jetstream.key_value(self.name)
        except BucketNotFoundError:
            with suppress(BadRequestError):  # another executor created it first, with other options
                await jetstream.add_stream(self._config())
            return await jetstream.key_value(self.name)

    def _config(self) -> StreamConfig:
        """Return the configuration of its stream, that of nats-py if keys need no permissions of their own.

        Direct gets can be permitted by key, other reads cannot. By a rollup one key removes the others.
        """
        by_key = self.restricted or self.drops_oldest
        return StreamConfig(
            name=self.stream,
            subjects=[f"$KV.{self.name}.>"],
            max_age=self.ttl_s or None,
            max_bytes=self.max_bytes,
            max_msg_size=self.max_value_bytes,
            max_msgs_per_subject=1,
            discard=DiscardPolicy.OLD if self.drops_oldest else DiscardPolicy.NEW,
            deny_delete=True,
            allow_direct=by_key,
            allow_rollup_hdrs=not by_key,
            allow_msg_ttl=not by_key,
            num_replicas=self.replicas,
        )

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Translate errors of NATS into those of the port; one of a reached limit then names the bucket."""
        with outage_as_unavailable():
            try:
                yield
            except Denied as denied:
                raise AccessDenied(str(denied), denied.subject) from denied
            except APIError as error:
                error.description = f"{error.description or ''} (bucket {self.name})".strip()
                raise


class NatsKvRecords:
    """Records in a bucket. The first write creates a missing one.

    After an error the bucket is opened again, as it may have been replaced. With `from_leader`, reads need no direct
    gets, and see each write that another server of the cluster confirmed before.
    """

    def __init__(self, client: Client, bucket: Bucket, timeout_s: float = 5.0, *, from_leader: bool = False) -> None:
        self.bucket = bucket
        self._client, self._timeout_s, self._from_leader = client, timeout_s, from_leader
        self._opened: KeyValue | None = None

    async def ensure(self) -> None:
        """Create the bucket if it is missing. Raises Unavailable."""
        with self._errors():
            await self._open()

    async def read(self, key: str) -> Stored:
        """See `Records`."""
        with self._errors():
            try:
                opened = self._opened or self._use(await self._jetstream().key_value(self.bucket.name))
                entry = await opened.get(key)
            except BucketNotFoundError:
                return Stored()
            except KeyNotFoundError as missing:  # a deleted key still has a revision
                return Stored(None, (missing.entry.revision or 0) if missing.entry else 0)
        return Stored(entry.value or b"", entry.revision or 0)

    async def write(self, key: str, value: bytes, revision: int) -> int | None:
        """See `Records`."""
        with self._errors():
            try:
                opened = self._opened or await self._open()
                written = await opened.update(key, value, last=revision)
            except KeyWrongLastSequenceError:
                return None
            except NoStreamResponseError:  # the bucket was deleted, or has no leader: the next read reports it
                self._opened = None
                return None
            if self.bucket.changes:
                await self._client.publish(f"{self.bucket.changes}.{key}", b"%d\n%b" % (written, value))
        return written

    async def put(self, key: str, value: bytes) -> None:
        """See `ListedRecords`."""
        with self._errors():
            await (self._opened or await self._open()).put(key, value)

    @asynccontextmanager
    async def watch(self, on_change: OnChange) -> AsyncIterator[None]:
        """See `Records`."""

        async def on_message(message: Msg) -> None:
            number, _, value = message.data.partition(b"\n")
            if number.isdigit() and len(number) < _MAX_DIGITS and len(value) <= MAX_VALUE_BYTES:
                on_change(message.subject.removeprefix(f"{self.bucket.changes}."), Stored(value, int(number)))

        with self._errors():
            watching = await self._client.subscribe(f"{self.bucket.changes}.>", cb=on_message)
        try:
            yield
        finally:
            with suppress(nats.errors.Error, OSError):
                await watching.unsubscribe()

    def _jetstream(self) -> JetStreamContext:
        return self._client.jetstream(timeout=self._timeout_s)

    async def _open(self) -> KeyValue:
        return self._use(await self.bucket.open(self._jetstream()))

    def _use(self, opened: KeyValue) -> KeyValue:
        if self._from_leader:
            name = self.bucket.name
            opened = KeyValue(name, self.bucket.stream, f"$KV.{name}.", self._jetstream(), direct=False)
        self._opened = opened
        return opened

    @contextmanager
    def _errors(self) -> Iterator[None]:
        with self.bucket.errors():
            try:
                yield
            except (nats.errors.Error, OSError):
                self._opened = None
                raise


class NatsKvTexts:
    """Texts in a bucket with a `ttl_s`; `prefix` begins the key of each, so that it can be permitted."""

    def __init__(self, client: Client, bucket: Bucket, prefix: str) -> None:
        self.bucket = bucket
        self._client, self._prefix = client, prefix
        self._records = NatsKvRecords(client, bucket)

    async def ensure(self) -> None:
        """Create the bucket if it is missing. Raises Unavailable."""
        await self._records.ensure()

    async def put(self, name: str, text: bytes) -> None:
        """See `Texts`."""
        with self.bucket.errors():
            opened = await self.bucket.open(self._client.jetstream())
            await opened.put(self._prefix + name, text)

    async def get(self, name: str) -> bytes | None:
        """See `Texts`."""
        return (await self._records.read(self._prefix + name)).value

    async def delete(self, name: str) -> None:
        """See `Texts`."""
        with self.bucket.errors(), suppress(BucketNotFoundError):
            opened = await self._client.jetstream().key_value(self.bucket.name)
            await opened.purge(self._prefix + name)
