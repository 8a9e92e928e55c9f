"""KV bucket for paid results that could not be committed; any executor commits them within an hour (ADR 5)."""

from __future__ import annotations

import contextlib

from nats.aio.client import Client
from nats.js.api import KeyValueConfig
from nats.js.errors import BadRequestError, BucketNotFoundError, KeyNotFoundError
from nats.js.kv import KeyValue

from openapi_tool.bus.connection import outage_as_unavailable

BUCKET = "openapi_tool_answers"
KEYS = "answer.*"
_TTL_S = 3600
_MAX_BYTES = 64 * 2**20
_MAX_VALUE_BYTES = 512 * 1024


class ParkedResultStore:
    """Stores records by name; all methods raise Unavailable. The bucket is created with `replicas` replicas."""

    def __init__(self, client: Client, replicas: int) -> None:
        self._client = client
        self._replicas = replicas

    async def ensure(self) -> None:
        """Create the bucket if it is missing."""
        with outage_as_unavailable():
            await self._opened()

    async def put(self, name: str, record: bytes) -> None:
        """Store a record for an hour; create the bucket if it is missing."""
        with outage_as_unavailable():
            await (await self._opened()).put(_key(name), record)

    async def get(self, name: str) -> bytes | None:
        """Return a record, None if there is none."""
        with outage_as_unavailable():
            try:
                return (await (await self._bucket()).get(_key(name))).value
            except (BucketNotFoundError, KeyNotFoundError):
                return None

    async def delete(self, name: str) -> None:
        """Delete a record with all its revisions."""
        with outage_as_unavailable():
            await (await self._bucket()).purge(_key(name))

    async def _opened(self) -> KeyValue:
        try:
            return await self._bucket()
        except BucketNotFoundError:
            config = KeyValueConfig(
                bucket=BUCKET,
                ttl=_TTL_S,
                max_bytes=_MAX_BYTES,
                max_value_size=_MAX_VALUE_BYTES,
                replicas=self._replicas,
            )
            with contextlib.suppress(BadRequestError):  # another executor created it first, with other limits
                return await self._client.jetstream().create_key_value(config)
            return await self._bucket()

    async def _bucket(self) -> KeyValue:
        return await self._client.jetstream().key_value(BUCKET)


def _key(name: str) -> str:
    return f"answer.{name}"
