"""Hostile clients on real sockets: foreign hosts and origins, slow and huge requests, floods."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from contextlib import AsyncExitStack, suppress

import pytest

from openapi_tool.http import connections, request_shares
from openapi_tool.http.bodies import MAX_BODY_BYTES
from openapi_tool.http.connections import Connection, Connections
from openapi_tool.local.stack import UpstreamDouble
from openapi_tool.telemetry.logs import MAX_LINES, ProjectLimit
from tests.gateway.conftest import PAGE, Serve
from tests.gateway.test_http import READ, raw, sent
from tests.requirements import requirement
from tests.waiting import WAIT_S, until

JSON = "application/json"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


@requirement("gateway.access")
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:80", 200),
        ("127.0.0.1", 200),
        ("[::1]:8090", 200),
        ("192.168.1.7", 200),
        ("gateway", 200),
        ("gateway.tools.svc", 200),
        ("tools.example.org", 200),
        ("TOOLS.example.org:443", 200),
        ("attacker.example", 421),
        ("127.0.0.1.attacker.example", 421),
        ("tools.example.org.attacker.example", 421),
        ("localhost@attacker.example", 421),
        ("attacker.example#localhost", 421),
        ("attacker.example\\.local", 421),
        ("[::1]attacker.example", 421),
        ("attacker.example[::1]", 421),
        ("[attacker.example]", 421),
        ("attacker%2eexample", 421),
        ("attacker\u3002example", 421),
        (".svc", 421),
        ("127.0.0.1:65536", 421),
        ("[fe80::1%25eth0]:80", 200),
        ("a_b:", 200),
        ("", 421),
    ],
)
async def test_a_foreign_host_name_is_refused(serve: Serve, host: str, status: int) -> None:
    async with serve(gateway={"allowed_hosts": ("tools.example.org",)}) as served:
        answer = await sent(served, f"GET /v1/tools HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 %d" % status), answer[:300]


@requirement("gateway.access", "logs.limits")
async def test_requests_that_are_no_http_do_not_flood_the_log(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.addFilter(ProjectLimit())
    async with serve() as served:
        for _ in range(2 * MAX_LINES):
            assert (await sent(served, b"no HTTP\r\n\r\n")).startswith(b"HTTP/1.1 400")
    assert len(caplog.records) == MAX_LINES


@requirement("gateway.access")
async def test_clients_that_are_gone_before_they_are_accepted_are_no_defect(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as served, served.client() as client:
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", served.port)) as gone:  # the server runs only at the next await
                gone.sendall(b"GET /v1/tools HTTP/1.1\r\nHost: localhost\r\n\r\n")
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset it
        assert (await client.get("/v1/tools")).status_code == 200
        assert (await client.get("/v1/tools")).status_code == 200
    assert [each.message for each in caplog.records if each.levelno >= logging.ERROR] == []


@requirement("gateway.access")
async def test_the_end_of_a_connection_does_not_affect_a_later_one_of_the_same_address() -> None:
    open_ones, address = Connections(10), ("127.0.0.1", 1)
    old, new = (Connection(asyncio.Protocol(), open_ones) for _ in range(2))
    open_ones.add(address, old)
    open_ones.add(address, new)
    open_ones.discard(address, old)
    open_ones.to_end(address, old)
    assert open_ones.of(address) is new


@requirement("gateway.access")
async def test_a_connection_stays_open_after_a_preflight(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.5)
    origin = "https://chat.example.org"
    lines = ("OPTIONS /v1/tools HTTP/1.1", "Host: localhost", f"Origin: {origin}", "Access-Control-Request-Method: GET")
    async with serve(gateway={"allowed_origins": (origin,)}) as served, raw(served) as (reader, writer):
        writer.write("\r\n".join((*lines, "", "")).encode())
        assert b" 200 " in await reader.readuntil(b"\r\n\r\nOK")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 1.5)


@requirement("gateway.access")
@pytest.mark.parametrize("headers", ["Host: a\r\nHost: localhost", "X-Nothing: 1"])
async def test_several_host_names_or_none_are_refused(serve: Serve, headers: str) -> None:
    async with serve() as served:
        answer = await sent(served, f"GET /v1/tools HTTP/1.1\r\n{headers}\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith((b"HTTP/1.1 421", b"HTTP/1.1 400")), answer[:300]


@requirement("gateway.access")
@pytest.mark.parametrize("path", [READ, "/mcp", "/integrations/open-webui/search"])
@pytest.mark.parametrize(
    "origin", ["https://attacker.example", "null", "http://localhost:3000", "https://chat.example.org.evil.example"]
)
async def test_a_web_page_of_a_foreign_origin_may_not_call(
    serve: Serve, double: UpstreamDouble, path: str, origin: str
) -> None:
    async with serve(gateway={"allowed_origins": ("https://chat.example.org",)}) as served, served.client() as client:
        for content_type in ("text/plain", "application/json"):
            headers = {"Origin": origin, "Content-Type": content_type}
            refused = await client.post(path, content=b'{"query": "x"}', headers=headers)
            assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
            assert "access-control-allow-origin" not in refused.headers
        refused = await client.options(path, headers={"Origin": origin, **PREFLIGHT})
        assert "access-control-allow-origin" not in refused.headers
    assert double.requests() == []


@requirement("gateway.access")
async def test_a_web_page_of_an_allowed_origin_may_call(serve: Serve) -> None:
    origin = "https://chat.example.org"
    async with serve(gateway={"allowed_origins": (origin,)}) as served, served.client(Origin=origin) as client:
        allowed = await client.options(READ, headers=PREFLIGHT)
        assert allowed.headers["access-control-allow-origin"] == origin
        answer = await client.post(READ, json={"url": PAGE})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
    async with serve() as served, served.client(Origin=served.url) as client:
        assert (await client.get("/v1/tools")).status_code == 200  # its own
        assert (await client.get("/v1/tools", headers={"Origin": "http://127.0.0.1:1"})).status_code == 403


@requirement("gateway.access")
@pytest.mark.parametrize("path", [READ, "/mcp", "/integrations/open-webui/load"])
async def test_a_body_of_ten_megabytes_is_refused_and_its_client_reads_why(
    serve: Serve, double: UpstreamDouble, path: str
) -> None:
    body = b'{"url": "' + b"x" * 10_000_000 + b'"}'

    async def parts() -> object:
        for at in range(0, len(body), 65_536):
            yield body[at : at + 65_536]

    async with serve() as served, served.client() as client:
        for content in (body, parts()):
            refused = await client.post(path, content=content, headers={"Content-Type": "application/json"})  # type: ignore[arg-type]
            assert (refused.status_code, refused.json()["code"]) == (413, "bad_request")
            assert f"{MAX_BODY_BYTES:,}" in refused.json()["detail"]
        assert (await client.get("/v1/tools")).status_code == 200
    assert double.requests() == []


@requirement("gateway.access", "gateway.tokens")
async def test_no_body_is_read_without_a_token(serve: Serve) -> None:
    async with serve() as served:
        await served.token()
        head = f"POST {READ} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n\r\n"
        answer = await sent(served, head.encode())
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"connection: close" in answer.lower()


@requirement("gateway.access")
@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b"POST",
        b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
        b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n",
        b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n",
    ],
)
async def test_a_slow_client_is_cut_off_and_others_are_served(
    serve: Serve, beginning: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("HEAD_S", "BODY_S", "WRITE_S", "IDLE_S"):
        monkeypatch.setattr(connections, limit, 0.7)
    async with serve() as served:

        async def slow() -> None:
            async with raw(served) as (reader, writer):
                writer.write(beginning)
                reading = asyncio.create_task(reader.read())
                with suppress(ConnectionError):
                    while not reading.done():
                        writer.write(b"x")
                        await writer.drain()
                        await asyncio.sleep(0.1)
                with suppress(ConnectionError):
                    await reading

        attackers = [asyncio.create_task(slow()) for _ in range(20)]
        async with served.client() as client:
            assert (await client.get("/v1/tools")).status_code == 200
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*attackers)


@requirement("gateway.access")
async def test_a_request_of_two_lengths_is_refused_and_ends_its_connection(serve: Serve) -> None:
    """A proxy that goes by the other one would take the rest for another request, or for none."""
    async with serve() as served, raw(served) as (reader, writer):
        smuggled = b"GET /v1/tools HTTP/1.1\r\nHost: localhost\r\n\r\n"
        lengths = b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % (5 + len(smuggled))
        writer.write(b"POST /v1/tools/jina_read HTTP/1.1\r\nHost: localhost\r\n" + lengths + smuggled)
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1


@requirement("gateway.access")
async def test_a_client_that_reads_nothing_is_cut_off(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "WRITE_S", 1.0)
    request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with serve() as served, raw(served) as (_, writer):
        async with asyncio.timeout(WAIT_S):
            while not writer.is_closing():
                writer.write(request * 100)
                await asyncio.sleep(0.05)
        with pytest.raises(ConnectionError):
            await writer.drain()


@requirement("gateway.access")
async def test_idle_connections_make_room_for_new_ones(serve: Serve) -> None:
    async with serve(gateway={"max_connections": 16}) as served:
        idle = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(40)]
        async with served.client() as client:
            assert (await client.get("/v1/tools")).status_code == 200
        closed = [reader.at_eof() or reader.exception() is not None for reader, _ in idle]
        assert closed[0]
        assert not closed[-1]
        for _, writer in idle:
            writer.close()


@requirement("gateway.access")
async def test_one_token_has_a_bounded_number_of_requests(serve: Serve, double: UpstreamDouble) -> None:
    double.rules({"match": "article", "delay_s": 1.0})
    async with serve(gateway={"max_requests_per_token": 4}) as served:
        flooding, quiet = await served.token("p", "a"), await served.token("p", "b")
        async with served.client(flooding) as flood, served.client(quiet) as client:
            calls = [asyncio.create_task(flood.post(READ, json={"url": PAGE})) for _ in range(8)]
            await until(lambda: served.gateway.running >= 4)
            assert (await client.get("/v1/tools")).status_code == 200
            answers = await asyncio.gather(*calls)
        assert sorted(answer.status_code for answer in answers) == [200] * 4 + [429] * 4
        assert {answer.headers["retry-after"] for answer in answers if answer.status_code == 429} == {"2"}


@requirement("gateway.access")
async def test_the_bodies_of_one_token_take_bounded_memory_and_leave_room_for_others(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_shares, "MAX_BYTES_OF_TOKEN", 4 * MAX_BODY_BYTES)
    async with serve() as served:
        holding, quiet = await served.token("p", "a"), await served.token("p", "b")
        head = f"POST {READ} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {holding}\r\n"
        body = f"Content-Length: {MAX_BODY_BYTES}\r\n\r\n".encode() + b" " * (MAX_BODY_BYTES - 1)
        async with AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(raw(served)) for _ in range(8)]
            for _, writer in streams:
                writer.write(head.encode() + body)
                with suppress(ConnectionError):
                    await writer.drain()
            answers = [asyncio.create_task(reader.readline()) for reader, _ in streams]
            await until(lambda: sum(answer.done() for answer in answers) >= 4)
            assert sum(answer.done() and answer.result().startswith(b"HTTP/1.1 429") for answer in answers) == 4
            async with served.client(quiet) as client:
                large = await client.post(READ, content=b" " * MAX_BODY_BYTES, headers={"Content-Type": JSON})
                assert large.status_code == 400  # it was read
            for answer in answers:
                answer.cancel()
        async with served.client(holding) as client:
            await asyncio.sleep(0.2)
            large = await client.post(READ, content=b" " * MAX_BODY_BYTES, headers={"Content-Type": JSON})
            assert large.status_code == 400


@requirement("gateway.access")
async def test_the_tokens_of_one_project_leave_connections_and_bodies_to_others(
    serve: Serve, double: UpstreamDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_shares, "MAX_BYTES", 8 * 1_000)
    double.rules({"match": "article", "hang": True})
    async with serve(gateway={"max_connections": 16}) as served:
        flooding = [await served.token("p", f"a{number}") for number in range(3)]
        other = await served.token("q", "b")
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(served.client(token)) for token in flooding]
            calls = [asyncio.create_task(clients[n % 3].post(READ, json={"url": f"{PAGE}?{n}"})) for n in range(15)]
            await until(lambda: any(call.done() for call in calls))
            refused = next(call for call in calls if call.done()).result()
            assert (refused.status_code, "This project has 14 requests" in refused.json()["detail"]) == (429, True)
            async with served.client(other) as client:
                assert (await client.get("/v1/tools")).status_code == 200
            for call in calls:
                call.cancel()
        await until(lambda: served.gateway.running == 0)
        async with AsyncExitStack() as stack:
            for token in flooding:
                _, writer = await stack.enter_async_context(raw(served))
                head = f"POST {READ} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
                writer.write(f"{head}Content-Length: 2601\r\n\r\n".encode() + b" " * 2_600)
            async with served.client(other) as client:
                read = await client.post(READ, content=b" " * 900, headers={"Content-Type": JSON})
                assert read.status_code == 400


@requirement("gateway.access", "gateway.tokens")
async def test_wrong_tokens_do_not_lock_a_right_one_out_whatever_its_address(serve: Serve) -> None:
    async with serve() as served:
        token = await served.token()

        async def status(address: str, given: str) -> int:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port, local_addr=(address, 0))
            head = f"GET /v1/tools HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {given}\r\n\r\n"
            writer.write(head.encode())
            line = await reader.readline()
            writer.transport.abort()
            return int(line.split()[1])

        guesses = [f"oat_{number:012x}_{'f' * 64}" for number in range(100)]
        assert {await status("127.0.0.2", guess) for guess in guesses} == {401, 429}
        assert await status("127.0.0.2", guesses[0]) == 429
        assert await status("127.0.0.2", token) == 200
        assert await status("127.0.0.1", guesses[0]) == 401  # another address has tries of its own
        assert await status("127.0.0.1", token) == 200


@requirement("gateway.access")
@pytest.mark.parametrize("header", ["Idempotency-Key", "X-Agent-Id", "Mcp-Method", "Origin", "Authorization"])
async def test_no_header_of_a_request_becomes_one_of_the_response(serve: Serve, header: str) -> None:
    body = b'{"url": "' + PAGE.encode() + b'"}'
    async with serve() as served:
        token = await served.token(any_agent=True)
        for value in (
            b"a\rX-Injected: 1",
            b"a\n\nX-Injected: 1",
            b"a%0d%0aX-Injected: 1",
            b"\xc4\x8d\xc4\x8aX-Injected: 1",
        ):
            lines = (
                f"POST {READ} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nContent-Type: {JSON}\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n{header}: "
            )
            answer = await sent(served, lines.encode() + value + b"\r\n\r\n" + body)
            head = answer.partition(b"\r\n\r\n")[0]
            assert answer.startswith(b"HTTP/1.1 "), answer[:300]
            assert b"x-injected" not in head.lower(), head


@requirement("gateway.access")
@pytest.mark.parametrize(
    "path",
    [
        "/v1/tools/../../etc/passwd",
        "/v1/tools/..%2f..%2fetc%2fpasswd",
        "/v1/tools/%2e%2e/%2e%2e/openapi.json",
        "/v1/tools/jina_read%00",
        "/v1/tools/jina_read%0d%0aX-Injected:%201",
        "/v1/tools/jina_read;x",
        "/v1/tools/JINA_READ",
        "//v1/tools/jina_read",
        "/v1/tools/" + "a" * 10_000,
        "/v1/tools/%ff%fe",
        "/v1%2ftools/jina_read",
        "/v1/%74ools/jina_read",
        "http://attacker.example/v1/tools/jina_read",
    ],
)
async def test_no_path_leads_elsewhere(serve: Serve, double: UpstreamDouble, path: str) -> None:
    body = b'{"url": "' + PAGE.encode() + b'"}'
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    async with serve() as served:
        answer = await sent(served, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert answer.startswith(b"HTTP/1.1 4"), answer[:300]
    assert b"\r\nX-Injected" not in answer
    assert double.requests() == []


@requirement("gateway.access")
@pytest.mark.parametrize(
    "head",
    [
        "GET /v1/tools HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked",
        "GET /v1/tools HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1",
        "GET /v1/tools HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1, 2",
        "GET /v1/tools HTTP/1.1\r\nHost : localhost",
        "GET /v1/tools HTTP/1.1\r\nHost: localhost\r\nX-Agent-Id: a\x00b",
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=range(6),
)
async def test_a_malformed_head_is_refused_and_others_are_served(serve: Serve, head: str) -> None:
    async with serve() as served:
        answer = await sent(served, head.encode("latin-1") + b"\r\n\r\nGET /v1/budget HTTP/1.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400"), answer[:300]
        assert answer.count(b"HTTP/1.1 ") == 1
        async with served.client() as client:
            assert (await client.get("/v1/tools")).status_code == 200


@requirement("gateway.access")
async def test_the_head_of_a_request_is_bounded(serve: Serve) -> None:
    async with serve() as served, raw(served) as (reader, writer):
        writer.write(b"GET /v1/tools HTTP/1.1\r\nHost: localhost\r\n")
        with suppress(ConnectionError):
            for number in range(10_000):
                writer.write(b"X-%d: %s\r\n" % (number, b"a" * 1_000))
                await writer.drain()
            assert (await reader.read(12)) in (b"HTTP/1.1 400", b"")


@requirement("gateway.access")
async def test_a_compressed_body_is_refused(serve: Serve) -> None:
    async with serve() as served, served.client() as client:
        refused = await client.post(READ, content=b"x", headers={"Content-Encoding": "gzip"})
        assert refused.status_code == 415


@requirement("gateway.access")
async def test_pipelined_requests_are_answered_in_their_order(serve: Serve) -> None:
    request = b"GET /v1/budget HTTP/1.1\r\nHost: localhost\r\n"
    async with serve() as served:
        answer = await sent(served, (request + b"\r\n") * 5 + request + b"Connection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200") == 6


@requirement("gateway.access", "mcp.cancellation")
async def test_a_storm_of_cancellations_leaves_nothing_behind(serve: Serve, double: UpstreamDouble) -> None:
    double.rules({"match": "article", "hang": True})
    body = b'{"url": "' + PAGE.encode() + b'"}'
    head = f"POST {READ} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    async with serve(cache={"ttl_s": 0}) as served:
        began = time.monotonic()
        for _ in range(100):
            async with raw(served) as (_, writer):
                writer.write(head.encode() + b"\r\n\r\n" + body)
                await writer.drain()
        await until(lambda: not served.gateway.running)
        assert time.monotonic() - began < 60
        double.rules()
        async with served.client() as client:
            assert (await client.post(READ, json={"url": PAGE})).status_code == 200
