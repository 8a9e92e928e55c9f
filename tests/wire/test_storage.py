"""Streams and buckets of executors: created, replicated, recreated and reported when full; JetStream domains."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import nats
import nats.errors
import pytest
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, KeyValueConfig, StreamConfig
from nats.js.errors import NotFoundError
from tenacity import stop_after_delay, wait_fixed
from typer.testing import CliRunner

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.bus import dead_letters, kv_stores, leases
from openapi_tool.bus.client import BusClient, routed
from openapi_tool.bus.connection import connected
from openapi_tool.bus.dead_letters import DeadLetters
from openapi_tool.bus.kv_stores import ParkedResultStore, shared_session_key
from openapi_tool.bus.leases import Lease, Leases
from openapi_tool.bus.storage import Storage
from openapi_tool.bus.streams import StreamMissing, ensure_durable, replica_count
from openapi_tool.cli import app
from openapi_tool.concurrency import retried
from openapi_tool.local.caller import STREAM, Caller
from openapi_tool.local.servers import NatsServer, free_port
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.settings import Settings
from openapi_tool.telemetry.health import JETSTREAM, Health
from openapi_tool.telemetry.redact import Redactor
from tests.chaos.profiles import until_led
from tests.chaos.servers import NatsCluster
from tests.requirements import requirement
from tests.support import delivery
from tests.wire.test_bus import DSN, server
from tests.wire.world import DURABLE, World, open_world

LEASES, SESSIONS, PARKED = f"KV_{leases.BUCKET}", f"KV_{kv_stores.BUCKET}", f"KV_{kv_stores.PARKED_BUCKET}"
STREAMS = {LEASES, SESSIONS, PARKED, dead_letters.STREAM}


@dataclass
class Stored:
    """Stores of an executor, and the check of their streams."""

    client: BusClient
    leases: Leases
    parked: ParkedResultStore
    storage: Storage
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
    return replace(delivery(), attempt=2, stream="stream", stream_sequence=sequence)


async def stored_on(client: BusClient, replicas: int = 1) -> Stored:
    health, leases_, results = Health(), Leases(client, 5.0, replicas), ParkedResultStore(client, replicas)
    key = await retried(
        lambda: shared_session_key(client, replicas), on=Unavailable, wait=wait_fixed(0.1), stop=stop_after_delay(20)
    )  # as at the start: a new cluster may lose the first replies
    storage = Storage(client, leases_, results, DeadLetters(client, Redactor(), replicas), key, replicas, health)
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
    open_bucket = ParkedResultStore._bucket  # noqa: SLF001 - the only hook between look-up and creation
    others = [KeyValueConfig(bucket=kv_stores.PARKED_BUCKET, ttl=7200)]

    async def create_meanwhile(parked: ParkedResultStore) -> Any:
        try:
            return await open_bucket(parked)
        finally:
            if others:
                await stored.jetstream.create_key_value(others.pop())

    monkeypatch.setattr(ParkedResultStore, "_bucket", create_meanwhile)
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
    await kv_stores.restore_session_key(stored.client, stored.storage.session_key or b"")
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
    await stored.jetstream.publish(f"{dead_letters.SUBJECT}.proj", b"{}")
    await stored.storage.check()
    assert f"{dead_letters.STREAM} is full" in stored.reason()


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
            await stored.storage.check()
            infos = {info.config.name: info for info in await stored.jetstream.streams_info()}
            assert {name: infos[name].config.num_replicas for name in STREAMS} == dict.fromkeys(STREAMS, 3)
            leader = infos[LEASES].cluster
            assert leader is not None
            await asyncio.to_thread(cluster.nodes[str(leader.leader)].stop)
            async with asyncio.timeout(20):
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
        except (nats.errors.Error, OSError):  # there is no leader yet
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
    return stack.another_nats(f"{run}-{domain}", f"\njetstream {{ store_dir: {store}, domain: {domain} }}\n{more}\n")


async def _joined(leaf: NatsServer) -> None:
    """Wait until the leaf's clients reach the hub's JetStream. Raises TimeoutError."""
    client = await nats.connect(leaf.url)
    async with asyncio.timeout(10):
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
    del caller  # it has made project and agent
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
    ours = [f"openapi_tool.{name}" for name in ("stats", f"returned.{STREAM}.{DURABLE}", "limits.>", "budgets.>")]
    assert with_domain["subscribe"]["allow"] == ["_INBOX.mine.>", *ours]
