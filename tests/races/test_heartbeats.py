"""Heartbeats: counted once they are sent, tried again in time, many at once. A test moves the clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import nats.errors
import orjson
import pytest

from openapi_tool.bus.client import BusClient
from openapi_tool.bus.delivery import delivery_of
from openapi_tool.bus.heartbeats import Heartbeats
from openapi_tool.bus.held import Held
from openapi_tool.bus.leases import Lease, Leases, lease_key
from openapi_tool.protocol.command import Acknowledge, Delivery, Settlement
from tests.races.fakes import FakeBus, Run, Scene, Schedule, turns
from tests.requirements import requirement

ACK_WAIT_S = 6.0
WELL_BEFORE = 0.8 * ACK_WAIT_S


class Calls:
    """Running calls, a clock that a test moves, and when the server heard of which."""

    def __init__(self, number: int, received_at: float = 0.0, *, leased: bool = False) -> None:
        self.now = received_at
        self.bus = FakeBus(Schedule())
        leases = Leases(cast("BusClient", self.bus), ACK_WAIT_S)
        self.heartbeats = Heartbeats(leases, ACK_WAIT_S, lambda: self.now)
        self.running = [self._call(sequence, leased) for sequence in range(1, number + 1)]

    def _call(self, sequence: int, leased: bool) -> Held:  # noqa: FBT001 - of these tests
        message = self.bus.message(sequence)
        delivery = delivery_of(message)
        assert delivery is not None
        lease = Lease(lease_key("stream", sequence), 1, 2) if leased else None
        return Held(message, delivery, self.now, self.now, lease=lease)

    async def look(self, at: float) -> int:
        """Look at the calls at this time; how many heartbeats were sent."""
        before, self.now = len(self.bus.sent(b"+WPI")), at
        await self.heartbeats.send(self.running)
        return len(self.bus.sent(b"+WPI")) - before

    def looks(self) -> list[float]:
        """The times of the looks."""
        return [number * self.heartbeats.check_every_s for number in range(1, 30)]


def failing(times: int, error: Exception) -> Callable[[bytes], Any]:
    left = [error] * times

    async def refuse(_: bytes) -> None:
        if left:
            raise left.pop()

    return refuse


@pytest.mark.parametrize("error", [nats.errors.ConnectionClosedError(), TimeoutError(), ConnectionResetError()])
@requirement("run.heartbeat")
def test_one_that_fails_is_tried_again_well_before_the_ack_wait_ends_in_every_phase(error: Exception, run: Run) -> None:
    async def check() -> None:
        for hundredths in range(50):
            received_at = hundredths / 100
            calls = Calls(1, received_at)
            calls.bus.refusing = failing(2, error)
            sent_at = [at for at in calls.looks() if at > received_at and await calls.look(at)]
            assert sent_at[0] - received_at < WELL_BEFORE
            calls.bus.refusing = None

    run(check())


@requirement("run.heartbeat")
def test_one_that_fails_is_tried_again_well_before_the_ack_wait_ends(run: Run) -> None:
    """Also the one after a heartbeat that was sent, counted from when it was."""

    async def check() -> None:
        calls = Calls(1)
        assert await calls.look(2.7) == 1
        calls.bus.refusing = failing(1, nats.errors.ConnectionClosedError())
        assert [await calls.look(2.7 + later) for later in (2.6, 2.75, 3.25, 3.75)] == [0, 0, 1, 0]

    run(check())


@requirement("run.heartbeat", "lease.owner")
def test_one_whose_lease_was_not_renewed_is_tried_again(run: Run) -> None:
    async def check() -> None:
        calls = Calls(1, leased=True)
        leases = calls.heartbeats._leases  # noqa: SLF001 - an outage has to be put somewhere
        renew, left = leases.renew, [TimeoutError()]

        async def renew_later(lease: Lease) -> None:
            if left:
                raise left.pop()
            await renew(lease)

        leases.renew = renew_later  # type: ignore[method-assign]
        assert [await calls.look(at) for at in (2.75, 3.25, 3.75)] == [1, 1, 0]

    run(check())


@requirement("run.heartbeat")
def test_those_of_many_calls_go_out_side_by_side_and_never_more_than_the_limit(run: Run) -> None:
    async def check() -> None:
        calls, go = Calls(300), asyncio.Event()
        calls.heartbeats.ack_wait_s = 600.0  # one may take 60 s, however busy the machine is
        in_flight: list[int] = [0]

        async def hold(_: bytes) -> None:
            in_flight[0] += 1
            await go.wait()

        calls.bus.refusing = hold
        looking = asyncio.create_task(calls.look(300.0))
        await turns()
        assert in_flight[0] == 64
        go.set()
        assert await looking == 300

    run(check())


@requirement("run.heartbeat")
def test_one_that_hangs_ends_at_its_limit_and_keeps_no_other_from_being_sent(run: Run) -> None:
    async def check() -> None:
        calls = Calls(3)
        calls.heartbeats.ack_wait_s = 0.1  # a limit of 10 ms
        hangs = [True]

        async def hang_once(_: bytes) -> None:
            if hangs:
                hangs.pop()
                await asyncio.Event().wait()

        calls.bus.refusing = hang_once
        assert await calls.look(1.0) == 2
        assert await calls.look(1.01) == 1

    run(check())


# Commands that lost several executors: how many of them run at once, and that they are in nobody's way.


SUSPECTS, FRESH = 40, 12


class Handling:
    """Keeps every call until `go`; knows which run, and which were given up."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.running, self.exhausted = set[int](), set[int]()

    async def handle(self, delivery: Delivery) -> Settlement:
        self.running.add(delivery.stream_sequence)
        if delivery.exhausted:
            self.exhausted.add(delivery.stream_sequence)
        await self.go.wait()
        return Acknowledge()


def scene_with(lost: int, concurrency: int = 40) -> tuple[Scene, Handling]:
    """A consumer to which commands come again of which so many runs were lost."""
    handling = Handling()
    scene = Scene(concurrency=concurrency, handle=handling.handle)
    for sequence in range(1, SUSPECTS + 1):
        record = {"version": 1, "owner": "gone", "lost": lost, "expires_at": 0.0}
        scene.bus.stored[lease_key("stream", sequence)] = (1, orjson.dumps(record))
    return scene, handling


@requirement("hostile.neighbour")
def test_suspects_take_up_to_a_fourth_of_the_slots_and_the_rest_come_again(run: Run) -> None:
    async def check() -> None:
        scene, handling = scene_with(lost=2)
        for sequence in range(1, SUSPECTS + 1):
            scene.deliver(sequence, attempt=3)
        await turns(60)
        for sequence in range(SUSPECTS + 1, SUSPECTS + FRESH + 1):
            scene.deliver(sequence)
        await turns(60)
        suspects = {sequence for sequence in handling.running if sequence <= SUSPECTS}
        refused = set(range(1, SUSPECTS + 1)) - suspects
        assert len(suspects) == 10
        assert len(handling.running) == 10 + FRESH
        assert scene.consumer.running == 10 + FRESH  # none waits in a slot
        assert len(scene.bus.sent(b"-NAK")) == 30
        assert {scene.bus.lost(sequence) for sequence in suspects} == {3}
        assert {scene.bus.lost(sequence) for sequence in refused} == {2}  # what did not begin is not counted
        handling.go.set()
        await turns(60)
        scene.deliver(min(refused), attempt=4)
        await turns(60)
        assert min(refused) in handling.running
        assert handling.exhausted == set()

    run(check())


@requirement("hostile.neighbour")
def test_commands_that_lost_one_executor_are_under_no_suspicion(run: Run) -> None:
    async def check() -> None:
        scene, handling = scene_with(lost=1, concurrency=48)  # at most 42 of them of one project
        for sequence in range(1, SUSPECTS + 1):
            scene.deliver(sequence, attempt=2)
        await turns(60)
        assert len(handling.running) == SUSPECTS
        handling.go.set()
        await turns(60)

    run(check())


@requirement("hostile.neighbour")
def test_with_few_slots_suspects_run_one_after_the_other(run: Run) -> None:
    async def check() -> None:
        scene, handling = scene_with(lost=2, concurrency=3)
        for sequence in range(1, 4):
            scene.deliver(sequence, attempt=3)
        await turns(60)
        assert len(handling.running) == 1
        handling.go.set()
        await turns(60)
        assert scene.consumer.running == 0

    run(check())


@requirement("hostile.neighbour")
def test_a_place_among_suspects_is_free_again_however_a_call_ends(run: Run) -> None:
    async def check() -> None:
        scene, handling = scene_with(lost=2, concurrency=4)
        for sequence in range(1, 4):
            task = scene.deliver(sequence, attempt=3)
            await turns(60)
            assert handling.running == {sequence}
            task.cancel()
            await scene.ended(task)
            handling.running.clear()
            assert scene.bus.lost(sequence) == 2

    run(check())
