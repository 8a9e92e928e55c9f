"""Both ends of a NATS connection, byte by byte: what no well-behaved client or server would send."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

INFO = {"server_id": "fake", "version": "2.15.0", "headers": True, "max_payload": 1_048_576}


async def publish(url: str, subject: bytes, body: bytes, headers: bytes | None = None) -> None:
    """Publish these very bytes, and wait until the server has taken them."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    await reader.readline()
    writer.write(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n')
    if headers is None:
        writer.write(b"PUB %s %d\r\n" % (subject, len(body)))
    else:
        writer.write(b"HPUB %s %d %d\r\n%s" % (subject, len(headers), len(headers) + len(body), headers))
    writer.write(body + b"\r\nPING\r\n")
    while (line := await reader.readline()) != b"PONG\r\n":
        assert not line.startswith(b"-ERR"), line
    writer.close()
    await writer.wait_closed()


class Connection:
    """A client's connection to the fake server: every byte that it sent, and a way to answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self.heard = b""
        self.logged_in = asyncio.Event()
        self.subscribed = asyncio.Event()
        self.task = _this_task()

    async def serve(self, greeting: bytes, tls: ssl.SSLContext | None) -> None:
        """Greet, go over to TLS where the server has a certificate, then answer pings until the client has gone."""
        self.writer.write(greeting)
        if tls is not None:
            await self.writer.start_tls(tls)
        while line := await self._reader.readline():
            self.heard += line
            if line.startswith(b"CONNECT"):
                self.logged_in.set()
            if line.startswith(b"SUB"):
                self.subscribed.set()
            if line == b"PING\r\n":
                self.writer.write(b"PONG\r\n")

    def drop(self) -> None:
        """Break the connection off: under TLS a polite end would wait for the client's."""
        self.writer.transport.abort()

    @property
    def sid(self) -> bytes:
        """The id of the client's last subscription."""
        return self.heard.rpartition(b"SUB ")[2].splitlines()[0].split()[-1]


class FakeServer:
    """Speaks just enough NATS to be connected to; `url` is on loopback. With `tls` it goes over to that."""

    def __init__(self, greeting: bytes) -> None:
        self.greeting = greeting
        self.tls: ssl.SSLContext | None = None
        self.url = ""
        self.accepted: asyncio.Queue[Connection] = asyncio.Queue()
        self.connections: list[Connection] = []

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        self.connections.append(connection)
        self.accepted.put_nowait(connection)
        with suppress(ConnectionError, ssl.SSLError, asyncio.CancelledError):
            await connection.serve(self.greeting, self.tls)
        connection.drop()

    @property
    def heard(self) -> bytes:
        """Every byte that any client sent."""
        return b"".join(connection.heard for connection in self.connections)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[FakeServer]:
        """Accept connections meanwhile."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            await _rounds()  # what arrived a moment ago is accepted: asyncio leaks it if the server closes meanwhile
            server.close()
            for connection in self.connections:
                connection.task.cancel()
                await asyncio.wait([connection.task])
            await _rounds()  # and what was broken off is closed


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def _rounds() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def info(**changes: Any) -> bytes:
    """A server's greeting."""
    return b"INFO " + json.dumps(INFO | changes).encode() + b"\r\n"


@asynccontextmanager
async def fake_server(greeting: bytes | None = None, **changes: Any) -> AsyncIterator[FakeServer]:
    """A fake server with this greeting, or the usual one with changes."""
    async with FakeServer(info(**changes) if greeting is None else greeting).listening() as server:
        yield server


def header_block(headers: Mapping[str, str], *lines: bytes) -> bytes:
    """A header block of these headers and, after them, these lines as they are."""
    named = [f"{name}: {value}".encode() for name, value in headers.items()]
    return b"\r\n".join([b"NATS/1.0", *named, *lines, b"", b""])
