"""The limits of one key and endpoint, as numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """Limits: requests and tokens in any 60 s, concurrent requests; None is unlimited."""

    requests: int | None = None
    tokens: int | None = None
    concurrent: int | None = None

    @property
    def limited(self) -> bool:
        """Return whether anything is limited."""
        return self.requests is not None or self.tokens is not None or self.concurrent is not None
