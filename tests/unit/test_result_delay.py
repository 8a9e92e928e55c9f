"""Results that are ready before the worker has suspended the turn: delayed without a slot, for a second at most."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from openapi_tool.executor.waiting_turn import ResultDelay
from openapi_tool.limits.permits import NO_SLOT, Slot
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.records import WaitingTurnRecord
from tests.races.virtual import run_virtually
from tests.requirements import requirement
from tests.support import delivery, identity, waiting_turn

START = datetime(2026, 1, 1, tzinfo=UTC)


class LoopClock:
    """The server's clock, on the event loop's."""

    behind_s = 0.0

    def time(self) -> float:
        return START.timestamp() + asyncio.get_running_loop().time() - self.behind_s


@dataclass
class FakeSlots:
    """Records the slots that were released."""

    sequences: list[int] = field(default_factory=list)

    def release(self, sequence: int) -> None:
        self.sequences.append(sequence)

    def charge(self, sequence: int, requests: int) -> None:
        pass

    def of(self, _: int) -> Slot:
        return NO_SLOT


@dataclass
class Scene:
    """A delay of 60 ms; `answered` returns when it ended, in ms since START."""

    min_answer_s: float = 0.06
    clock: LoopClock = field(default_factory=LoopClock)
    slots: FakeSlots = field(default_factory=FakeSlots)

    def __post_init__(self) -> None:
        self.delay = ResultDelay(self.min_answer_s, self.clock, self.slots)

    async def answered(self, command: Delivery, waiting: WaitingTurnRecord | None = None, **ids: Any) -> int:
        caller = identity(**ids)
        self.delay.record_command(command, caller)
        await self.delay.wait(command, caller, waiting or waiting_turn())
        return round(asyncio.get_running_loop().time() * 1000)


def sent(after_ms: float = 0, sequence: int = 1) -> Delivery:
    return replace(delivery(), published_at=START + timedelta(milliseconds=after_ms), stream_sequence=sequence)


@requirement("result.delay")
def test_early_result_waits_without_a_slot_until_the_worker_has_suspended() -> None:
    async def check() -> None:
        scene = Scene()
        assert await scene.answered(sent(sequence=7)) == 60
        assert scene.slots.sequences == [7]

    run_virtually(check())


@requirement("result.delay")
def test_late_result_neither_waits_nor_releases_its_slot() -> None:
    async def check() -> None:
        scene = Scene()
        await asyncio.sleep(0.08)
        assert await scene.answered(sent()) == 80
        assert scene.slots.sequences == []

    run_virtually(check())


@requirement("result.delay")
@pytest.mark.parametrize(
    "waiting", [waiting_turn(message_type="ui_action"), waiting_turn(turn_epoch=0)], ids=["ui", "epoch 0"]
)
def test_result_is_not_held_for_ui_actions_and_epoch_0(waiting: WaitingTurnRecord) -> None:
    async def check() -> None:
        scene = Scene()
        assert await scene.answered(sent(), waiting) == 0
        assert scene.slots.sequences == []

    run_virtually(check())


def test_zero_disables_the_delay() -> None:
    async def check() -> None:
        assert await Scene(min_answer_s=0).answered(sent()) == 0

    run_virtually(check())


@requirement("result.delay")
def test_results_of_a_step_wait_for_its_newest_command() -> None:
    async def check() -> None:
        scene = Scene()

        async def call(after_ms: float) -> int:
            await asyncio.sleep(after_ms / 1000)
            return await scene.answered(sent(after_ms))

        # The newest command is sent after 9 * 20 ms; the hold is 60 ms.
        assert await asyncio.gather(*(call(20 * number) for number in range(10))) == [240] * 10

    run_virtually(check())


@requirement("result.delay")
def test_commands_of_another_step_or_agent_delay_nothing() -> None:
    async def check() -> None:
        scene = Scene()
        for other in ({"step_id": "next"}, {"agent_id": "other"}, {"project_id": "other"}, {"agent_turn_id": "other"}):
            scene.delay.record_command(sent(50), identity(**other))
        assert await scene.answered(sent()) == 60

    run_virtually(check())


@requirement("result.delay")
@pytest.mark.parametrize("behind_s", [0.0, 28.0])
def test_endless_step_or_wrong_clock_delays_a_result_by_a_second_at_most(behind_s: float) -> None:
    async def check() -> None:
        scene = Scene()
        scene.clock.behind_s = behind_s
        scene.delay.record_command(sent(3_600_000), identity())  # a command with a timestamp one hour ahead
        # With a clock that is behind only the loop's time ends the wait: after 17 sleeps of 60 ms, at 1,020 ms.
        assert await scene.answered(sent()) == 1000 + 20 * bool(behind_s)

    run_virtually(check())


def test_memory_for_steps_is_bounded() -> None:
    async def check() -> None:
        scene = Scene()
        for number in range(10_000):
            scene.delay.record_command(sent(), identity(step_id=f"step-{number}"))
        assert len(scene.delay._newest_at) <= 4_096  # noqa: SLF001 - memory shows nowhere else
        await asyncio.sleep(2)
        for number in range(5_000):
            scene.delay.record_command(sent(2_000), identity(step_id=f"later-{number}"))
        assert len(scene.delay._newest_at) <= 4_096  # noqa: SLF001 - the same

    run_virtually(check())
