"""Shared record of one key that the upstream refuses: marked once two calls have met the same refusal.

Pure, as `ledger`: no I/O, server time in seconds. Each function returns whether it has changed the record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import orjson

VERSION = 1
STATES: Mapping[int, str] = MappingProxyType({40102: "invalid", 40201: "exhausted", 40203: "exhausted"})
"""States of a key by the upstream's status. 40103, 40104 and 40202 are a call's own fault."""

AGAIN_S = 180.0
"""Seconds after which one call may try a marked key again."""

_SEEN_S = 600.0
"""Seconds within which the second call must meet the same refusal."""


@dataclass(slots=True)
class Refusal:
    """First refusal with a status: the call that met it, and when."""

    call: str
    at: float


@dataclass(slots=True)
class KeyRecord:
    """State of one key; `status` is 0 while it is not marked, `again_at` when it may be tried again."""

    version: int = VERSION
    status: int = 0
    since: float = 0.0
    again_at: float = 0.0
    seen: dict[int, Refusal] = field(default_factory=dict)

    @property
    def state(self) -> str | None:
        """Return `invalid`, `exhausted`, or None while the key is not marked."""
        return STATES.get(self.status)


def refuse(record: KeyRecord, status: int, call: str, now: float) -> bool:
    """Enter a refusal; the second call's marks the key."""
    if record.status:
        return mark(record, status, now)
    first = record.seen.get(status)
    if first is None or now - first.at >= _SEEN_S:
        record.seen[status] = Refusal(call, now)
        return True
    return first.call != call and mark(record, status, now)


def mark(record: KeyRecord, status: int, now: float) -> bool:
    """Mark the key, unless it is marked so."""
    if STATES[status] == record.state:
        return False
    if not record.status:
        record.since, record.again_at, record.seen = now, now + AGAIN_S, {}
    record.status = status
    return True


def try_again(record: KeyRecord, now: float) -> bool:
    """Let one call try a marked key; the next one may in some minutes."""
    if not record.status or record.again_at > now:
        return False
    record.again_at = now + AGAIN_S
    return True


def clear(record: KeyRecord) -> bool:
    """Take the mark off a key that works."""
    marked = bool(record.status or record.seen)
    record.status, record.seen = 0, {}
    return marked


def encode(record: KeyRecord) -> bytes:
    """Return the stored form."""
    return orjson.dumps(asdict(record), option=orjson.OPT_NON_STR_KEYS)


def decode(stored: bytes | None) -> KeyRecord:
    """Return a stored record; an empty one for anything else, also for another version."""
    try:
        value: Any = orjson.loads(stored or b"null")
        if value["version"] != VERSION or value["status"] not in (0, *STATES):
            return KeyRecord()
        seen = {int(status): Refusal(str(one["call"]), float(one["at"])) for status, one in value["seen"].items()}
        return KeyRecord(VERSION, value["status"], float(value["since"]), float(value["again_at"]), seen)
    except (TypeError, ValueError, KeyError, AttributeError):
        return KeyRecord()
