"""Stored form of the shared record of a key and endpoint. Any client that may write the bucket may store anything."""

from __future__ import annotations

from operator import attrgetter

import orjson
from pydantic import TypeAdapter, ValidationError

from openapi_tool.limits.ledger import STORED_FIELDS, Record

_REPLICA = attrgetter(*STORED_FIELDS)


def encode(record: Record) -> bytes:
    """Return the stored form. Replicas are lists of their fields, to save bytes: a record may have 1,000 of them."""
    value = {
        "version": record.version,
        "paused_until": record.paused_until,
        "requests": record.requests,
        "tokens": record.tokens,
        "replicas": {name: _REPLICA(replica) for name, replica in record.replicas.items()},
        "adaptive": record.adaptive,
    }
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)


_RECORD = TypeAdapter(Record)


def parse(stored: bytes | None) -> Record | None:
    """Return a stored record; None for anything else, also for another version."""
    try:
        return _RECORD.validate_json(stored or b"")
    except ValidationError:
        return None


def decode(stored: bytes | None) -> Record:
    """Return a stored record; an empty one for anything else, also for another version."""
    return parse(stored) or Record()
