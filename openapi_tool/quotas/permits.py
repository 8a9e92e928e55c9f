"""Permits to send an upstream request, and their interfaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pydantic import SecretStr

from openapi_tool.protocol.errors import ToolError
from openapi_tool.protocol.projects import AgentKey
from openapi_tool.tools.deadlines import Deadline


class Slot(Protocol):
    """Slot of one running call."""

    def pause(self) -> None:
        """Give up the slot while the call waits, unless too many calls are paused already."""

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
class PermitRequest:
    """A request to `endpoint`, as metrics, log lines and the records of quotas call an operation.

    `agent`: whose turn it is to send. `slot` is given up while the request waits. `key` is the value of `variable`; a
    pool may send another one. `call` is the number of the call in this process. `refused_by` are the variables of the
    keys with which the upstream has refused the request.
    """

    variable: str
    endpoint: str
    agent: AgentKey
    deadline: Deadline
    key: SecretStr
    slot: Slot = NO_SLOT
    call: int = 0
    refused_by: frozenset[str] = frozenset()


class Permit:
    """Right to send one request with `key`, perhaps another than that of the request for it. This one is unlimited.

    `variable` is that of the key. `is_sent`: the request got its connection. Then it is written, whatever happens, and
    the upstream may charge for it.
    """

    __slots__ = ("__weakref__", "is_sent", "key", "variable")

    def __init__(self, variable: str, key: SecretStr) -> None:
        self.variable = variable
        self.key = key
        self.is_sent = False

    def connected(self) -> None:
        """Record that the request is sent only now, after a wait for its connection."""
        self.is_sent = True

    def done(self, tokens: int) -> None:
        """End the request; `tokens` is its cost."""

    def failed(self, error: ToolError) -> int:
        """End the request with an error: a 429 pauses the key for all replicas, a refused key may be blocked.

        Return how often the request may be sent again at once, with other keys of the pool; 0 without such a key.
        """
        del error
        return 0

    def cancelled(self) -> None:
        """End a request whose outcome is unknown."""

    def unsent(self) -> None:
        """Give the permit back: the request is not sent."""


class Permits(Protocol):
    """Source of permits."""

    async def acquire(self, wanted: PermitRequest) -> Permit:
        """Wait for a permit. Raises RateLimited once none can come in time, and the error of a blocked key."""


class Unlimited:
    """Permits without any limit."""

    async def acquire(self, wanted: PermitRequest) -> Permit:
        """Return a permit at once."""
        return Permit(wanted.variable, wanted.key)
