"""Commands that wait for a slot: kept alive, run in fair order, given back when they should not wait here."""

from __future__ import annotations

import asyncio
import logging

import orjson
import pytest

from openapi_tool.bus.held import FetchMode
from openapi_tool.bus.returns import ReturnDelays
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.settlement import Acknowledge, Settlement
from openapi_tool.tools.result import Usage
from tests.races.fakes import FakeMemory, FakeTools, Run, Scene, Schedule, turns
from tests.requirements import requirement


class Handling:
    """Keeps every call until `go`; notes the deliveries that ran, in their order."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.ran: list[Delivery] = []

    async def handle(self, delivery: Delivery) -> Settlement:
        self.ran.append(delivery)
        await self.go.wait()
        return Acknowledge()

    @property
    def numbers(self) -> list[int]:
        return [delivery.stream_sequence for delivery in self.ran]


def scene_with(concurrency: int = 2, max_held: int = 512, ack_wait_s: float = 60.0) -> tuple[Scene, Handling]:
    handling = Handling()
    scene = Scene(concurrency=concurrency, max_held=max_held, ack_wait_s=ack_wait_s, handle=handling.handle)
    scene.consumer.start()
    return scene, handling


def naks(scene: Scene) -> list[tuple[int, float]]:
    """Stream sequence and delay in seconds of each command that went back."""
    return [
        (int(subject.split(".")[5]), orjson.loads(data.partition(b" ")[2] or b"{}").get("delay", 0) / 1e9)
        for subject, data in scene.bus.published
        if data.startswith(b"-NAK")
    ]


@requirement("intake")
def test_what_finds_no_slot_waits_with_heartbeats_and_runs_next_without_a_lease(run: Run) -> None:
    async def check() -> None:
        scene, handling = scene_with(ack_wait_s=0.2)
        for number in range(1, 4):
            scene.offer(scene.bus.message(number))
        await asyncio.sleep(0.15)
        assert handling.numbers == [1, 2]
        assert len(scene.bus.sent(b"+WPI")) >= 3
        handling.go.set()
        await turns(60)
        assert handling.numbers == [1, 2, 3]
        assert scene.bus.stored == {}
        assert scene.bus.sent(b"-NAK") == []
        await scene.consumer.stop(1)

    run(check())


@requirement("intake")
def test_another_projects_command_runs_before_the_backlog_of_the_first(run: Run) -> None:
    async def check() -> None:
        scene, handling = scene_with(concurrency=1)
        for number in range(1, 100):
            scene.offer(scene.bus.message(number))
        scene.offer(scene.bus.message(100, project="other"))
        handling.go.set()
        await turns(3_000)
        assert 100 in handling.numbers[:3]
        assert len(handling.numbers) == 100
        await scene.consumer.stop(1)

    run(check())


class Batches(FakeTools):
    """Tools whose calls of the project `batches` make four upstream requests each."""

    def memory(self, project_id: str) -> FakeMemory:
        memory = super().memory(project_id)
        memory.spent = Usage(requests=4 if project_id == "batches" else 1)
        return memory


@requirement("fair.weights")
def test_a_project_is_charged_the_upstream_requests_of_its_calls(run: Run) -> None:
    async def check() -> None:
        scene = Scene(concurrency=1, tools=Batches(Schedule()))
        scene.consumer.start()
        for number in range(1, 101):
            scene.offer(scene.bus.message(number, project=("batches", "single")[number % 2]))
        while len(scene.tools.projects) < 50:
            await turns()
        assert scene.tools.projects[:50].count("batches") == 10
        await scene.consumer.stop(1)

    run(check())


@requirement("intake")
def test_surplus_of_the_largest_project_goes_back_each_later_than_the_one_before(run: Run) -> None:
    async def check() -> None:
        scene, handling = scene_with(concurrency=1, max_held=10)
        for number in range(1, 31):
            scene.offer(scene.bus.message(number))
        scene.offer(scene.bus.message(31, project="other"))
        await turns(100)
        back = naks(scene)
        assert len(back) == 20
        assert 31 not in dict(back)
        assert [delay for _, delay in back] == sorted(delay for _, delay in back)
        assert back[-1][1] > back[0][1] > 0.09
        handling.go.set()
        await turns(600)
        assert len(handling.numbers) == 11
        for number, _ in back[:10]:
            scene.offer(scene.bus.message(number, attempt=2))
        await turns(600)
        assert len(handling.numbers) == 21
        assert {delivery.attempt for delivery in handling.ran} == {1}
        assert scene.bus.stored == {}  # no lease: nobody had begun it
        await scene.consumer.stop(1)

    run(check())


@requirement("intake")
def test_what_a_look_ahead_finds_of_the_largest_project_goes_back_untouched(run: Run) -> None:
    async def check() -> None:
        scene, handling = scene_with(concurrency=1, max_held=2)
        for number in range(1, 4):
            scene.offer(scene.bus.message(number))
        for number, project in ((4, "proj"), (5, "other"), (6, "proj")):
            scene.consumer._receive_or_refuse(scene.bus.message(number, project=project))  # noqa: SLF001 - as the look
        await turns(100)
        assert [number for number, _ in naks(scene)] == [4, 3, 6]
        handling.go.set()
        await turns(200)
        for number in (4, 3, 6):
            scene.consumer._receive_or_refuse(scene.bus.message(number, attempt=2))  # noqa: SLF001 - the same
            await turns(100)
        assert handling.numbers in ([1, 2, 5, 4, 3, 6], [1, 5, 2, 4, 3, 6])
        assert scene.bus.stored == {}
        await scene.consumer.stop(1)

    run(check())


@requirement("intake")
def test_what_went_back_and_was_delivered_elsewhere_in_between_needs_a_lease(run: Run) -> None:
    async def check() -> None:
        scene, handling = scene_with(concurrency=1, max_held=1)
        for number in range(1, 4):
            scene.offer(scene.bus.message(number))
        await turns(20)
        (back, _), *_ = naks(scene)
        handling.go.set()
        await turns(60)
        scene.offer(scene.bus.message(back, attempt=3))
        await turns(60)
        assert handling.ran[-1].attempt == 3
        assert "update done" in scene.schedule.seen
        await scene.consumer.stop(1)

    run(check())


@requirement("intake")
def test_what_waited_through_a_standstill_or_without_a_connection_begins_with_a_lease(run: Run) -> None:
    async def check(*, connected: bool) -> None:
        scene, handling = scene_with(concurrency=1, ack_wait_s=0.12)
        for number in (1, 2):
            scene.offer(scene.bus.message(number))
        await turns()
        if connected:
            scene.consumer.stalled(1.0)
        else:
            scene.bus.is_connected = False
            await asyncio.sleep(0.05)
        assert "update asked" not in scene.schedule.seen
        handling.go.set()
        await turns(60)
        assert handling.numbers == [1, 2]
        assert "update asked" in scene.schedule.seen
        await scene.consumer.stop(1)

    async def both() -> None:
        await check(connected=True)
        await check(connected=False)

    run(both())


@requirement("outage")
def test_what_waits_goes_back_when_calls_cannot_be_finished(run: Run) -> None:
    async def check() -> None:
        scene, handling = scene_with(concurrency=1)
        for number in range(1, 6):
            scene.offer(scene.bus.message(number))
        scene.mode = FetchMode.NONE
        scene.consumer.wake()
        await turns(60)
        assert naks(scene) == [(number, 0.0) for number in range(2, 6)]
        scene.offer(scene.bus.message(6))
        await turns(30)
        assert naks(scene)[-1][0] == 6
        handling.go.set()
        await turns(30)
        assert handling.numbers == [1]
        scene.mode = FetchMode.FREE
        for number in range(2, 7):
            scene.offer(scene.bus.message(number, attempt=2))
        await turns(300)
        assert handling.numbers == [1, 2, 3, 4, 5, 6]
        await scene.consumer.stop(1)

    run(check())


@requirement("run.stop")
def test_a_drain_gives_back_what_waits_at_once_and_lets_calls_finish(run: Run) -> None:
    async def check() -> None:
        scene, handling = scene_with(concurrency=2)
        for number in range(1, 301):
            scene.offer(scene.bus.message(number))
        await turns(5)
        drain = asyncio.create_task(scene.consumer.stop(60))
        await turns(2_000)
        assert len(naks(scene)) == 298
        assert not drain.done()
        handling.go.set()
        await drain
        assert handling.numbers == [1, 2]

    run(check())


@requirement("intake")
def test_a_command_that_is_held_already_is_not_held_twice(run: Run) -> None:
    async def check() -> None:
        scene, handling = scene_with(concurrency=1)
        for number in (1, 2, 2, 1):
            scene.offer(scene.bus.message(number))
        handling.go.set()
        await turns(60)
        assert handling.numbers == [1, 2]
        await scene.consumer.stop(1)

    run(check())


@requirement("intake")
def test_delays_follow_the_pace_at_which_calls_end_and_have_bounds() -> None:
    now = 0.0
    delays = ReturnDelays(slots=10, clock=lambda: now)
    for _ in range(1_000):
        delays.finished(1.0)  # ten calls a second
    first, second = delays.next("a", 50), delays.next("a", 50)
    assert (round(first, 2), round(second - first, 2)) == (5.1, 0.1)
    assert delays.next("b", 0) == 0.1
    assert max(delays.next("a", 50) for _ in range(1_000)) == 30.0
    now = 60.0
    assert round(delays.next("a", 50), 1) == 5.1


@requirement("answer.hold")
def test_an_answer_that_waits_for_its_worker_keeps_no_slot_and_goes_out_in_a_drain(run: Run) -> None:
    async def check() -> None:
        scene = Scene(concurrency=1, min_answer_s=0.3)
        scene.consumer.start()
        for number in range(1, 4):
            scene.offer(scene.bus.message(number))
        await turns(100)
        assert scene.tools.projects == ["proj", "proj"]  # the second one waits beside the first, and keeps its slot
        assert scene.consumer.running == 2
        assert scene.kernel.committed == []
        await scene.consumer.stop(0)
        assert len(scene.kernel.committed) == 2
        assert scene.bus.sent() == [b"-NAK", b"", b""]

    run(check())


@requirement("run.stop")
@pytest.mark.parametrize("commands", [1, 2], ids=["running", "waiting"])
def test_a_command_that_is_handed_back_leaves_a_line_with_its_ids(
    run: Run, caplog: pytest.LogCaptureFixture, commands: int
) -> None:
    """Also one that only waited."""
    caplog.set_level(logging.INFO, "openapi_tool")

    async def check() -> None:
        scene, _ = scene_with(concurrency=1)
        for number in range(1, commands + 1):
            scene.offer(scene.bus.message(number))
        await turns(5)
        await scene.consumer.stop(0)

    run(check())
    told = [vars(record) for record in caplog.records if getattr(record, "action", "") == "call.handed_back"]
    names = ("stream_sequence", "project_id", "agent_id", "agent_turn_id", "tool_call_id")
    ids = sorted([line[name] for name in names] for line in told)
    assert ids == [[number, "proj", "agent", "turn", f"call-{number}"] for number in range(1, commands + 1)]
