"""One call of a gateway: who calls, the call while it runs, and its answer.

`calls.Gateway` runs the calls. The packages `mcp` and `http` name the caller, watch the running call, and send the
answer to the client.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from http import HTTPStatus
from typing import Any

from openapi_tool.engine.call import Call
from openapi_tool.gateway.tools import GatewayTool
from openapi_tool.protocol.attempts import UpstreamAttempt
from openapi_tool.protocol.cards import new_id
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.tools.result import ResultFields


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: an agent of a project (a tenant). Budgets, cursors and stored texts belong to that agent.

    `tools` are patterns of the names of tools that the caller may call, such as `jina_*`. The policy of its project may
    permit fewer.
    """

    project_id: str
    agent_id: str
    tools: tuple[str, ...] = ("*",)

    def may_call(self, name: str) -> bool:
        """Return whether a tool of this name may be called."""
        return any(fnmatchcase(name, pattern) for pattern in self.tools)

    def new_identity(self) -> CallIdentity:
        """Return the identity of a new call.

        Turn and step are parts of an agent's run in a kernel (an agent platform). A gateway has none of these, so the
        id of the call stands for them.
        """
        call_id = new_id("tc_")
        return CallIdentity(
            self.project_id,
            self.agent_id,
            channel_id="gateway",
            agent_turn_id=call_id,
            turn_epoch=1,
            tool_call_id=call_id,
            step_id=call_id,
            trace_id=secrets.token_hex(16),
        )


@dataclass(slots=True)
class WaitRecord:
    """Records whether a call waits for a permit of the rate limit, or before a retry.

    Implements `quotas.permits.Slot`, as the engine pauses the slot of a call that waits. The call keeps its real slot
    all the time, so nothing else happens here.
    """

    is_waiting: bool = False

    def pause(self) -> None:
        """Record that the call waits."""
        self.is_waiting = True

    def resume(self) -> None:
        """Record that the call goes on."""
        self.is_waiting = False

    def sending(self) -> None:
        """Do nothing: the end of a process does not depend on which of its calls have sent a request."""


@dataclass(frozen=True, slots=True)
class CallProgress:
    """How far a running call is.

    An item is an element of the list that a batch is called with, such as one of several urls. `is_waiting` says
    whether the call waits for a permit or a retry.
    """

    done: int
    items: int
    is_waiting: bool


@dataclass(slots=True)
class RunningCall:
    """A call while it runs.

    `unchecked_arguments` are those of the model. `call` is what the engine records of the call, such as its requests to
    Jina. `wait` says whether the call waits now. `began` is on the monotonic clock, in seconds.
    """

    caller: Caller
    tool: GatewayTool
    unchecked_arguments: Mapping[str, Any]
    call: Call
    wait: WaitRecord
    began: float = field(default_factory=time.monotonic)

    @property
    def id(self) -> str:
        """Id by which `inspect` finds the call."""
        return self.call.identity.tool_call_id

    @property
    def progress(self) -> CallProgress:
        """How far the call is."""
        items = self._item_count
        done = sum(_is_success(attempt) for attempt in self.call.attempts)
        # Several requests may have succeeded for one item, so `done` may be higher than `items`.
        return CallProgress(min(done, items), items, self.wait.is_waiting)

    @property
    def _item_count(self) -> int:
        """Number of items of a batch, 1 for any other call."""
        list_argument = self.tool.definition.built_in.list_argument
        elements = self.unchecked_arguments.get(list_argument) if list_argument else None
        return len(elements) if isinstance(elements, list) and elements else 1

    @property
    def has_received_all(self) -> bool:
        """Whether the call has paid for something, and no request of it is in flight or waits to be sent."""
        attempts = self.call.attempts
        if not attempts or self.wait.is_waiting:
            return False
        none_in_flight = all(attempt.seconds is not None for attempt in attempts)
        return none_in_flight and any(map(_is_success, attempts))


def _is_success(attempt: UpstreamAttempt) -> bool:
    """Return whether the whole response to a request has arrived, and is no error."""
    return attempt.http_status == HTTPStatus.OK and attempt.seconds is not None


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a call, as a door sends it to the client.

    - `fields`: the result itself, with status, text, error and cost.
    - `call_id`: id by which `inspect` finds the call; None if there is no such tool, so nothing ran.
    - `result_name`: name under which the result is stored if nobody takes it; None if it must not be stored, or cost
      nothing.
    - `may_store`: whether the result may be stored at all: nothing in the call says "do not track".
    """

    fields: ResultFields
    call_id: str | None = None
    result_name: str | None = None
    may_store: bool = False

    @property
    def facts(self) -> Mapping[str, Any]:
        """What is known of the result beside its text, such as `usage` and `next_cursor`.

        They are in `tool_output`. If the definition has `result_format: object`, most are in the result of a success.
        """
        result = self.fields.result
        tool_output = self.fields.tool_output or {}
        if isinstance(result, dict) and not self.fields.error:
            return {**tool_output, **result}
        return tool_output
