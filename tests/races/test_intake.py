"""Races of intake and heartbeats."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import nats.errors
import orjson
import pytest

from openapi_tool.engine.call import Call
from openapi_tool.engine.runner import ToolRunner
from openapi_tool.kernel.jetstream.deliveries import delivery_of
from openapi_tool.kernel.jetstream.fetch_mode import FetchMode
from openapi_tool.kernel.jetstream.hand_back_delays import HandBackDelays
from openapi_tool.kernel.jetstream.heartbeats import _MAX_CONCURRENT, Heartbeats
from openapi_tool.kernel.jetstream.held import HeldCommand
from openapi_tool.kernel.jetstream.leases import Lease, Leases, lease_key
from openapi_tool.nats_client.client import BusClient
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.settlement import Acknowledge, Settlement
from openapi_tool.quotas.permits import Slot
from openapi_tool.telemetry.logs import MAX_LINES, JsonFormatter, ProjectLimit
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.tools.output import Usage
from tests.races.conftest import FakeBus, Run, Scene, Schedule, iterate_loop
from tests.requirements import requirement


class BlockingHandler:
    """Handler that blocks each call until `go` is set, and records the deliveries in `ran`, in their order."""

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


def scene_with(
    concurrency: int = 2, max_held: int = 512, ack_wait_s: float = 60.0, max_paused: int = 0
) -> tuple[Scene, BlockingHandler]:
    handling = BlockingHandler()
    scene = Scene(
        concurrency=concurrency,
        max_held=max_held,
        ack_wait_s=ack_wait_s,
        max_paused=max_paused,
        handle=handling.handle,
    )
    scene.consumer.start()
    return scene, handling


def naks(scene: Scene) -> list[tuple[int, float]]:
    """Return stream sequence and delay in seconds of each command that was handed back."""
    return [
        (int(subject.split(".")[5]), orjson.loads(data.partition(b" ")[2] or b"{}").get("delay", 0) / 1e9)
        for subject, data in scene.bus.published
        if data.startswith(b"-NAK")
    ]


@requirement("intake")
def test_command_without_free_slot_waits_with_heartbeats_and_runs_without_lease(run: Run) -> None:
    async def check() -> None:
        scene, handling = scene_with(ack_wait_s=0.2)
        for number in range(1, 4):
            scene.offer(scene.bus.message(number))
        await asyncio.sleep(0.15)
        assert handling.numbers == [1, 2]
        assert len(scene.bus.sent(b"+WPI")) >= 3
        handling.go.set()
        await iterate_loop(60)
        assert handling.numbers == [1, 2, 3]
        assert scene.bus.stored == {}  # no lease
        assert scene.bus.sent(b"-NAK") == []
        await scene.consumer.stop(1)

    run(check())


@requirement("intake")
def test_command_of_another_project_runs_before_the_backlog_of_the_first(run: Run) -> None:
    async def check() -> None:
        scene, handling = scene_with(concurrency=1)
        for number in range(1, 100):
            scene.offer(scene.bus.message(number))
        scene.offer(scene.bus.message(100, project="other"))
        handling.go.set()
        await iterate_loop(3_000)
        assert 100 in handling.numbers[:3]
        assert len(handling.numbers) == 100
        await scene.consumer.stop(1)

    run(check())


@requirement("hostile.neighbour")
def test_calls_of_one_project_that_never_end_leave_slots_for_others(run: Run) -> None:
    async def check() -> None:
        scene, handling = scene_with(concurrency=16)
        scene.offer(scene.bus.message(103, project="other"))
        await iterate_loop(10)
        for number in range(1, 101):
            scene.offer(scene.bus.message(number))
        await iterate_loop(10)
        assert len(handling.numbers) == 15  # 1 of `other`, and 14: an eighth of the slots stays free for other projects
        scene.offer(scene.bus.message(101, project="other"))
        await iterate_loop(10)
        assert handling.numbers[15:] == [101]
        handling.go.set()
        await iterate_loop(3_000)
        assert len(handling.numbers) == 102
        await scene.consumer.stop(1)

    run(check())


@requirement("hostile.neighbour")
def test_look_ahead_fetches_past_a_project_at_its_limit_although_slots_are_free(run: Run) -> None:
    """Otherwise a project with many short calls delays all others: its few waiting commands fit into the free slots."""

    async def check() -> None:
        scene, handling = scene_with(concurrency=64)
        scene.offer(scene.bus.message(100, project="other"))
        for number in range(1, 57):  # seven eighths of the slots: the limit of one project
            scene.offer(scene.bus.message(number))
        await iterate_loop(10)
        assert len(handling.numbers) == 57
        assert not scene.consumer._wanted_ahead()  # noqa: SLF001 - as LookAhead asks
        scene.offer(scene.bus.message(57))
        assert scene.consumer._wanted_ahead() >= 512  # noqa: SLF001 - as LookAhead asks
        handling.go.set()
        await iterate_loop(300)
        assert not scene.consumer._wanted_ahead()  # noqa: SLF001 - as LookAhead asks
        await scene.consumer.stop(1)

    run(check())


@requirement("hostile.neighbour")
def test_first_call_of_a_second_project_runs_beside_calls_that_have_all_slots(run: Run) -> None:
    async def check() -> None:
        scene, handling = scene_with(concurrency=16)
        for number in range(1, 41):
            scene.offer(scene.bus.message(number))
        await iterate_loop(10)
        assert len(handling.numbers) == 16
        for number in (101, 102, 103):
            scene.offer(scene.bus.message(number, project="other"))
        await iterate_loop(10)
        assert handling.numbers[16:] == [101, 102]  # an eighth of the slots
        handling.go.set()
        await iterate_loop(3_000)
        assert len(handling.numbers) == 43
        await scene.consumer.stop(1)

    run(check())


@requirement("hostile.neighbour")
def test_paused_calls_that_resume_take_no_slots_from_other_projects(run: Run) -> None:
    """A project's calls may pause at any time: they wait for a retry if the upstream is busy, as a page may be."""

    async def check() -> None:
        scene, handling = scene_with(concurrency=16, max_paused=64)
        slots = scene.slots
        scene.offer(scene.bus.message(100, project="other"))
        for number in range(1, 61):
            scene.offer(scene.bus.message(number))
        await iterate_loop(10)
        for number in range(1, 61):  # each frees its slot for the next one
            slots.of(number).pause()
            await iterate_loop(10)
        assert len(handling.numbers) == 61
        for number in range(1, 61):
            slots.of(number).resume()
        scene.offer(scene.bus.message(61))
        for number in range(101, 104):
            scene.offer(scene.bus.message(number, project="other"))
        await iterate_loop(10)
        assert handling.numbers[61:] == [101], "one of its two slots was in use"
        handling.go.set()
        await iterate_loop(3_000)
        assert sorted(handling.numbers) == [*range(1, 62), *range(100, 104)]
        await scene.consumer.stop(1)

    run(check())


@requirement("fair.weights")
def test_a_project_is_charged_the_upstream_requests_of_its_calls(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the project `batches` make four upstream requests each."""
    new_call = ToolRunner.new_call

    def new_spent_call(self: ToolRunner, owner: CallIdentity, slot: Slot) -> Call:
        call = new_call(self, owner, slot)
        call.spent = Usage(requests=4 if owner.project_id == "batches" else 1)
        return call

    monkeypatch.setattr(ToolRunner, "new_call", new_spent_call)

    async def check() -> None:
        scene = Scene(concurrency=1)
        scene.consumer.start()
        for number in range(1, 101):
            scene.offer(scene.bus.message(number, project=("batches", "single")[number % 2]))
        while len(scene.tools.projects) < 50:
            await iterate_loop()
        assert scene.tools.projects[:50].count("batches") == 10  # four requests against one: a fifth of the calls
        await scene.consumer.stop(1)

    run(check())


@requirement("intake")
def test_surplus_of_the_largest_project_is_handed_back_with_growing_delays(run: Run) -> None:
    async def check() -> None:
        scene, handling = scene_with(concurrency=1, max_held=10)
        for number in range(1, 31):
            scene.offer(scene.bus.message(number))
        scene.offer(scene.bus.message(31, project="other"))
        await iterate_loop(100)
        back = naks(scene)
        assert len(back) == 20  # of 31 commands 1 runs and 10 are held
        assert 31 not in dict(back)
        assert [delay for _, delay in back] == sorted(delay for _, delay in back)
        assert back[-1][1] > back[0][1] > 0.09
        handling.go.set()
        await iterate_loop(600)
        assert len(handling.numbers) == 11
        for number, _ in back[:10]:
            scene.offer(scene.bus.message(number, attempt=2))
        await iterate_loop(600)
        assert len(handling.numbers) == 21
        assert {delivery.number for delivery in handling.ran} == {1}
        assert scene.bus.stored == {}  # no lease: none of them was run before
        await scene.consumer.stop(1)

    run(check())


@requirement("intake")
def test_look_ahead_hands_back_commands_of_the_largest_project_without_decoding(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "openapi_tool")

    def logged(action: str) -> list[tuple[int, str]]:
        lines = [vars(record) for record in caplog.records if getattr(record, "action", "") == action]
        assert {line["levelname"] for line in lines} == {"DEBUG"}
        return [(line["stream_sequence"], line["tool_call_id"]) for line in lines]

    async def check() -> None:
        scene, handling = scene_with(concurrency=1, max_held=2)
        for number in range(1, 4):
            scene.offer(scene.bus.message(number))
        for number, project in ((4, "proj"), (5, "other"), (6, "proj")):
            scene.consumer._receive_ahead(scene.bus.message(number, project=project))  # noqa: SLF001 - by LookAhead
        await iterate_loop(100)
        # 4: the queue is full, and proj has the most; 3: evicted for 5; 6: as 4
        assert [number for number, _ in naks(scene)] == [4, 3, 6]
        ids = [(4, "call-4"), (3, "call-3"), (6, "call-6")]
        assert logged("call.handed_back") == ids
        handling.go.set()
        await iterate_loop(200)
        for number in (4, 3, 6):
            scene.consumer._receive_ahead(scene.bus.message(number, attempt=2))  # noqa: SLF001 - by LookAhead
            await iterate_loop(100)
        # 2 and 5 are of different projects, which have equal shares
        assert handling.numbers in ([1, 2, 5, 4, 3, 6], [1, 5, 2, 4, 3, 6])
        assert logged("call.redelivered") == ids
        assert scene.bus.stored == {}  # no lease
        await scene.consumer.stop(1)

    run(check())


@requirement("intake")
def test_command_handed_back_and_delivered_elsewhere_in_between_needs_a_lease(run: Run) -> None:
    async def check() -> None:
        scene, handling = scene_with(concurrency=1, max_held=1)
        for number in range(1, 4):
            scene.offer(scene.bus.message(number))
        await iterate_loop(20)
        (back, _), *_ = naks(scene)
        handling.go.set()
        await iterate_loop(60)
        scene.offer(scene.bus.message(back, attempt=3))
        await iterate_loop(60)
        assert handling.ran[-1].number == 3
        assert "update finished" in scene.schedule.seen  # a lease was taken
        await scene.consumer.stop(1)

    run(check())


@requirement("intake")
def test_command_that_waited_through_a_stall_or_a_disconnect_needs_a_lease(run: Run) -> None:
    async def check(*, connected: bool) -> None:
        scene, handling = scene_with(concurrency=1, ack_wait_s=0.12)
        for number in (1, 2):
            scene.offer(scene.bus.message(number))
        await iterate_loop()
        if connected:
            scene.consumer.stalled(1.0)
        else:
            scene.bus.is_connected = False
            await asyncio.sleep(0.05)
        assert "update started" not in scene.schedule.seen
        handling.go.set()
        await iterate_loop(60)
        assert handling.numbers == [1, 2]
        assert "update started" in scene.schedule.seen
        await scene.consumer.stop(1)

    async def both() -> None:
        await check(connected=True)
        await check(connected=False)

    run(both())


@requirement("outage")
def test_waiting_commands_are_handed_back_while_calls_cannot_be_finished(run: Run) -> None:
    async def check() -> None:
        scene, handling = scene_with(concurrency=1)
        for number in range(1, 6):
            scene.offer(scene.bus.message(number))
        scene.mode = FetchMode.NONE
        scene.consumer.wake()
        await iterate_loop(60)
        assert naks(scene) == [(number, 0.0) for number in range(2, 6)]
        scene.offer(scene.bus.message(6))
        await iterate_loop(30)
        assert naks(scene)[-1][0] == 6
        handling.go.set()
        await iterate_loop(30)
        assert handling.numbers == [1]
        scene.mode = FetchMode.UNLIMITED
        for number in range(2, 7):
            scene.offer(scene.bus.message(number, attempt=2))
        await iterate_loop(300)
        assert handling.numbers == [1, 2, 3, 4, 5, 6]
        await scene.consumer.stop(1)

    run(check())


@requirement("run.stop", "limits.waiting")
def test_drain_hands_back_calls_that_wait_for_their_first_permit(run: Run) -> None:
    async def check() -> None:
        scene, handling = scene_with(concurrency=3)
        slots = scene.consumer._slots  # noqa: SLF001 - this test pauses and sends as the calls' requests would
        for number in (1, 2, 3):
            scene.offer(scene.bus.message(number))
        await iterate_loop(5)
        slots.of(1).pause()
        slots.of(2).sending()
        slots.of(2).pause()
        drain = asyncio.create_task(scene.consumer.stop(60))
        await iterate_loop(50)
        assert len(naks(scene)) == 1
        slots.of(3).pause()
        await iterate_loop(50)
        assert len(naks(scene)) == 2
        assert not drain.done()
        handling.go.set()
        await drain
        assert len(naks(scene)) == 2

    run(check())


@requirement("run.stop")
def test_drain_hands_back_waiting_commands_at_once_and_lets_calls_finish(run: Run) -> None:
    async def check() -> None:
        scene, handling = scene_with(concurrency=2)
        for number in range(1, 301):
            scene.offer(scene.bus.message(number))
        await iterate_loop(5)
        drain = asyncio.create_task(scene.consumer.stop(60))
        await iterate_loop(2_000)
        assert len(naks(scene)) == 298
        assert not drain.done()
        handling.go.set()
        await drain
        assert handling.numbers == [1, 2]

    run(check())


@requirement("intake")
def test_redelivery_of_a_held_command_is_ignored(run: Run) -> None:
    async def check() -> None:
        scene, handling = scene_with(concurrency=1)
        for number in (1, 2, 2, 1):
            scene.offer(scene.bus.message(number))
        handling.go.set()
        await iterate_loop(60)
        assert handling.numbers == [1, 2]
        await scene.consumer.stop(1)

    run(check())


@requirement("intake")
def test_redelivery_delays_follow_the_mean_duration_of_a_projects_calls_within_bounds() -> None:
    now = 0.0
    delays = HandBackDelays(slots=10, clock=lambda: now)
    for _ in range(1_000):
        delays.finished("a", 1.0)  # ten calls a second
        delays.finished("slow", 12.0)
    first, second = delays.next("a", 50), delays.next("a", 50)  # behind 50 waiting commands; 0.1 s later
    assert (round(first, 2), round(second - first, 2)) == (5.1, 0.1)
    assert delays.next("b", 0) == 0.1
    assert delays.next("c", 300) < 5  # the calls of others do not delay it
    assert max(delays.next("a", 50) for _ in range(1_000)) == delays.next("slow", 50) == 10.0
    now = 60.0
    assert round(delays.next("a", 50), 1) == 5.1


@requirement("result.delay")
def test_delayed_result_occupies_no_slot_and_is_committed_in_a_drain(run: Run) -> None:
    async def check() -> None:
        scene = Scene(concurrency=1, min_result_delay_s=0.3)
        scene.consumer.start()
        for number in range(1, 4):
            scene.offer(scene.bus.message(number))
        await iterate_loop(100)
        # At most `concurrency` delayed results have no slot: the second keeps its own, so the third does not run.
        assert scene.tools.projects == ["proj", "proj"]
        assert scene.consumer.running == 2
        assert scene.kernel.committed == []
        await scene.consumer.stop(0)
        assert len(scene.kernel.committed) == 2
        assert scene.bus.sent() == [b"-NAK", b"", b""]  # JetStream treats an empty payload as +ACK

    run(check())


@requirement("run.stop")
@pytest.mark.parametrize("commands", [1, 2], ids=["running", "waiting"])
def test_handing_a_command_back_is_logged_with_its_ids(
    run: Run, caplog: pytest.LogCaptureFixture, commands: int
) -> None:
    """For a running and for a waiting command."""
    caplog.set_level(logging.INFO, "openapi_tool")

    async def check() -> None:
        scene, _ = scene_with(concurrency=1)
        for number in range(1, commands + 1):
            scene.offer(scene.bus.message(number))
        await iterate_loop(5)
        await scene.consumer.stop(0)

    run(check())
    lines = [vars(record) for record in caplog.records if getattr(record, "action", "") == "call.handed_back"]
    names = ("stream_sequence", "project_id", "agent_id", "agent_turn_id", "tool_call_id")
    ids = sorted([line[name] for name in names] for line in lines)
    assert ids == [[number, "proj", "agent", "turn", f"call-{number}"] for number in range(1, commands + 1)]


ACK_WAIT_S = 6.0
LATEST_RETRY_S = 0.8 * ACK_WAIT_S


class Calls:
    """Running calls with heartbeats, and a clock that the test moves."""

    def __init__(self, number: int, received_at: float = 0.0, *, leased: bool = False) -> None:
        self.now = received_at
        self.bus = FakeBus(Schedule())
        leases = Leases(cast("BusClient", self.bus), ACK_WAIT_S)
        self.heartbeats = Heartbeats(leases, ACK_WAIT_S, lambda: self.now)
        self.running = [self._call(sequence, leased) for sequence in range(1, number + 1)]

    def _call(self, sequence: int, leased: bool) -> HeldCommand:  # noqa: FBT001 - of these tests
        message = self.bus.message(sequence)
        delivery = delivery_of(message)
        assert delivery is not None
        lease = Lease(lease_key("stream", sequence), 1, 2) if leased else None
        return HeldCommand(message, delivery, self.now, self.now, lease=lease)

    async def check_at(self, at: float) -> int:
        """Check the calls at this time; return how many heartbeats were sent."""
        before, self.now = len(self.bus.sent(b"+WPI")), at
        await self.heartbeats.send(self.running)
        return len(self.bus.sent(b"+WPI")) - before

    def check_times(self) -> list[float]:
        """Return the times of the checks."""
        return [number * self.heartbeats.check_every_s for number in range(1, 30)]


def failing(times: int, error: Exception) -> Callable[[bytes], Any]:
    errors = [error] * times

    async def refuse(_: bytes) -> None:
        if errors:
            raise errors.pop()

    return refuse


@pytest.mark.parametrize("error", [nats.errors.ConnectionClosedError(), TimeoutError(), ConnectionResetError()])
@requirement("run.heartbeat")
def test_a_failed_heartbeat_is_retried_before_the_ack_wait_ends_in_every_phase(error: Exception, run: Run) -> None:
    async def check() -> None:
        for hundredths in range(50):
            received_at = hundredths / 100
            calls = Calls(1, received_at)
            calls.bus.refusing = failing(2, error)
            sent_at = [at for at in calls.check_times() if at > received_at and await calls.check_at(at)]
            assert sent_at[0] - received_at < LATEST_RETRY_S
            calls.bus.refusing = None

    run(check())


@requirement("run.heartbeat")
def test_a_failed_heartbeat_is_retried_before_the_ack_wait_ends(run: Run) -> None:
    """Also the heartbeat after a successful one, which is due 0.45 of AckWait after that."""

    async def check() -> None:
        calls = Calls(1)
        assert await calls.check_at(2.7) == 1
        calls.bus.refusing = failing(1, nats.errors.ConnectionClosedError())  # the attempt at 2.75
        assert [await calls.check_at(2.7 + later) for later in (2.6, 2.75, 3.25, 3.75)] == [0, 0, 1, 0]

    run(check())


@requirement("run.heartbeat", "lease.owner")
def test_a_heartbeat_whose_lease_was_not_renewed_is_retried(run: Run) -> None:
    async def check() -> None:
        calls = Calls(1, leased=True)
        leases = calls.heartbeats._leases  # noqa: SLF001 - to inject an outage
        renew, errors = leases.renew, [TimeoutError()]

        async def fail_once(lease: Lease) -> None:
            if errors:
                raise errors.pop()
            await renew(lease)

        leases.renew = fail_once  # type: ignore[method-assign]
        assert [await calls.check_at(at) for at in (2.75, 3.25, 3.75)] == [1, 1, 0]

    run(check())


@requirement("run.heartbeat")
def test_heartbeats_of_many_calls_are_sent_concurrently_up_to_the_limit(run: Run) -> None:
    async def check() -> None:
        calls, go = Calls(300), asyncio.Event()
        calls.heartbeats.ack_wait_s = 600.0  # so that no heartbeat times out on a busy machine
        in_flight: list[int] = [0]

        async def hold(_: bytes) -> None:
            in_flight[0] += 1
            await go.wait()

        calls.bus.refusing = hold
        checking = asyncio.create_task(calls.check_at(300.0))
        await iterate_loop()
        assert in_flight[0] == _MAX_CONCURRENT
        go.set()
        assert await checking == 300

    run(check())


@requirement("run.heartbeat")
def test_a_heartbeat_that_hangs_times_out_and_delays_no_other(run: Run) -> None:
    async def check() -> None:
        calls = Calls(3)
        calls.heartbeats.ack_wait_s = 0.1  # a limit of 10 ms
        hangs = [True]

        async def hang_once(_: bytes) -> None:
            if hangs:
                hangs.pop()
                await asyncio.Event().wait()

        calls.bus.refusing = hang_once
        assert await calls.check_at(1.0) == 2
        assert await calls.check_at(1.01) == 1

    run(check())


@contextmanager
def log_lines() -> Iterator[Counter[str]]:
    """Count the lines that a process would write, by action and project."""
    lines = Counter[str]()

    class Counting(logging.Handler):
        def emit(self, line: logging.LogRecord) -> None:
            fields = json.loads(self.format(line))
            lines[f"{fields['action']} {fields.get('project_id')}"] += 1

    handler = Counting()
    handler.addFilter(ProjectLimit(lambda: 0.0))
    handler.setFormatter(JsonFormatter(Redactor([])))
    logging.getLogger("openapi_tool").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("openapi_tool").removeHandler(handler)


@requirement("hostile.neighbour", "logs.limits")
def test_failing_heartbeats_and_overdue_calls_of_a_project_cause_a_limited_number_of_lines(run: Run) -> None:
    async def check() -> None:
        calls = Calls(100)
        calls.bus.refusing = failing(100, nats.errors.ConnectionClosedError())
        scene, _ = scene_with(concurrency=100)
        with log_lines() as lines:
            await calls.check_at(2.75)
            for number in range(1, 101):
                scene.offer(scene.bus.message(number))
            for work in scene.consumer._running.held_by_task.values():  # noqa: SLF001 - to make them overdue
                work.started_at -= 2 * scene.max_run_s
            scene.consumer._running.cancel_overdue(scene.max_run_s)  # noqa: SLF001 - one step of the heartbeats
        assert lines == {"heartbeat.failed proj": MAX_LINES, "call.overdue proj": MAX_LINES}
        await scene.consumer.stop(1)

    run(check())


@requirement("lease.owner")
def test_a_redelivered_call_that_hangs_before_its_run_begins_is_cancelled_once_as_overdue(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        scene = Scene()

        async def hang(delivery: Delivery) -> Lease:
            await asyncio.Event().wait()
            raise AssertionError(delivery)

        scene.consumer.leases.take = hang  # type: ignore[method-assign]
        task = scene.deliver(attempt=2)
        await iterate_loop()
        scene.consumer._running.held_by_task[task].started_at -= 2 * scene.max_run_s  # noqa: SLF001 - to make it overdue
        caplog.clear()
        for _ in range(2):
            scene.consumer._running.cancel_overdue(scene.max_run_s)  # noqa: SLF001 - one step of the heartbeats
        await scene.ended(task)
        actions = [getattr(record, "action", "") for record in caplog.records]
        assert (actions.count("call.overdue"), scene.bus.sent()) == (1, [b"-NAK"])
        assert scene.bus.lost(1) == 1, "the first run; the second had not begun"

    run(check())


@requirement("lease.owner")
def test_a_redelivered_call_that_is_overdue_when_its_run_begins_counts_as_lost(run: Run) -> None:
    async def check() -> None:
        scene, hangs = Scene(), asyncio.Event()
        begin = scene.consumer.leases.begin

        async def begin_late(lease: Lease) -> None:
            await hangs.wait()
            await begin(lease)

        scene.consumer.leases.begin = begin_late  # type: ignore[method-assign]
        task = scene.deliver(attempt=2)
        await iterate_loop()
        scene.consumer._running.held_by_task[task].started_at -= 2 * scene.max_run_s  # noqa: SLF001 - to make it overdue
        scene.consumer._running.cancel_overdue(scene.max_run_s)  # noqa: SLF001 - one step of the heartbeats
        await iterate_loop()
        hangs.set()
        await scene.ended(task)
        assert (scene.bus.sent(), scene.bus.lost(1)) == ([b"-NAK"], 2)

    run(check())


@requirement("hostile.neighbour", "logs.limits")
def test_defects_before_a_call_is_loaded_cause_a_limited_number_of_lines_of_its_project(run: Run) -> None:
    async def check() -> None:
        scene = Scene(concurrency=100)

        async def broken(_: object) -> Any:
            raise RuntimeError("a defect")

        scene.kernel.load = broken  # type: ignore[assignment,method-assign]
        with log_lines() as lines:
            for number in range(1, 101):
                scene.deliver(number)
            await iterate_loop(100)
        assert lines["call.broken proj"] == MAX_LINES
        assert not [line for line in lines if line.endswith(" None")]

    run(check())


# Suspects: commands that lost several executors. Few of them run at once, and they block no other command.


SUSPECTS, FRESH = 40, 12


class Handling:
    """Handler that blocks each call until `go`; records running and exhausted calls."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.running, self.exhausted = set[int](), set[int]()

    async def handle(self, delivery: Delivery) -> Settlement:
        self.running.add(delivery.stream_sequence)
        if delivery.exhausted:
            self.exhausted.add(delivery.stream_sequence)
        await self.go.wait()
        return Acknowledge()


def heartbeat_scene(lost: int, concurrency: int = 40) -> tuple[Scene, Handling]:
    """Return a consumer, and records of commands with `lost` lost runs each."""
    handling = Handling()
    scene = Scene(concurrency=concurrency, handle=handling.handle)
    for sequence in range(1, SUSPECTS + 1):
        record = {"version": 1, "owner": "gone", "lost": lost, "expires_at": 0.0}
        scene.bus.stored[lease_key("stream", sequence)] = (1, orjson.dumps(record))
    return scene, handling


@requirement("hostile.neighbour")
def test_suspects_take_up_to_a_quarter_of_the_slots_and_the_rest_is_redelivered(run: Run) -> None:
    async def check() -> None:
        scene, handling = heartbeat_scene(lost=2)
        for sequence in range(1, SUSPECTS + 1):
            scene.deliver(sequence, attempt=3)
        await iterate_loop(60)
        for sequence in range(SUSPECTS + 1, SUSPECTS + FRESH + 1):
            scene.deliver(sequence)
        await iterate_loop(60)
        suspects = {sequence for sequence in handling.running if sequence <= SUSPECTS}
        refused = set(range(1, SUSPECTS + 1)) - suspects
        assert len(suspects) == 10  # a quarter of 40 slots
        assert len(handling.running) == 10 + FRESH
        assert scene.consumer.running == 10 + FRESH  # no suspect waits in a slot
        assert len(scene.bus.sent(b"-NAK")) == 30
        assert {scene.bus.lost(sequence) for sequence in suspects} == {3}
        assert {scene.bus.lost(sequence) for sequence in refused} == {2}  # runs that did not begin are not counted
        handling.go.set()
        await iterate_loop(60)
        scene.deliver(min(refused), attempt=4)
        await iterate_loop(60)
        assert min(refused) in handling.running
        assert handling.exhausted == set()

    run(check())


@requirement("hostile.neighbour")
def test_commands_that_lost_one_executor_are_not_suspects(run: Run) -> None:
    async def check() -> None:
        scene, handling = heartbeat_scene(lost=1, concurrency=48)  # one project may use 42 of them
        for sequence in range(1, SUSPECTS + 1):
            scene.deliver(sequence, attempt=2)
        await iterate_loop(60)
        assert len(handling.running) == SUSPECTS
        handling.go.set()
        await iterate_loop(60)

    run(check())


@requirement("hostile.neighbour")
def test_with_few_slots_suspects_run_one_at_a_time(run: Run) -> None:
    async def check() -> None:
        scene, handling = heartbeat_scene(lost=2, concurrency=3)
        for sequence in range(1, 4):
            scene.deliver(sequence, attempt=3)
        await iterate_loop(60)
        assert len(handling.running) == 1
        handling.go.set()
        await iterate_loop(60)
        assert scene.consumer.running == 0

    run(check())


@requirement("hostile.neighbour")
def test_the_slot_of_a_suspect_is_freed_however_its_call_ends(run: Run) -> None:
    async def check() -> None:
        scene, handling = heartbeat_scene(lost=2, concurrency=4)
        for sequence in range(1, 4):
            task = scene.deliver(sequence, attempt=3)
            await iterate_loop(60)
            assert handling.running == {sequence}
            task.cancel()
            await scene.ended(task)
            handling.running.clear()
            assert scene.bus.lost(sequence) == 2

    run(check())
