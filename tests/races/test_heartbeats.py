"""Heartbeats: retries, concurrency and timeouts, with a clock moved by the test; suspected commands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import nats.errors
import orjson
import pytest

from openapi_tool.bus.client import BusClient
from openapi_tool.bus.held import _MAX_CONCURRENT, Heartbeats, Held
from openapi_tool.bus.leases import Lease, Leases, lease_key
from openapi_tool.bus.wire import delivery_of
from openapi_tool.protocol.command import Acknowledge, Delivery, Settlement
from tests.races.fakes import FakeBus, Run, Scene, Schedule, iterate_loop
from tests.requirements import requirement

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

    def _call(self, sequence: int, leased: bool) -> Held:  # noqa: FBT001 - of these tests
        message = self.bus.message(sequence)
        delivery = delivery_of(message)
        assert delivery is not None
        lease = Lease(lease_key("stream", sequence), 1, 2) if leased else None
        return Held(message, delivery, self.now, self.now, lease=lease)

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


def scene_with(lost: int, concurrency: int = 40) -> tuple[Scene, Handling]:
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
        scene, handling = scene_with(lost=2)
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
        scene, handling = scene_with(lost=1, concurrency=48)  # one project may use 42 of them
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
        scene, handling = scene_with(lost=2, concurrency=3)
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
        scene, handling = scene_with(lost=2, concurrency=4)
        for sequence in range(1, 4):
            task = scene.deliver(sequence, attempt=3)
            await iterate_loop(60)
            assert handling.running == {sequence}
            task.cancel()
            await scene.ended(task)
            handling.running.clear()
            assert scene.bus.lost(sequence) == 2

    run(check())
