"""Session identities, which tell one caller's requests from those of all others, for example in the cache.

A *session* is what an agent names with the argument `session_id`. Its identity is an HMAC of project, agent and that
argument, since two agents may use the same name.
"""

from __future__ import annotations

import hashlib
import hmac
import json

import orjson

from openapi_tool.protocol.jsontext import JsonValue

MIN_KEY_BYTES = 16


class SessionIdentities:
    """Derives session identities, with a key that all processes of this service share.

    Raises ValueError for a short key.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) < MIN_KEY_BYTES:
            raise ValueError(f"the session key must have at least {MIN_KEY_BYTES} bytes")
        self._key = key

    def identity(self, project_id: str, agent_id: str, session_id: JsonValue) -> str:
        """Return 64 hex digits for an owner and its `session_id` (any JSON value, None if the call has none).

        The HMAC is over a JSON array: if the ids were joined by a colon, `a:b` and `c` would give the same text as `a`
        and `b:c`. It is keyed, so no caller can compute another's identity.
        """
        owned = [project_id, agent_id, session_id]
        try:
            message = orjson.dumps(owned, option=orjson.OPT_SORT_KEYS)
        except TypeError:  # an integer beyond 64 bits
            message = json.dumps(owned, sort_keys=True).encode()
        return hmac.digest(self._key, message, hashlib.sha256).hex()
