"""Ack floor of the durable, stored so that a durable which is created again resumes there."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace

import orjson
from nats.aio.client import Client

from openapi_tool.nats_records.shared_bucket import shared_bucket
from openapi_tool.state.change import change
from openapi_tool.state.nats_kv import NatsKvRecords
from openapi_tool.state.port import AccessDenied

log = logging.getLogger(__name__)

FLOOR_PREFIX = "floor"


@dataclass(frozen=True, slots=True)
class AckFloor:
    """All commands up to `sequence` of a stream that match the filter are settled: where a new durable resumes.

    Otherwise it would redeliver every command of the last day. `created` distinguishes a stream from an earlier one of
    the same name, whose sequences mean nothing.
    """

    stream: str
    created: str
    filter_subject: str
    sequence: int


async def load_ack_floor(client: Client, durable: str, current: AckFloor) -> int:
    """Return the stored sequence for stream and filter of `current`, 0 without one. Raises Unavailable."""
    try:
        stored = await NatsKvRecords(client, shared_bucket()).read(_floor_key(durable))
    except AccessDenied as denied:
        log.warning(
            "cannot read the ack floor; the durable starts at the first command of the stream: %s",
            denied,
            extra={"action": "ack_floor.denied"},
        )
        return 0
    return _stored_sequence(stored.value, current)


async def save_ack_floor(client: Client, durable: str, current: AckFloor) -> None:
    """Store `current` if it is ahead of the stored floor. Raises Unavailable."""

    def advanced(value: bytes | None) -> bytes | None:
        is_ahead = current.sequence > _stored_sequence(value, current)
        return orjson.dumps(asdict(current)) if is_ahead else None

    await change(NatsKvRecords(client, shared_bucket()), _floor_key(durable), advanced)


def _floor_key(durable: str) -> str:
    return f"{FLOOR_PREFIX}.{durable}"


def _stored_sequence(value: bytes | None, current: AckFloor) -> int:
    """Return the stored sequence, 0 if it is of another stream or filter than `current`."""
    try:
        found = orjson.loads(value or b"null")
        stored = AckFloor(found["stream"], found["created"], found["filter_subject"], int(found["sequence"]))
    except (TypeError, ValueError, KeyError):
        return 0
    return stored.sequence if stored == replace(current, sequence=stored.sequence) else 0
