"""One tool call while it runs.

Its door makes the `Call` (`ToolRunner.new_call`) and passes it to the engine. The engine passes it to the backend. Both
record in it what the call has used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Any, Protocol, Self

from pydantic import SecretStr

from openapi_tool.protocol.attempts import UpstreamAttempt
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.projects import AgentKey, quota_project
from openapi_tool.quotas.budgets import CallAccounts
from openapi_tool.quotas.permits import NO_SLOT, Slot
from openapi_tool.tools.output import NO_USAGE, Usage

_NUMBERS = count()


class CallMemory(Protocol):
    """Memory that is reserved for a call from its first upstream response until its result is stored.

    A context for each user of the memory; contexts may be nested and may overlap.
    """

    def __enter__(self) -> Self:
        """Begin to use the memory."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End this use; the end of the last use releases all memory."""

    def release_all_but(self, size: int) -> None:
        """Release all but `size` bytes, which the caller still needs."""


@dataclass(slots=True, eq=False)
class Call:
    """Who calls, and what the call has used so far.

    Set when the call is made (`ToolRunner.new_call`):

    - `identity`: project, agent and turn of the caller, as the door names them.
    - `memory`: memory for its responses. The door enters it before the run, and exits it once the result is stored.
    - `slot`: the executor's place for this call, given up while a request waits for a permit.
    - `quota_namespace`: text before the project's name in the records of quotas; may be empty.
    - `number`: number of the call in this process, which no other call has.

    Set by the engine (`recheck`, `known_budget`) and the backend (`accounts`) before the first request:

    - `recheck`: raises ToolError if the call may send no more requests, for example because an operator has disabled
      its tool meanwhile.
    - `accounts`: the accounts that its requests are charged to (`quotas/budgets.py`); None without budgets.
    - `known_budget`: of a call with a cursor, which sends no request and has no accounts: what is known to be left.

    The backend adds, while requests run:

    - `spent`: upstream cost so far, including that of failed requests.
    - `attempts`: upstream requests so far, in the order in which they were sent.
    - `permit_waits`: begin and end of each wait for a permit, in seconds of the monotonic clock.
    - `secrets_sent`: secrets in its requests so far. They include several API keys if the key belongs to a pool, since
      each attempt and each item of a batch may take another one.
    - `repaired`: names of arguments that were repaired while the call ran; `Arguments.repaired` has those of before.
    - `left_out_logged`: whether the log already names the definition's parameters that are not sent.
    """

    identity: CallIdentity
    memory: CallMemory
    slot: Slot = NO_SLOT
    quota_namespace: str = ""
    number: int = field(default_factory=_NUMBERS.__next__)
    recheck: Callable[[], None] | None = None
    accounts: CallAccounts | None = None
    known_budget: Mapping[str, Any] | None = None
    spent: Usage = NO_USAGE
    attempts: list[UpstreamAttempt] = field(default_factory=list)
    permit_waits: list[tuple[float, float]] = field(default_factory=list)
    secrets_sent: set[SecretStr] = field(default_factory=set)
    repaired: set[str] = field(default_factory=set)
    left_out_logged: bool = False

    @property
    def project(self) -> str:
        """Id of the project."""
        return self.identity.project_id

    @property
    def quota_agent(self) -> AgentKey:
        """Project and agent as the records of quotas name them: who pays for the requests, and who queues."""
        return AgentKey(quota_project(self.quota_namespace, self.project), self.identity.agent_id)
