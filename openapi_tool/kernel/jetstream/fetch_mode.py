"""How many commands may be fetched."""

from __future__ import annotations

from enum import Enum, auto


class FetchMode(Enum):
    """Limit of fetching; PROBE is one command that tests the database."""

    UNLIMITED = auto()
    PROBE = auto()
    NONE = auto()
