"""The HTTP client, its transport, and connections that accept one response per request."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self
from weakref import WeakSet

import aiohttp
import httpx
import psutil
import pytest
import respx
import trustme
import uvloop
from aiohttp import web
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_writer import StreamWriter
from pydantic import SecretStr

from openapi_tool.concurrency.fair_semaphore import FairSemaphore
from openapi_tool.jina.byte_semaphore import ByteSemaphore
from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.egress import ALLOWED_HOSTS, EgressRefused, EgressTransport, tls_context
from openapi_tool.jina.failure_rules import ONCE
from openapi_tool.jina.options import EgressOptions
from openapi_tool.jina.request import UpstreamRequest
from openapi_tool.jina.response import Expected, UpstreamResult
from openapi_tool.jina.transport import ERRORS, AiohttpTransport, translate
from openapi_tool.jina.upstream_connection import UpstreamConnection
from openapi_tool.local.executor import LoopbackResolver
from openapi_tool.protocol.errors import (
    RateLimited,
    ResponseTooLarge,
    ToolError,
    ToolTimeout,
    UpstreamRejected,
    UpstreamUnavailable,
)
from openapi_tool.quotas.permits import Permit
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.output import ToolOutput
from tests.answering import for_request
from tests.requirements import requirement
from tests.support import assert_for_a_model, each
from tests.waiting import WAIT_S, until

KEY = SecretStr("a-key-of-the-test")
SEARCH = UpstreamRequest("POST", "s.jina.ai", "/", {"Accept": "application/json"}, b'{"q":"x"}', Expected("search"))
GET = UpstreamRequest("GET", "r.jina.ai", "/https://a.example", {}, None, Expected("reader"))
SUCCESS = {"code": 200, "data": []}


@pytest.fixture
async def client(jina: respx.Router) -> AsyncIterator[JinaClient]:
    client = JinaClient(EgressTransport(httpx.MockTransport(jina.async_handler)), max_response_bytes=1000)
    yield client
    await client.aclose()


async def fetch(
    client: JinaClient,
    request: UpstreamRequest = SEARCH,
    seconds: float = 5,
    on_connected: Callable[[], None] | None = None,
) -> Any:
    context = for_request(ByteSemaphore(20_000_000).for_call())
    return await client.fetch(request, KEY, Deadline.after(seconds), context, on_connected)


async def test_a_request_leaves_as_it_was_built_with_the_key_as_bearer(jina: respx.Router, client: JinaClient) -> None:
    route = jina.post("https://s.jina.ai/").respond(json=SUCCESS)
    assert (await fetch(client)).state == {"results": []}
    sent = route.calls.last.request
    assert sent.content == b'{"q":"x"}'
    assert sent.headers["authorization"] == "Bearer a-key-of-the-test"
    assert sent.headers["accept"] == "application/json"
    assert set(sent.headers) == {"accept", "authorization", "content-length", "host"}


@requirement("upstream.request")
async def test_escapes_in_a_target_are_sent_as_they_are(jina: respx.Router, client: JinaClient) -> None:
    route = jina.route(host="r.jina.ai").respond(json=SUCCESS)
    target = "/http%3A%2F%2Fa.example%2F%3Fq%3Da%2520b%23f"
    await fetch(client, UpstreamRequest("GET", "r.jina.ai", target, {}, None, Expected("search")))
    assert route.calls.last.request.url.raw_path == target.encode()


@pytest.mark.parametrize(
    "url",
    [
        "http://s.jina.ai/",
        "https://s.jina.ai:8443/",
        "https://user:pw@s.jina.ai/",
        "https://user@r.jina.ai/",
        "https://s.jina.ai.evil.example/",
        "https://s.jina.ai./",
        "https://example.org/",
        "https://xs.jina.ai/",
        "https://127.0.0.1/",
        "ftp://s.jina.ai/",
    ],
)
@requirement("egress.hosts")
async def test_no_other_destination_passes_the_egress(url: str, jina: respx.Router) -> None:
    route = jina.route().respond(json=SUCCESS)
    async with httpx.AsyncClient(transport=EgressTransport(httpx.MockTransport(jina.async_handler))) as http:
        with pytest.raises(EgressRefused):
            await http.send(httpx.Request("GET", url))
    assert not route.called


@pytest.mark.parametrize(
    "headers", [{"X-Evil": "1"}, {"Cookie": "a=b"}, {"X-Forwarded-For": "8.8.8.8"}, {"Host": "x.org"}]
)
@requirement("egress.hosts")
async def test_no_other_header_passes_the_egress(headers: dict[str, str], jina: respx.Router) -> None:
    route = jina.route().respond(json=SUCCESS)
    async with httpx.AsyncClient(transport=EgressTransport(httpx.MockTransport(jina.async_handler))) as http:
        with pytest.raises(EgressRefused):
            await http.send(httpx.Request("GET", "https://s.jina.ai/", headers=headers))
    assert not route.called


@requirement("egress.hosts")
async def test_a_redirect_is_a_typed_error_and_is_not_followed(jina: respx.Router, client: JinaClient) -> None:
    jina.post("https://s.jina.ai/").respond(302, headers={"Location": "https://evil.example/"})
    other = jina.route(host="evil.example").respond(json=SUCCESS)
    with pytest.raises(UpstreamRejected, match="redirect"):
        await fetch(client)
    assert not other.called


@requirement("egress.hosts")
async def test_proxies_of_the_environment_are_not_used(
    monkeypatch: pytest.MonkeyPatch, jina: respx.Router, client: JinaClient
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    jina.post("https://s.jina.ai/").respond(json=SUCCESS)
    assert (await fetch(client)).state == {"results": []}


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, text="<html>"),
        httpx.Response(200, text=""),
        httpx.Response(200, text='{"code": 200, "data": '),
        httpx.Response(200, text="[1]"),
        httpx.Response(200, content=b"\xff\xfe\x00"),
        httpx.Response(200, json=SUCCESS, headers={"Content-Encoding": "br"}),
        httpx.Response(503, text="<html>busy</html>"),
        httpx.Response(524, text="<html>"),
        httpx.Response(502),
    ],
)
@requirement("upstream.errors")
async def test_response_that_is_not_the_expected_json_is_unavailable(
    answer: httpx.Response, jina: respx.Router, client: JinaClient
) -> None:
    jina.post("https://s.jina.ai/").mock(return_value=answer)
    with pytest.raises(UpstreamUnavailable) as failed:
        await fetch(client)
    assert failed.value.retryable
    assert "<html>" not in failed.value.message


@pytest.mark.parametrize("depth", [1_100, 30_000])
@requirement("upstream.errors")
async def test_an_answer_that_is_nested_too_deeply_to_be_parsed_is_unavailable(depth: int) -> None:
    answer = httpx.Response(200, content=b'{"data": ' + b"[" * depth + b"]" * depth + b"}")
    client = JinaClient(httpx.MockTransport(lambda _: answer), 1_000_000)
    with pytest.raises(UpstreamUnavailable, match="not the JSON that was asked for"):
        await fetch(client)
    await client.aclose()


@requirement("upstream.errors")
async def test_error_inside_a_200_is_that_error(jina: respx.Router, client: JinaClient) -> None:
    jina.post("https://s.jina.ai/").respond(json={"code": 429, "data": None, "retryAfter": 3})
    with pytest.raises(RateLimited) as limited:
        await fetch(client)
    assert limited.value.retry_after == 3.0


@each("code", [0, -1, 99, 600, 2**64 - 1, True])
@requirement("upstream.errors")
async def test_invalid_code_in_a_200_is_a_server_error(code: int, jina: respx.Router, client: JinaClient) -> None:
    jina.post("https://s.jina.ai/").respond(json={"code": code, "data": None})
    with pytest.raises(UpstreamUnavailable) as failed:
        await fetch(client)
    assert failed.value.http_status == 502


@requirement("content.search")
async def test_empty_search_is_no_error(jina: respx.Router, client: JinaClient) -> None:
    body = {"data": None, "code": 422, "status": 42206, "message": "No search results available for query x"}
    jina.post("https://s.jina.ai/").respond(422, json=body)
    assert (await fetch(client)).state == {"results": []}


@pytest.mark.parametrize("length", ["\u00b2", "-1", "ten", "9" * 5_000])
@requirement("upstream.errors")
async def test_invalid_content_length_is_ignored(length: str, jina: respx.Router, client: JinaClient) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b'{"code": 200, "data": []}'

    headers = httpx.Headers({"Content-Length": length}, encoding="utf-8")
    jina.post("https://s.jina.ai/").mock(return_value=httpx.Response(200, headers=headers, content=body()))
    assert (await fetch(client)).state == {"results": []}


@requirement("upstream.errors")
async def test_a_body_over_the_limit_is_not_read_to_its_end(jina: respx.Router, client: JinaClient) -> None:
    """As much again is read, as its end states what it cost."""
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 400
            yield b"x" * 400

    jina.post("https://s.jina.ai/").mock(return_value=httpx.Response(200, content=body()))
    with pytest.raises(ResponseTooLarge, match="1,000 bytes"):
        await fetch(client)
    assert sent <= 1000 + 1000 + 2 * 400


@requirement("answer.time")
async def test_an_upstream_that_hangs_ends_with_the_deadline(jina: respx.Router, client: JinaClient) -> None:
    async def hang(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    jina.post("https://s.jina.ai/").mock(side_effect=hang)
    with pytest.raises(ToolTimeout):
        await fetch(client, seconds=0.05)


@requirement("upstream.errors")
async def test_a_network_failure_shows_no_address(jina: respx.Router, client: JinaClient) -> None:
    jina.post("https://s.jina.ai/").mock(side_effect=httpx.ConnectError("https://s.jina.ai/?key=secret refused"))
    with pytest.raises(UpstreamUnavailable) as failed:
        await fetch(client)
    assert "secret" not in str(failed.value.as_error())


_KINDS = [kind for _, kind in inspect.getmembers(aiohttp, inspect.isclass) if issubclass(kind, aiohttp.ClientError)]


@pytest.mark.parametrize("kind", [*_KINDS, TimeoutError], ids=lambda kind: str(kind.__name__))
async def test_every_exception_of_the_http_library_is_translated(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> Any:
        error = kind.__new__(kind)
        if kind is aiohttp.ClientConnectorCertificateError:
            error._certificate_error = ssl.SSLCertVerificationError()  # type: ignore[attr-defined]  # noqa: SLF001
        raise error

    monkeypatch.setattr(aiohttp.ClientSession, "request", fail)
    transport = AiohttpTransport(tls_context(None), EgressOptions())
    with pytest.raises(httpx.TransportError) as failed:
        await transport.handle_async_request(httpx.Request("GET", "https://s.jina.ai/"))
    assert str(failed.value) == kind.__name__
    assert isinstance(failed.value, httpx.TimeoutException) == issubclass(kind, TimeoutError)
    await transport.aclose()


def test_every_error_of_the_http_library_has_an_equivalent() -> None:
    kinds = [*_KINDS, TimeoutError]
    assert len(kinds) > 10
    for kind in kinds:
        assert any(issubclass(kind, known) for known, _ in ERRORS), kind
    specific = [known for known, _ in ERRORS]
    for position, known in enumerate(specific):
        assert not any(issubclass(known, earlier) for earlier in specific[:position]), f"{known} can never match"


# The transport itself, over TLS on loopback.

Handler = Callable[[web.Request], Any]


class Origin:
    """A TLS server on loopback for the upstream's hosts, and a client that reaches it by their names."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.ca = folder / "ca.pem"
        self.authority.cert_pem.write_to_path(str(self.ca))
        self.issue_certificate(*ALLOWED_HOSTS)
        self.runner: web.AppRunner | None = None
        self.requests: list[web.Request] = []
        self.peers: set[object] = set()

    def issue_certificate(self, *hosts: str) -> None:
        """Use a certificate for these hosts."""
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.authority.issue_cert(*hosts).configure_cert(self.tls)

    async def start(self, handler: Handler) -> None:
        async def recording(request: web.Request) -> web.StreamResponse:
            self.requests.append(request)
            if request.transport is not None:
                self.peers.add(request.transport.get_extra_info("peername"))
            response: web.StreamResponse = await handler(request)
            return response

        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", recording)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0, ssl_context=self.tls).start()

    def client(self, *, trusted: bool = True) -> JinaClient:
        assert self.runner is not None
        port = self.runner.addresses[0][1]
        tls = tls_context(str(self.ca) if trusted else None)
        return JinaClient(EgressTransport(AiohttpTransport(tls, EgressOptions(), LoopbackResolver(port))), 1_000_000)

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()


@pytest.fixture
async def origin(tmp_path: Path) -> AsyncIterator[Origin]:
    origin = Origin(tmp_path)
    yield origin
    await origin.stop()


async def _ok(_: web.Request) -> web.Response:
    return web.json_response(SUCCESS)


@requirement("egress.tls", "egress.hosts")
async def test_host_and_verification_stay_while_only_the_connect_is_redirected(origin: Origin) -> None:
    await origin.start(_ok)
    client = origin.client()
    assert (await fetch(client)).state == {"results": []}
    assert origin.requests[0].host == "s.jina.ai"
    await client.aclose()


@requirement("egress.tls")
async def test_a_certificate_of_an_unknown_authority_is_refused(origin: Origin) -> None:
    await origin.start(_ok)
    client = origin.client(trusted=False)
    with pytest.raises(UpstreamUnavailable) as failed:
        await fetch(client)
    assert failed.value.detail == {"kind": "certificate"}
    assert origin.requests == []
    await client.aclose()


@requirement("upstream.errors")
async def test_a_certificate_that_is_refused_is_for_the_operator_and_not_tried_again(
    origin: Origin, caplog: pytest.LogCaptureFixture
) -> None:
    origin.issue_certificate("elsewhere.example")
    await origin.start(_ok)
    client = origin.client()
    with pytest.raises(UpstreamUnavailable) as failed:
        await fetch(client)
    assert (failed.value.max_retries, failed.value.retryable) == (0, False)
    assert "an operator must act" in failed.value.message
    assert_for_a_model(failed.value)
    [record] = [record for record in caplog.records if getattr(record, "action", "") == "egress.certificate_refused"]
    assert (record.levelname, record.__dict__["host"]) == ("ERROR", "s.jina.ai")
    assert "certificate" in record.getMessage()
    assert "mismatch" in record.__dict__["reason"]
    await client.aclose()


@requirement("egress.tls")
async def test_a_certificate_of_another_host_is_refused(origin: Origin) -> None:
    origin.issue_certificate("elsewhere.example")
    await origin.start(_ok)
    client = origin.client()
    with pytest.raises(UpstreamUnavailable):
        await fetch(client)
    assert origin.requests == []
    await client.aclose()


@requirement("egress.tls")
def test_old_versions_of_tls_are_refused() -> None:
    context = tls_context(None)
    assert (context.minimum_version, context.check_hostname) == (ssl.TLSVersion.TLSv1_2, True)


@requirement("egress.hosts")
async def test_the_connection_layer_follows_no_redirect_and_keeps_no_cookie(origin: Origin) -> None:
    async def redirect(_: web.Request) -> web.Response:
        headers = {"Location": "https://s.jina.ai/elsewhere", "Set-Cookie": "a=b"}
        return web.Response(status=302, headers=headers)

    await origin.start(redirect)
    client = origin.client()
    for _ in range(2):
        with pytest.raises(UpstreamRejected):
            await fetch(client)
    assert [request.path for request in origin.requests] == ["/", "/"]
    assert not any("Cookie" in request.headers for request in origin.requests)
    await client.aclose()


@requirement("egress.hosts")
async def test_the_connection_layer_uses_no_proxy(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    await origin.start(_ok)
    client = origin.client()
    assert (await fetch(client)).state == {"results": []}
    await client.aclose()


async def test_connection_is_reused_between_requests(origin: Origin) -> None:
    await origin.start(_ok)
    client = origin.client()
    for _ in range(3):
        await fetch(client)
    assert len(origin.requests) == 3
    assert len(origin.peers) == 1
    await client.aclose()


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_dropped_connection_is_one_request_and_one_typed_error(origin: Origin, method: str) -> None:
    async def drop(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    await origin.start(drop)
    client = origin.client()
    body = b"{}" if method == "POST" else None
    with pytest.raises(UpstreamUnavailable):
        await fetch(client, UpstreamRequest(method, "s.jina.ai", "/", {}, body, Expected("search")))
    assert len(origin.requests) == 1
    await client.aclose()


async def test_a_body_that_breaks_off_is_a_typed_error(origin: Origin) -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport is not None
        request.transport.abort()
        return response

    await origin.start(half)
    client = origin.client()
    with pytest.raises(UpstreamUnavailable):
        await fetch(client)
    await client.aclose()


async def test_the_target_travels_byte_for_byte(origin: Origin) -> None:
    await origin.start(_ok)
    client = origin.client()
    target = "/http%3A%2F%2Fa.example%2Fp%2F%2Fq%3Fx%3Da%2520b%26y%3D%C3%BC%23f"
    await fetch(client, UpstreamRequest("GET", "r.jina.ai", target, {}, None, Expected("search")))
    assert origin.requests[0].raw_path == target
    assert origin.requests[0].host == "r.jina.ai"
    await client.aclose()


async def test_closed_port_is_unavailable_at_once(tmp_path: Path) -> None:
    client = JinaClient(
        EgressTransport(AiohttpTransport(tls_context(None), EgressOptions(), LoopbackResolver(1))), 1000
    )
    with pytest.raises(UpstreamUnavailable) as failed:
        await fetch(client)
    assert failed.value.detail == {"kind": "ConnectError", "cause": "connection refused"}
    await client.aclose()


def test_an_error_keeps_its_kind_and_loses_its_text() -> None:
    assert isinstance(translate(TimeoutError()), httpx.TimeoutException)
    assert type(translate(LookupError())) is httpx.TransportError
    assert str(translate(aiohttp.ServerDisconnectedError("https://s.jina.ai/?q=private"))) == "ServerDisconnectedError"
    assert isinstance(ToolTimeout("x"), ToolError)


LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def body_of(content: str) -> bytes:
    return json.dumps({"code": 200, "data": [{"content": content}]}).encode()


def content_of(outcome: UpstreamResult) -> str:
    """Return the content in the outcome of a response with such a body."""
    assert isinstance(outcome, ToolOutput)
    return outcome.items[0].body


def response(content: str = "c", *, headers: bytes = b"") -> bytes:
    """Return a complete response."""
    body = body_of(content)
    return b"HTTP/1.1 200 OK\r\n%bContent-Length: %d\r\n\r\n%b" % (headers, len(body), body)


class Peer:
    """The server's end of one connection; `gone` is set once the client has closed it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.gone = asyncio.Event()

    def send(self, data: bytes) -> None:
        """Send bytes to the client."""
        self._writer.write(data)

    def end(self) -> None:
        """Close gracefully once everything is sent."""
        self._writer.close()

    async def request(self) -> None:
        """Wait for one more request, with the body that `fetch` sends."""
        await self._reader.readuntil(b'\r\n\r\n{"q":"x"}')


Script = Callable[[Peer], Awaitable[None]]


class Upstream:
    """TLS server that plays a script on each connection after the first request."""

    def __init__(self, folder: Path, script: Script, connections: int = 10, max_bytes: int = 1_000_000) -> None:
        authority = trustme.CA()
        self._ca = folder / "ca.pem"
        authority.cert_pem.write_to_path(str(self._ca))
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(*ALLOWED_HOSTS).configure_cert(self._tls)
        self._script, self._connections, self._max_bytes = script, connections, max_bytes
        self.peers: list[Peer] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self._port = port = self._server.sockets[0].getsockname()[1]
        transport = AiohttpTransport(
            tls_context(str(self._ca)), EgressOptions(self._connections), LoopbackResolver(port)
        )
        self.client = JinaClient(EgressTransport(transport), self._max_bytes)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        self._server.close()
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(peer.gone.wait() for peer in self.peers))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        self.peers.append(peer)
        with suppress(OSError, asyncio.IncompleteReadError):
            await peer.request()
            await self._script(peer)
            await reader.read()
        peer.gone.set()
        writer.transport.abort()

    def client_sockets(self) -> list[int]:
        """Return the client's open sockets."""
        opened = psutil.Process().net_connections("tcp4")
        return [found.fd for found in opened if found.fd >= 0 and getattr(found.raddr, "port", None) == self._port]

    async def request(self, on_connected: Callable[[], None] | None = None) -> Any:
        """Send one more request; return the content of its response."""
        return content_of(await fetch(self.client, seconds=WAIT_S, on_connected=on_connected))


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Return a function that runs a coroutine on one of the two event loops."""

    def run(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(asyncio.wait_for(work, 2 * WAIT_S))

    return run


Run = Callable[[Coroutine[Any, Any, None]], None]


@requirement("limits.window")
def test_a_request_counts_from_when_it_has_a_connection(run: Run, tmp_path: Path) -> None:
    """The second one waits for the only connection, which it uses again."""

    async def script(peer: Peer) -> None:
        for number in ("first", "second"):
            events.append("received")
            peer.send(response(number))
            await peer.request()

    async def send(upstream: Upstream, number: int) -> Any:
        permit = _Recorded(f"{number} sent")
        return await upstream.request(permit.connected)

    async def check() -> None:
        async with Upstream(tmp_path, script, connections=1) as upstream:
            assert list(await asyncio.gather(send(upstream, 1), send(upstream, 2))) == ["first", "second"]

    events: list[str] = []

    class _Recorded:
        def __init__(self, event: str) -> None:
            self._event = event

        def connected(self) -> None:
            events.append(self._event)

    run(check())
    assert events == ["1 sent", "received", "2 sent", "received"]


@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize("sent", [SEARCH, GET], ids=["with a body", "without"])
@requirement("budgets.exact")
def test_a_cancelled_request_has_a_connection_if_and_only_if_it_was_written(
    sent: UpstreamRequest,
    reused: bool,  # noqa: FBT001
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is cancelled in each iteration of the event loop until it is written."""

    async def script(peer: Peer) -> None:
        while True:
            peer.send(response())
            await peer.request()

    async def check() -> None:
        async with Upstream(tmp_path, script) as upstream:
            permit = Permit("KEY", KEY)
            for iterations in count():
                if reused:
                    await upstream.request()
                before, permit = len(written), Permit("KEY", KEY)
                fetching = asyncio.create_task(fetch(upstream.client, sent, on_connected=permit.connected))
                for _ in range(iterations):
                    await asyncio.sleep(0)
                fetching.cancel()
                await asyncio.wait([fetching])
                assert permit.is_sent == (len(written) > before), f"cancelled after {iterations} iterations"
                if permit.is_sent:
                    break
            assert iterations > 0

    written: list[bytes] = []
    write, write_lines = StreamWriter._write, StreamWriter._writelines  # noqa: SLF001 - where aiohttp writes

    def record(self: StreamWriter, chunk: bytes) -> None:
        written.append(chunk)
        write(self, chunk)

    def record_lines(self: StreamWriter, chunks: Iterable[bytes]) -> None:
        written.extend(chunks := list(chunks))
        write_lines(self, chunks)

    monkeypatch.setattr(StreamWriter, "_write", record)
    monkeypatch.setattr(StreamWriter, "_writelines", record_lines)
    run(check())


@pytest.mark.parametrize(
    "unsolicited", [response("smuggled"), b"HTTP/1.1 200", b"\r\n"], ids=["whole", "started", "blank"]
)
@pytest.mark.parametrize("received_by", ["the client", "its socket only"])
@requirement("egress.response")
def test_unsolicited_response_reaches_no_later_request(
    unsolicited: bytes, received_by: str, run: Run, tmp_path: Path
) -> None:
    async def once(peer: Peer) -> None:
        peer.send(response(f"of connection {len(upstream.peers)}"))

    async def check() -> None:
        async with upstream:
            assert await upstream.request() == "of connection 1"
            upstream.peers[0].send(unsolicited)
            if received_by == "the client":
                async with asyncio.timeout(WAIT_S):
                    await upstream.peers[0].gone.wait()
            assert await upstream.request() == "of connection 2"

    upstream = Upstream(tmp_path, once)
    run(check())


@pytest.mark.parametrize(
    "surplus",
    [response("smuggled"), b"HTTP/1.1 200 OK\r\nContent-", b"H", b"\r\n", b"\n"],
    ids=["whole", "half a head", "one byte", "blank line", "line feed"],
)
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("begun", [0, 5])
@requirement("egress.response")
def test_surplus_data_in_the_same_read_reaches_no_later_request(
    surplus: bytes,
    chunked: bool,  # noqa: FBT001
    begun: int,
    run: Run,
    tmp_path: Path,
) -> None:
    async def twice(peer: Peer) -> None:
        head, _, body = response(f"of connection {len(upstream.peers)}").partition(b"\r\n\r\n")
        if chunked:
            head, body = CHUNKED.removesuffix(b"\r\n\r\n"), b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        if begun:
            peer.send(head + b"\r\n\r\n" + body[:begun])
            await asyncio.sleep(0)  # so that the end and the surplus are sent together, but apart from the beginning
            peer.send(body[begun:] + surplus)
        else:
            peer.send(head + b"\r\n\r\n" + body + surplus)

    async def check() -> None:
        async with upstream:
            for number in range(1, 4):
                assert await upstream.request() == f"of connection {number}"

    upstream = Upstream(tmp_path, twice)
    run(check())


@requirement("egress.response")
def test_well_behaved_connection_is_reused(run: Run, tmp_path: Path) -> None:
    async def always(peer: Peer) -> None:
        peer.send(response("0", headers=b"X: y\r\n"))
        for number in range(1, 4):
            await peer.request()
            peer.send(b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n" + response(str(number)))

    async def check() -> None:
        async with upstream:
            assert [await upstream.request() for _ in range(4)] == ["0", "1", "2", "3"]
            assert len(upstream.peers) == 1

    upstream = Upstream(tmp_path, always)
    run(check())


HINT = b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n"


@pytest.mark.parametrize("number", [8, 9])
@requirement("egress.response")
def test_eight_informational_responses_may_come_before_an_answer(number: int, run: Run, tmp_path: Path) -> None:
    async def hint(peer: Peer) -> None:
        peer.send(HINT * number + response())

    async def check() -> None:
        async with upstream:
            if number == 8:
                assert await upstream.request() == "c"
                return
            with pytest.raises(UpstreamUnavailable):
                await upstream.request()

    upstream = Upstream(tmp_path, hint)
    run(check())


@pytest.mark.parametrize("before", [b"", response()[:-5]], ids=["instead of an answer", "after one"])
@requirement("egress.response")
def test_endless_informational_responses_are_parsed_in_small_pieces_and_aborted(
    before: bytes, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def flood(peer: Peer) -> None:
        peer.send(before)
        peer.send((response()[-5:] if before else b"") + HINT * 50_000)

    parsed: list[int] = []

    def data_received(self: ResponseHandler, data: bytes) -> None:
        parsed.append(len(data))
        original(self, data)

    async def check() -> None:
        async with upstream:
            if before:
                assert await upstream.request() == "c"
            else:
                with pytest.raises(UpstreamUnavailable):
                    await upstream.request()
            async with asyncio.timeout(WAIT_S):
                await upstream.peers[0].gone.wait()
            assert max(parsed) <= 16_384
            assert sum(parsed) <= 3 * 16_384

    original = ResponseHandler.data_received
    monkeypatch.setattr(ResponseHandler, "data_received", data_received)
    upstream = Upstream(tmp_path, flood)
    run(check())


class _Transport(asyncio.Transport):
    """Transport without a connection; once it is aborted, it has no socket, as that of TLS."""

    def __init__(self) -> None:
        super().__init__()
        self._socket, self._peer = socket.socketpair()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default if name != "socket" or self.is_closing() else self._socket

    def is_closing(self) -> bool:
        return self._socket.fileno() < 0

    def abort(self) -> None:
        self._socket.close()
        self._peer.close()

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


@requirement("egress.response")
async def test_a_connection_that_is_being_aborted_takes_no_request() -> None:
    """Until the event loop has closed it, the pool still has it."""
    connection = UpstreamConnection(asyncio.get_running_loop(), turns=FairSemaphore(1), open_connections=WeakSet())
    connection.connection_made(_Transport())
    connection.set_response_params()
    connection.data_received(response())
    connection.data_received(b"surplus")
    assert not connection.is_connected()


@requirement("egress.response")
def test_a_response_larger_than_the_read_buffer_arrives_whole(run: Run, tmp_path: Path) -> None:
    text = "abcdefghij" * 80_000

    async def whole(peer: Peer) -> None:
        peer.send(response(text))

    async def chunked(peer: Peer) -> None:
        body = body_of(text)
        parts = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:7], body[7:500_000], body[500_000:]))
        peer.send(CHUNKED + parts + b"0\r\n\r\n")

    async def closed(peer: Peer) -> None:
        peer.send(response(text, headers=b"Connection: close\r\n"))
        peer.end()

    async def check(script: Script) -> None:
        async with Upstream(tmp_path, script) as upstream:
            assert await upstream.request() == text

    for script in (whole, chunked, closed):
        run(check(script))


@requirement("fair.projects")
def test_requests_of_one_project_leave_connections_for_another(run: Run, tmp_path: Path) -> None:
    """Batches may need more connections than there are, for as long as a page takes."""
    connections, waiting = 16, asyncio.Semaphore(0)

    async def only_the_last(peer: Peer) -> None:
        if len(upstream.peers) == connections - 1:
            peer.send(response())
        waiting.release()

    async def check() -> None:
        async with upstream:
            request = partial(upstream.client.fetch, SEARCH, KEY, Deadline.after(WAIT_S))
            budget = ByteSemaphore(20_000_000)
            held = [asyncio.create_task(request(for_request(budget.for_call("large")))) for _ in range(20)]
            for _ in range(connections * 7 // 8):
                await waiting.acquire()
            assert content_of(await request(for_request(budget.for_call("small")))) == "c"
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)
            assert upstream.client._transport._inner._session.connector._in_use.used == 0  # type: ignore[attr-defined]  # noqa: SLF001

    upstream = Upstream(tmp_path, only_the_last, connections)
    run(check())


@requirement("egress.response")
def test_a_connection_of_a_cancelled_request_is_closed_when_the_client_is(run: Run, tmp_path: Path) -> None:
    """A TLS connection ends in later iterations of the loop; one whose loop ends before is reported as unclosed."""

    async def check() -> None:
        ended = asyncio.Event()

        async def silent(_: Peer) -> None:
            await ended.wait()

        async with Upstream(tmp_path, silent) as upstream:
            request = asyncio.create_task(upstream.request())
            await until(lambda: upstream.peers)
            request.cancel()
            await asyncio.wait([request])
            assert upstream.client_sockets()
            await upstream.client.aclose()
            assert upstream.client_sockets() == []
            ended.set()

    run(check())


LINE = b"X: " + b"h" * 8_000 + b"\r\n"
LARGE: dict[str, tuple[bytes, bool]] = {
    "a head of 24 kB": (response(headers=3 * LINE), True),
    "a head of 96 kB": (response(headers=12 * LINE), False),
    "a head of 96 kB that does not end": (b"HTTP/1.1 200 OK\r\n" + 12 * LINE, False),
    "trailers of 96 kB that do not end": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + 12 * LINE,
        False,
    ),
    "a chunk's extension that does not end": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;" + b"x" * 96_000,
        False,
    ),
}


@pytest.mark.parametrize("case", LARGE)
@requirement("egress.response")
def test_non_body_bytes_of_a_response_are_limited_together(case: str, run: Run, tmp_path: Path) -> None:
    sent, fits = LARGE[case]

    async def send(peer: Peer) -> None:
        peer.send(sent)

    async def check() -> None:
        async with upstream:
            if fits:
                assert await upstream.request() == "c"
                return
            with pytest.raises(UpstreamUnavailable) as refused:
                await upstream.request()
            assert refused.value.max_retries == 0, "each retry would be billed, and get the same"
            assert refused.value.retryable
            assert "refused" in refused.value.message

    upstream = Upstream(tmp_path, send)
    run(check())


@requirement("egress.response")
def test_refused_response_of_a_reused_connection_is_retried_once(run: Run, tmp_path: Path) -> None:
    """It may be the surplus of an earlier response, perhaps to another project."""

    async def surplus(peer: Peer) -> None:
        peer.send(response())
        await peer.request()
        peer.send(response(headers=12 * LINE))

    async def check() -> None:
        async with Upstream(tmp_path, surplus) as upstream:
            assert await upstream.request() == "c"
            with pytest.raises(UpstreamUnavailable) as refused:
                await upstream.request()
            assert refused.value.max_retries == ONCE

    run(check())


@pytest.mark.parametrize(
    "sent", [b"\x00\x01\r\n\r\n", response(headers=b"X: " + b"h" * 9_000 + b"\r\n")], ids=["no HTTP", "a long line"]
)
def test_malformed_response_is_retried_once(sent: bytes, run: Run, tmp_path: Path) -> None:
    async def send(peer: Peer) -> None:
        peer.send(sent)

    async def check() -> None:
        async with Upstream(tmp_path, send) as upstream:
            with pytest.raises(UpstreamUnavailable) as refused:
                await upstream.request()
            assert refused.value.max_retries == ONCE, "each retry is billed, too"

    run(check())


_TINY = 25_000 * b"1\r\n \r\n"
SMALL_CHUNKS = {
    "tiny": (_TINY, False),
    "tiny on a connection that ends": (_TINY, True),
    "tiny behind a large one": (b"7a120\r\n%b\r\n" % (b" " * 500_000) + _TINY, False),
    "of 24 bytes": (25_000 * (b"18\r\n%b\r\n" % (b" " * 24)), False),
    "extended": (600 * (b"8;" + b"x" * 200 + b"\r\n        \r\n"), False),
}
"""Bodies with at least 120 kB of chunk framing, and whether the connection ends behind it."""


@pytest.mark.parametrize("case", SMALL_CHUNKS)
@requirement("egress.response")
def test_parsing_small_chunks_leaves_most_of_the_event_loop_to_others(case: str, run: Run, tmp_path: Path) -> None:
    """400,000 chunks take a second of CPU, whatever their size."""
    chunks, ends = SMALL_CHUNKS[case]

    async def in_chunks(peer: Peer) -> None:
        peer.send(response("first"))
        await peer.request()
        body = body_of("c")
        peer.send(CHUNKED + chunks + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        if ends:
            peer.end()

    async def check() -> None:
        async with Upstream(tmp_path, in_chunks) as upstream:
            assert await upstream.request() == "first"
            began = time.monotonic()
            assert await upstream.request() == "c"
            assert time.monotonic() - began > 0.2  # of which 0.05 are CPU

    run(check())


@requirement("egress.response")
def test_a_page_in_small_chunks_is_read(run: Run, tmp_path: Path) -> None:
    body = body_of("c" * 500_000)
    chunks = [body[start : start + 64] for start in range(0, len(body), 64)]

    async def in_chunks(peer: Peer) -> None:
        framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
        peer.send(CHUNKED + framed + b"0\r\n\r\n")

    async def check() -> None:
        async with Upstream(tmp_path, in_chunks) as upstream:
            assert await upstream.request() == "c" * 500_000

    run(check())


@pytest.mark.parametrize("closes", [False, True], ids=["kept", "closed"])
@pytest.mark.parametrize("size", [100, 1_369, 60_000])
@requirement("egress.response")
def test_a_large_body_in_chunks_is_read_however_often_its_reader_pauses_the_parser(
    size: int, run: Run, tmp_path: Path, *, closes: bool
) -> None:
    """Bytes that the paused parser has only buffered are no framing, and a close does not discard them."""
    text = "c" * 3_000_000

    async def in_chunks(peer: Peer) -> None:
        body = body_of(text)
        chunks = [body[start : start + size] for start in range(0, len(body), size)]
        framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
        connection = b"Connection: close\r\n" if closes else b""
        while True:
            peer.send(b"HTTP/1.1 200 OK\r\n" + connection + b"Transfer-Encoding: chunked\r\n\r\n" + framed)
            peer.send(b"0\r\n\r\n")
            if closes:
                return peer.end()
            await peer.request()

    async def check() -> None:
        async with Upstream(tmp_path, in_chunks, max_bytes=10_000_000) as upstream:
            times = 4 if size > 1_000 else 1  # smaller ones wait for turns
            for _ in range(times):
                assert await upstream.request() == text
            assert len(upstream.peers) == (times if closes else 1)

    run(check())


@requirement("egress.response")
def test_a_small_answer_after_a_large_one_on_the_same_connection_is_read(run: Run, tmp_path: Path) -> None:
    """The body of the first must not count for the second: its head would then look like 500 kB of chunk framing."""

    async def large_then_small(peer: Peer) -> None:
        peer.send(response("l" * 500_000))
        await peer.request()
        peer.send(response("s", headers=b"X-Padding: " + b"x" * 4_000 + b"\r\n")[:-10])
        await asyncio.sleep(0.1)
        peer.send(response("s")[-10:])

    async def check() -> None:
        async with Upstream(tmp_path, large_then_small) as upstream:
            assert await upstream.request() == "l" * 500_000
            assert await upstream.request() == "s"
            assert len(upstream.peers) == 1

    run(check())
