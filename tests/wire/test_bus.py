"""Connections to NATS: every authentication method, TLS, and the key that replicas share."""

from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import json
import os
import ssl
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nats.errors
import nkeys
import pytest
import trustme
from aiohttp import web
from aiohttp.test_utils import TestServer
from nats.aio.msg import Msg
from nats.errors import BadHeaderError, MaxPayloadError
from nats.js import JetStreamContext
from nats.js.api import Header, StreamConfig

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.kernel.jetstream.dead_letters import DeadLetters
from openapi_tool.kernel.jetstream.leases import Leases
from openapi_tool.kernel.jetstream.pull_requests import unsubscribe
from openapi_tool.kernel.jetstream.streams import ensure_durable
from openapi_tool.kernel.postgres.store import KernelStore
from openapi_tool.local.caller import STREAM, Caller
from openapi_tool.local.servers import NatsServer, free_port
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.connection import connected
from openapi_tool.nats_records.session_key import SESSION_KEY, shared_session_key
from openapi_tool.nats_records.shared_bucket import BUCKET, shared_bucket
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.settings import Settings
from openapi_tool.telemetry.redact import MASK, Redactor
from tests.requirements import requirement
from tests.support import another_nats, delete_streams, delivery
from tests.waiting import WAIT_S, until
from tests.wire.conftest import FakeServer, World, fake_server, info

DSN = {"dsn": "postgresql://127.0.0.1/unused"}


@contextmanager
def server(stack: EmbeddedStack, more: str) -> Iterator[NatsServer]:
    server = another_nats(stack, f"nats-{uuid.uuid4().hex[:8]}", more)
    server.start()
    yield server
    server.stop()


@asynccontextmanager
async def client_of(**section: Any) -> AsyncIterator[BusClient]:
    bootstrap = build_bootstrap(Settings(postgres=DSN, nats=section), {})
    async with asyncio.timeout(WAIT_S), connected(bootstrap.bus) as client:
        yield client


@requirement("nats.login")
async def test_replies_arrive_at_the_configured_inbox(stack: EmbeddedStack) -> None:
    """A user with permission for this inbox only would otherwise wait forever at the start."""
    with server(stack, "") as nats_server:
        async with client_of(servers=nats_server.url, inbox_prefix="_INBOX.mine") as client:
            requests: asyncio.Queue[Msg] = asyncio.Queue()
            await client.subscribe("echo", cb=requests.put)
            reply = asyncio.create_task(client.request("echo", timeout=5))
            request = await requests.get()
            assert request.reply.startswith("_INBOX.mine.")
            await request.respond(b"")
            await reply


@requirement("command.any")
async def test_headers_are_sent_in_one_line_each_and_counted_with_the_payload(stack: EmbeddedStack) -> None:
    """The server would end a connection that sends more than it takes."""
    with server(stack, "max_payload: 1024") as nats_server:
        async with client_of(servers=nats_server.url) as client:
            received: asyncio.Queue[Msg] = asyncio.Queue()
            await client.subscribe("subject", cb=received.put)
            headers = {Header.MSG_ID: "é", "line": "a\r\nb: c", "padding": "x" * 500}
            block = f"NATS/1.0\r\nNats-Msg-Id: é\r\nline: a  b: c\r\npadding: {'x' * 500}\r\n\r\n"
            fitting = 1024 - len(block.encode())
            with pytest.raises(MaxPayloadError):
                await client.publish("subject", b"p" * (fitting + 1), headers=headers)
            await client.publish("subject", b"p" * fitting, headers=headers)
            message = await received.get()
            assert message.headers == {"Nats-Msg-Id": "é", "line": "a  b: c", "padding": "x" * 500}
            with pytest.raises(BadHeaderError):
                await client.publish("subject", headers={"a b": "1"})


async def assert_connects(**section: Any) -> None:
    async with client_of(**section) as client:
        await client.flush()


async def assert_refused(**section: Any) -> None:
    """Assert that no connection is made. The client retries forever, so the attempt is cut short."""
    bootstrap = build_bootstrap(Settings(postgres=DSN, nats=section), {})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3), connected(bootstrap.bus):
            pass


@requirement("nats.login")
async def test_login_with_user_and_password(stack: EmbeddedStack) -> None:
    with server(stack, 'authorization { user: "u", password: "the-right-one" }') as nats_server:
        await assert_connects(servers=nats_server.url, user="u", password="the-right-one")
        await assert_refused(servers=nats_server.url, user="u", password="another")
        await assert_refused(servers=nats_server.url)


@requirement("nats.login")
async def test_login_with_a_token(stack: EmbeddedStack, tmp_path: Path) -> None:
    with server(stack, 'authorization { token: "the-right-token" }') as nats_server:
        await assert_connects(servers=nats_server.url, token="the-right-token")
        file = tmp_path / "token"
        file.write_text("the-right-token\n")
        await assert_connects(servers=nats_server.url, token_file=file)
        await assert_refused(servers=nats_server.url, token="another-token")


@requirement("nats.rotation", "secrets.output")
async def test_a_new_password_in_a_file_is_used_and_masked(stack: EmbeddedStack, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("the-old-word\n")
    with server(stack, 'authorization { user: "u", password: "the-right-one" }') as nats_server:
        section = {"servers": nats_server.url, "user": "u", "password_file": file}
        bootstrap = build_bootstrap(Settings(postgres=DSN, nats=section), {})
        file.write_text("the-right-one\n")
        async with asyncio.timeout(WAIT_S), connected(bootstrap.bus) as client:
            await client.flush()
    assert bootstrap.redactor.text("the-old-word, the-right-one") == f"{MASK}, {MASK}"


@requirement("nats.login")
async def test_login_with_an_nkey(stack: EmbeddedStack, tmp_path: Path) -> None:
    seed = _seed(nkeys.PREFIX_BYTE_USER)
    (tmp_path / "user.nk").write_bytes(seed)
    public = nkeys.from_seed(seed).public_key.decode()
    with server(stack, f"authorization {{ users: [ {{ nkey: {public} }} ] }}") as nats_server:
        await assert_connects(servers=nats_server.url, nkey_seed_file=tmp_path / "user.nk")
        await assert_refused(servers=nats_server.url)


@requirement("nats.login")
async def test_login_with_a_credentials_file(stack: EmbeddedStack, tmp_path: Path) -> None:
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


@requirement("nats.login")
async def test_login_with_a_client_certificate(stack: EmbeddedStack, tmp_path: Path) -> None:
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
    """Return a NATS JWT (version 2) without limits, signed by the issuer's key."""
    limits: dict[str, Any] = {"subs": -1, "data": -1, "payload": -1}
    account: dict[str, Any] = {
        "limits": {**limits, "imports": -1, "exports": -1, "wildcards": True, "conn": -1, "leaf": -1}
    }
    body: dict[str, Any] = {
        "iss": _public(issuer),
        "sub": _public(subject),
        "name": kind,
        "iat": 1_700_000_000,
        "nats": {"type": kind, "version": 2, **{"account": account, "user": limits}.get(kind, {})},
    }
    body["jti"] = base64.b32encode(hashlib.sha256(json.dumps(body).encode()).digest()).decode().rstrip("=")
    unsigned = ".".join(_part(part) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, body))
    signature = nkeys.from_seed(issuer).sign(unsigned.encode())
    return f"{unsigned}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"


def _part(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


@requirement("session.scoped")
async def test_the_first_replica_creates_the_session_key_and_all_share_it(stack: EmbeddedStack) -> None:
    with server(stack, "") as nats_server:
        async with client_of(servers=nats_server.url) as one, client_of(servers=nats_server.url) as other:
            keys = await asyncio.gather(*(shared_session_key(client) for client in (one, other, one, other)))
        assert len(set(keys)) == 1
        assert len(keys[0]) == 32
        nats_server.stop()
        nats_server.start()
        async with client_of(servers=nats_server.url) as again:
            assert await shared_session_key(again) == keys[0]


@requirement("session.scoped", "privilege.least")
async def test_a_session_key_that_no_executor_made_is_refused(stack: EmbeddedStack) -> None:
    """A user who may send any request to JetStream can have the answer, which it knows, stored as the key."""
    with server(stack, "") as nats_server:
        async with client_of(servers=nats_server.url) as client:
            bucket = await shared_bucket().open(client.jetstream())
            await client.publish("$JS.API.STREAM.MSG.GET.KV_openapi_tool", b'{"seq":1}', f"$KV.{BUCKET}.{SESSION_KEY}")
            async with asyncio.timeout(WAIT_S):
                while not (await client.jetstream().stream_info(f"KV_{BUCKET}")).state.messages:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.02)
            with pytest.raises(Unavailable, match=r"session_key in bucket openapi_tool has \d+ bytes instead of 32"):
                await shared_session_key(client)
            await bucket.put(SESSION_KEY, b"k" * 32)
            assert await shared_session_key(client) == b"k" * 32


def test_an_unusable_certificate_prevents_the_connection(tmp_path: Path) -> None:
    broken = tmp_path / "ca.pem"
    broken.write_text("no certificate")
    with pytest.raises(Exception, match=r"nats\.ca_file"):
        build_bootstrap(Settings(postgres=DSN, nats={"ca_file": broken}), {})
    assert ssl.create_default_context().check_hostname


@requirement("nats.storage")
async def test_streams_and_buckets_are_created_with_the_configured_replicas(stack: EmbeddedStack) -> None:
    """A single server refuses three replicas, which shows that they were requested."""
    with server(stack, "") as nats_server:
        bootstrap = build_bootstrap(Settings(postgres=DSN, nats={"servers": nats_server.url, "replicas": 3}), {})
        durable, replicas = bootstrap.durable, 3
        async with connected(bootstrap.bus) as client:
            for made in (
                ensure_durable(client, durable),
                shared_session_key(client, replicas),
                Leases(client, 1.0, replicas).take(delivery()),
                DeadLetters(client, Redactor(), replicas).record(delivery(), "reason", "message"),
            ):
                with pytest.raises((nats.errors.Error, Unavailable), match="replicas > 1 not supported"):
                    await made
            assert await client.jetstream().streams_info() == []


@requirement("nats.storage")
async def test_the_executor_passes_the_configured_replicas_to_the_server(
    world_without_executor: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, created, add_stream = world_without_executor, [], JetStreamContext.add_stream

    async def record_and_add_stream(self: JetStreamContext, config: StreamConfig) -> Any:
        created.append((config.name, config.num_replicas))
        return await add_stream(self, config.evolve(num_replicas=1))

    monkeypatch.setattr(JetStreamContext, "add_stream", record_and_add_stream)
    await delete_streams(world.caller)
    load, outages = KernelStore.load, [True]

    async def fail_once(self: KernelStore, key: Any) -> Any:
        if outages:
            outages.pop()
            raise Unavailable("PostgreSQL: connection refused")
        return await load(self, key)

    monkeypatch.setattr(KernelStore, "load", fail_once)
    async with world.executor(nats={"servers": world.stack.nats.url, "replicas": 3}):
        await until(lambda: (STREAM, 3) in created)
        await world.send(await world.place(), headers={"CG-Turn-Id": "an-old-turn"})
    assert set(created) == {
        (name, 3) for name in (STREAM, "KV_openapi_tool", "KV_openapi_tool_leases", "openapi_tool_dead_letters")
    }


# Tasks of nats-py end with their subscription, and do not run in the context of a call.


async def _ignore(message: Msg) -> None:
    del message


@pytest.mark.parametrize("connected_then", [True, False])
@requirement("outage")
async def test_a_subscription_that_a_lost_connection_ends_leaves_no_task(
    caplog: pytest.LogCaptureFixture,
    connected_then: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """The garbage collector would log "Task was destroyed" with the ids of whichever call runs at that moment."""
    async with fake_server() as fake, client_of(servers=fake.url) as client:
        subscription = await client.subscribe("subject", cb=_ignore)
        await fake.connections[0].subscribed.wait()
        if not connected_then:
            await client.force_reconnect()
        ending = asyncio.create_task(unsubscribe(client, subscription))
        await asyncio.sleep(0)
        fake.connections[0].drop()
        await ending
        del subscription, ending
        await asyncio.sleep(0)  # in which a cancelled task ends
        gc.collect()
    assert [record.getMessage() for record in caplog.records if "destroyed" in record.getMessage()] == []


@requirement("logs.call")
async def test_replies_are_not_received_in_the_context_of_a_call(
    stack: EmbeddedStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    call: ContextVar[str] = ContextVar("call", default="none")
    receive, seen = BusClient._on_reply, []  # noqa: SLF001 - replaced on purpose

    async def record(self: BusClient, message: Msg) -> None:
        seen.append(call.get())
        await receive(self, message)

    monkeypatch.setattr(BusClient, "_on_reply", record)
    with server(stack, "") as nats_server:
        async with client_of(servers=nats_server.url) as client:
            call.set("a call")
            await client.jetstream().account_info()
    assert seen == ["none"]


# If TLS is configured, no byte of a login is sent without it.


LOGIN = {"user": "executor", "password": "the-right-one"}
REASON = "does not offer TLS"


@dataclass(frozen=True, slots=True)
class Authority:
    """Certificate authority and a certificate for loopback, as files and as the context of a Python server."""

    ca: Path
    server: Path
    context: ssl.SSLContext


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    folder = tmp_path_factory.mktemp("authority")
    made, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate = made.issue_cert("localhost", "127.0.0.1")
    certificate.configure_cert(context)
    made.cert_pem.write_to_path(str(folder / "ca.pem"))
    certificate.private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
    return Authority(folder / "ca.pem", folder / "server.pem", context)


def bus(servers: str, **section: Any) -> Any:
    return build_bootstrap(Settings(postgres=DSN, nats={"servers": servers, **LOGIN, **section}), {}).bus


async def refused(servers: str, **section: Any) -> str:
    """Return the message for an operator if the connection is refused at the start."""
    with pytest.raises(Unavailable) as error:
        async with asyncio.timeout(WAIT_S), connected(bus(servers, **section)):
            pass
    return str(error.value)


@pytest.mark.parametrize("asked", ["tls", "scheme", "ca_file"])
@pytest.mark.parametrize("greeting", [{}, {"tls_required": False}, {"tls_required": 0, "auth_required": True}])
@requirement("nats.login")
async def test_nothing_is_sent_to_a_server_without_tls(
    authority: Authority, asked: str, greeting: dict[str, Any]
) -> None:
    async with fake_server(**greeting) as fake:
        sections: dict[str, Any] = {"tls": {"tls": True}, "ca_file": {"ca_file": authority.ca}, "scheme": {}}
        url = fake.url.replace("nats://", "tls://") if asked == "scheme" else fake.url
        reason = await refused(url, **sections[asked])
        assert fake.received == b""
    assert REASON in reason
    assert fake.url.removeprefix("nats://") in reason
    assert "the-right-one" not in reason


@requirement("nats.login")
async def test_one_tls_url_requires_tls_of_all_servers(caplog: pytest.LogCaptureFixture) -> None:
    """A man in the middle of the plain connection could announce the other server."""
    async with fake_server() as plain, fake_server() as other:
        assert REASON in await refused(f"{plain.url},{other.url.replace('nats://', 'tls://')}")
        assert plain.received + other.received == b""
    assert [record for record in caplog.records if REASON in record.getMessage()]


async def _until(fake: FakeServer, accepted: int) -> None:
    while len(fake.connections) < accepted:
        await fake.accepted.get()


@requirement("nats.login")
async def test_a_reconnect_requires_tls(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    async with fake_server(tls_required=True) as fake, asyncio.timeout(WAIT_S):
        fake.tls = authority.context
        async with connected(bus(fake.url, ca_file=authority.ca)) as client:
            first = fake.connections[0]
            assert b"the-right-one" in first.received
            offered, fake.greeting, fake.tls = fake.greeting, info(), None
            first.drop()
            await _until(fake, 3)
            fake.greeting, fake.tls = offered, authority.context
            while client.stats["reconnects"] == 0:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.05)
            assert b"the-right-one" in fake.connections[-1].received
        plain = [connection.received for connection in fake.connections[1:3]]
    assert plain == [b"", b""]
    assert [record for record in caplog.records if REASON in record.getMessage()]


@requirement("nats.login")
async def test_an_announced_server_requires_tls(authority: Authority) -> None:
    async with fake_server() as plain:
        announced = [plain.url.removeprefix("nats://")]
        async with fake_server(tls_required=True, connect_urls=announced) as first, asyncio.timeout(WAIT_S):
            first.tls = authority.context
            async with connected(bus(first.url, ca_file=authority.ca)):
                first.greeting, first.tls = info(), None
                first.connections[0].drop()
                await _until(plain, 1)
                await _until(first, 2)
                assert plain.received + first.connections[1].received == b""


@requirement("nats.login")
async def test_tls_is_used_if_the_server_offers_it_without_requiring_it(
    stack: EmbeddedStack, authority: Authority
) -> None:
    certificate = json.dumps(str(authority.server))
    more = f"tls {{ cert_file: {certificate}, key_file: {certificate} }}\nallow_non_tls: true\n"
    with server(stack, more) as nats_server:
        await assert_connects(servers=nats_server.url, ca_file=authority.ca)
        await assert_connects(servers=nats_server.url)


@pytest.mark.filterwarnings("ignore:parameter 'timeout':DeprecationWarning")  # nats-py's use of aiohttp
@requirement("nats.login")
async def test_a_websocket_requires_tls(stack: EmbeddedStack, authority: Authority) -> None:
    certificate = json.dumps(str(authority.server))
    users = 'authorization { user: "executor", password: "the-right-one" }\n'
    port = free_port()
    listen = f'listen: "127.0.0.1:{port}"'
    with server(
        stack, f"websocket {{ {listen}, tls {{ cert_file: {certificate}, key_file: {certificate} }} }}\n{users}"
    ):
        await assert_connects(servers=f"wss://127.0.0.1:{port}", ca_file=authority.ca, **LOGIN)
    with server(stack, f"websocket {{ {listen}, no_tls: true }}\n{users}"):
        await assert_connects(servers=f"ws://127.0.0.1:{port}", **LOGIN)
        assert REASON in await refused(f"ws://127.0.0.1:{port}", tls=True)


@pytest.mark.filterwarnings("ignore:parameter 'timeout':DeprecationWarning")  # nats-py's use of aiohttp
@requirement("nats.login")
async def test_nothing_is_sent_over_a_plain_websocket_that_claims_tls() -> None:
    received: list[bytes] = []

    async def claim(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_bytes(info(tls_required=True, tls_available=True))
        received.extend([message.data async for message in socket])
        return socket

    application = web.Application()
    application.router.add_get("/", claim)
    async with TestServer(application, host="127.0.0.1") as claiming:
        assert REASON in await refused(f"ws://127.0.0.1:{claiming.port}", tls=True)
    assert received == []


@dataclass(frozen=True, slots=True)
class Refusal:
    """Name and validity of the server's certificate, the executor's settings, and why there is no connection."""

    says: str
    host: str = "localhost"
    until: datetime = datetime(2100, 1, 1, tzinfo=UTC)
    settings: Mapping[str, str] = field(default_factory=dict)


UNKNOWN_ISSUER = "the server's certificate cannot be verified (unable to get local issuer certificate); "
REFUSALS = {
    "another CA": Refusal(UNKNOWN_ISSUER + "check nats.ca_file ({other_ca})", settings={"ca_file": "other_ca"}),
    "no CA": Refusal(UNKNOWN_ISSUER + "set nats.ca_file"),
    "another host": Refusal(
        "the server's certificate is of another host (Hostname mismatch, certificate is not valid for 'localhost'.); "
        "check nats.servers (NATS_SERVERS)",
        host="elsewhere.example",
        settings={"ca_file": "ca"},
    ),
    "expired": Refusal(
        "the server's certificate cannot be used now (certificate has expired); renew it, and check the clocks",
        until=datetime(2020, 1, 1, tzinfo=UTC),
        settings={"ca_file": "ca"},
    ),
    "no client certificate": Refusal(
        "the server requires a client certificate; set nats.cert_file and nats.key_file", settings={"ca_file": "ca"}
    ),
}


@pytest.mark.filterwarnings("ignore:parameter 'timeout':DeprecationWarning")  # nats-py's use of aiohttp
@pytest.mark.parametrize("scheme", ["tls", "wss"])
@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
@requirement("nats.rotation", "start.reasons")
async def test_the_cause_of_a_failed_handshake_is_named(
    stack: EmbeddedStack, tmp_path: Path, refusal: Refusal, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    if scheme == "wss" and "client" in refusal.says:
        pytest.skip("the greeting, which says that certificates are required, comes after the handshake")
    made, port, paths = trustme.CA(), free_port(), {name: tmp_path / name for name in ("ca", "other_ca", "server")}
    made.cert_pem.write_to_path(str(paths["ca"]))
    trustme.CA().cert_pem.write_to_path(str(paths["other_ca"]))
    certificate = made.issue_cert(refusal.host, not_before=datetime(2019, 1, 1, tzinfo=UTC), not_after=refusal.until)
    certificate.private_key_and_cert_chain_pem.write_to_path(str(paths["server"]))
    pem, ca = (json.dumps(str(paths[name])) for name in ("server", "ca"))
    verify = f"ca_file: {ca}, verify: true" if "client" in refusal.says else ""
    tls = f"tls {{ cert_file: {pem}, key_file: {pem}, {verify} }}"
    if scheme == "wss":
        tls = f'websocket {{ listen: "127.0.0.1:{port}", tls {{ cert_file: {pem}, key_file: {pem} }} }}'
    with server(stack, tls) as nats_server:
        url = f"{scheme}://localhost:{port if scheme == 'wss' else nats_server.url.rpartition(':')[2]}"
        settings = {name: paths[file] for name, file in refusal.settings.items()}
        with pytest.raises(Unavailable) as error:
            async with asyncio.timeout(WAIT_S), connected(replace(bus(url, **settings), once=True)):
                pass
    where = url.partition("://")[2]
    assert str(error.value) == f"cannot connect to NATS at {where}: {refusal.says.format(**paths)}"
    assert caplog.records == []


@requirement("nats.login")
async def test_clients_that_play_the_kernel_require_tls_too(stack: EmbeddedStack) -> None:
    async with fake_server() as fake:
        options = {"tls": ssl.create_default_context(), "allow_reconnect": False, **LOGIN}
        with pytest.raises((Unavailable, nats.errors.Error), match=REASON):
            async with (
                asyncio.timeout(WAIT_S),
                Caller.open(stack.postgres.dsn(), servers=fake.url, **options),
            ):
                pass
        assert fake.received == b""
