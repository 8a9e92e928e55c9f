"""One tool call while it runs: made once by its door, and carried to everything that works for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Protocol, Self

from pydantic import SecretStr

from openapi_tool.protocol.attempts import UpstreamAttempt
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.projects import AgentKey, quota_project
from openapi_tool.quotas.budgets import CallAccounts
from openapi_tool.quotas.permits import NO_SLOT, Slot
from openapi_tool.tools.output import NO_USAGE, Usage

_NUMBERS = count()


class CallMemory(Protocol):
    """Memory that is reserved for a call from its first upstream response until its commit."""

    def __enter__(self) -> Self:
        """Enter; may be nested."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release all memory on the last exit."""

    def release_all_but(self, size: int) -> None:
        """Release all but `size` bytes."""


@dataclass(slots=True, eq=False)
class Call:
    """Who calls, and what the call has used so far.

    - `identity`: as the door names them.
    - `memory`: a context, to be exited once the result is stored. A shared request may keep it longer.
    - `slot`: given up while a request waits for a permit.
    - `recheck`: raises ToolError if the call may send no more requests, for example since its tool was disabled.
    - `accounts`: those that its requests are charged to; None without budgets.
    - `spent`: upstream cost so far, including failed requests.
    - `attempts`: upstream requests so far, in the order in which they were sent.
    - `permit_waits`: begins and ends of waits for a permit, on the monotonic clock in seconds.
    - `secrets_sent`: secrets in its requests so far; several keys if each attempt, or item of a batch, took one of a
      pool.
    - `left_out_logged`: whether the log names the definition's parameters that are not sent.
    - `repaired`: arguments that were repaired while the call ran, beside those of `Arguments.repaired`.
    - `quota_namespace`: goes before the project's name in the records of quotas; may be empty.
    - `number`: identifies the call in this process.
    """

    identity: CallIdentity
    memory: CallMemory
    slot: Slot = NO_SLOT
    recheck: Callable[[], None] | None = None
    accounts: CallAccounts | None = None
    spent: Usage = NO_USAGE
    attempts: list[UpstreamAttempt] = field(default_factory=list)
    permit_waits: list[tuple[float, float]] = field(default_factory=list)
    secrets_sent: set[SecretStr] = field(default_factory=set)
    left_out_logged: bool = False
    repaired: set[str] = field(default_factory=set)
    quota_namespace: str = ""
    number: int = field(default_factory=_NUMBERS.__next__)

    @property
    def project(self) -> str:
        """Id of the project."""
        return self.identity.project_id

    @property
    def quota_agent(self) -> AgentKey:
        """Project and agent, named as in the records of quotas: who pays for the requests, and whose turn it is."""
        return AgentKey(quota_project(self.quota_namespace, self.project), self.identity.agent_id)
