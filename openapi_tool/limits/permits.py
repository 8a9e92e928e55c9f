"""Interfaces of the rate limiter, and of the store of its records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import Field, SecretStr

from openapi_tool.protocol.errors import ToolError
from openapi_tool.tools.policy import Deadline


class Slot(Protocol):
    """Slot of one running call."""

    def pause(self) -> None:
        """Give up the slot while the call waits, if not too many do."""

    def resume(self) -> None:
        """Take a slot again."""

    def sending(self) -> None:
        """Record that the call sends a request: a drain waits for it."""


class NoSlot:
    """Slot of a call that has none."""

    def pause(self) -> None:
        """Do nothing."""

    def resume(self) -> None:
        """Do nothing."""

    def sending(self) -> None:
        """Do nothing."""


NO_SLOT = NoSlot()


@dataclass(slots=True)
class Need:
    """A request to `endpoint`, the name of an operation.

    `flow` is (project, agent). `slot` is given up while the request waits. `key` is the value of `variable`; a pool may
    send another one. `call` is the number of the call in this process. `refused_by` are the variables of the keys with
    which the upstream has refused the request.
    """

    variable: str
    endpoint: str
    flow: tuple[str, str]
    deadline: Deadline
    key: SecretStr
    slot: Slot = NO_SLOT
    call: int = 0
    refused_by: frozenset[str] = frozenset()


class Permit:
    """Right to send one request with `key`, which may be another than that of the `Need`. This one is unlimited."""

    __slots__ = ("__weakref__", "key")

    def __init__(self, key: SecretStr) -> None:
        self.key = key

    def connected(self) -> None:
        """Record that the request is sent only now, after a wait for its connection."""

    def done(self, tokens: int) -> None:
        """End the request; `tokens` is its cost."""

    def failed(self, error: ToolError) -> None:
        """End the request with an error: a 429 pauses the key for all replicas, a refused key may be blocked.

        Sets `max_retries` of the error if another key of the pool may serve the request.
        """

    def cancelled(self) -> None:
        """End a request whose outcome is unknown."""


class Permits(Protocol):
    """Source of permits."""

    async def acquire(self, need: Need) -> Permit:
        """Wait for a permit. Raises RateLimited once none can come in time, and the error of a blocked key."""


class Unlimited:
    """Permits without any limit."""

    async def acquire(self, need: Need) -> Permit:
        """Return a permit at once."""
        return Permit(need.key)


MAX_WRITE_ATTEMPTS = 8  # of a compare-and-set
Time = Annotated[float, Field(ge=0, le=1e12)]
"""Server time in a record, in seconds since the epoch."""

Number = Annotated[int, Field(ge=-(2**53), le=2**53)]


class Store(Protocol):
    """Records that all replicas share, by name (`bus/storage.py`); every method raises Unavailable."""

    async def read(self, name: str) -> tuple[int, bytes | None]:
        """Return revision and value of a record; 0 and None if there is none."""

    async def write(self, name: str, value: bytes, revision: int) -> int | None:
        """Replace a record that still has this revision, and notify the other replicas.

        Return the new revision, None if another replica was faster.
        """
