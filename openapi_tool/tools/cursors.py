"""Pagination cursors, which bind a stored text to its owner by an HMAC.

A cursor is base64 of 16 bytes card id, 5 bytes start, 5 bytes opening (optional; see `Position`), and 12 bytes of HMAC
over owner and position.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import uuid
from typing import NamedTuple

import orjson

from openapi_tool.protocol.errors import NotFound
from openapi_tool.protocol.identity import CallIdentity

_ID_BYTES = 16
_START_BYTES = 5
_SEAL_BYTES = 12
# White space and quotes, in which a model may enclose a cursor.
_STRIPPED_CHARS = " \t\r\n\"'`\u201c\u201d"


class Position(NamedTuple):
    """Position in an artifact's text, in characters.

    `opening` is the start of the code block or table that contains `start`, to repeat its first lines; None outside.
    """

    card_id: str
    start: int
    opening: int | None = None


class Cursors:
    """Issues and reads cursors with a key that all replicas share."""

    def __init__(self, key: bytes) -> None:
        self._key = hmac.digest(key, b"cursor", hashlib.sha256)

    def issue(self, owner: CallIdentity, position: Position) -> str:
        """Return a cursor, valid for this owner only; 44 characters, or 52 with an `opening`."""
        payload = uuid.UUID(position.card_id).bytes + position.start.to_bytes(_START_BYTES, "big")
        if position.opening is not None:
            payload += position.opening.to_bytes(_START_BYTES, "big")
        return base64.urlsafe_b64encode(payload + self._seal(owner, payload)).decode()

    def read(self, owner: CallIdentity, cursor: str) -> Position:
        """Return the position of a cursor. Raises NotFound if it was not issued to this owner."""
        try:
            opened = base64.b64decode(cursor.strip(_STRIPPED_CHARS), altchars=b"-_", validate=True)
        except ValueError:
            raise unknown_cursor() from None
        payload, seal = opened[:-_SEAL_BYTES], opened[-_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(owner, payload)):
            raise unknown_cursor()
        end_of_start = _ID_BYTES + _START_BYTES
        card_id, start, opening = payload[:_ID_BYTES], payload[_ID_BYTES:end_of_start], payload[end_of_start:]
        return Position(
            uuid.UUID(bytes=card_id).hex,
            int.from_bytes(start, "big"),
            int.from_bytes(opening, "big") if opening else None,
        )

    def _seal(self, owner: CallIdentity, payload: bytes) -> bytes:
        message = orjson.dumps([owner.project_id, owner.agent_id, payload.hex()])
        return hmac.digest(self._key, message, hashlib.sha256)[:_SEAL_BYTES]


def unknown_cursor() -> NotFound:
    """Return the error for forged, foreign and expired cursors, which a caller must not be able to distinguish."""
    return NotFound(
        "cursor: is unknown here, or its text is no longer stored; ask for the page itself again, by its url."
    )
