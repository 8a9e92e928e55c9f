"""Delay of results that are ready before the worker has suspended the turn (protocol section 12, ADR 8)."""

from __future__ import annotations

import asyncio

from openapi_tool.executor.ports import Clock, Slots
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.records import WaitingTurnRecord

_MAX_DELAY_S = 1.0
"""Longest useful delay in seconds: a worker defers a row that comes too early by a second."""

_MAX_STEPS = 4_096

_Step = tuple[str, str, str, str | None]
"""Project, agent, turn and step."""


class ResultDelay:
    """Delays results until `min_answer_s` seconds after the newest command of their step, at most `_MAX_DELAY_S`.

    A worker suspends a turn after it has sent all calls of the step. If it reads a result row before that, it defers
    the row by a second, and the model's next step may have to wait for it. For a UI action, and in epoch 0, no worker
    suspends a turn; those results are not delayed.
    """

    def __init__(self, min_answer_s: float, clock: Clock, slots: Slots) -> None:
        self._min_answer_s = min_answer_s
        self._clock = clock
        self._slots = slots
        self._newest_at: dict[_Step, float] = {}

    def record_command(self, delivery: Delivery, identity: CallIdentity) -> None:
        """Record the publish time of a command: the delay counts from the newest of the step."""
        if self._min_answer_s:
            step, at = _step(identity), delivery.published_at.timestamp()
            self._newest_at[step] = max(at, self._newest_at.get(step, at))
            if len(self._newest_at) > _MAX_STEPS:
                self._drop_old()

    async def wait(self, delivery: Delivery, identity: CallIdentity, waiting_turn: WaitingTurnRecord) -> None:
        """Release the slot and wait until the worker should have suspended the turn."""
        if not self._min_answer_s or not waiting_turn.suspends:
            return
        step, published_at = _step(identity), delivery.published_at.timestamp()
        remaining_s = self._remaining_s(step, published_at)
        if remaining_s <= 0:
            return
        self._slots.release(delivery.stream_sequence)
        now = asyncio.get_running_loop().time
        give_up_at = now() + _MAX_DELAY_S
        while remaining_s > 0 and now() < give_up_at:
            await asyncio.sleep(min(remaining_s, self._min_answer_s))
            remaining_s = self._remaining_s(step, published_at)

    def _remaining_s(self, step: _Step, published_at: float) -> float:
        due = self._newest_at.get(step, published_at) + self._min_answer_s
        return min(due, published_at + _MAX_DELAY_S) - self._clock.time()

    def _drop_old(self) -> None:
        """Drop steps whose results need no further delay; all steps if too many recent ones remain."""
        cutoff = self._clock.time() - _MAX_DELAY_S
        recent = {step: at for step, at in self._newest_at.items() if at > cutoff}
        self._newest_at = recent if len(recent) < _MAX_STEPS else {}


def _step(identity: CallIdentity) -> _Step:
    return identity.project_id, identity.agent_id, identity.agent_turn_id, identity.step_id
