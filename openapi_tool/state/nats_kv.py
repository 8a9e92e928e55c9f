"""Shared state in KV buckets of NATS JetStream: `NatsKvRecords` and `NatsKvTexts` implement the port (`port`).

A bucket is a stream whose subjects are `$KV.BUCKET.KEY`, and which keeps the last message of each subject.
"""

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

MAX_VALUE_BYTES = 256 * 1024  # of a record or a part of a text
_MAX_DIGITS = 20  # of a revision in a message: a longer number is no revision, and would be costly to read


@dataclass(frozen=True, slots=True)
class Bucket:
    """Bucket with `replicas` copies, whose records expire `ttl_s` seconds after their last change (0: never).

    `max_bytes` and `max_value_bytes` are unlimited if -1. If the bucket is full, a write fails; if `drops_oldest`, the
    write removes the oldest records instead. If `restricted`, users can be permitted to read and write single keys.

    If `changes` is set, each change is published on the subject `CHANGES.KEY`, as revision, line feed and value. The
    watchers of nats-py are not used for this: they are consumers, which the executor's NATS user may not create.
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
        """Return the configuration of its stream.

        Without `restricted` and `drops_oldest`, it is the one that nats-py creates. With one of them, direct gets are
        allowed, as these can be permitted key by key, and rollups are not: by a rollup, whoever may write one key could
        remove all others.
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
        """Translate errors of NATS into those of the port; an error that JetStream reports then names the bucket."""
        with outage_as_unavailable():
            try:
                yield
            except Denied as denied:
                raise AccessDenied(str(denied), denied.subject) from denied
            except APIError as error:
                error.description = f"{error.description or ''} (bucket {self.name})".strip()
                raise


class NatsKvRecords:
    """Records (`Records`) in a bucket. The first write creates the bucket if it is missing.

    After an error the bucket is opened again, as an operator may have replaced it. A read may be answered by any server
    of a cluster, also by one that lacks the last writes. With `from_leader`, the leader answers: a read sees each write
    that was confirmed before.
    """

    def __init__(self, client: Client, bucket: Bucket, timeout_s: float = 5.0, *, from_leader: bool = False) -> None:
        self.bucket = bucket
        self._client = client
        self._timeout_s = timeout_s
        self._from_leader = from_leader
        self._opened: KeyValue | None = None

    async def ensure(self) -> None:
        """Create the bucket if it is missing. Raises Unavailable."""
        with self._errors():
            await self._open()

    async def read(self, key: str) -> Stored:
        """Return a record; `Stored()` if it was never written, or the bucket is missing."""
        with self._errors():
            try:
                opened = self._opened or self._use(await self._jetstream().key_value(self.bucket.name))
                entry = await opened.get(key)
            except BucketNotFoundError:
                return Stored()
            except KeyNotFoundError as missing:
                if missing.entry is None:
                    return Stored()
                return Stored(None, missing.entry.revision or 0)  # a deleted key still has a revision
        return Stored(entry.value or b"", entry.revision or 0)

    async def write(self, key: str, value: bytes, revision: int) -> int | None:
        """Replace a record that still has this revision, 0 if there is none; return the new revision, or None."""
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
        """Store a record whatever its revision is (`ListedRecords`)."""
        with self._errors():
            opened = self._opened or await self._open()
            await opened.put(key, value)

    @asynccontextmanager
    async def watch(self, on_change: OnChange) -> AsyncIterator[None]:
        """Call `on_change` for changes that are published while the context is open (`Bucket.changes`)."""

        async def on_message(message: Msg) -> None:
            # Anything else than a change may come: whoever may publish on the subject decides.
            number, _, value = message.data.partition(b"\n")
            is_revision = number.isdigit() and len(number) < _MAX_DIGITS
            if is_revision and len(value) <= MAX_VALUE_BYTES:
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
        """Use an open bucket from now on; return it, or one that reads from the leader."""
        if self._from_leader:
            name = self.bucket.name
            opened = KeyValue(name, self.bucket.stream, f"$KV.{name}.", self._jetstream(), direct=False)
        self._opened = opened
        return opened

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Translate errors of NATS into those of the port; after one, open the bucket again."""
        with self.bucket.errors():
            try:
                yield
            except (nats.errors.Error, OSError):
                self._opened = None
                raise


class NatsKvTexts:
    """Texts (`Texts`) in a bucket with a `ttl_s`, of at most 256 KiB.

    The key of each begins with `prefix`, so that a user can be permitted to use these keys only.
    """

    def __init__(self, client: Client, bucket: Bucket, prefix: str) -> None:
        self.bucket = bucket
        self._client = client
        self._prefix = prefix
        self._records = NatsKvRecords(client, bucket)

    async def ensure(self) -> None:
        """Create the bucket if it is missing. Raises Unavailable."""
        await self._records.ensure()

    async def put(self, name: str, text: bytes) -> None:
        """Store or replace a text."""
        with self.bucket.errors():
            opened = await self.bucket.open(self._client.jetstream())
            await opened.put(self._prefix + name, text)

    async def get(self, name: str) -> bytes | None:
        """Return a text; None if there is none or it has expired."""
        stored = await self._records.read(self._prefix + name)
        return stored.value

    async def delete(self, name: str) -> None:
        """Delete a text if there is one."""
        with self.bucket.errors(), suppress(BucketNotFoundError):
            opened = await self._client.jetstream().key_value(self.bucket.name)
            await opened.purge(self._prefix + name)
