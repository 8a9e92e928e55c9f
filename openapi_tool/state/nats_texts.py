"""Texts of any size in buckets of NATS JetStream.

The object store of JetStream needs a consumer for each read, and whoever may create one can have the server publish
what is stored on any subject.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import nats.errors
from nats.js.errors import BucketNotFoundError, KeyNotFoundError

from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.connection import outage_as_unavailable
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.state.nats_kv import MAX_VALUE_BYTES, Bucket

TIMEOUT_S = 2.0
_PAUSE_S = 5.0
_HEADERS_BYTES = 4 * 1024
_MAX_PARTS = 256
_NEARLY_FULL = 0.75  # of the bytes that a bucket may hold


class Patience:
    """After one request has waited for NATS in vain, others fail at once for a while: no call waits for each."""

    def __init__(self, client: BusClient) -> None:
        self.client = client
        self._again_at = 0.0

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Translate errors of NATS into Unavailable."""
        if not self.client.is_connected or time.monotonic() < self._again_at:
            raise Unavailable("NATS: no connection, or no answer in time")
        try:
            with outage_as_unavailable():
                yield
        except Unavailable as outage:
            if isinstance(outage.__cause__, nats.errors.TimeoutError):
                self._again_at = time.monotonic() + _PAUSE_S
            raise


class PartedTexts:
    """Texts in parts that fit into a message; the first part, which has their number, is stored last."""

    def __init__(self, patience: Patience, bucket: Bucket) -> None:
        self.bucket = bucket
        self._patience = patience

    async def put(self, name: str, text: bytes) -> None:
        """See `Texts`."""
        await self.put_all({name: text})

    async def put_all(self, texts: Mapping[str, bytes]) -> None:
        """See `TextSets`."""
        with self._patience.errors(), self.bucket.errors():
            for name, text in reversed(list(texts.items())):
                await self._put(name, text)
            await self._bound_owner(next(iter(texts)).partition(".")[0])

    async def _put(self, name: str, text: bytes) -> None:
        client = self._patience.client
        size = min(MAX_VALUE_BYTES, client.max_payload) - _HEADERS_BYTES
        parts = [text[start : start + size] for start in range(0, len(text), size)] or [b""]
        parts[0] = b"%d\n%b" % (len(parts), parts[0])
        opened = await self.bucket.open(client.jetstream(timeout=TIMEOUT_S))
        for number in reversed(range(len(parts))):
            await opened.put(f"{name}.{number}", parts[number])

    async def _bound_owner(self, owner: str) -> None:
        """Once the bucket is nearly full, delete of this owner all but as many parts as fit into half of it.

        A full bucket drops the oldest parts, whoever owns them: so an owner alone never fills it.
        """
        jetstream = self._patience.client.jetstream(timeout=TIMEOUT_S)
        stream, max_bytes = self.bucket.stream, self.bucket.max_bytes
        if (await jetstream.stream_info(stream)).state.bytes > _NEARLY_FULL * max_bytes > 0:
            await jetstream.purge_stream(
                stream, subject=f"$KV.{self.bucket.name}.{owner}.>", keep=max_bytes // 2 // MAX_VALUE_BYTES
            )

    async def get(self, name: str) -> bytes | None:
        """See `Texts`."""
        with self._patience.errors():
            try:
                opened = await self._patience.client.jetstream(timeout=TIMEOUT_S).key_value(self.bucket.name)
                number, _, text = ((await opened.get(f"{name}.0")).value or b"").partition(b"\n")
                if not (number.isdigit() and len(number) <= len(str(_MAX_PARTS)) and int(number) <= _MAX_PARTS):
                    return None  # damaged
                rest = (opened.get(f"{name}.{part}") for part in range(1, int(number)))
                return b"".join([text, *(part.value or b"" for part in await asyncio.gather(*rest))])
            except (BucketNotFoundError, KeyNotFoundError):  # no such bucket, or a part has expired
                return None

    async def delete(self, name: str) -> None:
        """See `Texts`."""
        with self._patience.errors(), suppress(BucketNotFoundError):
            opened = await self._patience.client.jetstream(timeout=TIMEOUT_S).key_value(self.bucket.name)
            await opened.delete(f"{name}.0")
