"""How many commands may be fetched from JetStream; the health of database and NATS decides that."""

from __future__ import annotations

from enum import Enum, auto


class FetchMode(Enum):
    """Limit of fetching."""

    UNLIMITED = auto()
    """As many commands as there are free slots."""
    PROBE = auto()
    """One command at a time, as a test whether the database works again."""
    NONE = auto()
