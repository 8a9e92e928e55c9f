"""How many requests, and bytes of their bodies, one token and one project may have at the same time.

So neither one token nor one project, which may have many tokens, can use up what all share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus

from openapi_tool.http.problems import Problem
from openapi_tool.options.gateway import GatewayOptions

MAX_BYTES_OF_TOKEN = 16 * 2**20
"""Bytes that the bodies of one token's unanswered requests may have together."""

MAX_BYTES = 64 * 2**20
"""Bytes that the bodies of all unanswered requests may have together; parsed they take several times as much memory."""

MAX_SHARE = 7 / 8
"""Share of all connections, and of `MAX_BYTES`, that one project may have with all its tokens."""


class RequestShares:
    """Requests that are not answered yet, and the bytes of their bodies, by token and by project."""

    def __init__(self, options: GatewayOptions) -> None:
        self._max_of_token = options.max_requests_per_token
        self._max_of_project = int(options.max_connections * MAX_SHARE)
        self._requests_of_token = Counter[str]()
        self._requests_of_project = Counter[str]()
        self._bytes_of_token = Counter[str]()
        self._bytes_of_project = Counter[str]()

    @contextmanager
    def counted(self, token: str, project: str) -> Iterator[Callable[[int], None]]:
        """Count a request of a token, which is given by its name, while the context is open.

        Yield a function that counts bytes of its body, also until the context ends. The context and the function raise
        Problem if a share is used up.
        """
        if self._requests_of_token[token] >= self._max_of_token:
            raise _too_many(f"This token has {self._max_of_token} requests that are not answered yet")
        if self._requests_of_project[project] >= self._max_of_project:
            raise _too_many(f"This project has {self._max_of_project} requests that are not answered yet")
        counted_bytes = 0

        def count_bytes(size: int) -> None:
            nonlocal counted_bytes
            self._check_bytes(token, project, size)
            self._bytes_of_token[token] += size
            self._bytes_of_project[project] += size
            counted_bytes += size

        self._requests_of_token[token] += 1
        self._requests_of_project[project] += 1
        try:
            yield count_bytes
        finally:
            self._requests_of_token[token] -= 1
            self._requests_of_project[project] -= 1
            self._bytes_of_token[token] -= counted_bytes
            self._bytes_of_project[project] -= counted_bytes
            self._forget_unused(token, project)

    def _check_bytes(self, token: str, project: str, size: int) -> None:
        """Raise Problem if the token, the project, or all together would have too many bytes with `size` more."""
        if (
            self._bytes_of_token[token] + size > MAX_BYTES_OF_TOKEN
            or self._bytes_of_project[project] + size > MAX_BYTES * MAX_SHARE
            or self._bytes_of_project.total() + size > MAX_BYTES
        ):
            raise _too_many("The bodies of running requests are too large together")

    def _forget_unused(self, token: str, project: str) -> None:
        """Drop the counters of a token and a project that have no request any more."""
        if not self._requests_of_token[token]:
            del self._requests_of_token[token], self._bytes_of_token[token]
        if not self._requests_of_project[project]:
            del self._requests_of_project[project], self._bytes_of_project[project]


def _too_many(what: str) -> Problem:
    return Problem(
        HTTPStatus.TOO_MANY_REQUESTS,
        "rate_limited",
        f"{what}; call again in a few seconds, with less at a time.",
        headers={"Retry-After": "2"},
        close=True,
    )
