"""Permits to send an upstream request: what a call asks for, and what it gets.

The engine asks `Permits` before each request. `Limiter` is the source of permits with limits; `Unlimited` has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pydantic import SecretStr

from openapi_tool.protocol.errors import ToolError
from openapi_tool.protocol.projects import AgentKey
from openapi_tool.tools.deadlines import Deadline


class Slot(Protocol):
    """Slot of one running call: a process runs a limited number of calls at the same time."""

    def pause(self) -> None:
        """Give the slot to another call while this one waits, unless too many calls are paused already."""

    def resume(self) -> None:
        """Take a slot again."""

    def sending(self) -> None:
        """Record that the call sends a request: a process that is to stop waits for it."""


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
    """What a call asks a permit for.

    `endpoint` is the name of the operation, as in metrics, log lines and the records of quotas. `variable` contains the
    `key`; if it is in a pool, the permit may be for another key. Projects, and the agents of each, take turns: `agent`
    says whose turn the request takes. `slot` is given up while the request waits. `call` is the number of the call in
    this process. `refused_by` are the variables of the keys with which the upstream has refused the request so far.
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
    """Right to send one request with `key`, the value of `variable`: perhaps not the key that was asked for.

    `is_sent` says whether the request has got its connection. From then on it is written, whatever happens, and the
    upstream may charge for it.

    This class is the permit of a key without limits; it records nothing.
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
        """End the request, which has succeeded; `tokens` is its cost."""

    def failed(self, error: ToolError) -> int:
        """End the request with an error. A 429 pauses the key for all replicas; a key that was refused may be blocked.

        Return how often the request may be sent again at once, with other keys of the pool; 0 if there is none.
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
        """Wait for a permit. Raises RateLimited as soon as none can come in time, and the error of a blocked key."""


class Unlimited:
    """Permits without any limit."""

    async def acquire(self, wanted: PermitRequest) -> Permit:
        """Return a permit at once."""
        return Permit(wanted.variable, wanted.key)
