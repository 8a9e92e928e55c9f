"""Keys of `openapi-tool usage`; a module of its own, as the command line imports no driver for its options."""

from __future__ import annotations

from enum import StrEnum


class By(StrEnum):
    """What the usage of stored calls can be summed up by."""

    TOOL = "tool"
    AGENT = "agent"
    DAY = "day"
    SESSION = "session"
    ERROR = "error"
