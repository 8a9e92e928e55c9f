"""Session identities (protocol section 5).

A caller's `session_id` is only an alias. The session identity is an HMAC of project, agent and alias. So the same alias
of two agents gives two identities, no caller can compute the identity of another one, and all replicas
compute the same.
"""

from __future__ import annotations

import hashlib
import hmac
import json

import orjson

from openapi_tool.protocol.jsonvalue import JsonValue

MIN_KEY_BYTES = 16


class SessionScope:
    """Deriver of session identities, with a key that all replicas share; raises ValueError for a short key."""

    def __init__(self, key: bytes) -> None:
        if len(key) < MIN_KEY_BYTES:
            raise ValueError(f"the session key must have at least {MIN_KEY_BYTES} bytes")
        self._key = key

    def identity(self, project_id: str, agent_id: str, alias: JsonValue) -> str:
        """Return 64 hex digits for an owner and an alias (any JSON value, None if the call has none).

        The HMAC is over one JSON array. Values joined by a separator could collide: `a:b` and `c`, or `a` and `b:c`.
        """
        owned = [project_id, agent_id, alias]
        try:
            message = orjson.dumps(owned, option=orjson.OPT_SORT_KEYS)
        except TypeError:  # an integer beyond 64 bits
            message = json.dumps(owned, sort_keys=True).encode()
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()
