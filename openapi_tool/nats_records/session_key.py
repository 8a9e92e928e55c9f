"""The key for session identities, which all executors share.

A session identity is a hash, made with this key, that replaces the name which a tool or model gives to a part of its
work. The first executor creates the key.
"""

from __future__ import annotations

import logging
import secrets

from nats.aio.client import Client

from openapi_tool.nats_records.shared_bucket import BUCKET, shared_bucket
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.state.change import change
from openapi_tool.state.nats_kv import NatsKvRecords

log = logging.getLogger(__name__)

SESSION_KEY = "session_key"
_SESSION_KEY_BYTES = 32


async def shared_session_key(client: Client, replicas: int = 1) -> bytes:
    """Return the key, which the first executor creates and none changes. Raises Unavailable."""
    try:
        return await _stored(client, secrets.token_bytes(_SESSION_KEY_BYTES), replicas)
    except Unavailable as error:
        raise Unavailable(f"no shared session key (set session.key): {error}") from error


async def restore_session_key(client: Client, key: bytes, replicas: int = 1) -> None:
    """Store the key after its bucket was deleted, for executors which start later. Raises Unavailable."""
    if await _stored(client, key, replicas) != key:
        log.error(
            "another executor created a different session key: the executors compute different sessions; restart all",
            extra={"action": "session_key.differs"},
        )


async def _stored(client: Client, new: bytes, replicas: int) -> bytes:
    """Return the stored key; store `new` if there is none."""
    records = NatsKvRecords(client, shared_bucket(replicas), from_leader=True)
    found = await change(records, SESSION_KEY, lambda stored: new if stored is None else None)
    return _checked(found.value or b"")


def _checked(key: bytes) -> bytes:
    """Refuse a key that no executor made.

    NATS does not check reply subjects: a user who may not write the key can have an answer of JetStream stored as it,
    and knows that answer.
    """
    if not key:
        raise Unavailable(f"NATS: the key {SESSION_KEY} in bucket {BUCKET} is empty; remove it")
    if len(key) != _SESSION_KEY_BYTES:
        raise Unavailable(
            f"NATS: the key {SESSION_KEY} in bucket {BUCKET} has {len(key)} bytes instead of {_SESSION_KEY_BYTES}, "
            "so no executor made it; remove it"
        )
    return key
