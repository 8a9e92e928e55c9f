"""Where a cut result goes on, as an opaque text that only its owner can use (tool-design section 3)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import uuid
from dataclasses import dataclass

import orjson

from openapi_tool.protocol.errors import NotFound

_ID_BYTES, _START_BYTES, _SEAL_BYTES = 16, 5, 12
_UNKNOWN = "cursor: is unknown here, or its text is no longer kept; ask for the page itself again, by its url."


@dataclass(frozen=True, slots=True)
class Position:
    """A place in an artifact's text: the card and how many characters come before."""

    card_id: str
    start: int


class Cursors:
    """Issues and reads cursors, sealed with a key that all replicas share."""

    def __init__(self, key: bytes) -> None:
        self._key = hmac.digest(key, b"cursor", hashlib.sha256)

    def issue(self, project_id: str, agent_id: str, position: Position) -> str:
        """44 characters that stand for `position`, for this owner only."""
        place = uuid.UUID(position.card_id).bytes + position.start.to_bytes(_START_BYTES, "big")
        return base64.urlsafe_b64encode(place + self._seal(project_id, agent_id, place)).decode()

    def read(self, project_id: str, agent_id: str, cursor: str) -> Position:
        """The position. Raises NotFound for a cursor that was not issued to this owner."""
        try:
            opened = base64.b64decode(cursor.strip(), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise unknown_cursor() from None
        place, seal = opened[:-_SEAL_BYTES], opened[-_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(project_id, agent_id, place)):
            raise unknown_cursor()
        return Position(uuid.UUID(bytes=place[:_ID_BYTES]).hex, int.from_bytes(place[_ID_BYTES:], "big"))

    def _seal(self, project_id: str, agent_id: str, place: bytes) -> bytes:
        message = orjson.dumps([project_id, agent_id, place.hex()])
        return hmac.digest(self._key, message, hashlib.sha256)[:_SEAL_BYTES]


def unknown_cursor() -> NotFound:
    """The one answer for every cursor that does not lead anywhere: forged, foreign or expired."""
    return NotFound(_UNKNOWN)
