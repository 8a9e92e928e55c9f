"""Races around NATS: cancellation, silence, buckets that go, leases, how far a durable got, doorbells."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, Self, TypeVar, cast

import nats.errors
import orjson
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import (
    BadRequestError,
    BucketNotFoundError,
    NoStreamResponseError,
    NotFoundError,
    ServiceUnavailableError,
)
from tenacity import stop_after_attempt, wait_fixed

from openapi_tool.bus import wakeup_publisher
from openapi_tool.bus.ack_floor import AckFloor, load_ack_floor, save_ack_floor
from openapi_tool.bus.client import BusClient
from openapi_tool.bus.dead_letters import DeadLetters
from openapi_tool.bus.durable_monitor import DurableMonitor
from openapi_tool.bus.leases import Lease, Leases, LeaseTaken
from openapi_tool.bus.parked_results import ParkedResultStore
from openapi_tool.bus.server_clock import ServerClock
from openapi_tool.bus.storage import Storage
from openapi_tool.bus.streams import Durable, DurableOptions
from openapi_tool.bus.wakeup_publisher import WakeupPublisher
from openapi_tool.protocol.command import Acknowledge, Delivery, Requeue
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.report import Wakeup
from openapi_tool.telemetry.health import CONSUMER, JETSTREAM, NATS, Health
from tests.races.fakes import FakeBus, FakeKernel, FakeTools, Run, Schedule, pipeline, turns
from tests.requirements import requirement
from tests.support import BODY, HEADERS, delivery


@requirement("run.stop")
def test_a_cancellation_that_arrives_with_the_end_of_a_flush_is_not_swallowed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pull that was renewed at that moment went on, and the drain waited for it without end."""

    async def check() -> None:
        flushed = asyncio.get_running_loop().create_future()

        async def flush(*_: Any, **__: Any) -> Any:
            return await asyncio.wait_for(flushed, 10)

        monkeypatch.setattr(Client, "flush", flush)
        await _cancelled_with(BusClient().flush(), lambda: flushed.set_result(None))

    run(check())


@requirement("run.stop")
def test_a_cancellation_that_arrives_with_the_answer_of_a_request_is_not_swallowed(run: Run) -> None:
    async def check() -> None:
        client = Unconnected()
        await _cancelled_with(client.request("subject", timeout=10), client.answer)
        assert not client.waits

    run(check())


@requirement("run.stop")
def test_a_request_without_an_answer_ends_in_time_and_leaves_nothing(run: Run) -> None:
    async def check() -> None:
        client = Unconnected()
        with pytest.raises(nats.errors.TimeoutError):
            await client.request("subject", timeout=0.01)
        assert not client.waits
        client.answer()  # late: nobody waits, nothing breaks

    run(check())


class Unconnected(BusClient):
    """A client whose requests go nowhere and are answered here."""

    def __init__(self) -> None:
        super().__init__()
        self._inbox_prefix, self._resp_sub_prefix, self._resp_map = bytearray(b"_INBOX"), bytearray(b"_INBOX.x."), {}
        self._replies: list[str] = []

    async def publish(self, *_: Any, reply: str = "", **__: Any) -> None:
        self._replies.append(reply.removeprefix("_INBOX.x."))

    def answer(self) -> None:
        future = self._resp_map.get(self._replies[-1])
        if future is not None:
            future.set_result(Msg(self))

    @property
    def waits(self) -> bool:
        return bool(self._resp_map or self._awaiting_reply)


async def _cancelled_with(asking: Coroutine[Any, Any, Any], answer: Callable[[], None]) -> None:
    async def side_task() -> None:
        await asking
        await asyncio.Event().wait()

    task = asyncio.create_task(side_task())
    await turns()
    answer()
    task.cancel()
    await asyncio.wait([task], timeout=1)
    assert task.cancelled()


@requirement("run.stop")
def test_a_flush_that_fails_raises_what_nats_py_raises(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async def broken(*_: Any, **__: Any) -> None:
            raise ConnectionResetError

        monkeypatch.setattr(Client, "flush", broken)
        with pytest.raises(ConnectionResetError):
            await BusClient().flush()

    run(check())


@requirement("answer.doorbell")
def test_a_doorbell_that_is_refused_after_an_outage_is_given_up(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        answers: list[Exception] = [nats.errors.TimeoutError(), nats.errors.MaxPayloadError()]

        async def publish(*_: Any, **__: Any) -> None:
            raise answers.pop(0)

        client = cast("BusClient", SimpleNamespace(publish_to_stream=publish))
        assert not await WakeupPublisher(client).publish(Wakeup("subject", {}, b"{}"))
        assert not answers

    caplog.set_level(logging.INFO, "openapi_tool")
    run(check())
    assert [vars(record)["action"] for record in caplog.records] == ["doorbell.retried", "doorbell.failed"]


T = TypeVar("T")
FILTER = "cg.v1r4.*.*.cmd.tool.jina.>"
OPTIONS = DurableOptions("v1r4", "durable", FILTER, 6.0, 1_000)


@dataclass
class Observed:
    """A server that is asked for a durable: what it says next, an error or changes of its usual answer."""

    says: list[Exception | dict[str, Any]] = field(default_factory=list)
    is_connected: bool = True
    reconnects: int = 0
    durable: Durable | None = field(default_factory=lambda: Durable("stream", "durable"))
    durable_error: str = ""
    silence_s: float = 0.0
    told: list[str] = field(default_factory=list)

    async def request(self, *_: object, **__: object) -> Any:
        said = self.says.pop(0)
        await asyncio.sleep(0)
        if isinstance(said, Exception):
            raise said
        config = {"filter_subject": FILTER, "ack_wait": 6 * 10**9, "max_deliver": -1, "max_ack_pending": 1_000}
        return SimpleNamespace(data=orjson.dumps({"config": config} | said))

    async def start_over(self) -> None:
        self.reconnects += 1

    def renew_pull(self) -> None:
        self.told.append("renew")

    def ensure_durable_again(self, _: str) -> None:
        self.told.append("prepare")

    def use_ack_wait(self, _: float) -> None:
        """Not of these tests."""

    def watch(self, health: Health, clock: ServerClock | None = None) -> DurableMonitor:
        return DurableMonitor(cast("BusClient", self), OPTIONS, self, clock or ServerClock(), health)


@requirement("nats.watched")
def test_a_silent_server_is_unready_at_the_first_question_and_connected_to_again_less_and_less_often(run: Run) -> None:
    async def check() -> None:
        observed, health, reconnects = Observed(), Health(), list[int]()
        watch = observed.watch(health)
        for question in range(1, 25):
            observed.says = [nats.errors.TimeoutError()]
            await watch.check()
            assert not health.dependencies[NATS].ok
            if observed.reconnects > len(reconnects):
                reconnects.append(question)
        assert reconnects == [3, 6, 12, 24]
        observed.says = [{}]
        await watch.check()
        assert health.dependencies[NATS].ok
        assert observed.told == ["renew"]  # the server may have forgotten the request
        for _ in range(3):
            observed.says = [nats.errors.TimeoutError()]
            await watch.check()
        assert observed.reconnects == 5  # counted from the last answer

    run(check())


@requirement("nats.watched")
def test_an_error_is_an_answer_and_an_answer_is_no_sign_of_life_of_the_pull(run: Run) -> None:
    """Answers to the monitor do not reset the silence of the pull request: the server may have lost the request."""

    async def check() -> None:
        observed, health = Observed(), Health()
        watch = observed.watch(health)
        for _ in range(6):
            observed.says = [{"error": {"code": 503, "description": "no leader"}}]
            await watch.check()
        assert (observed.reconnects, health.dependencies[NATS].ok, health.dependencies[CONSUMER].ok) == (0, True, False)
        observed.says, observed.silence_s = [{}], 16.0
        await watch.check()
        assert "does not answer the pull request" in health.dependencies[CONSUMER].reason

    run(check())


@requirement("nats.watched")
def test_a_new_leader_is_asked_anew_once_and_a_missing_durable_is_prepared(run: Run) -> None:
    async def check() -> None:
        observed = Observed([{"cluster": {"leader": leader}} for leader in ("a", "a", "b", "b")])
        watch = observed.watch(Health())
        for _ in range(4):
            await watch.check()
        assert observed.told == ["renew", "renew"]  # for the first leader that is seen, and for the next one
        observed.says = [{"error": {"code": 404, "description": "consumer not found"}}]
        await watch.check()
        assert observed.told[2:] == ["prepare"]

    run(check())


@requirement("nats.watched")
def test_no_question_is_asked_while_the_connection_is_made_again(run: Run) -> None:
    async def check() -> None:
        observed, health = Observed([nats.errors.TimeoutError()] * 4), Health()
        watch = observed.watch(health)
        for connected in (True, True, False, True, True):
            observed.is_connected = connected
            await watch.check()
            assert not health.dependencies[NATS].ok
        assert (observed.says, observed.reconnects) == ([], 0)  # two and two, not four in a row

    run(check())


@dataclass
class Buckets(FakeBus):
    """KV whose handles are of one bucket: where that is deleted they answer no more, and a new one is to be opened."""

    there: bool = False
    generation: int = 0
    others: list[Callable[[], object]] = field(default_factory=list)

    def make(self) -> None:
        self.there, self.generation, self.stored = True, self.generation + 1, {}

    def delete_bucket(self) -> None:
        self.there = False

    async def key_value(self, _: str) -> Any:
        await self.schedule.step("open")
        if not self.there:
            raise BucketNotFoundError
        return Handle(self, self.generation)

    async def create_key_value(self, _: object) -> Any:
        await self.schedule.step("make")
        if self.there:
            raise BadRequestError
        self.make()
        return Handle(self, self.generation)


@dataclass
class Handle:
    """Return value of `key_value`."""

    buckets: Buckets
    generation: int

    @property
    def gone(self) -> bool:
        return not self.buckets.there or self.generation != self.buckets.generation

    async def get(self, key: str) -> Any:
        if self.gone:
            raise nats.errors.NoRespondersError
        return await self.buckets.get(key)

    async def update(self, key: str, value: bytes, last: int | None = None) -> None:
        if self.gone:
            raise NoStreamResponseError
        await self.buckets.update(key, value, last)


def redelivered(sequence: int = 1) -> Delivery:
    return replace(delivery(), attempt=2, stream_sequence=sequence)


def leases_on(buckets: FakeBus, clock: Callable[[], float] = time.time) -> Leases:
    return Leases(cast("BusClient", buckets), 6.0, clock=clock)


def meanwhile(work: Callable[[], Coroutine[Any, Any, T]], into: list[asyncio.Task[T]]) -> Callable[[], None]:
    """Begin this, and keep its task."""
    return lambda: into.append(asyncio.create_task(work()))


async def awaits_of(attempt: Callable[[Buckets], Any]) -> int:
    buckets = Buckets(Schedule())
    buckets.make()
    await attempt(buckets)
    return len(buckets.schedule.seen)


@requirement("nats.storage")
def test_a_bucket_that_goes_at_any_await_costs_one_delivery_at_most(run: Run) -> None:
    """A handle that was kept failed until a restart."""

    async def check() -> None:
        for moment in range(1, await awaits_of(lambda buckets: leases_on(buckets).take(redelivered())) + 1):
            buckets = Buckets(Schedule())
            buckets.make()
            leases = leases_on(buckets)
            await leases.take(redelivered(2))  # from now on it has a handle
            buckets.schedule.acts[len(buckets.schedule.seen) + moment] = buckets.delete_bucket
            try:
                taken = await leases.take(redelivered())
            except (nats.errors.Error, BucketNotFoundError):  # an outage: the command comes again
                taken = await leases.take(redelivered())
            assert isinstance(taken, Lease), moment
            buckets.delete_bucket()
            with suppress(nats.errors.NoRespondersError):
                await leases.take(redelivered(3))
            assert isinstance(await leases.take(redelivered(3)), Lease), moment

    run(check())


@requirement("dialects.isolated", "lease.owner")
def test_commands_of_two_streams_with_one_sequence_have_two_leases(run: Run) -> None:
    async def check() -> None:
        buckets = Buckets(Schedule())
        commands = [replace(redelivered(), stream=f"cg_cmd_{version}") for version in ("v1r4", "v1r3")]
        taken = [await leases_on(buckets).take(command) for command in (*commands, *commands)]
        assert [type(lease).__name__ for lease in taken] == ["Lease", "Lease", "LeaseTaken", "LeaseTaken"]

    run(check())


@requirement("nats.storage", "lease.owner")
def test_executors_that_make_the_bucket_at_once_agree_on_one_owner(run: Run) -> None:
    async def check() -> None:
        buckets = Buckets(Schedule())
        taken = await asyncio.gather(*(leases_on(buckets).take(redelivered()) for _ in range(6)))
        assert buckets.generation == 1
        assert sorted(type(lease).__name__ for lease in taken) == ["Lease"] + ["LeaseTaken"] * 5

    run(check())


@requirement("lease.owner")
def test_whatever_one_executor_does_between_two_awaits_of_another_a_lease_has_one_owner(run: Run) -> None:
    async def check() -> None:
        moments = await awaits_of(lambda buckets: leases_on(buckets).take(redelivered()))
        for moment in range(1, moments + 1):
            buckets = Buckets(Schedule())
            buckets.make()
            other = leases_on(buckets)
            others: list[asyncio.Task[Lease | LeaseTaken]] = []
            buckets.schedule.acts[moment] = meanwhile(partial(other.take, redelivered()), others)
            mine = await leases_on(buckets).take(redelivered())
            [theirs] = await asyncio.gather(*others)
            assert isinstance(mine, Lease) != isinstance(theirs, Lease), moment

    run(check())


@requirement("lease.owner")
def test_an_executor_whose_own_clock_is_off_takes_no_lease_from_another(run: Run) -> None:
    """Leases count on the clock of NATS; on one that is 28 s ahead each would have ended."""

    async def check() -> None:
        buckets, server = Buckets(Schedule()), ServerClock()
        server.observe(1_000.0, time.monotonic(), time.monotonic())
        buckets.make()
        assert isinstance(await leases_on(buckets, server.time).take(redelivered()), Lease)
        ahead = ServerClock()  # of another process: what it is told counts, whatever its wall clock says
        ahead.observe(1_000.0, time.monotonic(), time.monotonic())
        assert isinstance(await leases_on(buckets, ahead.time).take(redelivered()), LeaseTaken)
        ahead.observe(1_007.0, time.monotonic(), time.monotonic())
        assert isinstance(await leases_on(buckets, ahead.time).take(redelivered()), Lease)

    run(check())


@requirement("lease.owner", "run.heartbeat")
def test_a_late_renewal_leaves_the_lease_to_who_has_it_by_now(run: Run) -> None:
    async def check() -> None:
        buckets, now = Buckets(Schedule()), [0.0]
        buckets.make()
        first, second = leases_on(buckets, lambda: now[0]), leases_on(buckets, lambda: now[0])
        lease = await first.take(redelivered())
        assert isinstance(lease, Lease)
        now[0] = 7.0
        assert isinstance(await second.take(redelivered()), Lease)
        await first.renew(lease)
        now[0] = 12.0
        assert isinstance(await first.take(redelivered()), LeaseTaken)

    run(check())


def floor_at(sequence: int, created: str = "then") -> AckFloor:
    return AckFloor("stream", created, FILTER, sequence)


@requirement("nats.watched")
def test_a_floor_never_goes_back_whichever_replica_writes_when(run: Run) -> None:
    async def check() -> None:
        for moment, (mine, theirs) in product(range(1, 6), ((12, 20), (20, 12))):
            buckets = Buckets(Schedule())
            buckets.make()
            await save_ack_floor(cast("BusClient", buckets), "durable", floor_at(10))
            others: list[asyncio.Task[None]] = []
            begun = len(buckets.schedule.seen)
            client = cast("BusClient", buckets)
            theirs_kept = partial(save_ack_floor, client, "durable", floor_at(theirs))
            buckets.schedule.acts[begun + moment] = meanwhile(theirs_kept, others)
            await save_ack_floor(client, "durable", floor_at(mine))
            await asyncio.gather(*others)
            kept = await load_ack_floor(client, "durable", floor_at(0))
            assert kept in (mine, theirs)
            await save_ack_floor(client, "durable", floor_at(max(mine, theirs)))  # the next look of who was further
            assert await load_ack_floor(client, "durable", floor_at(0)) == 20
            await save_ack_floor(client, "durable", floor_at(5))
            assert await load_ack_floor(client, "durable", floor_at(0)) == 20
            assert await load_ack_floor(client, "durable", floor_at(0, "now")) == 0  # another stream of the same name

    run(check())


@dataclass
class Server(Buckets):
    """JetStream as `Storage` asks for it: streams that are there, missing or do not answer."""

    silent: set[str] = field(default_factory=set)
    made: list[str] = field(default_factory=list)

    def jetstream(self, timeout: float = 5.0) -> Self:
        del timeout
        return self

    async def stream_info(self, stream: str) -> Any:
        await self.schedule.step(stream)
        if stream in self.silent:
            raise nats.errors.TimeoutError
        if stream not in self.made:
            self.made.append(stream)
            raise NotFoundError
        config = SimpleNamespace(num_replicas=1, max_bytes=-1, max_msgs=-1)
        return SimpleNamespace(config=config, state=SimpleNamespace(bytes=0, messages=0))


class Made:
    """Something that can be made, and notes it."""

    async def ensure(self) -> None:
        await asyncio.sleep(0)


@requirement("nats.storage")
def test_one_bucket_that_does_not_answer_keeps_no_other_from_being_made(run: Run) -> None:
    async def check() -> None:
        server, health = Server(Schedule()), Health()
        server.make()
        server.silent = {"KV_openapi_tool_leases"}
        storage = Storage(
            cast("BusClient", server),
            cast("Leases", Made()),
            cast("ParkedResultStore", Made()),
            cast("DeadLetters", Made()),
            None,
            1,
            health,
        )
        await storage.check()
        assert health.dependencies[JETSTREAM].reason == "KV_openapi_tool_leases does not answer: TimeoutError"
        assert sorted(server.made) == ["KV_openapi_tool", "KV_openapi_tool_answers", "openapi_tool_dead_letters"]
        checking = asyncio.create_task(storage.check())
        await turns(1)
        checking.cancel()
        await asyncio.wait([checking], timeout=1)
        assert checking.cancelled()
        server.silent = set()
        await storage.check()
        assert health.dependencies[JETSTREAM].ok

    run(check())


@dataclass
class Bells:
    """The stream of doorbells: what it says to each, None where it takes one; the last of `says` for ever."""

    says: list[Exception | None]
    taken: int = 0
    rung: int = 0

    async def publish_to_stream(self, *_: object) -> None:
        self.rung += 1
        said = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        await asyncio.sleep(0)
        if said is not None:
            raise said
        self.taken += 1


OUTAGES = (
    NoStreamResponseError(),
    ServiceUnavailableError(code=503),
    nats.errors.TimeoutError(),
    ConnectionResetError(),
)
WAKEUP = Wakeup("cg.v1r4.proj.public.cmd.agent.worker.wakeup", HEADERS, b"{}")


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five attempts, however long they take on a busy machine, in place of three seconds."""
    monkeypatch.setattr(wakeup_publisher, "_WAIT", wait_fixed(0.001))
    monkeypatch.setattr(wakeup_publisher, "stop_after_delay", lambda _: stop_after_attempt(5))


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("outage", OUTAGES, ids=lambda outage: type(outage).__name__)
@requirement("answer.doorbell")
def test_a_doorbell_that_nobody_takes_is_rung_until_somebody_does(outage: Exception, run: Run) -> None:
    async def check() -> None:
        bells = Bells([outage, outage, None])
        assert await WakeupPublisher(cast("BusClient", bells)).publish(WAKEUP)
        assert (bells.rung, bells.taken) == (3, 1)
        bells = Bells([outage])
        with pytest.raises(Unavailable):
            await WakeupPublisher(cast("BusClient", bells)).publish(WAKEUP)
        assert bells.rung == 5

    run(check())


@pytest.mark.usefixtures("_impatient")
@requirement("answer.doorbell")
def test_a_result_whose_doorbell_fails_goes_back_until_nobody_waits_and_is_then_left_to_the_scan(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        for age_s, settled, missed in ((0.0, Requeue, 0), (120.0, Acknowledge, 1)):
            caplog.clear()
            schedule = Schedule()
            kernel, bells = FakeKernel(schedule), Bells([NoStreamResponseError()])
            publisher = WakeupPublisher(cast("BusClient", bells))
            published_at = datetime.fromtimestamp(time.time() - age_s, UTC)
            command = replace(delivery(HEADERS, BODY), published_at=published_at)
            settlement = await pipeline(kernel, FakeTools(schedule), publisher).handle(command)
            assert isinstance(settlement, settled)
            assert len(kernel.committed) == 1
            actions = [getattr(record, "action", "") for record in caplog.records if record.levelno >= logging.ERROR]
            assert actions.count("doorbell.missed") == missed

    run(check())
