"""Store the durable's ack floor, so that a durable which is created again resumes there.

The durable is JetStream's record of which commands are delivered and settled; its ack floor is the stream sequence up
to which all are settled. If an operator deletes the durable, it is created anew, and without a stored floor it would
redeliver every command of the last day.
"""

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

FLOOR_PREFIX = "floor"  # of the key in the bucket; the durable's name follows


@dataclass(frozen=True, slots=True)
class AckFloor:
    """All commands up to `sequence` of a stream that match the filter are settled.

    `created` is the stream's creation time. It distinguishes the stream from an earlier one of the same name, whose
    sequences mean nothing in this one.
    """

    stream: str
    created: str
    filter_subject: str
    sequence: int


async def load_ack_floor(client: Client, durable: str, current: AckFloor) -> int:
    """Return the stored sequence, 0 if none is stored for stream and filter of `current`. Raises Unavailable."""
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
    """Store `current` unless the stored floor is as far or farther. Raises Unavailable."""

    def advanced(value: bytes | None) -> bytes | None:
        is_ahead = current.sequence > _stored_sequence(value, current)
        return orjson.dumps(asdict(current)) if is_ahead else None

    await change(NatsKvRecords(client, shared_bucket()), _floor_key(durable), advanced)


def _floor_key(durable: str) -> str:
    return f"{FLOOR_PREFIX}.{durable}"


def _stored_sequence(value: bytes | None, current: AckFloor) -> int:
    """Return the sequence in a stored record, 0 if it is of another stream or filter than `current`, or unreadable."""
    try:
        fields = orjson.loads(value or b"null")
        stored = AckFloor(fields["stream"], fields["created"], fields["filter_subject"], int(fields["sequence"]))
    except (TypeError, ValueError, KeyError):
        return 0
    is_same_but_sequence = stored == replace(current, sequence=stored.sequence)
    return stored.sequence if is_same_but_sequence else 0
