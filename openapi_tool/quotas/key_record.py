"""Shared record of a key at one endpoint (ADR 9): whether the upstream refuses the key there, and when to try it again.

`Keys` of each replica reads, changes and writes it. No I/O; every time is the server's, in seconds since the epoch.

A key is *blocked* by its second refusal, of another call than the first. Then one call of all replicas may *try* it,
after longer and longer pauses, until the upstream accepts it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

import orjson
from pydantic import Field, TypeAdapter, ValidationError

from openapi_tool.quotas.amounts import Time

STATES: Mapping[int, str] = MappingProxyType({40102: "invalid", 40201: "exhausted", 40203: "exhausted"})
"""State of a blocked key by the upstream's status. 40103, 40104 and 40202 are caused by the call, not by the key."""

RETRIES_S = 10.0, 30.0, 60.0, 180.0
"""Seconds until one call may try a blocked key: after it was blocked, after the first trial, after the second one, and
after each later one. A balance is often topped up, and a key accepted again, within seconds."""

PREFIX = "key."  # of the names of these records

_SECOND_REFUSAL_S = 600.0  # maximum between two refusals that block a key
_HASH_BYTES = 4  # enough to tell the values of a rotation apart


class KeyUse(NamedTuple):
    """Use of the key in a variable for an endpoint, the name of an operation."""

    variable: str
    endpoint: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """First refusal with a status: its call, such as `replica/number`, and its time."""

    call: Annotated[str, Field(max_length=100)]
    at: Time


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """State of one key at one endpoint.

    `status` is one of `STATES` if the key is blocked, since `since`, and else 0. A blocked key may be tried at
    `retry_at`, and was tried `trials` times so far. `refusals` has the first refusals of a key that is not blocked, by
    the upstream's status.
    """

    version: Literal[3] = 3
    status: int = 0
    since: Time = 0.0
    retry_at: Time = 0.0
    trials: Annotated[int, Field(ge=0, le=2**31)] = 0
    refusals: Annotated[dict[int, Refusal], Field(max_length=len(STATES))] = field(default_factory=dict)

    @property
    def state(self) -> str | None:
        """State of a blocked key, else None."""
        return STATES.get(self.status)


_RECORD = TypeAdapter(KeyRecord)


def record_name(use: KeyUse, value: str) -> str:
    """Return the name of a key's record; the hash of its value gives a rotated key another record.

    Records of an earlier version had names without the endpoint; they expire unread.
    """
    digest = hashlib.blake2b(value.encode(), digest_size=_HASH_BYTES, person=b"openapi_tool_key")
    return f"{PREFIX}{use.variable}.{use.endpoint}-{digest.hexdigest()}"


def encode(record: KeyRecord) -> bytes:
    """Return the stored form."""
    return orjson.dumps(record, option=orjson.OPT_NON_STR_KEYS)


def decode(stored: bytes | None, now: float) -> KeyRecord:
    """Return a stored record, with its times corrected as it may be forged; an empty one for anything else."""
    try:
        record = _RECORD.validate_json(stored or b"")
    except ValidationError:
        return KeyRecord()
    if record.status not in (0, *STATES):
        return KeyRecord()
    return replace(record, since=min(record.since, now), retry_at=min(record.retry_at, now + RETRIES_S[-1]))


# Changes. Each returns the record as it is afterwards: the same one if there is nothing to change.


def record_refusal(record: KeyRecord, status: int, call: str, now: float) -> KeyRecord:
    """Record a refusal with a status of `STATES`; the second one, of another call, blocks the key."""
    if record.status:
        is_other_state = STATES[status] != record.state
        return replace(record, status=status) if is_other_state else record
    first = record.refusals.get(status)
    if first is None or abs(now - first.at) >= _SECOND_REFUSAL_S:
        return replace(record, refusals={**record.refusals, status: Refusal(call, now)})
    if first.call == call:
        return record
    return replace(record, status=status, since=now, retry_at=now + RETRIES_S[0], trials=0, refusals={})


def claim_trial(record: KeyRecord, now: float) -> KeyRecord:
    """Let the present call try a blocked key, if that is due: the next trial is due after a pause."""
    if not record.status or record.retry_at > now:
        return record
    trials = record.trials + 1
    pause_s = RETRIES_S[min(trials, len(RETRIES_S) - 1)]
    return replace(record, retry_at=now + pause_s, trials=trials)


def end_trial(record: KeyRecord, now: float) -> KeyRecord:
    """Let the next call try a blocked key at once: the trial told nothing about the key."""
    return replace(record, retry_at=min(record.retry_at, now)) if record.status else record


def unblock(record: KeyRecord) -> KeyRecord:
    """Use the key again: the upstream has accepted it in a trial."""
    return replace(record, status=0, refusals={})


def forget_refusals(record: KeyRecord) -> KeyRecord:
    """Forget first refusals: the upstream has accepted a key that is not blocked."""
    return record if record.status else replace(record, refusals={})
