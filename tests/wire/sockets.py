"""Both ends of a NATS connection, byte by byte: what no well-behaved client or server would send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
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

    async def serve(self, greeting: bytes) -> None:
        """Greet, then answer pings until the client has gone."""
        self.writer.write(greeting)
        while line := await self._reader.readline():
            self.heard += line
            if line.startswith(b"CONNECT"):
                self.logged_in.set()
            if line.startswith(b"SUB"):
                self.subscribed.set()
            if line == b"PING\r\n":
                self.writer.write(b"PONG\r\n")

    @property
    def sid(self) -> bytes:
        """The id of the client's last subscription."""
        return self.heard.rpartition(b"SUB ")[2].splitlines()[0].split()[-1]


class FakeServer:
    """Speaks just enough NATS to be connected to; `url` is on loopback."""

    def __init__(self, greeting: bytes) -> None:
        self.greeting = greeting
        self.url = ""
        self.accepted: asyncio.Queue[Connection] = asyncio.Queue()
        self.connections: list[Connection] = []

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        self.connections.append(connection)
        self.accepted.put_nowait(connection)
        try:
            await connection.serve(self.greeting)
        except ConnectionError:
            pass
        finally:
            writer.close()

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
            server.close()
            for connection in self.connections:
                connection.writer.close()
            await server.wait_closed()


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
