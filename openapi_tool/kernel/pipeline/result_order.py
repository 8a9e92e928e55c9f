"""When a result may be committed: after its worker has suspended the turn, and one result of a turn at a time (ADR 8).

A *worker* is the kernel's process that runs an agent. It defers a result by a second if it finds the result before it
has suspended the turn, or finds two results of the turn at once. To save that second, results wait here for a few
milliseconds. A call holds no slot (place for a running call) while its result waits.

- *Turn*: one run of an agent. It calls tools, and is suspended until their results are there.
- *Step*: the calls that one answer of the model asks for; a turn has one or more steps. The worker sends all commands
  of a step, then it suspends the turn.
- A turn is *busy* if it has an unread result, or another command of the step, whose result may come at any moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass

from cachetools import LRUCache

from openapi_tool.concurrency.keyed_lock import KeyedLock
from openapi_tool.kernel.pipeline.ports import CallSlot, Clock
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.errors import TurnBusy
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.records import WaitingTurnRecord
from openapi_tool.protocol.report import TurnCondition

MAX_STALL_S = 1.0
"""Longest wait for a worker that reads no result of the turn. A longer wait has no use: the worker looks at a deferred
result again after a second."""

_RETRY_S = 0.01  # between two looks at the turn; a worker takes some 30 ms for a result
_MAX_TURNS = 4_096  # turns that are remembered with the time at which their last result was written

_Turn = tuple[str, str, str]  # project, agent, turn

Write = Callable[[TurnCondition | None], Awaitable[bool]]
"""Writes rows; returns False if that was refused. Raises TurnBusy if the condition does not hold, and Unavailable."""

IsTurnBusy = Callable[[float], Awaitable[bool]]
"""Returns whether writing would raise TurnBusy now. Other commands of the step count only while they are younger than
the parameter, in seconds."""


@dataclass(slots=True)
class CommitWait:
    """Wait of one result for its commit.

    The result is ready since `ready_at`, and the wait ends at `ends_at` at the latest, both in seconds on the event
    loop's clock. `waited_s` is how long the result has waited so far; attempts to write do not count.
    """

    delivery: Delivery
    identity: CallIdentity
    waiting_turn: WaitingTurnRecord
    slot: CallSlot
    ready_at: float
    ends_at: float
    waited_s: float = 0.0

    @property
    def turn(self) -> _Turn:
        """Return the key of the turn."""
        return self.identity.project_id, self.identity.agent_id, self.identity.agent_turn_id

    @contextmanager
    def without_slot(self) -> Iterator[None]:
        """Give up the call's slot, and count the time inside the block as waited."""
        self.slot.release()
        now = asyncio.get_running_loop().time
        began = now()
        try:
            yield
        finally:
            self.waited_s += now() - began


class ResultOrder:
    """Commits results `min_result_delay_s` after their step's newest command, and one of a turn at a time.

    A result waits at most `max_wait_s`, and no longer than MAX_STALL_S after this process wrote the last result of its
    turn. `clock` returns the time of the server that timestamps commands.
    """

    def __init__(self, min_result_delay_s: float, max_wait_s: float, clock: Clock) -> None:
        self._min_result_delay_s = min_result_delay_s
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._lines = KeyedLock()  # for each turn, a line of the results of this process that wait for their commit
        # When a result of the turn that had waited in line was written last, on the event loop's clock.
        self._written_at: LRUCache[_Turn, float] = LRUCache(_MAX_TURNS)

    def begin(
        self, delivery: Delivery, identity: CallIdentity, waiting_turn: WaitingTurnRecord, slot: CallSlot
    ) -> CommitWait:
        """Return the wait of a result that is ready now."""
        now = asyncio.get_running_loop().time()
        return CommitWait(delivery, identity, waiting_turn, slot, now, now + self._max_wait_s)

    def restart(self, wait: CommitWait) -> None:
        """Let the result wait anew: while no commit is possible, the time that it waited means nothing.

        For example, eight results of a step wait out an outage of 3 s. Without new waits all of them would have waited
        as long as they may, and would be committed together once the database answers again.
        """
        wait.ready_at = asyncio.get_running_loop().time()
        wait.ends_at = wait.ready_at + self._max_wait_s

    async def wait_for_suspension(self, wait: CommitWait) -> None:
        """Wait until the worker should have suspended the turn, judging by this command's age alone.

        The step's other commands are considered later, by `write`.
        """
        if not wait.waiting_turn.suspends:  # no worker waits for the result
            return
        age_s = self._clock() - wait.delivery.published_at.timestamp()
        delay_s = self._min_result_delay_s - age_s
        if delay_s > 0:
            with wait.without_slot():
                await asyncio.sleep(min(delay_s, self._remaining_s(wait)))

    async def write(self, wait: CommitWait, write_rows: Write, is_turn_busy: IsTurnBusy) -> bool:
        """Write the rows once the worker has read the other results of the turn; return False if that was refused.

        The only call of its step writes at once. Otherwise the results of this process wait in line, and the first in
        the line writes once the turn is not busy. A result that has waited as long as it may is written in any case.
        """
        may_wait = wait.waiting_turn.suspends and self._remaining_s(wait) > 0
        if may_wait:
            with suppress(TurnBusy):  # the step has other commands
                return await write_rows(TurnCondition.no_other_command())
            async with AsyncExitStack() as line:
                await self._reach_the_front(wait, line)
                with suppress(TurnBusy):  # still, after the longest wait
                    return await self._write_when_quiet(wait, write_rows, is_turn_busy)
        return await write_rows(None)  # without a condition

    async def _write_when_quiet(self, wait: CommitWait, write_rows: Write, is_turn_busy: IsTurnBusy) -> bool:
        """Write the rows once the turn is not busy with results of other replicas, or of other tools.

        Raises TurnBusy if it still is when the result has waited as long as it may.
        """
        condition = TurnCondition.others_older_than(self._min_result_delay_s)
        pause_s = _RETRY_S
        while (remaining_s := self._remaining_s(wait)) > 0:
            if not await is_turn_busy(self._min_result_delay_s):
                with suppress(TurnBusy):
                    written = await write_rows(condition)
                    self._written_at[wait.turn] = asyncio.get_running_loop().time()
                    return written
                # Since the look at the turn, another replica wrote a result, or it holds the turn's lock. The rows may
                # be large, so they are sent less and less often.
                pause_s *= 2
            with wait.without_slot():
                await asyncio.sleep(min(pause_s, remaining_s))
        raise TurnBusy

    async def _reach_the_front(self, wait: CommitWait, line: AsyncExitStack) -> None:
        """Wait until the result is the first of its turn's line; give up when it has waited as long as it may.

        `line` then holds the place until it is closed. Each result before this one that is written lets it wait for
        longer (`_remaining_s`), hence the loop.
        """
        with wait.without_slot():
            while (remaining_s := self._remaining_s(wait)) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(remaining_s):
                        await line.enter_async_context(self._lines.hold(wait.turn))
                    return

    def _remaining_s(self, wait: CommitWait) -> float:
        """Return the seconds for which a result may still wait; 0 or less if it may not.

        A result is written only when the one before it was read, so each written result shows that the worker reads. If
        none was written for MAX_STALL_S, the worker does not read, and further waiting has no use.
        """
        progress_at = max(wait.ready_at, self._written_at.get(wait.turn, 0.0))
        return min(wait.ends_at, progress_at + MAX_STALL_S) - asyncio.get_running_loop().time()
