"""Attacks on the HTTP door, as programs of their own: `python -m tests.hostile.door_attacks NAME PORT TOKEN`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import orjson

READ = "/v1/tools/jina_read"
PAGE = "http://site.fixture.test:8099/article"
SLOW = f"{PAGE}?slow"
"""Page for which the double takes 250 ms."""

_JSON = "Content-Type: application/json\r\n"
_META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": {"name": "attacker", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}
ATTACKER = "127.0.0.2"
"""Address of the attacker; the victim has another one."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Attack = Callable[[int, str], Coroutine[Any, Any, None]]


@asynccontextmanager
async def connection(port: int) -> AsyncIterator[Streams]:
    """Yield a connection, which is closed at once at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(ATTACKER, 0), limit=2**20)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def head(path: str, token: str, size: int | None, more: str = _JSON) -> bytes:
    """Return the head of a request with a body of this size."""
    length = f"Content-Length: {size}\r\n" if size is not None else ""
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n{more}{length}\r\n".encode()


def request(path: str, token: str, body: bytes, more: str = _JSON) -> bytes:
    """Return a request."""
    return head(path, token, len(body), more) + body


def mcp(method: str, token: str, **params: Any) -> bytes:
    """Return a request of MCP as of 2026-07-28."""
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": _META}}
    name = f"Mcp-Name: {params['name']}\r\n" if "name" in params else ""
    more = (
        f"{_JSON}Accept: application/json, text/event-stream\r\nMCP-Protocol-Version: 2026-07-28\r\n"
        f"Mcp-Method: {method}\r\n{name}"
    )
    return request("/mcp", token, orjson.dumps(message), more)


async def _many(number: int, at_once: int, one: Callable[[int], Awaitable[None]]) -> None:
    """Run `one` for each number; what the server refuses or closes is its right."""
    free = asyncio.Semaphore(at_once)

    async def run(index: int) -> None:
        async with free:
            with suppress(OSError, asyncio.IncompleteReadError):
                await one(index)

    async with asyncio.TaskGroup() as group:
        for index in range(number):
            group.create_task(run(index))


async def slow_heads(port: int, token: str) -> None:
    """Send heads byte by byte on many connections."""

    async def one(_index: int) -> None:
        async with connection(port) as (_, writer):
            writer.write(b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
            for _ in range(30):
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.1)

    await _many(500, 500, one)


async def slow_bodies(port: int, token: str) -> None:
    """Send nearly all of a largest body on many connections, and then byte by byte."""

    async def one(_index: int) -> None:
        async with connection(port) as (_, writer):
            writer.write(head(READ, token, 2**20) + b"x" * (2**20 - 100))
            for _ in range(30):
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.1)

    await _many(250, 250, one)


async def large_bodies(port: int, token: str) -> None:
    """Send arguments of 10 MB, with a length and in chunks."""

    async def one(index: int) -> None:
        body = b'{"url": "' + b"x" * 10_000_000 + b'"}'
        async with connection(port) as (reader, writer):
            chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            more = f"{_JSON}Transfer-Encoding: chunked\r\n"
            writer.write(head(READ, token, None, more) + chunked if index % 2 else request("/mcp", token, body))
            await reader.readuntil(b"\r\n")

    await _many(60, 10, one)


async def wrong_tokens(port: int, token: str) -> None:
    """Try 10,000 tokens."""
    del token

    async def one(index: int) -> None:
        async with connection(port) as (reader, writer):
            writer.write(request(READ, f"oat_{index:012x}_{index:064x}", b"{}"))
            await reader.readuntil(b"\r\n")

    await _many(10_000, 50, one)


async def flood(port: int, token: str) -> None:
    """Call as often as one token may."""

    async def one(index: int) -> None:
        async with connection(port) as (reader, writer):
            for number in range(4):
                writer.write(request(READ, token, orjson.dumps({"url": f"{SLOW}&{index}-{number}"})))
                answered = await reader.readuntil(b"\r\n\r\n")
                length = next(int(line[15:]) for line in answered.splitlines() if line.startswith(b"content-length:"))
                await reader.readexactly(length)

    await _many(300, 300, one)


async def json_bombs(port: int, token: str) -> None:
    """Send JSON that is hard to parse, to each end point."""
    bombs = (
        b"[" * 1_000_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b"{" + b",".join(b'"%d":0' % number for number in range(90_000)) + b"}",
        b'{"url": [' + b"0," * 500_000 + b"0]}",
        b'{"url": ' + b"9" * 1_000_000 + b"}",
        b'{"url": 1e' + b"9" * 900_000 + b"}",
        b'{"url": "' + b"\\ud800" * 150_000 + b'"}',
    )
    wrapped = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"jina_read","arguments":%b}}'
    more = f"{_JSON}Accept: application/json, text/event-stream\r\nMCP-Protocol-Version: 2025-06-18\r\n"

    async def one(index: int) -> None:
        bomb = bombs[index % len(bombs)]
        path = (READ, "/mcp", "/integrations/open-webui/load")[index % 3]
        async with connection(port) as (reader, writer):
            body = wrapped % bomb[: 2**20 - 200] if path == "/mcp" else bomb
            writer.write(request(path, token, body[: 2**20], more))
            await reader.readuntil(b"\r\n")

    await _many(42, 6, one)


async def streams_that_nobody_reads(port: int, token: str) -> None:
    """Subscribe with the largest filters, and call tools; read nothing."""
    uris = [f"test://{number:040x}" for number in range(18_000)]
    listen = mcp("subscriptions/listen", token, notifications={"toolsListChanged": True, "resourceSubscriptions": uris})
    call = mcp("tools/call", token, name="jina_read", arguments={"url": SLOW})

    async def one(index: int) -> None:
        async with connection(port) as (_, writer):
            writer.write(listen if index % 5 else call * 20)
            await writer.drain()
            await asyncio.sleep(8)

    await _many(250, 250, one)


async def cancel_storm(port: int, token: str) -> None:
    """Begin calls, and close their connections at once."""
    plain = request(READ, token, orjson.dumps({"url": SLOW}))
    modern = mcp("tools/call", token, name="jina_read", arguments={"url": SLOW})

    async def one(index: int) -> None:
        async with connection(port) as (_, writer):
            writer.write(modern if index % 2 else plain)
            await writer.drain()
            await asyncio.sleep(0.02)

    await _many(1_000, 50, one)


async def idle_connections(port: int, token: str) -> None:
    """Keep 1,000 connections open."""
    del token

    async def one(_: int) -> None:
        async with connection(port):
            await asyncio.sleep(6)

    await _many(1_000, 1_000, one)


ATTACKS: Mapping[str, Attack] = {
    each.__name__: each
    for each in (
        slow_heads,
        slow_bodies,
        large_bodies,
        wrong_tokens,
        flood,
        json_bombs,
        streams_that_nobody_reads,
        cancel_storm,
        idle_connections,
    )
}

if __name__ == "__main__":
    asyncio.run(ATTACKS[sys.argv[1]](int(sys.argv[2]), sys.argv[3]))
