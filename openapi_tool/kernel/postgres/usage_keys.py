"""What the usage of stored calls can be summed up by."""

from __future__ import annotations

from enum import StrEnum


class By(StrEnum):
    """Keys to sum up usage by."""

    TOOL = "tool"
    AGENT = "agent"
    DAY = "day"
    SESSION = "session"
    ERROR = "error"
