"""Connections to NATS and PostgreSQL with every way to authenticate, and what replicas share."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import ssl
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import nats.errors
import nkeys
import pytest
import trustme
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

from openapi_tool.bus.connection import connected
from openapi_tool.bus.dead_letters import DeadLetters
from openapi_tool.bus.leases import Leases
from openapi_tool.bus.shared import shared_session_key
from openapi_tool.bus.streams import ensure_durable
from openapi_tool.kernel.store import KernelStore
from openapi_tool.local.caller import STREAM
from openapi_tool.local.nats_server import NatsServer
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.prepared import prepare
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.settings import Settings
from tests.promises import requirement
from tests.support import delivery
from tests.wire.world import World

DSN = {"dsn": "postgresql://127.0.0.1/unused"}


@contextmanager
def server(stack: EmbeddedStack, more: str) -> Iterator[NatsServer]:
    server = stack.another_nats(f"nats-{uuid.uuid4().hex[:8]}", more)
    server.start()
    yield server
    server.stop()


@asynccontextmanager
async def client_of(**section: Any) -> AsyncIterator[Client]:
    prepared = prepare(Settings(postgres=DSN, nats=section), {})
    async with asyncio.timeout(5), connected(prepared.bus) as client:
        yield client


async def assert_connects(**section: Any) -> None:
    async with client_of(**section) as client:
        await client.flush()


async def assert_refused(**section: Any) -> None:
    """A server that refuses is tried again for ever, so the attempt has to be cut short."""
    prepared = prepare(Settings(postgres=DSN, nats=section), {})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3), connected(prepared.bus):
            pass


@requirement("bus.login")
async def test_a_user_with_a_password(stack: EmbeddedStack) -> None:
    with server(stack, 'authorization { user: "u", password: "the-right-one" }') as nats_server:
        await assert_connects(servers=nats_server.url, user="u", password="the-right-one")
        await assert_refused(servers=nats_server.url, user="u", password="another")
        await assert_refused(servers=nats_server.url)


@requirement("bus.login")
async def test_a_token(stack: EmbeddedStack) -> None:
    with server(stack, 'authorization { token: "the-right-token" }') as nats_server:
        await assert_connects(servers=nats_server.url, token="the-right-token")
        await assert_refused(servers=nats_server.url, token="another-token")


@requirement("bus.login")
async def test_an_nkey(stack: EmbeddedStack, tmp_path: Path) -> None:
    seed = _seed(nkeys.PREFIX_BYTE_USER)
    (tmp_path / "user.nk").write_bytes(seed)
    public = nkeys.from_seed(seed).public_key.decode()
    with server(stack, f"authorization {{ users: [ {{ nkey: {public} }} ] }}") as nats_server:
        await assert_connects(servers=nats_server.url, nkey_seed_file=tmp_path / "user.nk")
        await assert_refused(servers=nats_server.url)


@requirement("bus.login")
async def test_a_credentials_file(stack: EmbeddedStack, tmp_path: Path) -> None:
    operator, user = _seed(nkeys.PREFIX_BYTE_OPERATOR), _seed(nkeys.PREFIX_BYTE_USER)
    account, system = (_seed(nkeys.PREFIX_BYTE_ACCOUNT) for _ in range(2))
    config = (
        f"operator: {_jwt(operator, operator, 'operator')}\n"
        f"system_account: {_public(system)}\nresolver: MEMORY\nresolver_preload: {{\n"
        f"  {_public(account)}: {_jwt(operator, account, 'account')}\n"
        f"  {_public(system)}: {_jwt(operator, system, 'account')}\n}}\n"
    )
    credentials = tmp_path / "user.creds"
    credentials.write_text(
        f"-----BEGIN NATS USER JWT-----\n{_jwt(account, user, 'user')}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.decode()}\n------END USER NKEY SEED------\n"
    )
    with server(stack, config) as nats_server:
        await assert_connects(servers=nats_server.url, credentials_file=credentials)
        await assert_refused(servers=nats_server.url)


@requirement("bus.tls")
async def test_tls_with_a_client_certificate(stack: EmbeddedStack, tmp_path: Path) -> None:
    authority = trustme.CA()
    files = {name: tmp_path / f"{name}.pem" for name in ("ca", "server", "client", "client_key")}
    authority.cert_pem.write_to_path(str(files["ca"]))
    authority.issue_cert("localhost", "127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(files["server"]))
    client = authority.issue_cert("executor")
    client.cert_chain_pems[0].write_to_path(str(files["client"]))
    client.private_key_pem.write_to_path(str(files["client_key"]))
    paths = {name: json.dumps(str(path)) for name, path in files.items()}
    more = f"tls {{ cert_file: {paths['server']}, key_file: {paths['server']}, ca_file: {paths['ca']}, verify: true }}"
    mutual = {"ca_file": files["ca"], "cert_file": files["client"], "key_file": files["client_key"]}
    with server(stack, more) as nats_server:
        address = nats_server.url.replace("nats://", "tls://").replace("127.0.0.1", "localhost")
        await assert_connects(servers=address, **mutual)
        await assert_refused(servers=address, ca_file=files["ca"])
        await assert_refused(servers=address, cert_file=files["client"], key_file=files["client_key"])
        other_name = address.replace("localhost", "127.0.0.2")
        await assert_refused(servers=other_name, **mutual)


def _seed(prefix: int) -> bytes:
    return bytes(nkeys.encode_seed(os.urandom(32), prefix))


def _public(seed: bytes) -> str:
    return str(nkeys.from_seed(seed).public_key.decode())


def _jwt(issuer: bytes, subject: bytes, kind: str) -> str:
    """A NATS JWT (version 2), signed by the issuer's key, with no limits: a user's stand beside its type."""
    of_traffic: dict[str, Any] = {"subs": -1, "data": -1, "payload": -1}
    of_account: dict[str, Any] = {
        "limits": {**of_traffic, "imports": -1, "exports": -1, "wildcards": True, "conn": -1, "leaf": -1}
    }
    body: dict[str, Any] = {
        "iss": _public(issuer),
        "sub": _public(subject),
        "name": kind,
        "iat": 1_700_000_000,
        "nats": {"type": kind, "version": 2, **{"account": of_account, "user": of_traffic}.get(kind, {})},
    }
    body["jti"] = base64.b32encode(hashlib.sha256(json.dumps(body).encode()).digest()).decode().rstrip("=")
    unsigned = ".".join(_part(part) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, body))
    signature = nkeys.from_seed(issuer).sign(unsigned.encode())
    return f"{unsigned}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"


def _part(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


@requirement("session.shared_key")
async def test_the_first_replica_makes_the_session_key_and_all_share_it(stack: EmbeddedStack) -> None:
    with server(stack, "") as nats_server:
        async with client_of(servers=nats_server.url) as one, client_of(servers=nats_server.url) as other:
            keys = await asyncio.gather(*(shared_session_key(client) for client in (one, other, one, other)))
        assert len(set(keys)) == 1
        assert len(keys[0]) == 32
        nats_server.stop()
        nats_server.start()
        async with client_of(servers=nats_server.url) as again:
            assert await shared_session_key(again) == keys[0]


def test_an_unusable_certificate_is_no_reason_to_connect_without(tmp_path: Path) -> None:
    broken = tmp_path / "ca.pem"
    broken.write_text("no certificate")
    with pytest.raises(Exception, match=r"nats\.ca_file"):
        prepare(Settings(postgres=DSN, nats={"ca_file": broken}), {})
    assert ssl.create_default_context().check_hostname


@requirement("bus.replicas")
async def test_whatever_is_made_is_made_with_the_replicas_that_are_asked_for(stack: EmbeddedStack) -> None:
    """A lone server refuses more than one."""
    with server(stack, "") as nats_server:
        prepared = prepare(Settings(postgres=DSN, nats={"servers": nats_server.url, "replicas": 3}), {})
        durable, replicas = prepared.durable, prepared.settings.nats.replicas
        async with connected(prepared.bus) as client:
            for made in (
                ensure_durable(client, durable),
                shared_session_key(client, replicas),
                Leases(client, 1.0, replicas).take(delivery()),
                DeadLetters(client, replicas).keep(delivery(), "reason", "message"),
            ):
                with pytest.raises((nats.errors.Error, Unavailable), match="replicas > 1 not supported"):
                    await made
            assert await client.jetstream().streams_info() == []


@requirement("bus.replicas")
async def test_the_executor_asks_for_the_replicas_that_are_set(
    idle_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, asked, add_stream = idle_world, [], JetStreamContext.add_stream

    async def add_stream_and_tell(self: JetStreamContext, config: StreamConfig) -> Any:
        asked.append((config.name, config.num_replicas))
        return await add_stream(self, config.evolve(num_replicas=1))

    monkeypatch.setattr(JetStreamContext, "add_stream", add_stream_and_tell)
    await world.caller.forget_streams()
    load, away = KernelStore.load, [True]

    async def load_later(self: KernelStore, key: Any) -> Any:
        if away:
            away.pop()
            raise Unavailable("PostgreSQL: away")
        return await load(self, key)

    monkeypatch.setattr(KernelStore, "load", load_later)
    async with world.executor(nats={"servers": world.stack.nats.url, "replicas": 3}):
        async with asyncio.timeout(5):
            while (STREAM, 3) not in asked:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        await world.send(await world.place(), headers={"CG-Turn-Id": "an-old-turn"})
    assert set(asked) == {
        (name, 3) for name in (STREAM, "KV_openapi_tool", "KV_openapi_tool_leases", "openapi_tool_dead_letters")
    }
