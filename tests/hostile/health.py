"""Attacks on the health server by any client that reaches its port."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.hostile.case import Cases
from tests.hostile.scene import Scene, assert_succeeded

CASES = Cases()
SOCKETS = 1_200
CALLS = 20
READY_S = 8.0
_SPARE = 300


@asynccontextmanager
async def _connections(scene: Scene, number: int, data: bytes) -> AsyncIterator[list[asyncio.StreamWriter]]:
    """Open `number` connections and send `data` on each; the server may close some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, number + _SPARE)), hard))
    writers: list[asyncio.StreamWriter] = []
    try:
        for _ in range(number):
            with suppress(OSError):  # one that the server closed
                _, writer = await asyncio.open_connection("127.0.0.1", scene.stage.health_port)
                writers.append(writer)
                writer.write(data)
        yield writers
    finally:
        for writer in writers:
            writer.close()


async def _ready(scene: Scene) -> None:
    """Wait for a complete response to a probe. Raises TimeoutError."""
    async with asyncio.timeout(READY_S):
        while True:
            with suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection("127.0.0.1", scene.stage.health_port)
                writer.write(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                data = await reader.read()
                writer.close()
                if b'"ready"' in data:
                    return
            await asyncio.sleep(0.05)


async def _calls_succeed(scene: Scene) -> None:
    tool = await scene.define()
    for answer in await scene.calls(CALLS, tool, {"query": "beside the health server {n}"}):
        assert_succeeded(answer)


@CASES.case("14")
async def incomplete_requests(scene: Scene) -> None:
    async with _connections(scene, SOCKETS, b"GET /readyz HTTP/1.1\r\nHost: "):
        await _calls_succeed(scene)
        await _ready(scene)


@CASES.case("14")
async def idle_connections(scene: Scene) -> None:
    async with _connections(scene, SOCKETS, b""):
        await _calls_succeed(scene)
        await _ready(scene)


@CASES.case("14")
async def slow_requests(scene: Scene) -> None:
    async with _connections(scene, 100, b"GET /readyz HTTP/1.1\r\n") as writers:
        for _ in range(20):
            for writer in writers:
                with suppress(OSError):
                    writer.write(b"X")
            await asyncio.sleep(0.02)
        await _calls_succeed(scene)
        await _ready(scene)


@CASES.case("14")
async def headers_and_bodies_of_ten_megabytes(scene: Scene) -> None:
    head = b"GET /readyz HTTP/1.1\r\nHost: x\r\nX-Long: "
    body = b"POST /readyz HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n"
    async with _connections(scene, 8, head + b"x" * 10_000_000), _connections(scene, 8, body + b"x" * 9_000_000):
        await _calls_succeed(scene)
        await _ready(scene)


@CASES.case("14")
async def pipelined_requests(scene: Scene) -> None:
    one = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    async with _connections(scene, 8, one * 2_000):
        await _calls_succeed(scene)
        await _ready(scene)


@CASES.case("14")
async def endless_requests_for_metrics(scene: Scene) -> None:
    for _ in range(20):
        async with _connections(scene, 30, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"):
            await _ready(scene)
    await _calls_succeed(scene)


@CASES.case("14")
async def malformed_requests(scene: Scene) -> None:
    odd = (
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /readyz HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01" + b"\x00" * 200,
        b"GET " + b"/a" * 40_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /readyz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
        b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    )
    for data in odd:
        async with _connections(scene, 2, data):
            await asyncio.sleep(0.01)
    await _ready(scene)
