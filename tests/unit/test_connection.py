"""Bytes from the upstream that no server should send: over TLS on loopback, with both event loops."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
import trustme
import uvloop
from aiohttp.client_proto import ResponseHandler

from openapi_tool.jina.byte_semaphore import ByteSemaphore
from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.egress import ALLOWED_HOSTS, EgressTransport, tls_context
from openapi_tool.jina.failures import ONCE
from openapi_tool.jina.transport import AiohttpTransport, on_connected
from openapi_tool.local.executor import LoopbackResolver
from openapi_tool.protocol.errors import UpstreamUnavailable
from openapi_tool.tools.deadline import Deadline
from tests.requirements import requirement
from tests.unit.test_http import KEY, SEARCH, fetch

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
TIMEOUT_S = 10


def response(content: str = "c", *, headers: bytes = b"") -> bytes:
    """Return a complete response."""
    body = json.dumps({"code": 200, "data": content}).encode()
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

    def __init__(self, folder: Path, script: Script, connections: int = 10) -> None:
        authority = trustme.CA()
        self._ca = folder / "ca.pem"
        authority.cert_pem.write_to_path(str(self._ca))
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(*ALLOWED_HOSTS).configure_cert(self._tls)
        self._script, self._connections = script, connections
        self.peers: list[Peer] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        port = self._server.sockets[0].getsockname()[1]
        transport = AiohttpTransport(tls_context(str(self._ca)), self._connections, LoopbackResolver(port))
        self.client = JinaClient(EgressTransport(transport), 1_000_000)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        self._server.close()
        async with asyncio.timeout(TIMEOUT_S):
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

    async def request(self) -> Any:
        """Send one more request; return the content of its response."""
        return (await fetch(self.client, seconds=TIMEOUT_S))["data"]


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Return a function that runs a coroutine on one of the two event loops."""

    def run(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(asyncio.wait_for(work, 2 * TIMEOUT_S))

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
        on_connected.set(lambda: lambda: events.append(f"{number} sent"))  # stands for a weak reference to a callback
        return await upstream.request()

    async def check() -> None:
        async with Upstream(tmp_path, script, connections=1) as upstream:
            assert list(await asyncio.gather(send(upstream, 1), send(upstream, 2))) == ["first", "second"]

    events: list[str] = []
    run(check())
    assert events == ["1 sent", "received", "2 sent", "received"]


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
                async with asyncio.timeout(TIMEOUT_S):
                    await upstream.peers[0].gone.wait()
            assert await upstream.request() == "of connection 2"

    upstream = Upstream(tmp_path, once)
    run(check())


@requirement("egress.response")
def test_surplus_response_in_the_same_read_reaches_no_later_request(run: Run, tmp_path: Path) -> None:
    async def twice(peer: Peer) -> None:
        head, _, body = response(f"of connection {len(upstream.peers)}").partition(b"\r\n\r\n")
        peer.send(head + b"\r\n\r\n" + body[:5])
        await asyncio.sleep(0)  # so that the end and the surplus are sent together, but apart from the beginning
        peer.send(body[5:] + response("smuggled"))

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
            async with asyncio.timeout(TIMEOUT_S):
                await upstream.peers[0].gone.wait()
            assert max(parsed) <= 16_384
            assert sum(parsed) <= 3 * 16_384

    original = ResponseHandler.data_received
    monkeypatch.setattr(ResponseHandler, "data_received", data_received)
    upstream = Upstream(tmp_path, flood)
    run(check())


@requirement("egress.response")
def test_a_response_larger_than_the_read_buffer_arrives_whole(run: Run, tmp_path: Path) -> None:
    text = "abcdefghij" * 80_000

    async def whole(peer: Peer) -> None:
        peer.send(response(text))

    async def chunked(peer: Peer) -> None:
        body = json.dumps({"code": 200, "data": text}).encode()
        parts = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:7], body[7:500_000], body[500_000:]))
        peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + parts + b"0\r\n\r\n")

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
            request = partial(upstream.client.fetch, SEARCH, KEY, Deadline.after(TIMEOUT_S))
            budget = ByteSemaphore(20_000_000)
            held = [asyncio.create_task(request(budget.for_call("large").for_request())) for _ in range(20)]
            for _ in range(connections * 7 // 8):
                await waiting.acquire()
            assert (await request(budget.for_call("small").for_request()))["data"] == "c"
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)
            assert upstream.client._transport._inner._session.connector._in_use.used == 0  # type: ignore[attr-defined]  # noqa: SLF001

    upstream = Upstream(tmp_path, only_the_last, connections)
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
            assert refused.value.max_retries == ONCE, "each retry would be billed, too"
            assert "refused" in refused.value.message

    upstream = Upstream(tmp_path, send)
    run(check())


@pytest.mark.parametrize("piece", [b"1\r\n \r\n", b"8;" + b"x" * 200 + b"\r\n        \r\n"], ids=["tiny", "extended"])
@requirement("egress.response")
def test_body_in_chunks_that_are_mostly_framing_is_aborted(piece: bytes, run: Run, tmp_path: Path) -> None:
    """Parsing 500,000 chunks of one byte would block the event loop for a second."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def in_chunks(peer: Peer) -> None:
        body = b'{"code":200,"data":"c"}'
        peer.send(head + piece * (1_000_000 // len(piece)) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))

    async def check() -> None:
        async with Upstream(tmp_path, in_chunks) as upstream:
            with pytest.raises(UpstreamUnavailable):
                await upstream.request()

    run(check())


@requirement("egress.response")
def test_a_body_in_many_chunks_of_a_usual_size_is_read(run: Run, tmp_path: Path) -> None:
    body = json.dumps({"code": 200, "data": "c" * 500_000}).encode()
    chunks = [body[start : start + 64] for start in range(0, len(body), 64)]

    async def in_chunks(peer: Peer) -> None:
        framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
        peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n")

    async def check() -> None:
        async with Upstream(tmp_path, in_chunks) as upstream:
            assert await upstream.request() == "c" * 500_000

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
