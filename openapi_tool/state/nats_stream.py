"""Messages that a stream of NATS JetStream holds, read in batches without a consumer.

Whoever may create a consumer can have the server publish the messages on any subject: so no user gets that permission,
and messages are read by direct gets (`held_messages`). Servers before 2.11 know no batches, and answer with one message
at a time.

`ListedKvRecords` are records of a bucket that can be listed. `Stream` is a stream in which messages are stored.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import NamedTuple

import nats.errors
import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import DiscardPolicy, Header, StreamConfig
from nats.js.errors import APIError, BadRequestError, NoStreamResponseError, NotFoundError

from openapi_tool.nats_client.client import BusClient
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.state.nats_kv import Bucket, NatsKvRecords

BATCH = 500  # messages
_BATCH_BYTES = 4 * 2**20  # of the messages of a batch together
_TIMEOUT_S = 5.0  # until the next message of a batch, or an answer about a stream
_TRIES = 3  # to list a bucket that changes meanwhile
_END_OF_BATCH, _NONE_FOUND = "204", "404"  # statuses of the message without data that ends a batch


class Held(NamedTuple):
    """A message that a stream holds."""

    sequence: int
    subject: str
    data: bytes
    is_deletion: bool
    """Whether it marks a deleted key of a bucket."""


async def held_messages(client: Client, stream: str, subject: str, first: int = 1) -> AsyncGenerator[Held, None]:
    """Yield the messages of a subject (with wildcards) from the sequence `first` on.

    The stream must exist and allow direct gets. Any server of a cluster may answer, also one that lacks the last
    messages. Raises nats.errors.Error, OSError.
    """
    inbox = client.new_inbox()
    replies = await client.subscribe(inbox)
    try:
        more = True
        while more:  # once for each batch
            wanted = {"seq": first, "next_by_subj": subject, "batch": BATCH, "max_bytes": _BATCH_BYTES}
            await client.publish(f"$JS.API.DIRECT.GET.{stream}", orjson.dumps(wanted), reply=inbox)
            in_batch = True
            while in_batch:
                message = await replies.next_msg(timeout=_TIMEOUT_S)
                headers = message.headers or {}
                status = headers.get(Header.STATUS)
                if status:
                    more = _goes_on(status, message)
                    break
                in_batch = "Nats-Num-Pending" in headers  # else the server knows no batches: this message is all
                held = _held(message, headers)
                first = held.sequence + 1
                yield held
    finally:
        with suppress(nats.errors.Error, OSError):
            await replies.unsubscribe()


def _goes_on(status: str, message: Msg) -> bool:
    """Return whether more messages follow after the batch that `message` has ended. Raises APIError."""
    if status == _NONE_FOUND:
        return False
    headers = message.headers or {}
    if status != _END_OF_BATCH:
        raise APIError(code=int(status), description=headers.get(Header.DESCRIPTION, ""))
    return headers.get("Nats-Num-Pending") != "0"


def _held(message: Msg, headers: dict[str, str]) -> Held:
    return Held(
        int(headers["Nats-Sequence"]), headers["Nats-Subject"], message.data, is_deletion="KV-Operation" in headers
    )


class ListedKvRecords(NatsKvRecords):
    """Records of a bucket that can be listed (`ListedRecords`).

    The last list is kept, and used again if nothing was written since then.
    """

    def __init__(self, client: BusClient, bucket: Bucket, timeout_s: float = 2.0) -> None:
        super().__init__(client, bucket, timeout_s)
        self._bus = client
        self._listed: dict[str, bytes] = {}
        self._state_of_list: object = None  # the state that the stream had when `_listed` was read

    async def all(self) -> dict[str, bytes]:
        """Return all records by key; each write that was confirmed before is among them."""
        if not self._bus.is_connected:
            outage = f": {self._bus.outage}" if self._bus.outage else ""
            raise Unavailable(f"NATS: no connection{outage}")
        with self._errors():
            for _ in range(_TRIES):
                listed = await self._list()
                if listed is not None:
                    return listed
        raise Unavailable(f"NATS: bucket {self.bucket.name} changes while it is read, or its servers differ; try again")

    async def _list(self) -> dict[str, bytes] | None:
        """Return all records by key; None if what was read may lack a confirmed write."""
        jetstream = self._jetstream()
        try:
            info = await jetstream.stream_info(self.bucket.stream)
        except NotFoundError:
            return {}
        counts = info.state
        state = (info.created, counts.first_seq, counts.last_seq, counts.messages)  # differs after each write
        if state == self._state_of_list:
            return self._listed
        listed, seen = await self._read_all()
        # What was read may come from a server that lags behind. The leader, which answers here, knows each write.
        if not counts.messages or seen >= await self._last_sequence():
            self._listed = listed
            self._state_of_list = state
            return listed
        return None

    async def _last_sequence(self) -> int:
        last = await self._jetstream().get_last_msg(self.bucket.stream, ">")
        return last.seq or 0

    async def _read_all(self) -> tuple[dict[str, bytes], int]:
        """Return the records by key, and the last sequence that was read."""
        prefix = f"$KV.{self.bucket.name}."
        listed = {}
        seen = 0
        async with aclosing(held_messages(self._client, self.bucket.stream, f"{prefix}>")) as messages:
            async for held in messages:
                seen = held.sequence
                if not held.is_deletion:
                    listed[held.subject.removeprefix(prefix)] = held.data
        return listed, seen


@dataclass(frozen=True, slots=True)
class Stream:
    """Stream of the subjects `PREFIX.>`, whose messages expire `ttl_s` seconds after they were stored.

    A message that does not fit into `max_bytes` removes the oldest ones.
    """

    name: str
    prefix: str
    ttl_s: float
    max_bytes: int
    replicas: int = 1

    async def publish(self, client: BusClient, subject: str, data: bytes, timeout_s: float = 2.0) -> None:
        """Store a message; create the stream if it is missing. Raises nats.errors.Error, OSError."""
        try:
            await client.publish_to_stream(subject, data, {}, timeout_s)
        except NoStreamResponseError:
            await self._create(client)
            await client.publish_to_stream(subject, data, {}, timeout_s)

    async def created(self, client: BusClient) -> object:
        """Return the time at which the stream was created; None if it is missing. Raises nats.errors.Error, OSError."""
        try:
            info = await client.jetstream(timeout=_TIMEOUT_S).stream_info(self.name)
        except NotFoundError:
            return None
        return info.created

    async def _create(self, client: BusClient) -> None:
        config = StreamConfig(
            name=self.name,
            subjects=[f"{self.prefix}.>"],
            max_age=self.ttl_s,
            max_bytes=self.max_bytes,
            discard=DiscardPolicy.OLD,
            deny_delete=True,
            allow_direct=True,
            num_replicas=self.replicas,
        )
        with suppress(BadRequestError):  # another process created it first, with other options
            await client.jetstream().add_stream(config)
