"""Pagination cursors, which bind a stored text to its owner by an HMAC.

A cursor is base64 of the `Position` and a seal. The position is 16 bytes card id, 5 bytes `start`, and 5 bytes
`block_start` if there is one. The *seal* is the first 12 bytes of an HMAC over owner and position.
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
_QUOTES = " \t\r\n\"'`\u201c\u201d"  # and white space, in which a model may enclose a cursor


class Position(NamedTuple):
    """Position in an artifact's text, in characters.

    `block_start` is where the code block or table begins that contains `start`, so that its first lines can be
    repeated; None outside of one.
    """

    card_id: str
    start: int
    block_start: int | None = None


class Cursors:
    """Issues and reads cursors, with a key that all processes of this service share."""

    def __init__(self, key: bytes) -> None:
        self._key = hmac.digest(key, b"cursor", hashlib.sha256)

    def issue(self, owner: CallIdentity, position: Position) -> str:
        """Return a cursor, valid for this owner only; 44 characters, or 52 with a `block_start`."""
        payload = uuid.UUID(position.card_id).bytes + position.start.to_bytes(_START_BYTES, "big")
        if position.block_start is not None:
            payload += position.block_start.to_bytes(_START_BYTES, "big")
        return base64.urlsafe_b64encode(payload + self._seal(owner, payload)).decode()

    def read(self, owner: CallIdentity, cursor: str) -> Position:
        """Return the position of a cursor. Raises NotFound if it was not issued to this owner."""
        try:
            decoded = base64.b64decode(cursor.strip(_QUOTES), altchars=b"-_", validate=True)
        except ValueError:
            raise unknown_cursor() from None
        payload, seal = decoded[:-_SEAL_BYTES], decoded[-_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(owner, payload)):
            raise unknown_cursor()
        card_id = payload[:_ID_BYTES]
        start = payload[_ID_BYTES : _ID_BYTES + _START_BYTES]
        block_start = payload[_ID_BYTES + _START_BYTES :]
        return Position(
            uuid.UUID(bytes=card_id).hex,
            int.from_bytes(start, "big"),
            int.from_bytes(block_start, "big") if block_start else None,
        )

    def _seal(self, owner: CallIdentity, payload: bytes) -> bytes:
        message = orjson.dumps([owner.project_id, owner.agent_id, payload.hex()])
        return hmac.digest(self._key, message, hashlib.sha256)[:_SEAL_BYTES]


def unknown_cursor() -> NotFound:
    """Return the error for forged, foreign and expired cursors, which a caller must not be able to distinguish."""
    return NotFound(
        "cursor: is unknown here, or its text is no longer stored; ask for the page itself again, by its url."
    )
