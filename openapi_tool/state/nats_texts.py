"""Texts of any size in buckets of NATS JetStream.

The object store of JetStream is not used for them: it needs a consumer for each read. Whoever may create a consumer can
have the server publish what is stored on any subject.
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

TIMEOUT_S = 2.0  # of one request to NATS
_PAUSE_S = 5.0  # for which requests fail at once after one has waited in vain
_HEADERS_BYTES = 4 * 1024  # left of a message for its headers and subject, and for the number of parts
_MAX_PARTS = 256  # of a text that is read: with parts of nearly 256 KiB, nearly 64 MiB
_NEARLY_FULL = 0.75  # of the bytes that a bucket may hold


class Patience:
    """Lets requests to NATS fail at once for a while after one has waited in vain.

    Otherwise a call that reads and stores several texts would wait for each of them.
    """

    def __init__(self, client: BusClient) -> None:
        self.client = client
        self._again_at = 0.0  # monotonic time until which requests fail at once

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise Unavailable at once, or translate errors of NATS into it."""
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
    """Texts (`TextSets`) in parts that fit into a message: of the text `n` under the keys `n.0`, `n.1`, ….

    The first part begins with the number of parts and a line feed. It is stored last: if it is found, all were stored.
    """

    def __init__(self, patience: Patience, bucket: Bucket) -> None:
        self.bucket = bucket
        self._patience = patience

    async def put(self, name: str, text: bytes) -> None:
        """Store or replace a text."""
        await self.put_all({name: text})

    async def put_all(self, texts: Mapping[str, bytes]) -> None:
        """Store all of these texts of one owner, the first one last."""
        first_name = next(iter(texts))
        owner = first_name.partition(".")[0]
        with self._patience.errors(), self.bucket.errors():
            for name, text in reversed(list(texts.items())):
                await self._put(name, text)
            await self._bound_owner(owner)

    async def _put(self, name: str, text: bytes) -> None:
        client = self._patience.client
        size = min(MAX_VALUE_BYTES, client.max_payload) - _HEADERS_BYTES
        parts = [text[start : start + size] for start in range(0, len(text), size)] or [b""]
        parts[0] = b"%d\n%b" % (len(parts), parts[0])
        opened = await self.bucket.open(client.jetstream(timeout=TIMEOUT_S))
        for number in reversed(range(len(parts))):
            await opened.put(f"{name}.{number}", parts[number])

    async def _bound_owner(self, owner: str) -> None:
        """If the bucket is nearly full, delete the oldest parts of this owner that do not fit into half of the bucket.

        A full bucket drops the oldest parts, whoever owns them. So an owner who stores many texts must not fill it.
        """
        max_bytes = self.bucket.max_bytes
        if max_bytes <= 0:  # unlimited
            return
        jetstream = self._patience.client.jetstream(timeout=TIMEOUT_S)
        stream = self.bucket.stream
        info = await jetstream.stream_info(stream)
        if info.state.bytes > _NEARLY_FULL * max_bytes:
            kept_parts = max_bytes // 2 // MAX_VALUE_BYTES
            await jetstream.purge_stream(stream, subject=f"$KV.{self.bucket.name}.{owner}.>", keep=kept_parts)

    async def get(self, name: str) -> bytes | None:
        """Return a text; None if there is none, it is damaged, or a part of it has expired."""
        with self._patience.errors():
            try:
                opened = await self._patience.client.jetstream(timeout=TIMEOUT_S).key_value(self.bucket.name)
                first = await opened.get(f"{name}.0")
                number, _, text = (first.value or b"").partition(b"\n")
                if not _is_number_of_parts(number):
                    return None
                rest = [opened.get(f"{name}.{part}") for part in range(1, int(number))]
                parts = [part.value or b"" for part in await asyncio.gather(*rest)]
                return b"".join([text, *parts])
            except (BucketNotFoundError, KeyNotFoundError):
                return None

    async def delete(self, name: str) -> None:
        """Delete the first part of a text if there is one: the others expire unread."""
        with self._patience.errors(), suppress(BucketNotFoundError):
            opened = await self._patience.client.jetstream(timeout=TIMEOUT_S).key_value(self.bucket.name)
            await opened.delete(f"{name}.0")


def _is_number_of_parts(number: bytes) -> bool:
    """Return whether a first part begins with such a number; a damaged one may begin with anything."""
    has_few_digits = len(number) <= len(str(_MAX_PARTS))  # to convert thousands of digits is costly
    return number.isdigit() and has_few_digits and int(number) <= _MAX_PARTS
