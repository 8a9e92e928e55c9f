"""Problems of connection and durable that are noticed within seconds, and settings that are restored."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import nats
import nats.errors
import pytest
from nats.js import JetStreamContext

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.bus import durable_monitor
from openapi_tool.bus.client import BusClient
from openapi_tool.bus.connection import connected
from openapi_tool.bus.durable import ServerClock, _has_quorum
from openapi_tool.bus.durable_monitor import DurableMonitor
from openapi_tool.bus.kv_stores import ensure_bucket
from openapi_tool.bus.streams import Durable, DurableOptions, ensure_durable
from openapi_tool.local.servers import NatsServer
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.settings import Settings
from openapi_tool.telemetry.health import CONSUMER, NATS, Health
from tests.chaos.profiles import until_led
from tests.chaos.servers import NatsCluster
from tests.requirements import requirement
from tests.wire.test_bus import DSN, server
from tests.wire.test_intake import until
from tests.wire.test_storage import makes_commands

REACTION_S = 6.0


@dataclass
class FakeConsumer:
    """Consumer that records the calls of the monitor."""

    durable: Durable | None
    silence_s: float = 0.0
    durable_error: str = ""
    calls: list[str] = field(default_factory=list)
    ack_wait_s: float = 0.0

    def renew_pull(self) -> None:
        self.calls.append("renew")

    def ensure_durable_again(self, reason: str) -> None:
        self.calls.append(f"ensure durable: {reason}")

    def use_ack_wait(self, seconds: float) -> None:
        self.ack_wait_s = seconds


@dataclass
class Watched:
    """Durable on a server of its own, and the monitor that checks it."""

    server: NatsServer
    client: BusClient
    admin: JetStreamContext
    options: DurableOptions
    durable: Durable
    consumer: FakeConsumer
    health: Health
    monitor: DurableMonitor

    async def info(self) -> Any:
        return await self.admin.consumer_info(self.durable.stream, self.durable.name)

    async def change(self, **changes: Any) -> None:
        config = (await self.info()).config
        await self.admin.add_consumer(self.durable.stream, config.evolve(**changes, name=self.durable.name))

    async def pause(self) -> None:
        resume_at = (datetime.now(UTC) + timedelta(seconds=60)).isoformat()
        await self.admin.pause_consumer(self.durable.stream, self.durable.name, resume_at)

    def monitor_with_limit(self, max_ack_pending: int) -> DurableMonitor:
        options = replace(self.options, max_ack_pending=max_ack_pending)
        return DurableMonitor(self.client, options, self.consumer, ServerClock(), self.health)

    def reason(self, name: str = CONSUMER) -> str:
        dependency = self.health.dependencies[name]
        assert dependency.ok == (not dependency.reason)
        return dependency.reason


@pytest.fixture
async def watched(stack: EmbeddedStack) -> AsyncIterator[Watched]:
    async with _watched(stack) as found:
        yield found


@asynccontextmanager
async def _watched(stack: EmbeddedStack) -> AsyncIterator[Watched]:
    with server(stack, "") as nats_server:
        bootstrap = build_bootstrap(Settings(postgres=DSN, nats={"servers": nats_server.url}), {})
        admin = await nats.connect(nats_server.url)
        async with connected(bootstrap.bus) as client:
            durable, health = await ensure_durable(client, bootstrap.durable), Health()
            consumer = FakeConsumer(durable)
            monitor = DurableMonitor(client, bootstrap.durable, consumer, ServerClock(), health)
            await monitor.check()
            consumer.calls.clear()
            yield Watched(nats_server, client, admin.jetstream(), bootstrap.durable, durable, consumer, health, monitor)
        await admin.close()


@requirement("nats.watched")
async def test_a_correct_durable_is_ready_and_its_reply_sets_the_clock(watched: Watched) -> None:
    assert (watched.reason(NATS), watched.reason()) == ("", "")
    assert watched.health.clock_offset_s == pytest.approx(0, abs=1)
    assert watched.consumer.ack_wait_s == watched.options.ack_wait_s


@requirement("nats.watched", "chart.runs")
async def test_the_monitor_does_not_delay_a_start(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise readiness waits for the next check, a second later: the durable is created within milliseconds."""
    pauses: list[float] = []

    async def create_durable_meanwhile(delay_s: float) -> None:
        pauses.append(delay_s)
        watched.consumer.durable = watched.durable
        if len(pauses) == 2:
            raise asyncio.CancelledError

    watched.consumer.durable = None
    monkeypatch.setattr("openapi_tool.bus.durable_monitor.asyncio.sleep", create_durable_meanwhile)
    with pytest.raises(asyncio.CancelledError):
        await watched.monitor.run()
    assert pauses[0] <= 0.1
    assert watched.reason() == ""


@pytest.mark.parametrize(
    "changed", [{"max_deliver": 3}, {"filter_subject": "cg.v1r4.*.*.cmd.tool.other.>"}], ids=["max_deliver", "filter"]
)
@requirement("nats.watched")
async def test_settings_without_which_calls_are_lost_are_restored(watched: Watched, changed: dict[str, Any]) -> None:
    await watched.change(**changed)
    await watched.monitor.check()
    config = (await watched.info()).config
    assert (config.max_deliver, config.filter_subject) == (-1, watched.options.filter_subject)
    assert ("the wrong filter" in watched.reason()) == ("filter_subject" in changed)
    await watched.monitor.check()
    assert watched.reason() == ""


@requirement("nats.watched")
async def test_a_durable_whose_filter_was_wrong_redelivers_what_it_may_have_skipped(watched: Watched) -> None:
    """Otherwise calls are lost: 42 of 757 in four changes of the filter, each corrected within a second."""
    await settle(watched, 5, 2)
    await watched.monitor.check()
    await settle(watched, 0, 3)
    await watched.change(filter_subject="cg.v1r4.*.*.cmd.tool.other.>")
    await watched.monitor.check()
    assert (await watched.info()).num_pending == 3


@requirement("nats.watched")
async def test_a_server_that_cannot_reset_a_durable_logs_how_to_find_the_commands(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def unknown(*_: Any) -> None:
        raise nats.errors.NoRespondersError  # before nats-server 2.14

    monkeypatch.setattr(durable_monitor, "reset_durable", unknown)
    await watched.change(filter_subject="cg.v1r4.*.*.cmd.tool.other.>")
    await watched.monitor.check()
    assert "deadletters list --abandoned" in caplog.text
    assert (await watched.info()).config.filter_subject == watched.options.filter_subject


@requirement("nats.watched")
async def test_settings_that_another_replica_may_have_changed_are_adopted_and_logged_once(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    await watched.change(ack_wait=1.0, max_ack_pending=77)
    for _ in range(3):
        await watched.monitor.check()
    config = (await watched.info()).config
    assert (config.ack_wait, config.max_ack_pending, watched.consumer.ack_wait_s) == (1.0, 77, 1.0)
    assert [getattr(record, "action", "") for record in caplog.records].count("durable.differs") == 1
    assert watched.reason() == ""


async def fill(watched: Watched, unacknowledged: int, pending: int) -> Any:
    """Fill the durable with a backlog; return the subscription and the unacknowledged messages."""
    await watched.change(max_ack_pending=unacknowledged)
    for _ in range(unacknowledged + pending):
        await watched.client.jetstream().publish("cg.v1r4.proj.public.cmd.tool.jina.search", b"{}")
    pull = await watched.admin.pull_subscribe_bind(watched.durable.name, watched.durable.stream)
    return pull, await pull.fetch(unacknowledged)


def actions(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [getattr(record, "action", "") for record in caplog.records]


@requirement("intake.full")
async def test_a_backlog_raises_the_durables_limit_which_is_lowered_afterwards(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "openapi_tool")
    watched.monitor = watched.monitor_with_limit(6)
    pull, messages = await fill(watched, 6, 0)
    await watched.monitor.check()
    assert (await watched.info()).config.max_ack_pending == 6  # no command waits behind these
    await watched.client.jetstream().publish("cg.v1r4.other.public.cmd.tool.jina.search", b"{}")
    for _ in range(3):
        await watched.monitor.check()
    info = await watched.info()
    assert (info.config.max_ack_pending, info.config.ack_wait) == (14, watched.options.ack_wait_s)  # twice the backlog
    messages += await pull.fetch(1)
    assert messages[-1].subject.startswith("cg.v1r4.other.")
    for message in messages[:4]:
        await message.ack_sync()
    for _ in range(3):
        await watched.monitor.check()
    assert (await watched.info()).config.max_ack_pending == 6
    assert actions(caplog).count("durable.capacity") == 2
    assert "durable.full" not in actions(caplog)


@requirement("intake.full")
async def test_a_durable_limit_that_cannot_be_raised_logs_a_warning_once_a_minute(
    watched: Watched, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: Any) -> None:
        raise nats.errors.Error

    await fill(watched, 2, 1)
    monkeypatch.setattr(durable_monitor, "change_max_ack_pending", refused)
    for _ in range(3):
        await watched.monitor.check()
    monkeypatch.undo()
    monkeypatch.setattr(durable_monitor, "MAX_ACK_PENDING", 2)
    await watched.monitor.check()
    assert actions(caplog).count("durable.full") == 1
    assert (await watched.info()).config.max_ack_pending == 2


@requirement("nats.watched")
async def test_settings_that_are_changed_repeatedly_are_restored_once_a_minute(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []

    async def refused(*_: Any) -> None:
        tried.append(time.monotonic())

    monkeypatch.setattr(durable_monitor, "restore_settings", refused)
    await watched.change(max_deliver=3)
    for _ in range(4):
        await watched.monitor.check()
    assert len(tried) == 1
    monkeypatch.setattr(durable_monitor, "_RESTORE_RETRY_S", 0.0)
    await watched.monitor.check()
    assert len(tried) == 2


@requirement("nats.watched")
async def test_a_paused_durable_is_not_ready_and_never_resumed(watched: Watched) -> None:
    await watched.pause()
    await watched.change(max_deliver=3)
    await watched.monitor.check()
    assert "paused until" in watched.reason()
    await ensure_durable(watched.client, watched.options)
    await watched.monitor.check()
    assert "paused until" in watched.reason()
    assert (await watched.info()).config.max_deliver == -1


@requirement("nats.watched")
async def test_a_deleted_durable_is_created_again(watched: Watched) -> None:
    await watched.admin.delete_consumer(watched.durable.stream, watched.durable.name)
    await watched.monitor.check()
    assert "is missing" in watched.reason()
    assert [call.partition(":")[0] for call in watched.consumer.calls] == ["ensure durable"]
    await ensure_durable(watched.client, watched.options)
    await watched.monitor.check()
    assert (watched.reason(), watched.consumer.calls[-1]) == ("", "renew")


async def settle(watched: Watched, commands: int, settled: int) -> None:
    """Send `commands` commands, and acknowledge the first `settled` ones."""
    for number in range(commands):
        await watched.admin.publish(f"cg.v1r4.p.c.cmd.tool.jina.{number}", b"{}")
    pull = await watched.admin.pull_subscribe_bind(watched.durable.name, watched.durable.stream)
    for message in await pull.fetch(settled, timeout=5):
        await message.ack_sync()
    await pull.unsubscribe()


async def pending_after_deletion(watched: Watched) -> int:
    """Delete and recreate the durable; return how many commands it will deliver."""
    await ensure_bucket(watched.client)
    await watched.monitor.check()
    await watched.admin.delete_consumer(watched.durable.stream, watched.durable.name)
    await ensure_durable(watched.client, watched.options)
    return int((await watched.info()).num_pending)


@requirement("nats.watched")
async def test_a_recreated_durable_starts_after_the_ack_floor_of_the_old_one(watched: Watched) -> None:
    """Otherwise it starts with the first command of the day: 20,000 were redelivered."""
    await settle(watched, 5, 3)
    assert await pending_after_deletion(watched) == 2


@requirement("nats.watched")
async def test_in_a_recreated_stream_a_durable_starts_with_the_first_command(watched: Watched) -> None:
    await settle(watched, 5, 3)
    await pending_after_deletion(watched)
    config = (await watched.admin.stream_info(watched.durable.stream)).config
    await watched.admin.delete_stream(watched.durable.stream)
    await watched.admin.add_stream(config)
    await ensure_durable(watched.client, watched.options)
    await settle(watched, 5, 1)
    assert (await watched.info()).num_pending == 4


@requirement("nats.watched")
async def test_an_ack_floor_of_another_filter_is_ignored(watched: Watched) -> None:
    await settle(watched, 5, 3)
    await pending_after_deletion(watched)
    await watched.admin.delete_consumer(watched.durable.stream, watched.durable.name)
    await ensure_durable(watched.client, replace(watched.options, filter_subject="cg.v1r4.p.*.cmd.tool.jina.>"))
    assert (await watched.info()).num_pending == 5


@pytest.mark.parametrize("stored", [b"", b"[]", b"{broken", b'{"stream": "x"}'])
@requirement("nats.watched")
async def test_an_unreadable_ack_floor_is_ignored(watched: Watched, stored: bytes) -> None:
    await (await ensure_bucket(watched.client)).put(f"floor.{watched.durable.name}", stored)
    await settle(watched, 5, 3)
    assert await pending_after_deletion(watched) == 2


@requirement("nats.watched")
async def test_an_ack_floor_that_cannot_be_stored_is_no_problem(watched: Watched) -> None:
    await settle(watched, 5, 3)
    await watched.monitor.check()  # there is no bucket
    assert watched.reason() == ""


@requirement("nats.watched")
async def test_a_leader_without_quorum_is_not_ready(stack: EmbeddedStack) -> None:
    """Such a leader replies as usual for over ten seconds, while nothing can be delivered or stored."""
    cluster = NatsCluster(stack)
    await cluster.start()
    try:
        await until_led(cluster.urls, makes_commands)
        bootstrap = build_bootstrap(Settings(postgres=DSN, nats={"servers": ",".join(cluster.urls)}), {})
        async with connected(bootstrap.bus) as client:
            durable = await ensure_durable(client, bootstrap.durable)
            info = await client.jetstream().consumer_info(durable.stream, durable.name)
        assert info.cluster is not None
        leader = str(info.cluster.leader)
        bootstrap = build_bootstrap(Settings(postgres=DSN, nats={"servers": cluster.nodes[leader].url}), {})
        async with connected(bootstrap.bus) as client:
            health = Health()
            monitor = DurableMonitor(client, bootstrap.durable, FakeConsumer(durable), ServerClock(), health)
            await monitor.check()
            assert health.dependencies[CONSUMER].reason == ""
            followers = [node for name, node in cluster.nodes.items() if name != leader]
            await asyncio.gather(*(asyncio.to_thread(node.stop) for node in followers))
            async with asyncio.timeout(REACTION_S):
                while not health.dependencies[CONSUMER].reason:
                    await monitor.check()
            assert (
                health.dependencies[CONSUMER].reason == "the durable has no quorum: most of its servers are unavailable"
            )
    finally:
        await asyncio.gather(*(asyncio.to_thread(node.stop) for node in cluster.nodes.values()))


@pytest.mark.parametrize(
    ("followers", "quorum"),
    [
        ([], True),
        ([{"active": 10**9}, {"active": 10**9}], True),
        ([{"active": 10**9}, {"active": 5 * 10**9}], True),
        ([{"active": 5 * 10**9}, {"active": 5 * 10**9}], False),
        ([{"active": 0, "offline": True}], False),
        ([{"active": 0, "offline": True}] * 2 + [{"active": 0}] * 2, True),
    ],
)
@requirement("nats.watched")
def test_quorum_counts_recently_active_followers(followers: list[dict[str, Any]], quorum: bool) -> None:  # noqa: FBT001
    assert _has_quorum(followers) == quorum


@requirement("nats.watched")
async def test_an_unanswered_pull_request_is_not_ready(watched: Watched) -> None:
    watched.consumer.silence_s = 16
    await watched.monitor.check()
    assert "does not answer the pull request" in watched.reason()


@requirement("nats.watched")
async def test_a_silent_server_is_detected_and_reconnected(watched: Watched) -> None:
    """A half-open connection looks idle; TCP detects it only after many minutes."""
    process = watched.server.process
    assert process is not None
    running = asyncio.create_task(watched.monitor.run())
    process.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        await until(lambda: watched.reason(NATS))
        assert time.monotonic() - began < REACTION_S
        await until(lambda: not watched.client.is_connected)
    finally:
        process.signal(signal.SIGCONT)
    began = time.monotonic()
    await until(lambda: not watched.reason(NATS) and not watched.reason())
    assert time.monotonic() - began < REACTION_S
    assert watched.client.stats["reconnects"] == 1
    assert "renew" in watched.consumer.calls
    running.cancel()
    await asyncio.wait([running])
