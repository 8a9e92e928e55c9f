"""Streams and buckets of the executor, and the durable."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import nats
import nats.errors
import pytest
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, KeyValueConfig, StreamConfig, StreamInfo
from nats.js.errors import APIError, NotFoundError
from tenacity import stop_after_delay, wait_fixed
from typer.testing import CliRunner

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.cli import app
from openapi_tool.concurrency.retries import retried
from openapi_tool.kernel.jetstream import dead_letters, durable_capacity, durable_settings, leases, parked_records
from openapi_tool.kernel.jetstream.consumer import CommandConsumer
from openapi_tool.kernel.jetstream.dead_letters import DeadLetters
from openapi_tool.kernel.jetstream.doorbell_publisher import DoorbellPublisher
from openapi_tool.kernel.jetstream.durable import _has_quorum
from openapi_tool.kernel.jetstream.durable_monitor import DurableMonitor
from openapi_tool.kernel.jetstream.leases import Lease, Leases
from openapi_tool.kernel.jetstream.storage_check import StorageMonitor
from openapi_tool.kernel.jetstream.streams import Durable, StreamMissing, ensure_durable
from openapi_tool.local.caller import STREAM, Caller
from openapi_tool.local.servers import NatsServer, free_port
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.nats_client.client import BusClient, routed
from openapi_tool.nats_client.connection import connected
from openapi_tool.nats_client.options import DurableOptions
from openapi_tool.nats_client.server_clock import ServerClock
from openapi_tool.nats_records import session_key, shared_bucket
from openapi_tool.nats_records.record_store import BUDGETS, LIMITS
from openapi_tool.nats_records.replicas import replica_count
from openapi_tool.nats_records.session_key import shared_session_key
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.settings import Settings
from openapi_tool.state.nats_kv import NatsKvTexts
from openapi_tool.telemetry.health import CONSUMER, JETSTREAM, NATS, Health
from openapi_tool.telemetry.redact import Redactor
from tests.chaos.harness import NatsCluster
from tests.chaos.profiles import until_led
from tests.requirements import requirement
from tests.support import another_nats, delivery
from tests.waiting import WAIT_S, until
from tests.wire.conftest import DURABLE, World, open_world
from tests.wire.test_bus import DSN, server

LEASES, SESSIONS, PARKED = f"KV_{leases.BUCKET}", f"KV_{shared_bucket.BUCKET}", f"KV_{parked_records.PARKED_BUCKET}"
STREAMS = {LEASES, SESSIONS, PARKED, dead_letters.STREAM}


@dataclass
class Stored:
    """Stores of an executor, and the check of their streams."""

    client: BusClient
    leases: Leases
    parked: NatsKvTexts
    storage: StorageMonitor
    health: Health

    @property
    def jetstream(self) -> JetStreamContext:
        return self.client.jetstream()

    def reason(self) -> str:
        found = self.health.dependencies[JETSTREAM]
        assert found.ok == (not found.reason)
        return found.reason

    async def shrink(self, stream: str, max_bytes: int) -> None:
        config = (await self.jetstream.stream_info(stream)).config
        await self.jetstream.update_stream(config.evolve(max_bytes=max_bytes, discard=DiscardPolicy.NEW))


def redelivered(sequence: int) -> Delivery:
    return replace(delivery(), number=2, stream="stream", stream_sequence=sequence)


async def stored_on(client: BusClient, replicas: int = 1) -> Stored:
    health, leases_ = Health(), Leases(client, 5.0, replicas)
    results = parked_records.parked_record_store(client, replicas)
    key = await retried(
        lambda: shared_session_key(client, replicas), on=Unavailable, wait=wait_fixed(0.1), stop=stop_after_delay(20)
    )  # as at the start: a new cluster may lose the first replies
    storage = StorageMonitor(
        client,
        leases_,
        results,
        DeadLetters(client, Redactor(), replicas),
        DoorbellPublisher(client),
        key,
        replicas,
        health,
    )
    return Stored(client, leases_, results, storage, health)


@pytest.fixture
async def stored(stack: EmbeddedStack) -> AsyncIterator[Stored]:
    with server(stack, "") as nats_server:
        bootstrap = build_bootstrap(Settings(postgres=DSN, nats={"servers": nats_server.url}), {})
        async with connected(bootstrap.bus) as client:
            yield await stored_on(client)


@requirement("nats.storage")
async def test_all_streams_and_buckets_are_created_at_the_start(stored: Stored) -> None:
    await stored.storage.check()
    assert stored.reason() == ""
    assert {info.config.name for info in await stored.jetstream.streams_info()} == STREAMS


@requirement("nats.storage")
async def test_a_deleted_lease_bucket_is_created_again(stored: Stored) -> None:
    """Otherwise redelivered calls would fail until a restart."""
    assert isinstance(await stored.leases.take(redelivered(1)), Lease)
    await stored.jetstream.delete_stream(LEASES)
    assert isinstance(await stored.leases.take(redelivered(2)), Lease)


@requirement("nats.storage")
async def test_a_lease_bucket_recreated_with_other_options_is_opened_again(stored: Stored) -> None:
    await stored.jetstream.create_key_value(KeyValueConfig(bucket=leases.BUCKET, direct=True))
    assert isinstance(await stored.leases.take(redelivered(1)), Lease)
    await stored.jetstream.delete_stream(LEASES)
    await stored.storage.check()
    assert isinstance(await stored.leases.take(redelivered(2)), Lease)


@requirement("nats.storage")
async def test_a_deleted_bucket_of_parked_results_is_created_again(stored: Stored) -> None:
    await stored.storage.check()
    await stored.parked.put("one", b"result")
    await stored.jetstream.delete_stream(PARKED)
    await stored.storage.check()
    assert PARKED in {info.config.name for info in await stored.jetstream.streams_info()}
    assert await stored.parked.get("one") is None
    await stored.parked.put("two", b"result")
    assert await stored.parked.get("two") == b"result"


@requirement("nats.storage")
async def test_a_bucket_of_parked_results_created_meanwhile_with_other_options_is_used(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas with different limits start at once; the server refuses the second creation."""
    open_bucket = JetStreamContext.key_value  # the only hook between look-up and creation
    others = [KeyValueConfig(bucket=parked_records.PARKED_BUCKET, ttl=7200)]

    async def create_meanwhile(jetstream: JetStreamContext, bucket: str) -> Any:
        try:
            return await open_bucket(jetstream, bucket)
        finally:
            if others:
                await stored.jetstream.create_key_value(others.pop())

    monkeypatch.setattr(JetStreamContext, "key_value", create_meanwhile)
    await stored.parked.put("one", b"result")
    assert await stored.parked.get("one") == b"result"


@requirement("nats.storage")
async def test_a_session_key_is_restored_after_its_bucket_was_deleted(stored: Stored) -> None:
    before = await shared_session_key(stored.client)
    await stored.jetstream.delete_stream(SESSIONS)
    await stored.storage.check()
    assert await shared_session_key(stored.client) == before


@requirement("nats.storage")
async def test_a_different_session_key_is_logged(stored: Stored, caplog: pytest.LogCaptureFixture) -> None:
    await stored.jetstream.delete_stream(SESSIONS)
    assert await shared_session_key(stored.client) != stored.storage.session_key
    await session_key.restore_session_key(stored.client, stored.storage.session_key or b"")
    assert [getattr(record, "action", "") for record in caplog.records] == ["session_key.differs"]


@pytest.mark.parametrize("stream", sorted(STREAMS))
@requirement("nats.storage")
async def test_a_full_bucket_is_reported_until_it_has_space(stored: Stored, stream: str) -> None:
    await stored.storage.check()
    await stored.shrink(stream, 1)
    await stored.storage.check()
    assert f"{stream} is full" in stored.reason()
    await stored.shrink(stream, -1)
    await stored.storage.check()
    assert stored.reason() == ""


@requirement("nats.storage")
async def test_a_stream_at_its_message_limit_is_reported(stored: Stored) -> None:
    await stored.storage.check()
    config = (await stored.jetstream.stream_info(dead_letters.STREAM)).config
    await stored.jetstream.update_stream(config.evolve(max_msgs=1))
    await stored.jetstream.publish(f"{dead_letters.SUBJECT_PREFIX}.proj", b"{}")
    await stored.storage.check()
    assert f"{dead_letters.STREAM} is full" in stored.reason()


@requirement("nats.storage")
async def test_a_sealed_stream_is_named_until_it_is_created_again(stored: Stored) -> None:
    await stored.storage.check()
    await commands(stored)
    for stream in sorted({*STREAMS, STREAM}):
        await stored.jetstream.update_stream((await stored.jetstream.stream_info(stream)).config.evolve(sealed=True))
        await stored.storage.check()
        assert f"{stream} is sealed for good: delete it (nats stream rm {stream})" in stored.reason()
        await stored.jetstream.delete_stream(stream)
        await stored.storage.check()
        await stored.storage.check()
        assert stored.reason() == ""


@requirement("nats.storage")
@pytest.mark.parametrize("stream", sorted({*STREAMS, STREAM}))
async def test_a_stream_for_too_small_messages_is_named_with_the_command_that_helps(
    stored: Stored, stream: str
) -> None:
    await stored.storage.check()
    await commands(stored)
    config = (await stored.jetstream.stream_info(stream)).config
    await stored.jetstream.update_stream(config.evolve(max_msg_size=100))
    await stored.storage.check()
    assert f"{stream} takes messages of up to 100 bytes only" in stored.reason()
    size = int(stored.reason().partition(f"nats stream edit {stream} --max-msg-size ")[2].split()[0])
    await stored.jetstream.update_stream(config.evolve(max_msg_size=size))
    await stored.storage.check()
    assert stored.reason() == ""


@requirement("nats.storage")
@pytest.mark.parametrize(
    ("limit", "says"), [({"max_msgs": 1}, "1 of 1 messages"), ({"max_bytes": 100}, " of 100 bytes")]
)
async def test_a_full_command_stream_is_named_unless_it_deletes_old_messages(
    stored: Stored, limit: Mapping[str, int], says: str
) -> None:
    config = await commands(stored)
    await stored.jetstream.publish("cg.v1r4.proj.public.cmd.tool.jina.search", b"{}")
    await stored.jetstream.update_stream(config.evolve(discard=DiscardPolicy.NEW, **limit))
    await stored.storage.check()
    assert f"{STREAM} is full (" in stored.reason()
    assert says in stored.reason()
    await stored.jetstream.update_stream(config.evolve(discard=DiscardPolicy.OLD, **limit))
    await stored.storage.check()
    assert stored.reason() == ""


async def commands(stored: Stored) -> StreamConfig:
    """Create the command stream, and let the doorbells know it."""
    config = StreamConfig(name=STREAM, subjects=["cg.v1r4.*.*.cmd.*.*.>"])
    stored.storage.doorbells.stream = lambda: STREAM
    return (await stored.jetstream.add_stream(config)).config


@requirement("nats.storage", "cli.top")
async def test_a_stream_that_the_disk_has_no_room_for_is_named_with_the_remedy(
    stack: EmbeddedStack, tmp_path: Path
) -> None:
    """nats-server reserves the maximum size of a stream when it is created."""
    with server(stack, f'jetstream {{ store_dir: "{tmp_path}", max_file_store: 1MB }}') as nats_server:
        bootstrap = build_bootstrap(Settings(postgres=DSN, nats={"servers": nats_server.url}), {})
        async with connected(bootstrap.bus) as client:
            small = await stored_on(client)
            await small.storage.check()
            assert (
                f"{dead_letters.STREAM} cannot be used: insufficient storage resources available; "
                "free its disk or raise the limit"
            ) in small.reason()


@requirement("nats.storage", "cli.check")
async def test_check_fails_if_jetstream_stores_nothing(
    stack: EmbeddedStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No limit of a stream is reached, but that of the server: only storing something shows it."""
    small = f'jetstream {{ store_dir: "{tmp_path}", max_file_store: 100KB }}'
    with server(stack, small) as nats_server:
        client = await nats.connect(nats_server.url)
        jetstream = client.jetstream()
        await jetstream.add_stream(StreamConfig(name=STREAM, subjects=["cg.v1r4.*.*.cmd.*.*.>"]))
        await jetstream.create_key_value(KeyValueConfig(bucket=parked_records.PARKED_BUCKET, max_value_size=512 * 1024))
        assert await nats_problem(nats_server, monkeypatch) == ""
        with suppress(APIError):
            for _ in range(100):
                await jetstream.publish("cg.v1r4.proj.public.cmd.tool.jina.search", b"x" * 10_000)
        assert await nats_problem(nats_server, monkeypatch) == (
            f"JetStream stores no message in {PARKED}: insufficient resources; free its disk or raise the limit"
        )
        await client.close()


@requirement("nats.storage", "cli.check")
@pytest.mark.parametrize("stream", [STREAM, f"KV_{LIMITS.bucket.name}", f"KV_{BUDGETS.bucket.name}", *sorted(STREAMS)])
async def test_check_names_a_stream_that_takes_no_message(
    stack: EmbeddedStack, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    config = StreamConfig(name=stream, subjects=["cg.v1r4.*.*.cmd.*.*.>" if stream == STREAM else f"of.{stream}"])
    with server(stack, "") as nats_server:
        client = await nats.connect(nats_server.url)
        jetstream = client.jetstream()
        await jetstream.add_stream(config.evolve(max_msg_size=50))
        assert f"{stream} takes messages of up to 50 bytes" in await nats_problem(nats_server, monkeypatch)
        await jetstream.update_stream(config.evolve(max_bytes=100, discard=DiscardPolicy.NEW))
        assert f"{stream} is full (0 of 100 bytes)" in await nats_problem(nats_server, monkeypatch)
        await jetstream.update_stream(config.evolve(sealed=True))
        assert f"{stream} is sealed for good" in await nats_problem(nats_server, monkeypatch)
        await client.close()


async def nats_problem(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what `check` says of NATS."""
    monkeypatch.setenv("PG_DSN", "postgresql://127.0.0.1:1/unused")
    monkeypatch.setenv("NATS_SERVERS", nats_server.url)
    found = await asyncio.to_thread(CliRunner().invoke, app, ["check", "--json"])
    problem: str = json.loads(found.stdout)["checks"]["nats"]
    return problem


@requirement("nats.storage")
async def test_a_check_whose_reply_was_lost_with_the_connection_is_repeated(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a replica that was ready again became unready until the next check."""
    await stored.storage.check()
    stream_info = JetStreamContext.stream_info  # the only hook between request and reply

    async def lost(jetstream: JetStreamContext, name: str) -> Any:
        monkeypatch.setattr(JetStreamContext, "stream_info", stream_info)
        await stored.client.force_reconnect()
        await until(lambda: stored.client.stats["reconnects"] == 1)
        raise nats.errors.TimeoutError

    monkeypatch.setattr(JetStreamContext, "stream_info", lost)
    running = asyncio.create_task(stored.storage.run())
    await until(lambda: stored.client.stats["reconnects"] == 1)
    before = stored.health.dependencies[JETSTREAM].last_ok_at
    await until(lambda: stored.reason() or stored.health.dependencies[JETSTREAM].last_ok_at != before)
    assert stored.reason() == ""
    running.cancel()


@requirement("nats.storage")
async def test_fewer_replicas_than_the_command_stream_log_one_warning(
    stored: Stored, caplog: pytest.LogCaptureFixture
) -> None:
    await stored.storage.check()
    stored.storage.replicas = 3
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        await stored.storage.check()
    found = [record.getMessage() for record in caplog.records if getattr(record, "action", "") == "storage.replicas"]
    assert len(found) == len(STREAMS)
    assert any(f"nats stream edit {LEASES} --replicas 3" in line for line in found)
    assert stored.reason() == ""


@requirement("nats.storage", "privilege.least")
async def test_a_bucket_of_an_earlier_version_that_gives_away_the_session_key_logs_one_warning(
    stack: EmbeddedStack, caplog: pytest.LogCaptureFixture
) -> None:
    with server(stack, "") as nats_server:
        bootstrap = build_bootstrap(Settings(postgres=DSN, nats={"servers": nats_server.url}), {})
        async with connected(bootstrap.bus) as client:
            bucket = await client.jetstream().create_key_value(bucket=shared_bucket.BUCKET)
            await bucket.put(session_key.SESSION_KEY, b"k" * 32)
            stored = await stored_on(client)
            assert stored.storage.session_key == b"k" * 32, "replicas of both versions use the same key"
            for _ in range(2):
                await stored.storage.check()
            warnings = [line for line in caplog.records if getattr(line, "action", "") == "storage.unrestricted"]
            assert [shared_bucket.RESTRICT in line.getMessage() for line in warnings] == [True]
            await client.jetstream().delete_stream(SESSIONS)
            caplog.clear()
            new = await stored_on(client)
            await new.storage.check()
    assert "storage.unrestricted" not in [getattr(line, "action", "") for line in caplog.records]


@requirement("nats.storage")
async def test_created_streams_have_the_command_streams_replicas_and_survive_a_leader(stack: EmbeddedStack) -> None:
    """With the lease bucket on one server, 12 of 40 calls got no result when that server died."""
    cluster = NatsCluster(stack)
    await cluster.start()
    try:
        await until_led(cluster.urls, makes_commands)
        bootstrap = build_bootstrap(Settings(postgres=DSN, nats={"servers": ",".join(cluster.urls)}), {})
        async with connected(bootstrap.bus) as client:
            replicas = await replica_count(client, bootstrap.durable)
            stored = await stored_on(client, replicas)
            infos: dict[str | None, StreamInfo] = {}
            async with asyncio.timeout(WAIT_S):
                while not infos.keys() >= STREAMS:  # a check that a busy cluster answers late creates not all
                    await stored.storage.check()
                    infos = {info.config.name: info for info in await stored.jetstream.streams_info()}
            assert {name: infos[name].config.num_replicas for name in STREAMS} == dict.fromkeys(STREAMS, 3)
            leader = infos[LEASES].cluster
            assert leader is not None
            await asyncio.to_thread(cluster.nodes[str(leader.leader)].stop)
            async with asyncio.timeout(WAIT_S):
                assert isinstance(await _take_with_retries(stored.leases), Lease)
    finally:
        await asyncio.gather(*(asyncio.to_thread(node.stop) for node in cluster.nodes.values()))


async def makes_commands(jetstream: JetStreamContext) -> bool:
    await jetstream.add_stream(StreamConfig(name="cg_cmd_v1r4", subjects=["cg.v1r4.*.*.cmd.*.*.>"], num_replicas=3))
    return True


async def _take_with_retries(leases_: Leases) -> Any:
    while True:
        try:
            return await leases_.take(redelivered(1))
        except Unavailable:  # there is no leader yet
            await asyncio.sleep(0.1)


# An executor on a leaf node, whose JetStream domain is not the kernel's.


@dataclass(frozen=True, slots=True)
class LeafNode:
    """A hub and a leaf node that is connected to it."""

    hub: NatsServer
    leaf: NatsServer

    def settings(self, **changes: Any) -> Settings:
        return Settings(postgres=DSN, nats={"servers": self.leaf.url, **changes})


@pytest.fixture
async def tree(stack: EmbeddedStack) -> AsyncIterator[LeafNode]:
    """A hub, and a leaf node with a JetStream domain of its own."""
    port, run = free_port(), uuid.uuid4().hex[:8]
    hub = _server(stack, run, "hub", f'leafnodes {{ listen: "127.0.0.1:{port}" }}')
    leaf = _server(stack, run, "leaf", f'leafnodes {{ remotes: [ {{ url: "nats-leaf://127.0.0.1:{port}" }} ] }}')
    for one in (hub, leaf):
        await asyncio.to_thread(one.start)
    await _joined(leaf)
    yield LeafNode(hub, leaf)
    for one in (leaf, hub):
        await asyncio.to_thread(one.stop)


def _server(stack: EmbeddedStack, run: str, domain: str, more: str) -> NatsServer:
    store = json.dumps(str(stack.folder / f"{run}-{domain}-store"))
    return another_nats(stack, f"{run}-{domain}", f"\njetstream {{ store_dir: {store}, domain: {domain} }}\n{more}\n")


async def _joined(leaf: NatsServer) -> None:
    """Wait until the leaf's clients reach the hub's JetStream. Raises TimeoutError."""
    client = await nats.connect(leaf.url)
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                await client.request("$JS.hub.API.INFO", b"", timeout=1)
                break
            except (nats.errors.NoRespondersError, nats.errors.TimeoutError):
                await asyncio.sleep(0.05)
    await client.close()


@asynccontextmanager
async def kernel_on(server: NatsServer, stack: EmbeddedStack, database: str) -> AsyncIterator[World]:
    async with Caller.open(stack.postgres.dsn(database), servers=server.url) as kernel:
        await kernel.make_stream()
        async with open_world(stack, kernel, database) as world:
            yield world


@requirement("nats.login")
async def test_no_command_stream_is_created_on_a_leaf_node(tree: LeafNode) -> None:
    """Such a stream would never get a command, and the executor would look ready."""
    bootstrap = build_bootstrap(tree.settings(), {})
    async with connected(bootstrap.bus) as client:
        with pytest.raises(StreamMissing, match=r"JetStream domain 'leaf' of this server: set nats\.jetstream_domain"):
            await ensure_durable(client, bootstrap.durable)
        with pytest.raises(NotFoundError):
            await client.jetstream().stream_info(STREAM)


@requirement("nats.login")
async def test_an_operator_can_forbid_creating_the_command_stream(tree: LeafNode) -> None:
    bootstrap = build_bootstrap(tree.settings(jetstream_domain="leaf", create_stream=False), {})
    async with connected(bootstrap.bus) as client:
        with pytest.raises(StreamMissing, match=r"nats\.create_stream is off"):
            await ensure_durable(client, bootstrap.durable)
    bootstrap = build_bootstrap(tree.settings(jetstream_domain="leaf"), {})
    async with connected(bootstrap.bus) as client:
        assert (await ensure_durable(client, bootstrap.durable)).stream == STREAM


@requirement("nats.login")
async def test_from_a_leaf_node_calls_of_the_hub_are_answered(
    tree: LeafNode, stack: EmbeddedStack, caller: Caller, database: str
) -> None:
    del caller  # the fixture has created project and agent
    async with kernel_on(tree.hub, stack, database) as world:
        settings = {"servers": tree.leaf.url, "jetstream_domain": "hub", "inbox_prefix": "_INBOX.mine"}
        async with world.executor(nats=settings):
            outcome = await world.send(await world.place())
            stale = await world.send(await world.place(), headers={"CG-Turn-Id": "an-old-turn"})
        assert outcome.content["status"] == "success"
        assert len(outcome.doorbells) == 1
        assert [letter["reason"] for letter in stale.dead_letters] == ["stale_turn"]
        bootstrap = build_bootstrap(tree.settings(jetstream_domain="hub"), {})
        async with connected(bootstrap.bus) as client:
            assert isinstance(await Leases(client, 5).take(redelivered(1)), Lease)
            assert await shared_session_key(client) == await shared_session_key(world.caller.client)
            await client.jetstream().stream_info("KV_openapi_tool_leases")
        names = {info.config.name for info in await world.caller.client.jetstream().streams_info()}
        assert names == {STREAM, "KV_openapi_tool", "KV_openapi_tool_leases", "openapi_tool_dead_letters"}


@pytest.mark.parametrize(
    ("subject", "reached"),
    [
        ("$JS.API.STREAM.INFO.x", "$JS.hub.API.STREAM.INFO.x"),
        ("$KV.bucket.key", "$JS.hub.API.$KV.bucket.key"),
        ("$JS.ACK.x.y.1", "$JS.ACK.x.y.1"),
        ("$JS.hub.API.INFO", "$JS.hub.API.INFO"),
        ("cg.v1r4.p.c.cmd.agent.w.wakeup", "cg.v1r4.p.c.cmd.agent.w.wakeup"),
    ],
)
@requirement("nats.login")
def test_only_jetstream_subjects_are_mapped_to_the_domain(subject: str, reached: str) -> None:
    assert routed(subject, "hub") == reached
    assert routed(subject, None) == subject


@requirement("nats.login", "privilege.subjects")
def test_permissions_follow_domain_and_inbox(monkeypatch: pytest.MonkeyPatch) -> None:
    def printed() -> Mapping[str, Any]:
        found: Mapping[str, Any] = json.loads(CliRunner().invoke(app, ["nats", "permissions", "--json"]).stdout)
        return found

    usual = printed()["publish"]["allow"]
    monkeypatch.setenv("OPENAPI_TOOL__NATS__JETSTREAM_DOMAIN", "hub")
    monkeypatch.setenv("OPENAPI_TOOL__NATS__INBOX_PREFIX", "_INBOX.mine")
    with_domain = printed()
    assert with_domain["publish"]["allow"] == [routed(subject, "hub") for subject in usual]
    assert not [subject for subject in with_domain["publish"]["allow"] if subject.startswith(("$JS.API", "$KV"))]
    ours = [
        f"openapi_tool.{name}" for name in ("stats", f"handed_back.{STREAM}.{DURABLE}", "key_limits.>", "accounts.>")
    ]
    assert with_domain["subscribe"]["allow"] == ["_INBOX.mine.>", *ours]


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


def _monitor(
    client: BusClient, options: DurableOptions, consumer: FakeConsumer, health: Health, replicas: int = 1
) -> DurableMonitor:
    return DurableMonitor(client, options, cast("CommandConsumer", consumer), ServerClock(), health, replicas)


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
        options = replace(self.options, nats=replace(self.options.nats, max_ack_pending=max_ack_pending))
        return _monitor(self.client, options, self.consumer, self.health)

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
            monitor = _monitor(client, bootstrap.durable, consumer, health)
            await monitor.check()
            consumer.calls.clear()
            yield Watched(nats_server, client, admin.jetstream(), bootstrap.durable, durable, consumer, health, monitor)
        await admin.close()


@requirement("nats.watched")
async def test_a_correct_durable_is_ready_and_its_reply_sets_the_clock(watched: Watched) -> None:
    assert (watched.reason(NATS), watched.reason()) == ("", "")
    assert watched.health.clock_offset_s == pytest.approx(0, abs=1)
    assert watched.consumer.ack_wait_s == watched.options.nats.ack_wait_s


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
    monkeypatch.setattr("openapi_tool.kernel.jetstream.durable_monitor.asyncio.sleep", create_durable_meanwhile)
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
    async def unknown(*_: Any, **__: Any) -> None:
        raise nats.errors.NoRespondersError  # before nats-server 2.14

    monkeypatch.setattr(JetStreamContext, "reset_consumer", unknown)
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
    assert (info.config.max_ack_pending, info.config.ack_wait) == (
        14,
        watched.options.nats.ack_wait_s,
    )  # twice the backlog
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
    async def refused(*_: Any, **__: Any) -> None:
        raise nats.errors.Error

    await fill(watched, 2, 1)
    monkeypatch.setattr(durable_capacity, "change_durable", refused)
    for _ in range(3):
        await watched.monitor.check()
    monkeypatch.undo()
    monkeypatch.setattr(durable_capacity, "MAX_ACK_PENDING", 2)
    await watched.monitor.check()
    assert actions(caplog).count("durable.full") == 1
    assert (await watched.info()).config.max_ack_pending == 2


@requirement("nats.watched")
async def test_settings_that_are_changed_repeatedly_are_restored_once_a_minute(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []

    async def refused(*_: Any, **__: Any) -> None:
        tried.append(time.monotonic())

    monkeypatch.setattr(durable_settings, "change_durable", refused)
    await watched.change(max_deliver=3)
    for _ in range(4):
        await watched.monitor.check()
    assert len(tried) == 1
    monkeypatch.setattr(durable_settings, "_RESTORE_RETRY_S", 0.0)
    await watched.monitor.check()
    assert len(tried) == 2


_YEAR_NS = 365 * 86_400 * 10**9
HINDERING = {
    "headers_only": ("headers_only", True),
    "max_batch": ("max_batch", 1),
    "max_expires": ("max_expires", 10**9),
    "max_bytes": ("max_bytes", 1024),
    "short ack_wait": ("ack_wait", 10**6),  # the server would redeliver each command a thousand times a second
    "long ack_wait": ("ack_wait", _YEAR_NS),  # the commands of a replica that died would wait as long
    "inactive_threshold": ("inactive_threshold", 10**9),  # a second without a replica would delete the durable
    "backoff": ("backoff", [10**6, 10**9]),  # replaces AckWait
    "priority_groups": ("priority_groups", ["a"]),  # refuses requests that name none
}


@pytest.mark.parametrize(("setting", "value"), HINDERING.values(), ids=HINDERING)
@requirement("nats.watched")
async def test_settings_that_stop_deliveries_are_named_and_restored(
    watched: Watched, setting: str, value: object
) -> None:
    name = watched.durable.name
    subject = f"$JS.API.CONSUMER.INFO.{watched.durable.stream}.{name}"
    config = json.loads((await watched.client.request(subject)).data)["config"]
    config |= {setting: value, "max_deliver": 5}
    if setting == "priority_groups":
        config["priority_policy"] = "prioritized"
    request = {"stream_name": watched.durable.stream, "config": config, "action": "update"}
    reply = await watched.client.request(
        f"$JS.API.CONSUMER.DURABLE.CREATE.{watched.durable.stream}.{name}", json.dumps(request).encode()
    )
    assert json.loads(reply.data)["config"][setting]
    await watched.monitor.check()
    assert setting in watched.reason()
    assert watched.consumer.ack_wait_s == watched.options.nats.ack_wait_s, "heartbeats would use up the CPU, or cease"
    await watched.monitor.check()
    assert watched.reason() == ""
    restored = json.loads((await watched.client.request(subject)).data)["config"]
    assert setting == "ack_wait" or not restored.get(setting)
    assert (restored["max_deliver"], restored["ack_wait"]) == (-1, watched.options.nats.ack_wait_s * 10**9)
    assert watched.consumer.ack_wait_s == watched.options.nats.ack_wait_s


@requirement("nats.watched")
async def test_fewer_replicas_of_the_durable_than_of_its_stream_are_restored(watched: Watched) -> None:
    monitor = _monitor(watched.client, watched.options, watched.consumer, watched.health, replicas=3)
    await watched.change(num_replicas=1)
    await watched.monitor.check()
    assert watched.reason() == "", "the stream has one"
    await monitor.check()
    assert "num_replicas" in watched.reason()
    await monitor.check()
    assert watched.reason() == ""
    assert not (await watched.info()).config.num_replicas


@pytest.mark.parametrize(
    ("changed", "unready", "warning"),
    [
        ({"ack_policy": "none", "ack_wait": None, "max_ack_pending": None}, "ack_policy 'none'", False),
        ({"replay_policy": "original"}, "replay_policy 'original'", False),
        ({"mem_storage": True}, "", True),
    ],
    ids=["ack policy", "replay policy", "storage"],
)
@requirement("nats.watched")
async def test_settings_that_only_the_creator_of_a_durable_chooses_are_named(
    watched: Watched, changed: dict[str, Any], unready: str, caplog: pytest.LogCaptureFixture, *, warning: bool
) -> None:
    config = (await watched.info()).config
    await watched.admin.delete_consumer(watched.durable.stream, watched.durable.name)
    await watched.admin.add_consumer(watched.durable.stream, config.evolve(**changed, name=watched.durable.name))
    await watched.monitor.check()
    assert unready in watched.reason()
    assert bool(watched.reason()) == bool(unready)
    assert ("durable.in_memory" in [getattr(record, "action", "") for record in caplog.records]) == warning


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
    for message in await pull.fetch(settled, timeout=WAIT_S):
        await message.ack_sync()
    await pull.unsubscribe()


async def pending_after_deletion(watched: Watched) -> int:
    """Delete and recreate the durable; return how many commands it will deliver."""
    await shared_bucket.shared_bucket().open(watched.client.jetstream())
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
    await (await shared_bucket.shared_bucket().open(watched.client.jetstream())).put(
        f"floor.{watched.durable.name}", stored
    )
    await settle(watched, 5, 3)
    assert await pending_after_deletion(watched) == 2


@requirement("nats.watched")
async def test_an_ack_floor_that_cannot_be_stored_is_no_problem(watched: Watched) -> None:
    await settle(watched, 5, 3)
    await watched.monitor.check()  # there is no bucket
    assert watched.reason() == ""


@pytest.mark.alone
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
            monitor = _monitor(client, bootstrap.durable, FakeConsumer(durable), health)
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


@pytest.mark.alone
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
