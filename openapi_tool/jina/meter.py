"""Cost of upstream requests, counted so that each request is reported in exactly one result."""

from __future__ import annotations

from openapi_tool.tools.result import NO_USAGE, Usage


class Meter:
    """Counts tokens and requests until a result takes them."""

    def __init__(self) -> None:
        self.usage = NO_USAGE

    def add(self, usage: Usage) -> None:
        """Count more."""
        self.usage += usage

    def take(self) -> Usage:
        """Return the count and reset it."""
        taken, self.usage = self.usage, NO_USAGE
        return taken
