"""No result and no doorbell is lost or doubled: retries, heartbeats, leases, lost runs, outages and memory."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from nats.aio.msg import Msg
from nats.js.api import StreamConfig
from prometheus_client import REGISTRY

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.jina.backend import JinaBackend
from openapi_tool.jina.byte_semaphore import ByteSemaphore, ResponseMemory
from openapi_tool.jina.memory_estimates import max_call_memory
from openapi_tool.kernel.jetstream import doorbell_publisher
from openapi_tool.kernel.jetstream.doorbell_publisher import DoorbellPublisher
from openapi_tool.kernel.jetstream.leases import BUCKET, Lease, Leases, LeaseTaken, lease_key
from openapi_tool.kernel.postgres.store import KernelStore
from openapi_tool.local.caller import STREAM
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.nats_client.connection import connected
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.report import Doorbell
from openapi_tool.settings import Settings
from tests.conftest import PROJECT, reader_tool
from tests.requirements import requirement
from tests.waiting import until
from tests.wire.conftest import World
from tests.wire.test_bus import DSN, server


def nats_settings(world: World, **changes: Any) -> dict[str, Any]:
    return {"servers": world.stack.nats.url, **changes}


def moments(requests: list[dict[str, Any]]) -> list[float]:
    return [request["at"] for request in requests]


# Retries of upstream requests (jina-api section 4).


@pytest.mark.parametrize(
    ("statuses", "requests", "status"),
    [
        ([503, 503], 3, "success"),
        ([503] * 9, 4, "failed"),
        ([500], 2, "success"),
        ([500, 500], 2, "failed"),
        ([429], 2, "success"),
        ([401], 1, "failed"),
        ([422], 1, "failed"),
        ([501], 1, "failed"),
        ([524], 1, "failed"),
    ],
)
@requirement("upstream.retry")
async def test_upstream_errors_are_retried_as_often_as_configured(
    world: World, statuses: list[int], requests: int, status: str
) -> None:
    world.stack.upstream.rules({"statuses": statuses, "retry_after": "0"})
    outcome = await world.send(await world.place())
    assert (len(outcome.upstream_requests), outcome.content["status"]) == (requests, status)
    assert outcome.deliveries == 1


@requirement("upstream.retry")
async def test_a_broken_connection_is_retried(world: World) -> None:
    world.stack.upstream.rules({"drop": "before"})
    outcome = await world.send(await world.place())
    assert (len(outcome.upstream_requests), outcome.content["error"]["code"]) == (4, "upstream_unavailable")


@requirement("upstream.retry")
async def test_retry_after_in_seconds_is_respected(world: World) -> None:
    world.stack.upstream.rules({"statuses": [429], "retry_after": "1"})
    first, second = moments((await world.send(await world.place())).upstream_requests)
    assert second - first >= 1


@requirement("upstream.retry")
async def test_retry_after_as_a_date_is_respected(world: World) -> None:
    then = format_datetime(datetime.now(UTC) + timedelta(seconds=3), usegmt=True)
    world.stack.upstream.rules({"statuses": [429], "retry_after": then})
    first, second = moments((await world.send(await world.place())).upstream_requests)
    assert second - first >= 1  # a date has no fractions of a second


@requirement("upstream.retry")
async def test_a_retry_after_the_deadline_is_not_waited_for(world: World) -> None:
    world.stack.upstream.rules({"statuses": [429], "retry_after": "3600"})
    began = time.monotonic()
    outcome = await world.send(await world.place())
    assert (outcome.content["error"]["code"], len(outcome.upstream_requests)) == ("rate_limited", 1)
    assert time.monotonic() - began < 20


# Leases and lost runs.


def delivery(sequence: int, number: int) -> Delivery:
    return Delivery("cg.v1r4.p.c.cmd.tool.jina.search", {}, b"{}", datetime.now(UTC), number, sequence, stream="stream")


async def taken(leases: Leases, command: Delivery) -> Lease:
    lease = await leases.take(command)
    assert isinstance(lease, Lease)
    return lease


@requirement("lease.owner")
async def test_a_redelivered_command_has_one_owner_until_its_lease_ends(world_without_executor: World) -> None:
    client = world_without_executor.caller.client
    one, other = Leases(client, 0.4), Leases(client, 0.4)
    lease = await taken(one, delivery(1, 2))
    busy = await other.take(delivery(1, 3))
    assert isinstance(busy, LeaseTaken)
    assert 0 < busy.retry_in_s <= 0.4
    await asyncio.sleep(0.3)
    await one.renew(lease)
    await asyncio.sleep(0.2)
    assert isinstance(await other.take(delivery(1, 3)), LeaseTaken)
    await asyncio.sleep(0.4)
    await taken(other, delivery(1, 4))
    await one.renew(lease)  # too late, and without effect
    await one.settle(lease)  # the same
    assert isinstance(await one.take(delivery(1, 5)), LeaseTaken)
    await other.settle(lease)
    await taken(one, delivery(1, 6))


@requirement("lease.owner")
async def test_only_one_of_many_concurrent_executors_gets_a_lease(world_without_executor: World) -> None:
    executors = [Leases(world_without_executor.caller.client, 5) for _ in range(6)]
    found = await asyncio.gather(*(executor.take(delivery(2, 2)) for executor in executors))
    assert sum(isinstance(result, Lease) for result in found) == 1


@requirement("lease.owner")
async def test_runs_that_did_not_end_are_counted_and_those_handed_back_are_not(world_without_executor: World) -> None:
    leases = Leases(world_without_executor.caller.client, 5)
    lost = []
    for attempt, handed_back in ((2, True), (3, False), (4, False), (5, True), (6, False)):
        lease = await taken(leases, delivery(3, attempt))
        lost.append(lease.lost)
        await leases.begin(lease)
        if handed_back:
            await leases.hand_back(delivery(3, attempt), forgive=True)
    assert lost == [1, 1, 2, 3, 3]  # the first delivery, without a record, counts as lost; then attempts 3 and 4


@pytest.mark.parametrize(("upstream_s", "heartbeats"), [(0.2, 0), (0.8, 1), (1.5, 2)])
@requirement("run.heartbeat")
async def test_a_heartbeat_is_sent_once_it_is_due(
    world_without_executor: World, upstream_s: float, heartbeats: int
) -> None:
    world, received = world_without_executor, list[Msg]()

    async def record(message: Msg) -> None:
        if message.data == b"+WPI":
            received.append(message)

    await world.caller.client.subscribe("$JS.ACK.>", cb=record)
    world.stack.upstream.rules({"delay_s": upstream_s})
    async with world.executor(nats=nats_settings(world, ack_wait_s=1.2)):  # due after 0.54 s, checked every 0.1 s
        call, began = await world.place(), time.monotonic()
        outcome = await world.send(call)
        held_s = time.monotonic() - began
    assert (outcome.content["status"], outcome.deliveries) == ("success", 1)
    assert heartbeats <= len(received) <= int(held_s / 0.54), "a busy machine may take longer and send more"


@requirement("lease.owner")
async def test_a_first_delivery_that_is_handed_back_is_not_a_lost_one(world_without_executor: World) -> None:
    leases = Leases(world_without_executor.caller.client, 5)
    await leases.hand_back(delivery(4, 1), forgive=True)
    assert (await taken(leases, delivery(4, 2))).lost == 0


@requirement("lease.owner")
async def test_a_command_that_lost_too_many_executors_is_answered_without_a_run(
    world_without_executor: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs never end and are never handed back, as after a crash; their messages are redelivered."""
    world = world_without_executor
    settings = {"nats": nats_settings(world, ack_wait_s=0.3), "executor": {"max_lost_runs": 2}}
    call = await world.place()
    await world.caller.publish(call)
    for _ in range(2):
        async with world.executor(**settings) as consumer:
            monkeypatch.setattr(consumer._command_runner, "_handle", _never)  # noqa: SLF001 - to simulate a crash
            monkeypatch.setattr(consumer._command_runner, "_hand_back", _crash)  # noqa: SLF001 - the same
            monkeypatch.setattr(consumer, "_send_heartbeats", _never)
            await until(lambda: consumer.running == 1)
    async with world.executor(**settings):
        outcome = await world.outcome(call)
    assert (outcome.content["status"], outcome.content["error"]["code"]) == ("failed", "internal_error")
    assert [letter["reason"] for letter in outcome.dead_letters] == ["attempts_exhausted"]
    assert outcome.upstream_requests == []
    assert len(outcome.doorbells) == 1


async def _never(*_: object) -> None:
    await asyncio.Event().wait()


async def _crash(*_: object) -> None:
    """Do nothing: the process has crashed."""


@pytest.mark.parametrize("value", [b"", b"{broken", b"[]", b'{"version": 2, "owner": "x"}', b'{"odd": 1}'])
@requirement("lease.owner")
async def test_an_unreadable_lease_record_counts_as_missing(world_without_executor: World, value: bytes) -> None:
    leases = Leases(world_without_executor.caller.client, 5)
    await leases.hand_back(delivery(5, 1), forgive=True)
    bucket = await world_without_executor.caller.client.jetstream().key_value(BUCKET)
    await bucket.put(lease_key("stream", 5), value)
    assert (await taken(leases, delivery(5, 2))).lost == 1


@requirement("lease.owner")
async def test_a_call_that_exceeds_every_time_limit_is_cancelled_and_counts_as_lost(
    world_without_executor: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = world_without_executor
    async with world.executor(nats=nats_settings(world, ack_wait_s=0.3), executor={"max_lost_runs": 2}) as consumer:
        worker = consumer._command_runner  # noqa: SLF001 - to inject a defect
        handle = worker._handle  # noqa: SLF001 - to inject a defect

        async def hang_unless_exhausted(command: Delivery) -> Any:
            return await (handle(command) if command.exhausted else _never())

        monkeypatch.setattr(worker, "_handle", hang_unless_exhausted)
        monkeypatch.setattr(consumer, "_options", replace(consumer._options, max_run_s=1.0))  # noqa: SLF001 - the same
        outcome = await world.send(await world.place())
    assert outcome.content["error"]["code"] == "internal_error"
    overdue = [record.__dict__ for record in caplog.records if getattr(record, "action", "") == "call.overdue"]
    assert [line["project_id"] for line in overdue] == [PROJECT] * 2


@requirement("lease.owner")
async def test_a_defect_before_a_call_can_be_answered_is_retried_a_few_times_only(
    world_without_executor: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(KernelStore, "load", broken)
    async with world_without_executor.executor(executor={"max_lost_runs": 2, "requeue_delay_s": 0.02}):
        outcome = await world_without_executor.send(await world_without_executor.place())
    assert [letter["reason"] for letter in outcome.dead_letters] == ["defect"]
    assert (outcome.deliveries, outcome.term_acks, outcome.upstream_requests) == (3, 1, [])


@requirement("lease.owner")
async def test_rows_that_the_database_refuses_do_not_count_as_outage(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, refusals = KernelStore.commit, [True]

    async def refuse_once(self: KernelStore, *result: Any) -> bool:
        if refusals:
            refusals.pop()
            async with self._connections.lend("") as connection:
                await connection.execute("select 1 / 0")
        return await commit(self, *result)

    monkeypatch.setattr(KernelStore, "commit", refuse_once)
    outcome = await world.send(await world.place())
    assert (outcome.content["status"], outcome.deliveries, len(outcome.upstream_requests)) == ("success", 2, 1)


@requirement("answer.earlier")
async def test_two_commands_of_one_call_give_one_result(world: World) -> None:
    world.stack.upstream.rules({"delay_s": 0.1})
    call = await world.place()
    await asyncio.gather(*(world.caller.publish(call) for _ in range(4)))
    outcome = await world.outcome(call)
    assert outcome.content["status"] == "success"
    assert len(outcome.upstream_requests) <= 4
    for table in (
        "cards where metadata ->> 'type' = 'tool.result'",
        "state.agent_inbox where message_type = 'tool_result'",
    ):
        assert await world.caller.database.fetchval(f"select count(*) from {table}") == 1  # noqa: S608 - constants


@requirement("run.heartbeat")
async def test_a_long_call_is_sent_once_and_delivered_once(world_without_executor: World) -> None:
    world = world_without_executor
    world.stack.upstream.rules({"delay_s": 2.5})
    async with world.executor(nats=nats_settings(world, ack_wait_s=0.5)):
        outcome = await world.send(await world.place())
    assert (outcome.deliveries, len(outcome.upstream_requests)) == (1, 1)
    assert outcome.content["status"] == "success"


# Outages.


@requirement("answer.parked")
async def test_a_result_waits_for_an_unavailable_database(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, outages = KernelStore.commit, [True, True, True]

    async def fail_three_times(self: KernelStore, *result: Any) -> bool:
        if outages:
            outages.pop()
            raise Unavailable("PostgreSQL: connection refused")
        return await commit(self, *result)

    monkeypatch.setattr(KernelStore, "commit", fail_three_times)
    outcome = await world.send(await world.place())
    assert (outcome.content["status"], outcome.deliveries, len(outcome.upstream_requests)) == ("success", 1, 1)


@requirement("outage")
async def test_terminated_database_backends_lose_no_result(world: World) -> None:
    world.stack.upstream.rules({"delay_s": 0.3})
    calls = [await world.place() for _ in range(8)]
    for call in calls:
        await world.caller.publish(call)
    await asyncio.to_thread(world.stack.upstream.requests, 8)
    await world.caller.database.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity "
        "where application_name = 'openapi-tool' and datname = current_database()"
    )
    outcomes = [await world.outcome(call) for call in calls]
    assert [outcome.content["status"] for outcome in outcomes] == ["success"] * 8
    assert len(outcomes[-1].upstream_requests) == 8


@requirement("outage")
async def test_calls_wait_if_there_are_fewer_connections_than_calls(world_without_executor: World) -> None:
    world = world_without_executor
    postgres = {"dsn": world.dsn, "pool_size": 1}
    async with world.executor(postgres=postgres):
        calls = [await world.place() for _ in range(30)]
        await asyncio.gather(*(world.caller.publish(call) for call in calls))
        outcomes = [await world.outcome(call) for call in calls]
    assert {outcome.content["status"] for outcome in outcomes} == {"success"}
    assert outcomes[-1].deliveries == 30


@requirement("answer.doorbell")
async def test_a_doorbell_that_failed_is_sent_by_the_next_delivery(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, outages = DoorbellPublisher.publish, [True]

    async def fail_once(self: DoorbellPublisher, *doorbell: Any) -> bool:
        if outages:
            outages.pop()
            raise Unavailable("NATS: connection refused")
        return await publish(self, *doorbell)

    monkeypatch.setattr(DoorbellPublisher, "publish", fail_once)
    outcome = await world.send(await world.place())
    assert (len(outcome.doorbells), outcome.deliveries, len(outcome.upstream_requests)) == (1, 2, 1)


# Memory.


@requirement("memory.limit")
async def test_responses_wait_for_memory_instead_of_exceeding_it(world_without_executor: World) -> None:
    world = world_without_executor
    world.stack.upstream.rules({"match": "example", "answer": "s-post-json", "body_bytes": 300_000})
    egress = {"max_response_bytes": 400_000, "body_budget_bytes": max_call_memory(400_000) + 400_000}
    async with world.executor(egress=egress):
        calls = [await world.place({"query": f"example {number}"}) for number in range(6)]
        for call in calls:
            await world.caller.publish(call)
        outcomes = [await world.outcome(call) for call in calls]
    assert [outcome.content["status"] for outcome in outcomes] == ["success"] * 6


@requirement("memory.limit")
async def test_memory_for_a_page_is_held_until_its_result_is_committed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, call_memory = KernelStore.commit, JinaBackend.call_memory
    semaphores: list[ByteSemaphore] = []
    held: list[int] = []

    def record_semaphore(self: JinaBackend, project: str) -> ResponseMemory:
        semaphores.append(self.semaphore)
        return call_memory(self, project)

    async def record_held(self: KernelStore, *result: Any) -> bool:
        held.append(whole - semaphores[-1].free_bytes)
        return await commit(self, *result)

    monkeypatch.setattr(JinaBackend, "call_memory", record_semaphore)
    monkeypatch.setattr(KernelStore, "commit", record_held)
    whole = 256_000_000 - max_call_memory(10_000_000)
    world.stack.upstream.rules({"answer": "r-post-json", "body_bytes": 300_000})
    await world.caller.add_tool(PROJECT, reader_tool())
    outcome = await world.send(await world.place({"url": "https://a.example/"}, "jina_reader", suffix="read"))
    assert outcome.content["status"] == "success"
    assert held[0] >= 5 * 300_000
    assert semaphores[-1].free_bytes == whole


TOOL_COMMANDS = "cg.v1r4.*.*.cmd.tool.*.>"
ALL_COMMANDS = "cg.v1r4.*.*.cmd.*.*.>"
SHORT_TIMEOUTS: dict[str, Any] = {"worker_timeout_s": 3, "commit_margin_s": 0.5, "requeue_delay_s": 0.05}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell_publisher, "_TIMEOUT_S", 0.1)
    monkeypatch.setattr(doorbell_publisher, "_RETRY_LIMIT_S", 0.2)


async def capture(world: World, subjects: str, **limits: Any) -> None:
    """Let the stream capture only these subjects, with these limits."""
    jetstream = world.caller.client.jetstream()
    await jetstream.update_stream(StreamConfig(name=STREAM, subjects=[subjects], max_age=24 * 3600, **limits))


async def doorbells_in(world: World) -> int:
    info = await world.caller.client.jetstream().stream_info(STREAM, subjects_filter="cg.v1r4.*.*.cmd.agent.*.wakeup")
    return sum((info.state.subjects or {}).values())


def missed() -> float:
    return REGISTRY.get_sample_value("openapi_tool_doorbells_missed_total") or 0.0


def settings(world: World) -> dict[str, Any]:
    return {"nats": {"servers": world.stack.nats.url, "ack_wait_s": 0.5}, "executor": SHORT_TIMEOUTS}


@pytest.mark.usefixtures("quick")
@requirement("answer.doorbell")
async def test_a_doorbell_is_retried_while_the_stream_is_unavailable(
    world_without_executor: World, caplog: pytest.LogCaptureFixture
) -> None:
    world, before = world_without_executor, missed()
    caplog.set_level(logging.INFO, "openapi_tool")
    await capture(world, TOOL_COMMANDS)
    async with world.executor(**settings(world)):
        assert world.components is not None
        checking = asyncio.create_task(world.components.storage.run())
        call = await world.place()
        await world.caller.publish(call)
        await until(lambda: requeued(caplog))
        await capture(world, ALL_COMMANDS)
        outcome = await world.outcome(call)
        checking.cancel()
    assert await doorbells_in(world) >= 1
    assert outcome.deliveries > 1
    assert len(outcome.upstream_requests) == 1
    assert missed() == before
    line = requeued(caplog)[0]
    assert (line["project_id"], line["tool_call_id"]) == (call.project_id, call.tool_call_id)
    assert line["message"].startswith("handed a command back: NATS")


def requeued(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [
        vars(record) | {"message": record.getMessage()}
        for record in caplog.records
        if getattr(record, "action", "") == "command.requeued"
    ]


@pytest.mark.usefixtures("quick")
@requirement("answer.doorbell")
async def test_no_responders_is_an_outage_not_a_refusal(stack: EmbeddedStack) -> None:
    """While a stream elects a leader, its subjects have no responders."""
    with server(stack, "") as nats_server:
        bootstrap = build_bootstrap(Settings(postgres=DSN, nats={"servers": nats_server.url}), {})
        async with connected(bootstrap.bus) as client:
            with pytest.raises(Unavailable, match="NoStreamResponseError"):
                await DoorbellPublisher(client).publish(
                    Doorbell("cg.v1r4.proj.public.cmd.agent.worker.wakeup", {}, b"{}")
                )


@pytest.mark.usefixtures("quick")
@requirement("answer.doorbell")
async def test_a_doorbell_is_given_up_logged_and_counted_once_no_worker_waits(
    world_without_executor: World, caplog: pytest.LogCaptureFixture
) -> None:
    world, before = world_without_executor, missed()
    async with world.executor(**settings(world)):
        await world.send(await world.place())
        await capture(world, ALL_COMMANDS, max_msgs_per_subject=1, discard="new", discard_new_per_subject=True)
        outcome = await world.send(await world.place(suffix="other"))
    assert outcome.rows.inbox_row["payload"]["status"] == "success"
    assert len(outcome.upstream_requests) == 2  # of both calls
    assert missed() == before + 1
    found = [record for record in caplog.records if getattr(record, "action", "") == "doorbell.missed"]
    assert [record.levelno for record in found] == [logging.ERROR]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("status", "doorbells"), [("pending", 2), ("deferred", 2), ("consumed", 1), ("processing", 1)])
@requirement("answer.doorbell")
async def test_a_redelivered_command_sends_a_doorbell_only_while_its_row_is_unclaimed(
    world: World, status: str, doorbells: int
) -> None:
    """A recreated durable redelivers a day of commands; without this check each gets a doorbell again."""
    call = await world.place()
    await world.send(call)
    await world.caller.database.execute(
        "update state.agent_inbox set status = $1 where inbox_id like 'inbox_%'", status
    )
    await world.send(call)
    assert await doorbells_in(world) == doorbells
