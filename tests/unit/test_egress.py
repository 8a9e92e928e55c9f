"""Egress rules for requests, hosts and responses: tables of cases just inside and just outside each rule."""

from __future__ import annotations

import ast
import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self

import aiohttp
import httpx
import pytest
import trustme
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

import openapi_tool
from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.egress import EgressRefused, EgressTransport, check_url, tls_context
from openapi_tool.jina.options import EgressOptions
from openapi_tool.jina.transport import AiohttpTransport
from openapi_tool.protocol.errors import ToolMisconfigured, UpstreamUnavailable
from openapi_tool.settings import SettingsError, load_settings
from openapi_tool.tools.secret_variables import Secret
from tests.answering import ToolsOverTransport
from tests.requirements import requirement
from tests.support import definition, each
from tests.unit.test_http import SUCCESS, Origin, fetch

# fmt: off
PLAIN = [
    "https://s.jina.ai", "https://s.jina.ai/", "https://r.jina.ai/x", "https://s.jina.ai:443/", "https://s.jina.ai:/",
]
UNUSUAL = [  # pass the egress check, but are no base_url of a definition
    "HTTPS://S.JINA.AI/", "https://S.Jina.Ai/search?q=a%20b", "https://r.jina.ai/http%3A%2F%2Fevil.example%2F",
    "https://r.jina.ai/@evil.example", "https://s.jina.ai/?u=https://evil.example", "https://s.jina.ai/#@evil.example",
    "https://s\u3002jina\uff0eai/",  # other dots of IDNA: sent as s.jina.ai
]
REFUSED = [
    # scheme and port
    "http://s.jina.ai/", "ftp://s.jina.ai/", "ws://s.jina.ai/", "wss://s.jina.ai/", "//s.jina.ai/", "s.jina.ai/",
    "https:/s.jina.ai/", "https:s.jina.ai", "https://s.jina.ai:80/", "https://s.jina.ai:444/", "https://s.jina.ai:4430/",
    "https://s.jina.ai:0/", "https://s.jina.ai:-443/", "https://s.jina.ai:443:443/", "https://s.jina.ai:65979/",
    # user info
    "https://user@s.jina.ai/", "https://user:pw@s.jina.ai/", "https://:pw@s.jina.ai/", "https://s.jina.ai@evil.example/",
    "https://s.jina.ai:443@evil.example/", "https://s.jina.ai%40evil.example/", "https://evil.example\\@s.jina.ai/",
    # other hosts
    "https://jina.ai/", "https://api.jina.ai/", "https://ss.jina.ai/", "https://s.s.jina.ai/", "https://s.jina.aix/",
    "https://s-jina.ai/", "https://sxjina.ai/", "https://s.jina.ai.evil.example/", "https://evil.example/s.jina.ai",
    "https://evil.example?s.jina.ai", "https://evil.example#s.jina.ai", "https://evil.example\\.s.jina.ai/",
    "https://s.jina.ai./", "https://s.jina.ai../", "https://.s.jina.ai/", "https://s..jina.ai/", "https://s.jina.ai%2f/",
    "https://s.jina.ai%00.evil.example/", "https://%73.jina.ai/", "https:///s.jina.ai/", "https://",
    # look-alikes: full width, ideographic dots, Cyrillic, punycode
    "https://\uff53.jina.ai/", "https://s.jin\u0430.ai/", "https://s.xn--jin-7cd.ai/",
    "https://\u017f.jina.ai/", "https://s.jina.a\u0131/", "https://s\u00ad.jina.ai/", "https://s\u200b.jina.ai/",
    # addresses in every spelling
    "https://127.0.0.1/", "https://2130706433/", "https://0x7f000001/", "https://0177.0.0.1/", "https://127.1/",
    "https://[::1]/", "https://[::ffff:127.0.0.1]/", "https://[64:ff9b::7f00:1]/", "https://[2002:7f00:1::]/",
    "https://169.254.169.254/", "https://[::ffff:a9fe:a9fe]/", "https://8.8.8.8/", "https://[2001:4860:4860::8888]/",
    "https://[fe80::1%25eth0]/", "https://[s.jina.ai]/",
    # line breaks, blanks, tabs, NUL
    "https://s.jina.ai\r\n/", "https://s.jina.ai\n.evil.example/", "https://s.jina.ai\t/", "https://s.jina.ai /",
    "https://s.jina.ai/\r\nX-Evil: 1", "https://s.jina.ai/\x00", " https://s.jina.ai/", "https://s.jina.ai%0d%0a/",
]
# fmt: on


def _passes(url: str) -> bool:
    try:
        check_url(httpx.URL(url))
    except (EgressRefused, httpx.InvalidURL):
        return False
    return True


@each("url", [*PLAIN, *UNUSUAL])
@requirement("egress.hosts")
def test_allowed_url_passes_the_egress_check(url: str) -> None:
    assert _passes(url)


@each("url", REFUSED)
@requirement("egress.hosts")
def test_other_url_is_refused_by_the_egress_check(url: str) -> None:
    assert not _passes(url)


BASE_URLS = ("https://s.jina.ai", "https://s.jina.ai/", "https://s.jina.ai:443", "https://s.jina.ai:443/")


@each("base_url", BASE_URLS)
@requirement("options.jina")
def test_a_definition_may_name_the_hosts(base_url: str) -> None:
    assert definition({"base_url": base_url}).operation.host == "s.jina.ai"


@pytest.mark.parametrize(
    "base_url", [*REFUSED, *UNUSUAL, "https://s.jina.ai/x", "https://s.jina.ai?", "https://s.jina.ai\n"]
)
@requirement("options.jina")
def test_a_definition_may_name_nothing_else(base_url: str) -> None:
    with pytest.raises(ToolMisconfigured, match="base_url"):
        definition({"mode": "search", "base_url": base_url})


HTTP_CLIENTS = {"aiohttp", "httpcore", "httpx", "requests", "urllib.request", "urllib3", "http.client"}
HOLDERS = {
    "jina/body_reader.py",  # reads responses; sends nothing
    "jina/client.py",
    "jina/connections.py",
    "jina/document.py",  # one URL alone; tests/gateway/test_oauth.py
    "jina/egress.py",
    "jina/network_failures.py",  # types of exceptions
    "jina/transport.py",
    "telemetry/otlp_collector.py",
    "jina/upstream_connection.py",  # handles what a connection receives; opens none
    "telemetry/health_server.py",  # a server
    "cli/management_api.py",  # the command line's alone
    "testing.py",  # transports that send nothing
}


@requirement("egress.hosts")
def test_no_other_module_holds_an_http_client() -> None:
    package = Path(openapi_tool.__file__).parent
    holders = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name in HTTP_CLIENTS or name.partition(".")[0] in HTTP_CLIENTS for name in names):
                holders.add(path.relative_to(package).as_posix())
    assert {holder for holder in holders if not holder.startswith("local/")} == HOLDERS


class _Sink(httpx.AsyncBaseTransport):
    def __init__(self) -> None:
        self.sent: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.sent.append(request)
        return httpx.Response(200, json=SUCCESS)


@each("value", ["a\r\nX-Evil: 1", "a\nb", "a\rb", "a\0b", "a\tb", "a\x7fb", "\n", "a\x0bb"])
@each("name", ["Accept", "X-Target-Selector", "Authorization", "User-Agent"])
@requirement("egress.hosts")
async def test_no_header_with_a_line_break_leaves(name: str, value: str) -> None:
    sink = _Sink()
    async with httpx.AsyncClient(transport=EgressTransport(sink)) as http:
        with pytest.raises(EgressRefused, match="control character"):
            await http.send(httpx.Request("GET", "https://s.jina.ai/", headers={name: value}))
    assert sink.sent == []


@pytest.fixture
async def origin(tmp_path: Path) -> AsyncIterator[Origin]:
    origin = Origin(tmp_path)
    yield origin
    await origin.stop()


async def _ok(_: web.Request) -> web.Response:
    return web.json_response(SUCCESS)


HEADERS: dict[str, tuple[dict[str, str], bool]] = {
    "a header of 8 kB": ({"X-Long": "x" * 8_000}, True),
    "a header of 9 kB": ({"X-Long": "x" * 9_000}, False),
    "a name of 9 kB": ({"X" * 9_000: "x"}, False),
    "90 headers": ({f"X-{number}": "x" for number in range(90)}, True),
    "110 headers": ({f"X-{number}": "x" for number in range(110)}, False),
}


@pytest.mark.parametrize("case", HEADERS)
@requirement("egress.response")
async def test_the_head_of_an_answer_is_bounded(case: str, origin: Origin) -> None:
    headers, fits = HEADERS[case]

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(SUCCESS, headers=headers)

    await origin.start(answer)
    client = origin.client()
    if fits:
        assert (await fetch(client)).state == {"results": []}
    else:
        with pytest.raises(UpstreamUnavailable) as failed:
            await fetch(client)
        assert failed.value.detail == {"kind": "ResponseRefused"}
    await client.aclose()


@pytest.mark.parametrize(
    ("raised", "inner", "cause"),
    [
        (httpx.ConnectError, socket.gaierror(-2, "Name or service not known"), "the host's name cannot be resolved"),
        (httpx.ConnectError, ConnectionRefusedError(111, "refused"), "connection refused"),
        (httpx.ConnectError, ssl.SSLError(1, "unknown protocol"), "the TLS handshake failed"),
        (httpx.ConnectTimeout, TimeoutError(), "no connection in time"),
        (httpx.ConnectError, OSError(113, "No route to host"), "no connection"),
        (httpx.ReadError, ConnectionResetError(104, "reset"), "the connection was reset"),
        (httpx.ReadTimeout, TimeoutError(), "no response in time"),
        (httpx.RemoteProtocolError, aiohttp.ServerDisconnectedError(), "the connection ended before the response"),
    ],
)
@requirement("logs.call")
async def test_the_cause_of_a_request_without_response_is_logged(
    raised: type[httpx.TransportError], inner: Exception, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        try:
            try:
                raise inner
            except OSError as error:
                raise aiohttp.ClientConnectionError from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise raised("text with https://an.address/") from error

    caplog.set_level(logging.INFO)
    tools = ToolsOverTransport(answer)
    with pytest.raises(UpstreamUnavailable) as failed:
        await tools.output()
    assert failed.value.detail == {"kind": raised.__name__, "cause": cause}
    [line] = [record for record in caplog.records if getattr(record, "action", "") == "upstream.unreachable"]
    assert line.getMessage() == f"a request to r.jina.ai failed: {cause}"
    unconnected = issubclass(raised, httpx.ConnectError | httpx.ConnectTimeout)
    assert line.levelno == (logging.WARNING if unconnected else logging.INFO)


@pytest.mark.parametrize("encoding", ["", "identity", "Identity"])
@requirement("egress.response")
async def test_a_response_that_names_no_encoding_is_read(encoding: str) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"Content-Encoding": encoding}, json={"code": 200, "data": {"content": "c"}})

    assert (await ToolsOverTransport(answer).output()).content


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "x-gzip", "gzip, identity"])
@requirement("egress.response")
async def test_compressed_response_is_refused(encoding: str, origin: Origin) -> None:
    async def bomb(_: web.Request) -> web.Response:
        return web.Response(body=b"\x1f\x8b" + b"\0" * 1000, headers={"Content-Encoding": encoding})

    await origin.start(bomb)
    client = origin.client()
    with pytest.raises(UpstreamUnavailable, match="encoding"):
        await fetch(client)
    assert origin.requests[0].headers.get("Accept-Encoding") in (None, "identity")
    await client.aclose()


@pytest.mark.parametrize(
    ("first", "last", "answered"),
    [
        (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1, False),
        (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2, True),
        (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_3, True),
    ],
)
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
@requirement("egress.tls")
async def test_a_server_with_only_old_tls_gets_nothing(
    first: ssl.TLSVersion, last: ssl.TLSVersion, *, answered: bool, origin: Origin
) -> None:
    origin.tls.set_ciphers("ALL:@SECLEVEL=0")
    origin.tls.minimum_version, origin.tls.maximum_version = first, last
    await origin.start(_ok)
    client = origin.client()
    if answered:
        assert (await fetch(client)).state == {"results": []}
    else:
        with pytest.raises(UpstreamUnavailable):
            await fetch(client)
        assert origin.requests == []
    await client.aclose()


@requirement("egress.tls")
async def test_certificate_of_an_unknown_ca_is_refused(origin: Origin) -> None:
    stranger = trustme.CA()
    origin.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    stranger.issue_cert("s.jina.ai", "r.jina.ai").configure_cert(origin.tls)
    await origin.start(_ok)
    client = origin.client()
    with pytest.raises(UpstreamUnavailable):
        await fetch(client)
    assert origin.requests == []
    await client.aclose()


# Proxies: a listener that speaks CONNECT, and one that refuses connections.


class Proxy:
    """Forward proxy on loopback that connects every tunnel to one port, regardless of the requested host."""

    def __init__(self, leads_to: int = 0, status: bytes = b"200 OK") -> None:
        self.leads_to = leads_to
        self.status = status
        self.heads: list[bytes] = []
        self.carried = bytearray()
        self.tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 " + self.status + b"\r\n\r\n")
        if not self.leads_to:
            writer.close()
            return
        upstream, downstream = await asyncio.open_connection("127.0.0.1", self.leads_to)
        for source, sink in ((reader, downstream), (upstream, writer)):
            task = asyncio.create_task(self._carry(source, sink))
            self.tasks.add(task)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65_536):
                self.carried += data
                sink.write(data)
        finally:
            sink.close()


def proxied(origin: Origin, url: str) -> JinaClient:
    transport = AiohttpTransport(tls_context(str(origin.ca)), EgressOptions(proxy=Secret(url)))
    return JinaClient(EgressTransport(transport), 1_000_000)


@requirement("egress.proxy")
async def test_the_configured_proxy_carries_a_tunnel_that_it_cannot_read(origin: Origin) -> None:
    await origin.start(_ok)
    assert origin.runner is not None
    async with Proxy(origin.runner.addresses[0][1]) as proxy:
        client = proxied(origin, f"http://user:pass%40word@127.0.0.1:{proxy.port}")
        assert (await fetch(client)).state == {"results": []}
        await client.aclose()
    (head,) = proxy.heads
    assert head.startswith(b"CONNECT s.jina.ai:443 HTTP/1.1\r\n")
    assert b"Proxy-Authorization: Basic dXNlcjpwYXNzQHdvcmQ=" in head
    assert b"a-key-of-the-test" not in head + bytes(proxy.carried)
    assert not any(name.lower().startswith("proxy-") for name in origin.requests[0].headers)
    assert origin.requests[0].host == "s.jina.ai"


@requirement("egress.proxy", "egress.tls")
async def test_certificates_are_verified_through_a_proxy_too(origin: Origin) -> None:
    origin.issue_certificate("elsewhere.example")
    await origin.start(_ok)
    assert origin.runner is not None
    async with Proxy(origin.runner.addresses[0][1]) as proxy:
        client = proxied(origin, f"http://127.0.0.1:{proxy.port}")
        with pytest.raises(UpstreamUnavailable):
            await fetch(client)
        await client.aclose()
    assert len(proxy.heads) == 1
    assert origin.requests == []


@pytest.mark.parametrize("status", [b"407 Proxy Authentication Required", b"403 Forbidden", b"302 Found", b"502 Bad"])
@requirement("egress.proxy")
async def test_a_proxy_that_refuses_is_a_typed_error_without_its_address(status: bytes, origin: Origin) -> None:
    async with Proxy(status=status) as proxy:
        client = proxied(origin, f"http://user:password-of-proxy@127.0.0.1:{proxy.port}")
        with pytest.raises(UpstreamUnavailable) as failed:
            await fetch(client)
        await client.aclose()
    assert "password-of-proxy" not in str(failed.value.as_error())
    assert str(proxy.port) not in str(failed.value.as_error())


@requirement("egress.hosts")
async def test_proxy_of_the_environment_is_never_connected_to(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    await origin.start(_ok)
    async with Proxy() as trap:
        for name in ("http_proxy", "https_proxy", "all_proxy", "ws_proxy", "wss_proxy", "socks_proxy"):
            for variable in (name, name.upper()):
                monkeypatch.setenv(variable, f"http://127.0.0.1:{trap.port}")
        monkeypatch.setenv("NO_PROXY", "")
        client = origin.client()
        assert (await fetch(client)).state == {"results": []}
        await client.aclose()
    assert trap.heads == []


ALLOWED_PROXIES = [
    "http://proxy:3128",
    "http://proxy.example:3128/",
    "http://u:p@10.0.0.1:8080",
    "http://u@proxy:1",
    "http://[::1]:3128",
]
REFUSED_PROXIES = [
    "proxy:3128",
    "https://proxy:3128",
    "socks5://proxy:1080",
    "http://proxy",
    "http://proxy:",
    "http://proxy:3128/path",
    "http://proxy:3128?x",
    "http://proxy:3128#x",
    "http://a@b@proxy:3128",
    "http://pro\nxy:3128",
    "http://pro xy:3128",
]


@pytest.mark.parametrize("url", ALLOWED_PROXIES)
@requirement("egress.proxy")
def test_a_proxy_is_one_plain_url(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_DSN", "postgresql://db/kernel")
    proxy = load_settings({"egress": {"proxy": url}}).egress.proxy
    assert proxy is not None
    assert proxy.get_secret_value() == url


@pytest.mark.parametrize("egress", [*({"proxy": url} for url in REFUSED_PROXIES), {"public_addresses_only": True}])
@requirement("egress.proxy", "egress.public")
def test_invalid_proxy_is_refused_at_start(egress: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_DSN", "postgresql://db/kernel")
    with pytest.raises(SettingsError, match="egress"):
        load_settings({"egress": {"proxy": ALLOWED_PROXIES[0], **egress}})


# Resolution of names.


class StaticResolver(AbstractResolver):
    """Resolve every name to these addresses and count the lookups; connect to `port`."""

    def __init__(self, addresses: list[str], port: int) -> None:
        self.addresses = addresses
        self.port = port
        self.lookups = 0

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_INET) -> list[ResolveResult]:
        del port, family
        self.lookups += 1
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=self.port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self.addresses
        ]

    async def close(self) -> None:
        """Do nothing: the resolver holds no resources."""


NOT_PUBLIC = [
    *("127.0.0.1", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.0.1", "100.64.0.1", "169.254.169.254"),
    *("0.0.0.0", "224.0.0.1", "255.255.255.255", "198.18.0.1", "192.0.2.1", "168.63.129.16"),  # noqa: S104
    *("::1", "::", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1", "::ffff:127.0.0.1"),
    *("::ffff:10.0.0.1", "64:ff9b::a00:1", "64:ff9b:1::1", "2002:a00:1::", "2001:0:a00::1", "fe80::1%lo"),
]
PUBLIC = [
    *("8.8.8.8", "172.15.255.255", "172.32.0.1", "100.63.255.255", "100.128.0.1", "223.255.255.255"),
    *("2606:4700::1", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::"),
]


async def _connects(addresses: list[str], monkeypatch: pytest.MonkeyPatch, *, public_only: bool) -> list[str]:
    """Return the address that a call would connect to, without connecting."""
    reached: list[str] = []

    async def connect(_: object, __: object, address: tuple[str, int]) -> None:
        reached.append(address[0])
        raise ConnectionRefusedError

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(type(loop), "sock_connect", connect)
    transport = AiohttpTransport(
        tls_context(None), EgressOptions(public_addresses_only=public_only), StaticResolver(addresses, 443)
    )
    client = JinaClient(EgressTransport(transport), 1000)
    with pytest.raises(UpstreamUnavailable) as failed:
        await fetch(client)
    cause = "connection refused" if reached else "no connection"
    assert failed.value.detail == {"kind": "ConnectError", "cause": cause}
    await client.aclose()
    return reached


@pytest.mark.parametrize("address", NOT_PUBLIC)
@requirement("egress.public")
async def test_an_address_that_is_not_public_is_never_connected_to(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert await _connects([address], monkeypatch, public_only=True) == []
        assert await _connects(["8.8.8.8", address], monkeypatch, public_only=True) == []
    assert {getattr(record, "action", "") for record in caplog.records} == {"egress.address_refused"}


@pytest.mark.parametrize("address", PUBLIC)
@requirement("egress.public")
async def test_a_public_address_is_connected_to(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await _connects([address], monkeypatch, public_only=True) == [address]


@requirement("egress.public")
async def test_without_the_setting_any_address_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await _connects(["127.0.0.1"], monkeypatch, public_only=False) == ["127.0.0.1"]


@requirement("egress.public")
async def test_dns_rebinding_has_no_effect(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is resolved once, so the connection goes to the address that was checked."""
    await origin.start(_ok)
    assert origin.runner is not None
    port = origin.runner.addresses[0][1]
    resolver = StaticResolver(["8.8.8.8"], port)
    loop, connected_to = asyncio.get_running_loop(), []
    connect: Callable[..., Any] = type(loop).sock_connect

    async def to_loopback(self: Any, sock: socket.socket, address: tuple[str, int]) -> Any:
        connected_to.append(address[0])
        return await connect(self, sock, ("127.0.0.1", port))

    monkeypatch.setattr(type(loop), "sock_connect", to_loopback)
    monkeypatch.setattr(type(loop), "getaddrinfo", lambda *_, **__: pytest.fail("a second lookup"))
    transport = AiohttpTransport(tls_context(str(origin.ca)), EgressOptions(public_addresses_only=True), resolver)
    client = JinaClient(EgressTransport(transport), 1_000_000)
    assert (await fetch(client)).state == {"results": []}
    assert (resolver.lookups, connected_to) == (1, ["8.8.8.8"])
    await client.aclose()
