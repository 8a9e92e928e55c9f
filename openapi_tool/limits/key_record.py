"""Shared record of one key. Two refusals by the upstream with the same status, of different calls, block the key.

Pure like `ledger`: no I/O, server time in seconds. Each function returns whether it changed the record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import orjson

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

    call: str
    at: float


@dataclass(slots=True)
class KeyRecord:
    """State of one key. `status` is 0 while it is not blocked; `retry_at` is when a blocked key may be tried again."""

    version: int = VERSION
    status: int = 0
    since: float = 0.0
    retry_at: float = 0.0
    refusals: dict[int, Refusal] = field(default_factory=dict)

    @property
    def state(self) -> str | None:
        """Return `invalid`, `exhausted`, or None while the key is not blocked."""
        return STATES.get(self.status)


def record_refusal(record: KeyRecord, status: int, call: str, now: float) -> bool:
    """Record a refusal; the second one, by another call, blocks the key."""
    if record.status:
        return block(record, status, now)
    first = record.refusals.get(status)
    if first is None or now - first.at >= _SECOND_REFUSAL_S:
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


def unblock(record: KeyRecord) -> bool:
    """Unblock a working key, and forget its refusals."""
    changed = bool(record.status or record.refusals)
    record.status, record.refusals = 0, {}
    return changed


def encode(record: KeyRecord) -> bytes:
    """Return the stored form."""
    return orjson.dumps(asdict(record), option=orjson.OPT_NON_STR_KEYS)


def decode(stored: bytes | None) -> KeyRecord:
    """Return a stored record; an empty one for anything else, also for another version."""
    try:
        value: Any = orjson.loads(stored or b"null")
        if value["version"] != VERSION or value["status"] not in (0, *STATES):
            return KeyRecord()
        first = {
            int(status): Refusal(str(refusal["call"]), float(refusal["at"]))
            for status, refusal in value["refusals"].items()
        }
        return KeyRecord(VERSION, value["status"], float(value["since"]), float(value["retry_at"]), first)
    except (TypeError, ValueError, KeyError, AttributeError):
        return KeyRecord()
