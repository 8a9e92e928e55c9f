"""Fetching of commands while results cannot be committed, over a real NATS server and with a failing database."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientSession
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import BucketNotFoundError, NoKeysError, NotFoundError

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.kernel.jetstream import pull_consumer as pull_module
from openapi_tool.kernel.jetstream.consumer import CommandConsumer
from openapi_tool.kernel.jetstream.dead_letters import DeadLetters
from openapi_tool.kernel.jetstream.durable_monitor import DurableMonitor
from openapi_tool.kernel.jetstream.fetch_mode import FetchMode
from openapi_tool.kernel.jetstream.hand_back import notice_subject
from openapi_tool.kernel.jetstream.pull_consumer import PullConsumer
from openapi_tool.kernel.jetstream.streams import Durable
from openapi_tool.local.caller import STREAM
from openapi_tool.local.servers import free_port
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.connection import connected
from openapi_tool.nats_client.options import INBOX, ConsumerOptions, DurableOptions, NatsOptions
from openapi_tool.nats_client.server_clock import ServerClock
from openapi_tool.options.executor import ExecutorOptions
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.settlement import Acknowledge, Settlement
from openapi_tool.settings import Settings
from openapi_tool.telemetry.health import Health
from openapi_tool.telemetry.redact import Redactor
from tests.conftest import StartExecutor
from tests.requirements import requirement
from tests.waiting import WAIT_S, until
from tests.wire.conftest import DURABLE, World
from tests.wire.test_bus import DSN, server

OPTIONS = DurableOptions(
    "v1r4", DURABLE, "cg.v1r4.*.*.cmd.tool.jina.>", NatsOptions(ack_wait_s=6.0, max_ack_pending=1_000)
)
SUBJECT = "cg.v1r4.proj.public.cmd.tool.jina.search"
OTHERS = "cg.v1r4.others.public.cmd.tool.jina.search"


class ConsumerHarness:
    """Consumer with a fetch mode set by the test, and the deliveries that it handled; `release` ends handlers."""

    def __init__(self, world: World, client: BusClient, mode: FetchMode, durable: DurableOptions) -> None:
        self.world = world
        self.client = client
        self.mode: Callable[[], FetchMode] = lambda: mode
        self.handled: list[Delivery] = []
        self.release = asyncio.Event()
        letters = DeadLetters(client, Redactor(), 1)
        options = ConsumerOptions(durable, ExecutorOptions(concurrency=8), 60.0)
        self.consumer = CommandConsumer(client, options, letters, self._handle, self._mode)

    def _mode(self) -> FetchMode:
        return self.mode()  # looked up anew: a test may replace it

    async def _handle(self, delivery: Delivery) -> Settlement:
        self.handled.append(delivery)
        await self.release.wait()
        return Acknowledge()

    def set_mode(self, mode: FetchMode) -> None:
        self.mode = lambda: mode
        self.consumer.wake()

    async def publish(self, count: int, subject: str = SUBJECT) -> None:
        for _ in range(count):
            await self.world.caller.client.jetstream().publish(subject, b"{}")

    async def info(self, condition: Callable[[Any], bool]) -> Any:
        """Return the state of the durable once `condition` holds. Raises TimeoutError."""
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    info = await self.world.caller.client.jetstream().consumer_info(STREAM, DURABLE)
                except NotFoundError:  # not created yet
                    continue
                if condition(info):
                    return info


@asynccontextmanager
async def running(world: World, mode: FetchMode, durable: DurableOptions = OPTIONS) -> AsyncIterator[ConsumerHarness]:
    bootstrap = build_bootstrap(Settings(postgres=DSN, nats={"servers": world.stack.nats.url}), {})
    async with connected(bootstrap.bus) as client:
        harness = ConsumerHarness(world, client, mode, durable)
        harness.consumer.start()
        yield harness
        harness.release.set()
        await harness.consumer.stop(1.0)


@requirement("outage")
async def test_in_fetch_mode_none_no_request_is_open_and_nothing_is_delivered(world_without_executor: World) -> None:
    async with running(world_without_executor, FetchMode.UNLIMITED) as harness:
        await harness.info(lambda info: info.num_waiting == 1)
        harness.set_mode(FetchMode.NONE)
        await harness.info(lambda info: info.num_waiting == 0)
        await harness.publish(3)
        info = await harness.info(lambda info: info.num_pending == 3)
        assert (info.delivered.consumer_seq, info.num_waiting, harness.handled) == (0, 0, [])
        harness.release.set()
        harness.set_mode(FetchMode.UNLIMITED)
        info = await harness.info(lambda info: info.ack_floor.consumer_seq == 3)
        assert info.delivered.consumer_seq == 3
        assert [delivery.number for delivery in harness.handled] == [1, 1, 1]


@requirement("outage")
async def test_messages_in_transit_are_handed_back_at_once_and_need_no_lease(world_without_executor: World) -> None:
    async with running(world_without_executor, FetchMode.NONE) as harness:
        await harness.info(lambda _: True)
        await harness.publish(6)
        stopped = False

        def none_once_one_runs() -> FetchMode:
            nonlocal stopped
            stopped = stopped or bool(harness.consumer.running)
            return FetchMode.NONE if stopped else FetchMode.UNLIMITED

        harness.mode = none_once_one_runs
        harness.consumer.wake()
        await harness.info(lambda info: info.delivered.stream_seq == 6 and info.num_waiting == 0)
        assert len(harness.handled) == 1
        harness.release.set()
        harness.set_mode(FetchMode.UNLIMITED)
        await harness.info(lambda info: info.ack_floor.stream_seq == 6)
        assert [delivery.number for delivery in harness.handled] == [1] * 6
    with pytest.raises((NoKeysError, BucketNotFoundError)):
        await (await world_without_executor.caller.client.jetstream().key_value("openapi_tool_leases")).keys()


@requirement("intake")
async def test_a_command_behind_the_backlog_of_another_project_runs_next(world_without_executor: World) -> None:
    async with running(world_without_executor, FetchMode.UNLIMITED) as harness:
        await harness.info(lambda info: info.num_waiting == 1)
        await harness.publish(700)  # more than may be held, so that some are handed back
        await harness.info(lambda info: info.delivered.consumer_seq >= 700)
        await harness.publish(1, OTHERS)
        await harness.info(lambda info: info.delivered.stream_seq == 701)
        await until(lambda: 701 in (work := harness.consumer.sequences())["waiting"] + work["running"])  # received
        running_before = len(harness.handled)
        harness.release.set()
        info = await harness.info(lambda info: info.ack_floor.stream_seq == 701)
        # The next command to run, or the one after it.
        assert OTHERS in {delivery.subject for delivery in harness.handled[: running_before + 2]}
        assert len(harness.handled) == 701
        assert info.delivered.consumer_seq < 701 * 2  # handed back commands were redelivered about once


@requirement("intake.full")
async def test_a_flood_beyond_max_ack_pending_does_not_stop_other_projects(world_without_executor: World) -> None:
    """With three times `max_ack_pending` the server would deliver nothing behind the flood."""
    few = replace(OPTIONS, nats=NatsOptions(ack_wait_s=6.0, max_ack_pending=100))
    async with running(world_without_executor, FetchMode.UNLIMITED, few) as harness:
        await harness.info(lambda info: info.num_waiting == 1)
        await harness.publish(300)
        await harness.info(lambda info: info.num_ack_pending == 100)
        await harness.publish(5, OTHERS)
        monitor = DurableMonitor(harness.client, few, harness.consumer, ServerClock(), Health())
        await monitor.check()
        await harness.info(lambda info: info.delivered.stream_seq == 305)
        await until(lambda: len(harness.consumer.sequences()["waiting"]) + harness.consumer.running == 305)  # received
        running_before = len(harness.handled)
        harness.release.set()
        info = await harness.info(lambda info: info.ack_floor.stream_seq == 305)
        served = [delivery.subject for delivery in harness.handled]
        assert served[: running_before + 10].count(OTHERS) == 5  # both projects get every second slot
        assert (len(served), info.num_redelivered) == (305, 0)
        await monitor.check()
        assert (await harness.info(lambda _: True)).config.max_ack_pending == 100


@requirement("intake.lease")
async def test_commands_that_one_replica_hands_back_unrun_need_no_lease_at_another(
    world_without_executor: World,
) -> None:
    async with AsyncExitStack() as draining, running(world_without_executor, FetchMode.UNLIMITED) as other:
        first = await draining.enter_async_context(running(world_without_executor, FetchMode.UNLIMITED))
        await first.info(lambda info: info.num_waiting == 2)
        other.set_mode(FetchMode.NONE)
        await first.info(lambda info: info.num_waiting == 1)
        await first.publish(40)
        await first.info(lambda info: info.delivered.consumer_seq == 40 and len(first.handled) == 8)
        other.release.set()
        other.set_mode(FetchMode.UNLIMITED)
        await draining.aclose()
        await other.info(lambda info: info.ack_floor.stream_seq == 40)
        assert (len(first.handled), [delivery.number for delivery in other.handled]) == (8, [1] * 32)  # of 40, 8 slots
    with pytest.raises((NoKeysError, BucketNotFoundError)):
        await (await world_without_executor.caller.client.jetstream().key_value("openapi_tool_leases")).keys()


@requirement("intake.lease")
async def test_a_command_that_was_run_needs_a_lease_whatever_a_notice_says(world_without_executor: World) -> None:
    async with running(world_without_executor, FetchMode.UNLIMITED) as harness:
        await harness.info(lambda info: info.num_waiting == 1)
        subject = notice_subject(STREAM, DURABLE)
        # Pairs of stream sequence and delivery: wrong types, no pairs, too large; then one for another durable.
        for body in (b"[[1,0]]", b"[[1,1.0]]", b'[["1",1]]', b"[[1,1,1]]", b"{}", b"[", b"[[1,1]]" * 2_000, b"\xff"):
            await harness.client.publish(subject, body)
        await harness.client.publish(f"{subject}.other", b"[[1,1]]")
        await harness.publish(1)
        await harness.info(lambda _: len(harness.handled) == 1)
        harness.set_mode(FetchMode.NONE)
        await harness.info(lambda info: info.num_waiting == 0)  # an open request would receive it once more
        harness.consumer.stalled(OPTIONS.nats.ack_wait_s)
        message = next(iter(harness.consumer._running.held_by_task.values())).message  # noqa: SLF001
        await message.nak()
        async with running(world_without_executor, FetchMode.UNLIMITED) as other:
            await other.info(lambda _: len(other.handled) == 1)
            assert other.handled[0].number == 2


@requirement("intake")
async def test_a_busy_executor_takes_no_command_from_one_with_free_slots(world_without_executor: World) -> None:
    async with running(world_without_executor, FetchMode.UNLIMITED) as busy:
        await busy.info(lambda info: info.num_waiting == 1)
        await busy.publish(7)  # one project cannot use all slots
        await busy.publish(1, OTHERS)
        await busy.info(lambda _: len(busy.handled) == 8)
        async with running(world_without_executor, FetchMode.UNLIMITED) as free:
            await free.info(lambda info: info.num_waiting == 1)
            for _ in range(5):
                await free.publish(1)
                await asyncio.sleep(0.1)  # longer than a look-ahead request takes
            await free.info(lambda _: len(free.handled) == 5)
            assert len(busy.handled) == 8
            free.release.set()
        busy.release.set()


@requirement("breaker")
async def test_probes_are_fetched_one_at_a_time(world_without_executor: World) -> None:
    async with running(world_without_executor, FetchMode.PROBE) as harness:
        await harness.info(lambda info: info.num_waiting == 1)
        await harness.publish(4)
        await harness.info(lambda info: info.delivered.consumer_seq == 1 and info.num_waiting == 0)
        assert len(harness.handled) == 1
        harness.release.set()
        await harness.info(lambda info: info.ack_floor.consumer_seq == 4)
        assert len(harness.handled) == 4


NO_SPACE = """
create function public.no_space() returns trigger language plpgsql as $$ begin
  if current_user = 'openapi_tool' then
    raise exception 'could not extend file' using errcode = '53100';
  end if;
  return new;
end $$;
create trigger no_space before insert on cards for each row execute function public.no_space()
"""


@pytest.mark.parametrize(
    ("fault", "repair", "message"),
    [
        (NO_SPACE, "drop function public.no_space() cascade", "DiskFullError: could not extend file"),
        (
            # What no inspection shows: another mistake of the operator's is found before anything is fetched.
            NO_SPACE.replace("could not extend file", "a policy refuses it").replace("53100", "42501"),
            "drop function public.no_space() cascade",
            "a policy refuses it (SQLSTATE 42501)",
        ),
        (
            NO_SPACE.replace("could not extend file", "results are frozen").replace("53100", "P0001"),
            "drop function public.no_space() cascade",
            "no result can be written: results are frozen (SQLSTATE P0001; PL/pgSQL function no_space() line",
        ),
        (
            "alter table cards add constraint calls_only check (metadata ->> 'type' <> 'tool.result') not valid",
            "alter table cards drop constraint calls_only",
            'violates check constraint "calls_only" (SQLSTATE 23514)',
        ),
        (
            NO_SPACE.replace("raise exception 'could not extend file' using errcode = '53100'", "return null").replace(
                "on cards", "on state.agent_inbox"
            ),
            "drop function public.no_space() cascade",
            "no result can be written: the database discards new rows of state.agent_inbox",
        ),
    ],
    ids=["disk full", "refused", "a trigger raises", "a constraint", "a trigger discards rows"],
)
@requirement("breaker", "postgres.failures", "health")
async def test_while_commits_fail_nothing_is_fetched_and_afterwards_all_is_answered(
    world_without_executor: World, start_executor: StartExecutor, fault: str, repair: str, message: str
) -> None:
    world, port = world_without_executor, free_port()
    executor = start_executor(
        {"OPENAPI_TOOL__HEALTH__PORT": str(port), "OPENAPI_TOOL__HEALTH__CHECK_INTERVAL_S": "0.1"}
    )
    await readiness(port, lambda shown: shown["ready"])
    await world.caller.database.execute(fault)
    first = await world.place()
    await world.caller.publish(first)
    shown = await readiness(port, lambda shown: not shown["ready"])
    assert message in shown["dependencies"]["postgres"]["reason"]
    assert shown["dependencies"]["postgres"]["since"] <= time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    jetstream = world.caller.client.jetstream()
    async with asyncio.timeout(WAIT_S):
        while (await jetstream.consumer_info(STREAM, DURABLE)).num_waiting:
            pass
    others = [await world.place() for _ in range(5)]
    for call in others:
        await world.caller.publish(call)
    info = await jetstream.consumer_info(STREAM, DURABLE)
    assert (info.num_pending, info.num_waiting) == (5, 0)
    assert len(await asyncio.to_thread(world.stack.upstream.requests)) == 1
    await world.caller.database.execute(repair)
    for call in (first, *others):
        assert (await world.caller.result(call, WAIT_S)).card["content"]["status"] == "success"
    await readiness(port, lambda shown: shown["ready"])
    assert len(await asyncio.to_thread(world.stack.upstream.requests)) == 6
    assert executor.log_text().count("postgres is unavailable") == 1, executor.log_text()


async def readiness(port: int, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the body of /readyz once `condition` holds. Raises TimeoutError."""
    async with asyncio.timeout(WAIT_S), ClientSession() as session:
        while True:
            async with session.get(f"http://127.0.0.1:{port}/readyz") as answer:
                shown: dict[str, Any] = await answer.json()
            if condition(shown):
                return shown
            await asyncio.sleep(0.02)


@requirement("breaker")
async def test_a_call_whose_rows_are_refused_stops_no_other_call(world_without_executor: World) -> None:
    world = world_without_executor
    poisoned = await world.place()
    await world.caller.database.execute(
        "create function public.poison() returns trigger language plpgsql as $$ begin "
        f"if new.tool_call_id = '{poisoned.tool_call_id}' then "
        "raise exception 'no such value' using errcode = '22P02'; end if; return new; end $$; "
        "create trigger poison before insert on cards for each row execute function public.poison()"
    )
    async with world.executor(executor={"max_lost_runs": 2, "requeue_delay_s": 0.02}) as consumer:
        await world.caller.publish(poisoned)
        calls = [await world.place() for _ in range(10)]
        for call in calls:
            await world.caller.publish(call)
            assert consumer._fetch_mode() is FetchMode.UNLIMITED  # noqa: SLF001 - not visible elsewhere
        outcomes = [await world.outcome(call) for call in calls]
    assert {outcome.content["status"] for outcome in outcomes} == {"success"}
    assert [letter["reason"] for letter in outcomes[-1].dead_letters] == ["defect"]
    assert outcomes[-1].deliveries == 10 + 3  # two lost runs of the refused call, and the delivery that ends it


@requirement("breaker")
async def test_a_call_whose_commit_times_out_repeatedly_stops_no_other_call(world_without_executor: World) -> None:
    """If another client locks its rows, other calls must be fetched while its result waits, up to a minute."""
    world = world_without_executor
    slow = await world.place()
    await world.caller.database.execute(
        "create function public.slow() returns trigger language plpgsql as $$ begin "
        f"if new.tool_call_id = '{slow.tool_call_id}' then "
        "raise exception 'canceling statement due to statement timeout' using errcode = '57014'; end if; "
        "return new; end $$; "
        "create trigger slow before insert on cards for each row execute function public.slow()"
    )
    async with world.executor(executor={"commit_retry_timeout_s": 30.0}) as consumer:
        await world.caller.publish(slow)
        assert len(await asyncio.to_thread(world.stack.upstream.requests, 1)) == 1
        await asyncio.sleep(0.5)  # the commit fails and is retried
        for _ in range(5):
            call = await world.place()
            await world.caller.publish(call)
            assert (await world.caller.result(call, WAIT_S)).card["content"]["status"] == "success"
            assert consumer._fetch_mode() is FetchMode.UNLIMITED  # noqa: SLF001 - not visible elsewhere
            await asyncio.sleep(0.2)
        await world.caller.database.execute("drop function public.slow() cascade")
        assert (await world.caller.result(slow, WAIT_S)).card["content"]["status"] == "success"
    assert len(await asyncio.to_thread(world.stack.upstream.requests)) == 6


# The pull consumer never fetches more messages than there are free slots, however often its request is renewed.


STREAM_PULL, DURABLE_PULL, SLOTS = "work", "puller", 4


class Pulling:
    """Pull consumer with four free slots; no message is settled."""

    def __init__(self, client: BusClient) -> None:
        self.client = client
        self.received: list[Msg] = []
        self.pull = PullConsumer(client, Durable(STREAM_PULL, DURABLE_PULL), self.wanted, self.receive)

    def wanted(self) -> int:
        return max(0, SLOTS - len(self.received))

    def receive(self, message: Msg) -> bool:
        self.received.append(message)
        return True

    @property
    def jetstream(self) -> JetStreamContext:
        return self.client.jetstream()

    async def fetched_of(self, messages: int) -> int:
        """Return how many of `messages` are fetched once the server has nothing more to send."""
        for _ in range(messages):
            await self.jetstream.publish(STREAM_PULL)
        await until(lambda: len(self.received) >= SLOTS)
        await self.waiting(0)
        await self.client.flush()
        return len(self.received)

    async def renewed(self) -> None:
        """Renew the pull request, and wait until it is replaced."""
        pull, inbox = self.pull, self.pull._inbox  # noqa: SLF001 - not visible elsewhere
        pull.renew()
        await until(lambda: pull._inbox != inbox and pull._requested == SLOTS)  # noqa: SLF001 - the same

    async def reconnected(self) -> None:
        """Reconnect, and wait until one pull request is open."""
        before = self.client.stats["reconnects"]
        await self.client.force_reconnect()
        await until(lambda: self.client.stats["reconnects"] > before)
        self.pull.wake()
        await self.waiting(1)

    async def waiting(self, requests: int) -> None:
        """Wait until the server has this number of open requests. Raises TimeoutError."""
        async with asyncio.timeout(WAIT_S):
            while (await self.jetstream.consumer_info(STREAM_PULL, DURABLE_PULL)).num_waiting != requests:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@requirement("subject.durable")
async def test_a_stream_that_is_deleted_under_the_executor_is_reported(
    world_without_executor: World, caplog: pytest.LogCaptureFixture
) -> None:
    world = world_without_executor
    async with world.executor() as consumer:
        await until(lambda: consumer.durable)
        await world.caller.client.jetstream().delete_stream(STREAM)
        await until(lambda: any("deleted and created again" in text for text in caplog.messages))
        assert (await world.send(await world.place())).content["status"] == "success"
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    causes = ("Consumer Deleted", f"the durable {DURABLE} is missing")  # whichever is found first
    assert any(
        f"cannot consume commands: {cause}; looking up or creating the durable again" in warned for cause in causes
    )
    assert f"the stream {STREAM} was deleted and created again: the commands that it held are lost" in warned


@asynccontextmanager
async def pulling(stack: EmbeddedStack) -> AsyncIterator[Pulling]:
    with server(stack, "") as nats_server:
        bootstrap = build_bootstrap(Settings(postgres=DSN, nats={"servers": nats_server.url}), {})
        async with connected(bootstrap.bus) as client:
            jetstream = client.jetstream()
            await jetstream.add_stream(name=STREAM_PULL, subjects=[STREAM_PULL])
            durable = ConsumerConfig(durable_name=DURABLE_PULL, ack_policy=AckPolicy.EXPLICIT, max_ack_pending=1000)
            await jetstream.add_consumer(STREAM_PULL, durable)
            puller = Pulling(client)
            task = asyncio.create_task(puller.pull.run())
            await puller.waiting(1)
            yield puller
            task.cancel()
            await asyncio.wait([task])


@requirement("nats.watched", "logs.limits")
async def test_requests_that_the_server_refuses_at_once_are_sent_with_pauses(
    stack: EmbeddedStack, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal caused the next request at once: 2,000 requests and log lines a second, and no CPU for calls."""

    def refusals() -> int:
        return sum(getattr(record, "action", "") == "pull.ended" for record in caplog.records)

    async with pulling(stack) as puller:
        subject = f"$JS.API.CONSUMER.INFO.{STREAM_PULL}.{DURABLE_PULL}"
        config = json.loads((await puller.client.request(subject)).data)["config"]
        create = f"$JS.API.CONSUMER.DURABLE.CREATE.{STREAM_PULL}.{DURABLE_PULL}"
        for priority in ({"priority_groups": ["a"], "priority_policy": "overflow"}, {}):
            request = {"stream_name": STREAM_PULL, "config": config | priority, "action": "update"}
            assert "error" not in json.loads((await puller.client.request(create, json.dumps(request).encode())).data)
            if priority:
                puller.pull.renew()
                await until(refusals)
                await asyncio.sleep(1.0)
                assert refusals() < 10
        assert await puller.fetched_of(SLOTS) == SLOTS


@requirement("run.concurrency")
async def test_a_doorbell_does_not_reveal_the_inbox_of_the_pull_request(stack: EmbeddedStack) -> None:
    async with pulling(stack) as puller:
        doorbells: list[Msg] = []

        async def record(message: Msg) -> None:
            doorbells.append(message)

        await puller.client.subscribe(STREAM_PULL, cb=record)
        for _ in range(2):
            await puller.jetstream.publish(STREAM_PULL)
        await until(lambda: len(doorbells) == 2)
        prefix, first, second = INBOX.count(".") + 1, doorbells[0].reply.split("."), doorbells[1].reply.split(".")
        inbox = puller.pull._inbox.split(".")  # noqa: SLF001 - not visible elsewhere
        assert inbox[:prefix] == first[:prefix]
        # nats-py's own tokens share their beginning, so that one reveals the others.
        for token in (*first[prefix:], *second[prefix:]):
            assert token[:8] != inbox[prefix][:8]
        assert first[-1][:8] != second[-1][:8]


@requirement("nats.watched")
async def test_a_new_connection_ends_the_silence_of_the_one_before(stack: EmbeddedStack) -> None:
    """Else a replica that had been ready again for seconds became unready until the server's first heartbeat."""
    async with pulling(stack) as harness:
        await harness.waiting(1)
        harness.pull._unanswered_since = time.monotonic() - 60.0  # noqa: SLF001 - a time without an answer
        assert harness.pull.silence_s >= 60.0
        await harness.client.force_reconnect()
        await until(lambda: harness.client.stats["reconnects"] == 1)
        assert harness.pull.silence_s < 60.0, "before the next request is sent"
        harness.pull.wake()
        await harness.waiting(1)
        assert harness.pull.silence_s < 60.0


@requirement("run.concurrency")
async def test_renewing_the_pull_leaves_one_request_open(stack: EmbeddedStack) -> None:
    async with pulling(stack) as puller:
        for _ in range(3):
            await puller.renewed()
        assert await puller.fetched_of(6 * SLOTS) == SLOTS


@requirement("run.concurrency")
async def test_a_reconnect_leaves_one_pull_request_open(stack: EmbeddedStack) -> None:
    async with pulling(stack) as puller:
        for _ in range(3):
            await puller.reconnected()
        assert await puller.fetched_of(6 * SLOTS) == SLOTS


@requirement("run.concurrency")
async def test_sending_another_request_does_not_end_the_silence(
    stack: EmbeddedStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a silent server would look alive for 30 s, because a new request is sent after 13 s."""
    async with pulling(stack) as puller:
        monkeypatch.setattr(pull_module, "_MAX_SILENCE_S", 0.05)
        silences: list[float] = []
        publish = puller.client.publish

        async def drop_pull_requests(subject: str, *message: Any, **options: Any) -> None:
            silences.append(puller.pull.silence_s)
            if "MSG.NEXT" not in subject:
                await publish(subject, *message, **options)

        monkeypatch.setattr(puller.client, "publish", drop_pull_requests)
        puller.pull.renew()
        async with asyncio.timeout(WAIT_S):
            while len(silences) < 4:
                puller.pull.wake()
                await asyncio.sleep(0.02)
        assert silences == sorted(silences)
        assert puller.pull.silence_s > silences[-1] > 0.05


@requirement("subject.durable")
async def test_a_pull_request_is_limited_in_bytes(
    stack: EmbeddedStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server ends such a request without a warning, and the rest is requested at once."""
    monkeypatch.setattr(pull_module, "_MAX_BYTES", 1)
    async with pulling(stack) as puller:
        requests: list[Msg] = []

        async def count(request: Msg) -> None:
            requests.append(request)

        await puller.client.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM_PULL}.{DURABLE_PULL}", cb=count)
        sent = [number.to_bytes() * (puller.client.max_payload - 200) for number in range(SLOTS)]
        for data in sent:
            await puller.jetstream.publish(STREAM_PULL, data)
        await until(lambda: len(puller.received) == SLOTS)
        assert sorted(message.data for message in puller.received) == sent
        assert requests
        assert not caplog.records
