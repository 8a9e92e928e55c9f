"""TLS to NATS that was asked for is TLS or nothing: no byte of a login over a transport that anybody can read."""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats.errors
import pytest
import trustme
from aiohttp import web
from aiohttp.test_utils import TestServer

from openapi_tool.bus.connection import connected
from openapi_tool.local.caller import Caller
from openapi_tool.local.server import free_port
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.prepared import prepare
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.settings import Settings
from tests.promises import requirement
from tests.wire.sockets import FakeServer, fake_server, info
from tests.wire.test_bus import DSN, assert_connects, server
from tests.wire.world import SETTLED_S

LOGIN = {"user": "executor", "password": "the-right-one"}
REASON = "does not offer TLS"


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority, and a certificate for loopback: as files, and for a server of Python."""

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
    return prepare(Settings(postgres=DSN, nats={"servers": servers, **LOGIN, **section}), {}).bus


async def refused(servers: str, **section: Any) -> str:
    """What an operator is told where the connection is refused at the start."""
    with pytest.raises(Unavailable) as told:
        async with asyncio.timeout(SETTLED_S), connected(bus(servers, **section)):
            pass
    return str(told.value)


@pytest.mark.parametrize("asked", ["tls", "scheme", "ca_file"])
@pytest.mark.parametrize("greeting", [{}, {"tls_required": False}, {"tls_required": 0, "auth_required": True}])
@requirement("bus.tls_or_nothing")
async def test_a_server_without_tls_hears_nothing(authority: Authority, asked: str, greeting: dict[str, Any]) -> None:
    async with fake_server(**greeting) as fake:
        sections: dict[str, Any] = {"tls": {"tls": True}, "ca_file": {"ca_file": authority.ca}, "scheme": {}}
        url = fake.url.replace("nats://", "tls://") if asked == "scheme" else fake.url
        reason = await refused(url, **sections[asked])
        assert fake.heard == b""
    assert REASON in reason
    assert fake.url.removeprefix("nats://") in reason
    assert "the-right-one" not in reason


@requirement("bus.tls_or_nothing")
async def test_one_tls_server_asks_it_of_all(caplog: pytest.LogCaptureFixture) -> None:
    """Somebody on the way to the one could announce the other."""
    async with fake_server() as plain, fake_server() as other:
        assert REASON in await refused(f"{plain.url},{other.url.replace('nats://', 'tls://')}")
        assert plain.heard + other.heard == b""
    assert [record for record in caplog.records if REASON in record.getMessage()]


async def _until(fake: FakeServer, accepted: int) -> None:
    while len(fake.connections) < accepted:
        await fake.accepted.get()


@requirement("bus.tls_or_nothing")
async def test_a_reconnect_is_over_tls_or_not_at_all(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    async with fake_server(tls_required=True) as fake, asyncio.timeout(SETTLED_S):
        fake.tls = authority.context
        async with connected(bus(fake.url, ca_file=authority.ca)) as client:
            first = fake.connections[0]
            assert b"the-right-one" in first.heard
            offered, fake.greeting, fake.tls = fake.greeting, info(), None
            first.drop()
            await _until(fake, 3)
            fake.greeting, fake.tls = offered, authority.context
            while client.stats["reconnects"] == 0:  # noqa: ASYNC110 - the client tells nobody
                await asyncio.sleep(0.05)
            assert b"the-right-one" in fake.connections[-1].heard
        plain = [connection.heard for connection in fake.connections[1:3]]
    assert plain == [b"", b""]
    assert [record for record in caplog.records if REASON in record.getMessage()]


@requirement("bus.tls_or_nothing")
async def test_a_server_that_another_one_announces_is_reached_over_tls_or_not_at_all(authority: Authority) -> None:
    async with fake_server() as plain:
        announced = [plain.url.removeprefix("nats://")]
        async with fake_server(tls_required=True, connect_urls=announced) as first, asyncio.timeout(SETTLED_S):
            first.tls = authority.context
            async with connected(bus(first.url, ca_file=authority.ca)):
                first.greeting, first.tls = info(), None
                first.connections[0].drop()
                await _until(plain, 1)
                await _until(first, 2)
                assert plain.heard + first.connections[1].heard == b""


@requirement("bus.tls_or_nothing")
async def test_a_server_that_offers_tls_without_requiring_it_is_spoken_to_over_tls(
    stack: EmbeddedStack, authority: Authority
) -> None:
    certificate = json.dumps(str(authority.server))
    more = f"tls {{ cert_file: {certificate}, key_file: {certificate} }}\nallow_non_tls: true\n"
    with server(stack, more) as nats_server:
        await assert_connects(servers=nats_server.url, ca_file=authority.ca)
        await assert_connects(servers=nats_server.url)


@pytest.mark.filterwarnings("ignore:parameter 'timeout':DeprecationWarning")  # nats-py's use of aiohttp
@requirement("bus.tls_or_nothing")
async def test_a_websocket_is_over_tls_or_not_at_all(stack: EmbeddedStack, authority: Authority) -> None:
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
@requirement("bus.tls_or_nothing")
async def test_a_plain_websocket_that_claims_tls_hears_nothing() -> None:
    heard: list[bytes] = []

    async def claim(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_bytes(info(tls_required=True, tls_available=True))
        heard.extend([message.data async for message in socket])
        return socket

    application = web.Application()
    application.router.add_get("/", claim)
    async with TestServer(application, host="127.0.0.1") as claiming:
        assert REASON in await refused(f"ws://127.0.0.1:{claiming.port}", tls=True)
    assert heard == []


@requirement("bus.tls_or_nothing")
async def test_what_plays_the_kernel_is_as_strict(stack: EmbeddedStack) -> None:
    async with fake_server() as fake:
        options = {"tls": ssl.create_default_context(), "allow_reconnect": False, **LOGIN}
        with pytest.raises((Unavailable, nats.errors.Error), match=REASON):
            async with (
                asyncio.timeout(SETTLED_S),
                Caller.open(stack.postgres.dsn(), servers=fake.url, **options),
            ):
                pass
        assert fake.heard == b""
