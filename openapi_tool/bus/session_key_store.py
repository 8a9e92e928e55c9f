"""Session key in KV: created by the first executor, shared by all."""

from __future__ import annotations

import contextlib
import logging
import secrets

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js.api import KeyValueConfig
from nats.js.errors import BadRequestError, BucketNotFoundError, KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from openapi_tool.protocol.errors import Unavailable

log = logging.getLogger(__name__)

BUCKET = "openapi_tool"
SESSION_KEY = "session_key"
_KEY_BYTES = 32


async def shared_session_key(client: Client, replicas: int = 1) -> bytes:
    """Return the key for session identities; the first executor creates it, and it never changes.

    A missing bucket is created with `replicas` replicas. Raises Unavailable if NATS refuses; an operator can set
    `session.key` instead.
    """
    try:
        bucket = await ensure_bucket(client, replicas)
        try:
            return _value(await bucket.get(SESSION_KEY))
        except KeyNotFoundError:
            return await _create(bucket)
    except (nats.errors.Error, nats.js.errors.Error) as error:
        raise Unavailable(f"NATS: no shared session key (set session.key): {type(error).__name__}: {error}") from error


async def restore_session_key(client: Client, key: bytes, replicas: int = 1) -> None:
    """Store the key again after its bucket was deleted, so that executors which start later use the same one.

    Raises nats.errors.Error, or Unavailable if the stored key is empty.
    """
    bucket = await ensure_bucket(client, replicas)
    with contextlib.suppress(KeyWrongLastSequenceError):  # another executor was first
        await bucket.create(SESSION_KEY, key)
    if _value(await bucket.get(SESSION_KEY)) != key:
        log.error(
            "another executor created a different session key: the executors compute different sessions; restart all",
            extra={"action": "session_key.differs"},
        )


async def ensure_bucket(client: Client, replicas: int = 1) -> KeyValue:
    """Open the bucket; create it if it is missing. Raises nats.errors.Error."""
    jetstream = client.jetstream()
    try:
        return await jetstream.key_value(BUCKET)
    except BucketNotFoundError:
        with contextlib.suppress(BadRequestError):  # another executor created it first, with other options
            return await jetstream.create_key_value(KeyValueConfig(bucket=BUCKET, replicas=replicas))
        return await jetstream.key_value(BUCKET)


async def _create(bucket: KeyValue) -> bytes:
    key = secrets.token_bytes(_KEY_BYTES)
    try:
        await bucket.create(SESSION_KEY, key)
    except KeyWrongLastSequenceError:  # another executor was first
        return _value(await bucket.get(SESSION_KEY))
    return key


def _value(entry: KeyValue.Entry) -> bytes:
    if not entry.value:
        raise Unavailable(f"NATS: the key {SESSION_KEY} in bucket {BUCKET} is empty; remove it")
    return entry.value
