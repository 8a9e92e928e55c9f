"""What all replicas share: values made once by whoever comes first, kept in a KV bucket."""

from __future__ import annotations

import secrets

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js.api import KeyValueConfig
from nats.js.errors import BucketNotFoundError, KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from openapi_tool.protocol.errors import Unavailable

BUCKET = "openapi_tool"
SESSION_KEY = "session_key"
_KEY_BYTES = 32


async def shared_session_key(client: Client, replicas: int = 1) -> bytes:
    """The key behind session identities: made by the first replica, the same for all and for ever.

    The bucket is made with so many `replicas` where it is missing. Raises Unavailable when NATS refuses;
    an operator can set `session.key` instead.
    """
    try:
        bucket = await _bucket(client, replicas)
        try:
            return _value(await bucket.get(SESSION_KEY))
        except KeyNotFoundError:
            return await _make(bucket)
    except (nats.errors.Error, nats.js.errors.Error) as error:
        raise Unavailable(f"NATS: no shared session key (set session.key): {type(error).__name__}: {error}") from error


async def _bucket(client: Client, replicas: int) -> KeyValue:
    jetstream = client.jetstream()
    try:
        return await jetstream.key_value(BUCKET)
    except BucketNotFoundError:
        return await jetstream.create_key_value(KeyValueConfig(bucket=BUCKET, replicas=replicas))


async def _make(bucket: KeyValue) -> bytes:
    key = secrets.token_bytes(_KEY_BYTES)
    try:
        await bucket.create(SESSION_KEY, key)
    except KeyWrongLastSequenceError:  # another replica was first
        return _value(await bucket.get(SESSION_KEY))
    return key


def _value(entry: KeyValue.Entry) -> bytes:
    if not entry.value:
        raise Unavailable(f"NATS: the key {SESSION_KEY} in bucket {BUCKET} is empty; remove it")
    return entry.value
