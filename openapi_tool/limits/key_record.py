"""Shared record of one key. Two refusals by the upstream with the same status, of different calls, block the key.

Pure like `ledger`: no I/O, server time in seconds. Each function returns whether it changed the record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Annotated

import orjson
from pydantic import Field, TypeAdapter, ValidationError

from openapi_tool.limits.record import Time

VERSION = 2
STATES: Mapping[int, str] = MappingProxyType({40102: "invalid", 40201: "exhausted", 40203: "exhausted"})
"""State of a blocked key by the upstream's status. 40103, 40104 and 40202 are caused by the call, not by the key."""

RETRY_S = 180.0
"""Seconds after which one call may try a blocked key again."""

_SECOND_REFUSAL_S = 600.0
"""Maximum seconds between two refusals that block a key."""


@dataclass(slots=True)
class Refusal:
    """First refusal with a status: its call and time."""

    call: Annotated[str, Field(max_length=100)]
    at: Time


@dataclass(slots=True)
class KeyRecord:
    """State of one key. `status` is 0 while it is not blocked; `retry_at` is when a blocked key may be tried again."""

    version: Annotated[int, Field(ge=VERSION, le=VERSION)] = VERSION
    status: int = 0
    since: Time = 0.0
    retry_at: Time = 0.0
    refusals: Annotated[dict[int, Refusal], Field(max_length=len(STATES))] = field(default_factory=dict)

    @property
    def state(self) -> str | None:
        """Return `invalid`, `exhausted`, or None while the key is not blocked."""
        return STATES.get(self.status)


def record_refusal(record: KeyRecord, status: int, call: str, now: float) -> bool:
    """Record a refusal; the second one, by another call, blocks the key."""
    if record.status:
        return block(record, status, now)
    first = record.refusals.get(status)
    if first is None or abs(now - first.at) >= _SECOND_REFUSAL_S:
        record.refusals[status] = Refusal(call, now)
        return True
    return first.call != call and block(record, status, now)


def block(record: KeyRecord, status: int, now: float) -> bool:
    """Block the key. Returns False if it is blocked with the same state already."""
    if STATES[status] == record.state:
        return False
    if not record.status:
        record.since, record.retry_at, record.refusals = now, now + RETRY_S, {}
    record.status = status
    return True


def claim_trial(record: KeyRecord, now: float) -> bool:
    """Let the caller try a blocked key if no other call did within `RETRY_S`."""
    if not record.status or record.retry_at > now:
        return False
    record.retry_at = now + RETRY_S
    return True


def end_trial(record: KeyRecord, now: float) -> bool:
    """Let the next call try a blocked key: the response to this one did not depend on the key."""
    changed = bool(record.status) and record.retry_at > now
    record.retry_at = min(record.retry_at, now)
    return changed


def unblock(record: KeyRecord) -> bool:
    """Unblock a working key, and clear its refusals."""
    changed = bool(record.status or record.refusals)
    record.status, record.refusals = 0, {}
    return changed


def encode(record: KeyRecord) -> bytes:
    """Return the stored form."""
    return orjson.dumps(asdict(record), option=orjson.OPT_NON_STR_KEYS)


_RECORD = TypeAdapter(KeyRecord)


def decode(stored: bytes | None, now: float) -> KeyRecord:
    """Return a stored record; an empty one for anything else, also for another version.

    Any client that may write the bucket may store anything, so a key is tried again `RETRY_S` from now at the latest.
    """
    try:
        record = _RECORD.validate_json(stored or b"")
    except ValidationError:
        return KeyRecord()
    if record.status not in (0, *STATES):
        return KeyRecord()
    record.since, record.retry_at = min(record.since, now), min(record.retry_at, now + RETRY_S)
    return record
