"""Races around NATS: cancellation, silent servers, deleted buckets, leases, ack floors, doorbells."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import nats.errors
import orjson
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import StreamConfig
from nats.js.errors import (
    BadRequestError,
    BucketNotFoundError,
    NoStreamResponseError,
    NotFoundError,
    ServerError,
    ServiceUnavailableError,
)
from tenacity import stop_after_attempt, wait_fixed

from openapi_tool.kernel.jetstream import doorbell_publisher
from openapi_tool.kernel.jetstream.ack_floor import AckFloor, load_ack_floor, save_ack_floor
from openapi_tool.kernel.jetstream.consumer import CommandConsumer
from openapi_tool.kernel.jetstream.dead_letters import DeadLetters
from openapi_tool.kernel.jetstream.doorbell_publisher import DoorbellPublisher
from openapi_tool.kernel.jetstream.durable_monitor import DurableMonitor
from openapi_tool.kernel.jetstream.leases import Lease, Leases, LeaseTaken
from openapi_tool.kernel.jetstream.storage_check import StorageMonitor
from openapi_tool.kernel.jetstream.streams import Durable
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.options import DurableOptions, NatsOptions
from openapi_tool.nats_client.server_clock import ServerClock
from openapi_tool.nats_records.switches import change_switches
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.report import Doorbell
from openapi_tool.protocol.settlement import Acknowledge, HandBack
from openapi_tool.state.nats_kv import NatsKvTexts
from openapi_tool.telemetry.health import CONSUMER, JETSTREAM, NATS, Health
from openapi_tool.tools.switches import Switches
from tests.races.conftest import FakeBus, FakeKernel, FakeTools, Run, Schedule, iterate_loop, pipeline
from tests.requirements import requirement
from tests.support import BODY, HEADERS, delivery
from tests.waiting import WAIT_S


@requirement("run.stop")
def test_a_cancellation_that_arrives_as_a_flush_ends_is_not_swallowed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a pull that is renewed at that moment would continue, and the drain would wait forever."""

    async def check() -> None:
        flushed = asyncio.get_running_loop().create_future()

        async def flush(*_: Any, **__: Any) -> Any:
            return await asyncio.wait_for(flushed, 10)

        monkeypatch.setattr(Client, "flush", flush)
        await _assert_cancelled_with(BusClient().flush(), lambda: flushed.set_result(None))

    run(check())


@requirement("run.stop")
def test_a_cancellation_that_arrives_as_an_attempt_to_connect_ends_is_not_swallowed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the process would not stop while it waits for NATS, and try to connect for ever."""

    async def check() -> None:
        greeted = asyncio.get_running_loop().create_future()
        ended = []

        async def connect(*_: Any, **__: Any) -> None:
            try:
                await asyncio.wait_for(greeted, 10)
                await asyncio.Event().wait()  # stands for further attempts
            finally:
                ended.append(True)

        monkeypatch.setattr(Client, "connect", connect)
        await _assert_cancelled_with(BusClient().connect(), lambda: greeted.set_result(None))
        assert ended

    run(check())


@requirement("run.stop")
def test_a_cancellation_that_arrives_with_the_reply_to_a_request_is_not_swallowed(run: Run) -> None:
    async def check() -> None:
        client = Unconnected()
        await _assert_cancelled_with(client.request("subject", timeout=10), client.answer)
        assert not client.has_pending_requests

    run(check())


@requirement("run.stop")
def test_a_request_without_a_reply_times_out_and_leaves_no_state(run: Run) -> None:
    async def check() -> None:
        client = Unconnected()
        with pytest.raises(nats.errors.TimeoutError):
            await client.request("subject", timeout=0.01)
        assert not client.has_pending_requests
        client.answer()  # a late reply is ignored

    run(check())


class Unconnected(BusClient):
    """Client without a connection, whose requests are answered by `answer`."""

    def __init__(self) -> None:
        super().__init__()
        self._inboxes: list[str] = []

    async def publish(self, *_: Any, reply: str = "", **__: Any) -> None:
        self._inboxes.append(reply)

    def answer(self) -> None:
        request = self._requests.get(self._inboxes[-1])
        if request is not None:
            request.reply.set_result(Msg(self))

    @property
    def has_pending_requests(self) -> bool:
        return bool(self._requests)


async def _assert_cancelled_with(request: Coroutine[Any, Any, Any], answer: Callable[[], None]) -> None:
    async def side_task() -> None:
        await request
        await asyncio.Event().wait()

    task = asyncio.create_task(side_task())
    await iterate_loop()
    answer()
    task.cancel()
    await asyncio.wait([task], timeout=WAIT_S)
    assert task.cancelled()


@requirement("run.stop")
def test_a_failed_flush_raises_the_error_of_nats_py(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
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
        errors: list[Exception] = [nats.errors.TimeoutError(), nats.errors.MaxPayloadError()]

        async def publish(*_: Any, **__: Any) -> None:
            raise errors.pop(0)

        client = cast("BusClient", SimpleNamespace(publish_to_stream=publish, is_connected=False))
        assert not await DoorbellPublisher(client).publish(Doorbell("subject", {}, b"{}"))
        assert not errors

    caplog.set_level(logging.DEBUG, "openapi_tool")
    run(check())
    assert [vars(record)["action"] for record in caplog.records] == ["doorbell.retried", "doorbell.failed"]


T = TypeVar("T")
FILTER = "cg.v1r4.*.*.cmd.tool.jina.>"
OPTIONS = DurableOptions("v1r4", "durable", FILTER, NatsOptions(ack_wait_s=6.0, max_ack_pending=1_000))


@dataclass
class FakeServer:
    """Client and consumer of a monitor. `replies` are errors, or differences from the usual consumer info."""

    replies: list[Exception | dict[str, Any]] = field(default_factory=list)
    is_connected: bool = True
    outage: str = ""
    reconnects: int = 0
    durable: Durable | None = field(default_factory=lambda: Durable("stream", "durable"))
    durable_error: str = ""
    silence_s: float = 0.0
    calls: list[str] = field(default_factory=list)

    async def request(self, *_: object, **__: object) -> Any:
        reply = self.replies.pop(0)
        await asyncio.sleep(0)
        if isinstance(reply, Exception):
            raise reply
        config = {"filter_subject": FILTER, "ack_wait": 6 * 10**9, "max_deliver": -1, "max_ack_pending": 1_000}
        return SimpleNamespace(data=orjson.dumps({"config": config} | reply))

    async def start_over(self) -> None:
        self.reconnects += 1

    def renew_pull(self) -> None:
        self.calls.append("renew")

    def ensure_durable_again(self, _: str) -> None:
        self.calls.append("ensure durable")

    def use_ack_wait(self, _: float) -> None:
        """Do nothing."""

    def monitor(self, health: Health, clock: ServerClock | None = None) -> DurableMonitor:
        consumer = cast("CommandConsumer", self)
        return DurableMonitor(cast("BusClient", self), OPTIONS, consumer, clock or ServerClock(), health)


@requirement("nats.watched")
def test_a_silent_server_is_unready_at_the_first_check_and_reconnects_back_off(run: Run) -> None:
    async def check() -> None:
        server, health, reconnects = FakeServer(), Health(), list[int]()
        monitor = server.monitor(health)
        for check_number in range(1, 25):
            server.replies = [nats.errors.TimeoutError()]
            await monitor.check()
            assert not health.dependencies[NATS].ok
            if server.reconnects > len(reconnects):
                reconnects.append(check_number)
        assert reconnects == [3, 6, 12, 24]
        server.replies = [{}]
        await monitor.check()
        assert health.dependencies[NATS].ok
        assert server.calls == ["renew"]  # the server may have lost the pull request
        for _ in range(3):
            server.replies = [nats.errors.TimeoutError()]
            await monitor.check()
        assert server.reconnects == 5  # failures are counted from the last reply

    run(check())


@requirement("nats.watched")
def test_an_error_reply_shows_a_connection_but_does_not_end_the_silence_of_the_pull(run: Run) -> None:
    """Replies to the monitor do not reset the silence of the pull request: the server may have lost the request."""

    async def check() -> None:
        server, health = FakeServer(), Health()
        monitor = server.monitor(health)
        for _ in range(6):
            server.replies = [{"error": {"code": 503, "description": "no leader"}}]
            await monitor.check()
        assert (server.reconnects, health.dependencies[NATS].ok, health.dependencies[CONSUMER].ok) == (0, True, False)
        server.replies, server.silence_s = [{}], 16.0
        await monitor.check()
        assert "does not answer the pull request" in health.dependencies[CONSUMER].reason

    run(check())


@requirement("nats.watched")
def test_a_new_leader_renews_the_pull_once_and_a_missing_durable_is_created(run: Run) -> None:
    async def check() -> None:
        server = FakeServer([{"cluster": {"leader": leader}} for leader in ("a", "a", "b", "b")])
        monitor = server.monitor(Health())
        for _ in range(4):
            await monitor.check()
        assert server.calls == ["renew", "renew"]  # for the first leader, and for the new one
        server.replies = [{"error": {"code": 404, "description": "consumer not found"}}]
        await monitor.check()
        assert server.calls[2:] == ["ensure durable"]

    run(check())


@requirement("nats.watched")
def test_no_check_is_sent_while_the_client_reconnects(run: Run) -> None:
    async def check() -> None:
        server, health = FakeServer([nats.errors.TimeoutError()] * 4), Health()
        monitor = server.monitor(health)
        for connected in (True, True, False, True, True):
            server.is_connected = connected
            await monitor.check()
            assert not health.dependencies[NATS].ok
        assert (server.replies, server.reconnects) == ([], 0)  # the count starts again after a reconnect

    run(check())


@dataclass
class Buckets(FakeBus):
    """KV store whose handles stop working when their bucket is deleted, even if it is created again."""

    exists: bool = False
    generation: int = 0
    others: list[Callable[[], object]] = field(default_factory=list)

    def make(self) -> None:
        self.exists, self.generation, self.stored = True, self.generation + 1, {}

    def delete_bucket(self) -> None:
        self.exists = False

    async def key_value(self, _: str) -> Any:
        await self.schedule.step("open")
        if not self.exists:
            raise BucketNotFoundError
        return Handle(self, self.generation)

    async def add_stream(self, _: object) -> None:
        await self.schedule.step("make")
        if self.exists:
            raise BadRequestError
        self.make()


@dataclass
class Handle:
    """Return value of `key_value`."""

    buckets: Buckets
    generation: int

    @property
    def gone(self) -> bool:
        return not self.buckets.exists or self.generation != self.buckets.generation

    async def get(self, key: str) -> Any:
        if self.gone:
            raise nats.errors.NoRespondersError
        return await self.buckets.get(key)

    async def update(self, key: str, value: bytes, last: int | None = None) -> int:
        if self.gone:
            raise NoStreamResponseError
        return await self.buckets.update(key, value, last)


def redelivered(sequence: int = 1) -> Delivery:
    return replace(delivery(), number=2, stream_sequence=sequence)


def leases_on(buckets: FakeBus, clock: Callable[[], float] = time.time) -> Leases:
    return Leases(cast("BusClient", buckets), 6.0, clock=clock)


def meanwhile(work: Callable[[], Coroutine[Any, Any, T]], into: list[asyncio.Task[T]]) -> Callable[[], None]:
    """Return a function that starts `work` and appends its task to `into`."""
    return lambda: into.append(asyncio.create_task(work()))


async def awaits_of(attempt: Callable[[Buckets], Any]) -> int:
    buckets = Buckets(Schedule())
    buckets.make()
    await attempt(buckets)
    return len(buckets.schedule.seen)


@requirement("lease.owner")
def test_a_run_that_is_handed_back_late_releases_no_lease_of_another_executor(run: Run) -> None:
    """A first run has no lease; it may have stalled until its command was redelivered elsewhere."""

    async def check() -> None:
        buckets = Buckets(Schedule())
        buckets.make()
        other, stalled = leases_on(buckets), leases_on(buckets)
        assert isinstance(await other.take(redelivered()), Lease)
        await stalled.hand_back(delivery(), forgive=True)
        assert not isinstance(await leases_on(buckets).take(replace(redelivered(), number=3)), Lease)

    run(check())


@requirement("nats.storage")
def test_a_bucket_deleted_at_any_await_costs_at_most_one_delivery(run: Run) -> None:
    """Otherwise a cached handle would fail until a restart."""

    async def check() -> None:
        for moment in range(1, await awaits_of(lambda buckets: leases_on(buckets).take(redelivered())) + 1):
            buckets = Buckets(Schedule())
            buckets.make()
            leases = leases_on(buckets)
            await leases.take(redelivered(2))  # caches a handle
            buckets.schedule.acts[len(buckets.schedule.seen) + moment] = buckets.delete_bucket
            try:
                taken = await leases.take(redelivered())
            except Unavailable:  # an outage: the command is redelivered
                taken = await leases.take(redelivered())
            assert isinstance(taken, Lease), moment
            buckets.delete_bucket()
            with suppress(Unavailable):
                await leases.take(redelivered(3))
            assert isinstance(await leases.take(redelivered(3)), Lease), moment

    run(check())


@requirement("dialects.isolated", "lease.owner")
def test_commands_of_two_streams_with_the_same_sequence_have_separate_leases(run: Run) -> None:
    async def check() -> None:
        buckets = Buckets(Schedule())
        commands = [replace(redelivered(), stream=f"cg_cmd_{version}") for version in ("v1r4", "v1r3")]
        taken = [await leases_on(buckets).take(command) for command in (*commands, *commands)]
        assert [type(lease).__name__ for lease in taken] == ["Lease", "Lease", "LeaseTaken", "LeaseTaken"]

    run(check())


@requirement("nats.storage", "lease.owner")
def test_executors_that_create_the_bucket_concurrently_agree_on_one_owner(run: Run) -> None:
    async def check() -> None:
        buckets = Buckets(Schedule())
        taken = await asyncio.gather(*(leases_on(buckets).take(redelivered()) for _ in range(6)))
        assert buckets.generation == 1
        assert sorted(type(lease).__name__ for lease in taken) == ["Lease"] + ["LeaseTaken"] * 5

    run(check())


@requirement("lease.owner")
def test_a_lease_has_one_owner_for_any_interleaving_of_two_executors(run: Run) -> None:
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
def test_an_executor_with_a_wrong_clock_takes_no_lease_from_another(run: Run) -> None:
    """Leases use the clock of NATS: on a clock that is 28 s ahead each would have expired."""

    async def check() -> None:
        buckets, server = Buckets(Schedule()), ServerClock()
        server.observe(1_000.0, time.monotonic(), time.monotonic())
        buckets.make()
        assert isinstance(await leases_on(buckets, server.time).take(redelivered()), Lease)
        ahead = ServerClock()  # of another process; its wall clock does not matter
        ahead.observe(1_000.0, time.monotonic(), time.monotonic())
        assert isinstance(await leases_on(buckets, ahead.time).take(redelivered()), LeaseTaken)
        ahead.observe(1_007.0, time.monotonic(), time.monotonic())
        assert isinstance(await leases_on(buckets, ahead.time).take(redelivered()), Lease)

    run(check())


@requirement("lease.owner")
@pytest.mark.parametrize(
    "damage", [("expires_at", b"1e999"), ("lost", b"1" + b"0" * 30), ("delivery", b"1" + b"0" * 30)]
)
def test_a_lease_with_a_huge_number_stops_no_command(damage: tuple[str, bytes], run: Run) -> None:
    """JSON allows them: no lease may last forever, and each record must be writable again."""

    async def check() -> None:
        name, number = damage
        buckets = Buckets(Schedule())
        buckets.make()
        other = leases_on(buckets)
        lease = await other.take(redelivered())
        assert isinstance(lease, Lease)
        await other.begin(lease)
        [(key, (revision, value))] = buckets.stored.items()
        damaged = re.sub(rb'"%b":[0-9.]+' % name.encode(), b'"%b":%b' % (name.encode(), number), value)
        assert damaged != value
        buckets.stored[key] = revision, damaged
        taken = await leases_on(buckets).take(redelivered())
        assert isinstance(taken, Lease)
        assert taken.lost == 1  # as without a record

    run(check())


@requirement("lease.owner")
def test_a_command_is_delivered_again_after_one_lease_whatever_its_record_says(run: Run) -> None:
    """A NAK with a delay of 1e308 seconds would not be valid."""

    async def check() -> None:
        buckets, now = Buckets(Schedule()), [0.0]
        buckets.make()
        other, leases = leases_on(buckets, lambda: now[0]), leases_on(buckets, lambda: now[0])
        assert isinstance(await other.take(redelivered()), Lease)
        [(key, (revision, value))] = buckets.stored.items()
        for expires_at in (b"1e308", b"1e11"):
            buckets.stored[key] = revision, re.sub(rb'"expires_at":[0-9.]+', b'"expires_at":' + expires_at, value)
            assert await leases.take(redelivered()) == LeaseTaken(leases.duration_s)

    run(check())


@requirement("lease.owner", "run.heartbeat")
def test_a_late_renewal_does_not_take_the_lease_from_its_new_owner(run: Run) -> None:
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


@requirement("switches")
def test_switches_that_no_stream_stores_are_not_called_a_conflict_alone(run: Run) -> None:
    async def check() -> None:
        buckets = Buckets(Schedule())
        buckets.make()
        buckets.update = refuse  # type: ignore[method-assign, assignment]
        with pytest.raises(Unavailable, match="or no stream stores them"):
            await change_switches(cast("BusClient", buckets), lambda _: Switches())

    async def refuse(*_: object) -> int:
        raise NoStreamResponseError

    run(check())


def floor_at(sequence: int, created: str = "then") -> AckFloor:
    return AckFloor("stream", created, FILTER, sequence)


@requirement("nats.watched")
def test_an_ack_floor_never_goes_back_for_any_interleaving_of_two_replicas(run: Run) -> None:
    async def check() -> None:
        for moment, (mine, theirs) in product(range(1, 6), ((12, 20), (20, 12))):
            buckets = Buckets(Schedule())
            buckets.make()
            await save_ack_floor(cast("BusClient", buckets), "durable", floor_at(10))
            others: list[asyncio.Task[None]] = []
            begun = len(buckets.schedule.seen)
            client = cast("BusClient", buckets)
            save_theirs = partial(save_ack_floor, client, "durable", floor_at(theirs))
            buckets.schedule.acts[begun + moment] = meanwhile(save_theirs, others)
            await save_ack_floor(client, "durable", floor_at(mine))
            await asyncio.gather(*others)
            stored = await load_ack_floor(client, "durable", floor_at(0))
            assert stored in (mine, theirs)
            await save_ack_floor(
                client, "durable", floor_at(max(mine, theirs))
            )  # the next write of the replica that was ahead
            assert await load_ack_floor(client, "durable", floor_at(0)) == 20
            await save_ack_floor(client, "durable", floor_at(5))
            assert await load_ack_floor(client, "durable", floor_at(0)) == 20
            assert await load_ack_floor(client, "durable", floor_at(0, "now")) == 0  # another stream of the same name

    run(check())


@dataclass
class Server(Buckets):
    """JetStream for `Storage`: streams exist, are missing, or do not answer (`silent`)."""

    silent: set[str] = field(default_factory=set)
    made: list[str] = field(default_factory=list)
    stats: Mapping[str, int] = field(default_factory=lambda: {"reconnects": 0})

    async def stream_info(self, stream: str) -> Any:
        await self.schedule.step(stream)
        if stream in self.silent:
            raise nats.errors.TimeoutError
        if stream not in self.made:
            self.made.append(stream)
            raise NotFoundError
        config = StreamConfig(name=stream, num_replicas=1, allow_direct=True, allow_rollup_hdrs=False)
        return SimpleNamespace(config=config, state=SimpleNamespace(bytes=0, messages=0))


class FakeBucket:
    """Bucket or stream that can be created."""

    async def ensure(self) -> None:
        await asyncio.sleep(0)


@requirement("nats.storage")
def test_a_bucket_that_does_not_answer_does_not_prevent_creating_others(run: Run) -> None:
    async def check() -> None:
        server, health = Server(Schedule()), Health()
        server.make()
        server.silent = {"KV_openapi_tool_leases"}
        storage = StorageMonitor(
            cast("BusClient", server),
            cast("Leases", SimpleNamespace(records=FakeBucket())),
            cast("NatsKvTexts", FakeBucket()),
            cast("DeadLetters", FakeBucket()),
            DoorbellPublisher(cast("BusClient", server)),
            None,
            1,
            health,
        )
        await storage.check()
        assert health.dependencies[JETSTREAM].reason == "KV_openapi_tool_leases does not answer: TimeoutError"
        assert {"KV_openapi_tool", "KV_openapi_tool_parked", "openapi_tool_dead_letters"} <= set(server.made)
        checking = asyncio.create_task(storage.check())
        await iterate_loop(1)
        checking.cancel()
        await asyncio.wait([checking], timeout=1)
        assert checking.cancelled()
        server.silent = set()
        await storage.check()
        assert health.dependencies[JETSTREAM].ok

    run(check())


@dataclass
class FakeStream:
    """Stream of doorbells: each of `replies` in turn, then its last one forever; None accepts a doorbell."""

    replies: list[Exception | None]
    accepted: int = 0
    attempts: int = 0
    is_connected: bool = False

    async def publish_to_stream(self, *_: object) -> None:
        self.attempts += 1
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        await asyncio.sleep(0)
        if reply is not None:
            raise reply
        self.accepted += 1


OUTAGES = (
    NoStreamResponseError(),
    ServiceUnavailableError(code=503),
    nats.errors.TimeoutError(),
    ConnectionResetError(),
)
DOORBELL = Doorbell("cg.v1r4.proj.public.cmd.agent.worker.wakeup", HEADERS, b"{}")


@pytest.fixture
def _five_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit retries to five attempts instead of three seconds, because the machine may be busy."""
    monkeypatch.setattr(doorbell_publisher, "_WAIT", wait_fixed(0.001))
    monkeypatch.setattr(doorbell_publisher, "stop_after_delay", lambda _: stop_after_attempt(5))


@pytest.mark.usefixtures("_five_attempts")
@pytest.mark.parametrize("outage", OUTAGES, ids=lambda outage: type(outage).__name__)
@requirement("answer.doorbell")
def test_a_doorbell_is_retried_until_the_stream_accepts_it(outage: Exception, run: Run) -> None:
    async def check() -> None:
        stream = FakeStream([outage, outage, None])
        assert await DoorbellPublisher(cast("BusClient", stream)).publish(DOORBELL)
        assert (stream.attempts, stream.accepted) == (3, 1)
        stream = FakeStream([outage])
        with pytest.raises(Unavailable):
            await DoorbellPublisher(cast("BusClient", stream)).publish(DOORBELL)
        assert stream.attempts == 5

    run(check())


NOT_STORED = {
    "account": BadRequestError(code=400, err_code=10002, description="resource limits exceeded for account"),
    "server": ServiceUnavailableError(code=503, err_code=10023, description="insufficient resources"),
    "reserved": ServerError(code=500, err_code=10047, description="insufficient storage resources available"),
    "stream": ServiceUnavailableError(code=503, err_code=10077, description="maximum bytes exceeded"),
    "sealed": BadRequestError(code=400, err_code=10109, description="invalid operation on sealed stream"),
    "no answer": nats.errors.TimeoutError(),
}


@pytest.mark.usefixtures("_five_attempts")
@pytest.mark.parametrize("cause", NOT_STORED.values(), ids=NOT_STORED)
@requirement("answer.doorbell", "outage")
def test_while_no_message_is_stored_a_doorbell_is_never_given_up(cause: Exception, run: Run) -> None:
    """Even for a worker that no longer waits: the next delivery comes only after the outage."""

    async def check() -> None:
        schedule, stream, changes = Schedule(), FakeStream([cause], is_connected=True), list[str]()
        publisher = DoorbellPublisher(cast("BusClient", stream))
        publisher.changed = lambda: changes.append(publisher.outage)
        command = replace(delivery(HEADERS, BODY), published_at=datetime.fromtimestamp(time.time() - 120, UTC))
        handle = pipeline(FakeKernel(schedule), FakeTools(schedule), publisher).handle
        assert isinstance(await handle(command), HandBack)
        assert await publisher.problem() == publisher.outage == changes[0]
        stream.replies = [None]
        assert await publisher.problem() == ""
        assert changes[1:] == [""]
        assert await publisher.problem() == ""
        assert stream.accepted == 1

    run(check())


@pytest.mark.usefixtures("_five_attempts")
@requirement("answer.doorbell")
def test_a_limit_of_one_subject_does_not_stop_all_calls(run: Run) -> None:
    async def check() -> None:
        cause = ServiceUnavailableError(503, err_code=10077, description="maximum messages per subject exceeded")
        publisher = DoorbellPublisher(cast("BusClient", FakeStream([cause], is_connected=True)))
        with pytest.raises(Unavailable):
            await publisher.publish(DOORBELL)
        assert publisher.outage == ""

    run(check())


@pytest.mark.usefixtures("_five_attempts")
@requirement("answer.doorbell")
def test_a_command_whose_doorbell_fails_is_handed_back_until_no_worker_waits(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        for age_s, settled, missed in ((0.0, HandBack, 0), (120.0, Acknowledge, 1)):
            caplog.clear()
            schedule = Schedule()
            kernel, stream = FakeKernel(schedule), FakeStream([NoStreamResponseError()])
            publisher = DoorbellPublisher(cast("BusClient", stream))
            published_at = datetime.fromtimestamp(time.time() - age_s, UTC)
            command = replace(delivery(HEADERS, BODY), published_at=published_at)
            settlement = await pipeline(kernel, FakeTools(schedule), publisher).handle(command)
            assert isinstance(settlement, settled)
            assert len(kernel.committed) == 1
            actions = [getattr(record, "action", "") for record in caplog.records if record.levelno >= logging.ERROR]
            assert actions.count("doorbell.missed") == missed

    run(check())
