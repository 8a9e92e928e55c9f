"""When a result may be committed: after its worker has suspended the turn, and one result of a turn at a time (ADR 8).

A worker that finds a result before it has suspended the turn, or two results of a turn at once, defers one of them by a
second. While a result waits here its call holds no slot.
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
"""Longest wait for a worker that reads no result of the turn. It looks again at one that came too early after a second,
so a longer wait has no use."""

_RETRY_S = 0.01  # a worker takes some 30 ms for a result
_MAX_TURNS = 4_096  # remembered with the time of their last result

_Turn = tuple[str, str, str]  # project, agent, turn

Write = Callable[[TurnCondition | None], Awaitable[bool]]
"""Writes rows; returns False if that was refused. Raises TurnBusy if the condition does not hold, and Unavailable."""

IsTurnBusy = Callable[[float], Awaitable[bool]]
"""Returns whether writing would raise TurnBusy now. Its parameter is the age in seconds from which on other commands
of the step do not count."""


@dataclass(slots=True)
class CommitWait:
    """Wait of a result, ready since `ready_at`, for its commit, and the seconds that it has waited so far.

    It ends at `ends_at` at the latest. Times are in seconds on the event loop's clock.
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

    A result waits at most `max_wait_s`, and no longer than MAX_STALL_S after the last one of its turn was read. `clock`
    returns the time of the server that timestamps commands.
    """

    def __init__(self, min_result_delay_s: float, max_wait_s: float, clock: Clock) -> None:
        self._min_result_delay_s = min_result_delay_s
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._turns = KeyedLock()
        self._progress_at: LRUCache[_Turn, float] = LRUCache(_MAX_TURNS)

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

        `write` considers the step's other commands.
        """
        if wait.waiting_turn.suspends:
            age_s = self._clock() - wait.delivery.published_at.timestamp()
            if (delay_s := self._min_result_delay_s - age_s) > 0:
                with wait.without_slot():
                    await asyncio.sleep(min(delay_s, self._remaining_s(wait)))

    async def write(self, wait: CommitWait, write_rows: Write, is_turn_busy: IsTurnBusy) -> bool:
        """Write the rows once the worker has read the other results of the turn; return False if that was refused.

        The only call of its step writes at once. Otherwise the results of this process wait in line here, and the first
        in the line asks the database whether the turn is busy with results of other replicas, or of other tools. A
        result that has waited as long as it may is written in any case.
        """
        if wait.waiting_turn.suspends and self._remaining_s(wait) > 0:
            with suppress(TurnBusy):
                return await write_rows(TurnCondition.no_other_command())
            async with AsyncExitStack() as line:
                await self._reach_the_front(wait, line)
                in_turn = TurnCondition.others_older_than(self._min_result_delay_s)
                pause_s = _RETRY_S
                while (remaining_s := self._remaining_s(wait)) > 0:
                    if not await is_turn_busy(self._min_result_delay_s):
                        with suppress(TurnBusy):
                            written = await write_rows(in_turn)
                            self._progress_at[wait.turn] = asyncio.get_running_loop().time()
                            return written
                        pause_s *= 2  # another replica was faster, or holds the lock: send a large result less often
                    with wait.without_slot():
                        await asyncio.sleep(min(pause_s, remaining_s))
        return await write_rows(None)

    async def _reach_the_front(self, wait: CommitWait, line: AsyncExitStack) -> None:
        """Wait until the result is the first of its turn's line, as long as it may wait.

        The loop, as that time grows while results before it are read (`_remaining_s`).
        """
        with wait.without_slot():
            while (remaining_s := self._remaining_s(wait)) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(remaining_s):
                        await line.enter_async_context(self._turns.hold(wait.turn))
                    return

    def _remaining_s(self, wait: CommitWait) -> float:
        """Return the seconds for which a result may still wait."""
        progress_at = max(wait.ready_at, self._progress_at.get(wait.turn, 0.0))
        return min(wait.ends_at, progress_at + MAX_STALL_S) - asyncio.get_running_loop().time()
