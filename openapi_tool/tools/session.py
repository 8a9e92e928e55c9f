"""Whose session a call belongs to: an alias that callers choose, an identity that only we know.

`session_id` is an alias. The execution identity behind it is a keyed hash of (project, agent, alias),
so the same alias of two owners never meets, nobody can compute another owner's identity, and all
replicas agree (protocol section 5).
"""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import orjson

MIN_KEY_BYTES = 16


class SessionScope:
    """Derives execution identities with a key that all replicas share."""

    def __init__(self, key: bytes) -> None:
        if len(key) < MIN_KEY_BYTES:
            raise ValueError(f"the session key must have at least {MIN_KEY_BYTES} bytes")
        self._key = key

    def identity(self, project_id: str, agent_id: str, alias: Any) -> str:
        """64 hex digits for an owner and an alias (any JSON value, None where the call has none).

        The three are hashed as one JSON array, so no separator in any of them can make two look alike.
        """
        owned = [project_id, agent_id, alias]
        try:
            message = orjson.dumps(owned, option=orjson.OPT_SORT_KEYS)
        except TypeError:  # an integer beyond 64 bits
            message = json.dumps(owned, sort_keys=True).encode()
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()
