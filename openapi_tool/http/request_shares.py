"""How many requests, and bytes of their bodies, one token and one project may have at the same time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus

from openapi_tool.http.problems import Problem
from openapi_tool.options.gateway import GatewayOptions

MAX_TOKENS_BODIES = 16 * 2**20
"""Bytes that the bodies of one token's unanswered requests may have together."""

MAX_BODIES = 64 * 2**20
"""Bytes that the bodies of all unanswered requests may have together; parsed they take several times as much memory."""

MAX_SHARE = 7 / 8
"""Share of all connections, and of `MAX_BODIES`, that one project may have with all its tokens."""


class RequestShares:
    """Requests that are not answered yet, and the bytes of their bodies, by token and by project."""

    def __init__(self, options: GatewayOptions) -> None:
        self._per_token = options.max_requests_per_token
        self._per_project = int(options.max_connections * MAX_SHARE)
        self._of_token = Counter[str]()
        self._of_project = Counter[str]()
        self._bytes_of_token = Counter[str]()
        self._bytes_of_project = Counter[str]()

    @contextmanager
    def counted(self, token: str, project: str) -> Iterator[Callable[[int], None]]:
        """Count a request while the context is open.

        Yields a function that counts bytes of its body, which are held as long. Both raise Problem if a share is used.
        """
        held = 0
        if self._of_token[token] >= self._per_token:
            raise _too_many(f"This token has {self._per_token} requests that are not answered yet")
        if self._of_project[project] >= self._per_project:
            raise _too_many(f"This project has {self._per_project} requests that are not answered yet")

        def hold(size: int) -> None:
            nonlocal held
            if (
                self._bytes_of_token[token] + size > MAX_TOKENS_BODIES
                or self._bytes_of_project[project] + size > MAX_BODIES * MAX_SHARE
                or self._bytes_of_project.total() + size > MAX_BODIES
            ):
                raise _too_many("The bodies of running requests are too large together")
            self._bytes_of_token[token] += size
            self._bytes_of_project[project] += size
            held += size

        self._of_token[token] += 1
        self._of_project[project] += 1
        try:
            yield hold
        finally:
            self._of_token[token] -= 1
            self._of_project[project] -= 1
            self._bytes_of_token[token] -= held
            self._bytes_of_project[project] -= held
            if not self._of_token[token]:
                del self._of_token[token], self._bytes_of_token[token]
            if not self._of_project[project]:
                del self._of_project[project], self._bytes_of_project[project]


def _too_many(what: str) -> Problem:
    return Problem(
        HTTPStatus.TOO_MANY_REQUESTS,
        "rate_limited",
        f"{what}; call again in a few seconds, with less at a time.",
        headers={"Retry-After": "2"},
        close=True,
    )
