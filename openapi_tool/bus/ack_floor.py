"""Acknowledgement floor of the durable, stored in KV.

A durable that is deleted and created again resumes there; otherwise it would redeliver every command of the last day.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

import orjson
from nats.aio.client import Client
from nats.js.errors import BucketNotFoundError, KeyNotFoundError, KeyWrongLastSequenceError

from openapi_tool.bus.client import Denied
from openapi_tool.bus.session_key_store import BUCKET

log = logging.getLogger(__name__)

KEYS = "floor"


@dataclass(frozen=True, slots=True)
class AckFloor:
    """All commands up to `sequence` of a stream that match the filter are settled.

    `created` distinguishes a stream from an earlier one of the same name, whose sequences are meaningless for it.
    """

    stream: str
    created: str
    filter_subject: str
    sequence: int

    def is_of(self, other: AckFloor) -> bool:
        """Return whether both refer to the same stream and filter."""
        return (self.stream, self.created, self.filter_subject) == (other.stream, other.created, other.filter_subject)


async def load_ack_floor(client: Client, durable: str, current: AckFloor) -> int:
    """Return the stored sequence for the stream and filter of `current`, 0 if there is none.

    Raises nats.errors.Error in an outage.
    """
    try:
        bucket = await client.jetstream().key_value(BUCKET)
        stored = _decoded((await bucket.get(_key(durable))).value)
    except (BucketNotFoundError, KeyNotFoundError):
        return 0
    except Denied as denied:
        log.warning(
            "cannot read the ack floor; the durable starts at the first command of the stream: %s",
            denied,
            extra={"action": "ack_floor.denied"},
        )
        return 0
    return stored.sequence if stored and stored.is_of(current) else 0


async def save_ack_floor(client: Client, durable: str, current: AckFloor) -> None:
    """Store `current` if it is ahead of the stored floor; on a conflict the other floor stays.

    Raises nats.errors.Error.
    """
    bucket = await client.jetstream().key_value(BUCKET)
    revision, stored = 0, None
    try:
        entry = await bucket.get(_key(durable))
        revision, stored = entry.revision or 0, _decoded(entry.value)
    except KeyNotFoundError as missing:
        revision = (missing.entry.revision or 0) if missing.entry else 0
    if stored is not None and stored.is_of(current) and stored.sequence >= current.sequence:
        return
    try:
        await bucket.update(_key(durable), orjson.dumps(asdict(current)), last=revision)
    except KeyWrongLastSequenceError:
        log.debug("another replica stored the ack floor", extra={"action": "ack_floor.raced"})


def _key(durable: str) -> str:
    return f"{KEYS}.{durable}"


def _decoded(value: bytes | None) -> AckFloor | None:
    try:
        found = orjson.loads(value or b"null")
        return AckFloor(found["stream"], found["created"], found["filter_subject"], int(found["sequence"]))
    except (TypeError, ValueError, KeyError):
        return None
