"""Tokens that a process accepts now, read from their stores again and again.

A token is the text `oat_ID_SECRET` (`token_record`). A *store* is the shared state, or a file (`token_stores`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from openapi_tool.gateway.token_record import Token, TokensInvalid, has_secret, id_and_secret
from openapi_tool.gateway.token_stores import TokenStore
from openapi_tool.protocol.errors import Unavailable

log = logging.getLogger(__name__)


class FoundToken(NamedTuple):
    """A token's id and record."""

    id: str
    record: Token


class Tokens:
    """Tokens that a process accepts, of all stores. A change in a store takes effect with the next `refresh`.

    If a store cannot be read, the tokens that were read from it last are accepted for `grace_s` more seconds.
    `clock` returns the time by which tokens expire, in seconds since the epoch.
    """

    def __init__(
        self, stores: list[TokenStore], clock: Callable[[], float] = time.time, grace_s: float = math.inf
    ) -> None:
        self._sources = [_Source(store) for store in stores]
        self._clock = clock
        self._grace_s = grace_s
        self._logged_problem = ""  # why the last refresh failed, empty if it succeeded

    def __len__(self) -> int:
        """Number of known tokens, also revoked and expired ones."""
        return sum(len(source.tokens) for source in self._sources)

    async def load(self) -> None:
        """Read the tokens. Raises Unavailable, TokensInvalid."""
        for source in self._sources:
            await source.read()

    async def refresh(self) -> str:
        """Read the tokens again; return why that is impossible, else an empty text.

        The last known tokens then stay in use.
        """
        problems = []
        for source in self._sources:
            try:
                await source.read()
            except (Unavailable, TokensInvalid) as error:
                problems.append(str(error))
        problem = "; ".join(problems)
        if problem and problem != self._logged_problem:
            log.error(
                "cannot read the tokens; the old ones stay in use for %s s: %s",
                self._grace_s,
                problem,
                extra={"action": "tokens.read_failed"},
            )
        self._logged_problem = problem
        return problem

    @property
    def outdated(self) -> bool:
        """Return whether some store could not be read for so long that its tokens are accepted no more."""
        return any(map(self._is_outdated, self._sources))

    def _is_outdated(self, source: _Source) -> bool:
        return time.monotonic() - source.read_at > self._grace_s

    def find(self, text: str) -> FoundToken | None:
        """Return a token if it is usable, in a time that does not depend on how much of the text is right."""
        known = self._known(text)
        if known is None or not known.record.usable(self._clock()):
            return None
        return known

    def find_ended(self, text: str) -> FoundToken | None:
        """Return a token if it is right, but has expired or is revoked."""
        known = self._known(text)
        if known is None or known.record.usable(self._clock()):
            return None
        return known

    def _known(self, text: str) -> FoundToken | None:
        """Return the token with this id and this secret; it may have expired or be revoked."""
        token_id, secret = id_and_secret(text)
        record = None
        for source in self._sources:  # if several stores have the id, the last one counts
            if token_id in source.tokens:
                record = None if self._is_outdated(source) else source.tokens[token_id]
        is_right = has_secret(record, secret)  # also without a record, so that an unknown token takes as long
        return FoundToken(token_id, record) if record is not None and is_right else None


@dataclass(slots=True)
class _Source:
    """Store of tokens, and the tokens that were read from it last, by id.

    `read_at` is when that reading began, on the monotonic clock in seconds: a later change of the store may be missing.
    """

    store: TokenStore
    tokens: Mapping[str, Token] = field(default_factory=dict)
    read_at: float = -math.inf

    async def read(self) -> None:
        began = time.monotonic()
        self.tokens = await self.store.all()
        self.read_at = began
