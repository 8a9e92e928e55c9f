"""A call of a gateway while it runs."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from openapi_tool.engine.call import Call
from openapi_tool.gateway.caller import Caller
from openapi_tool.gateway.tools import GatewayTool
from openapi_tool.protocol.cards import new_id
from openapi_tool.protocol.identity import CallIdentity


@dataclass(slots=True)
class _Slot:
    """Knows whether a call waits for a permit or a retry (`quotas.permits.Slot`)."""

    waits: bool = False

    def pause(self) -> None:
        self.waits = True

    def resume(self) -> None:
        self.waits = False

    def sending(self) -> None:
        """Do nothing: there is no drain."""


@dataclass(frozen=True, slots=True)
class CallProgress:
    """How far a running call is: items that are done, all items, and whether it waits for a permit or a retry."""

    done: int
    items: int
    waits: bool


@dataclass(slots=True)
class RunningCall:
    """Call of a gateway from its arguments to its answer; `call` is what the engine runs, None until then.

    `given` are the arguments as the client sent them; `began` is on the monotonic clock, in seconds.
    """

    caller: Caller
    tool: GatewayTool
    given: Mapping[str, Any]
    began: float = field(default_factory=time.monotonic)
    id: str = field(default_factory=lambda: new_id("tc_"))
    trace_id: str = field(default_factory=lambda: secrets.token_hex(16))
    slot: _Slot = field(default_factory=_Slot)
    call: Call | None = None

    @property
    def progress(self) -> CallProgress:
        """How far it is."""
        batch = self.given.get(self.tool.definition.built_in.list_argument or "")
        items = len(batch) if isinstance(batch, list) and batch else 1
        attempts = self.call.attempts if self.call is not None else ()
        done = sum(attempt.http_status == HTTPStatus.OK and attempt.seconds is not None for attempt in attempts)
        return CallProgress(min(done, items), items, self.slot.waits)

    @property
    def identity(self) -> CallIdentity:
        """Identity of the call. As no kernel has named them, turn and step have the call's id."""
        return CallIdentity(
            self.caller.project_id,
            self.caller.agent_id,
            channel_id="gateway",
            agent_turn_id=self.id,
            turn_epoch=1,
            tool_call_id=self.id,
            step_id=self.id,
            trace_id=self.trace_id,
        )

    @property
    def has_received_all(self) -> bool:
        """Return whether something was paid for, and no request is in flight or waits to be sent."""
        if self.call is None or not self.call.attempts or self.slot.waits:
            return False
        return all(attempt.seconds is not None for attempt in self.call.attempts) and self.progress.done > 0
