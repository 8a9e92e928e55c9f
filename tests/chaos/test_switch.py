"""The switch that stands before PostgreSQL in the failover profile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from tests.chaos.switch import Switch


@asynccontextmanager
async def _echo(name: bytes) -> AsyncIterator[int]:
    """A server that answers with its name; yields its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1):
            writer.write(name)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _ask(streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bytes:
    """The name of the server that answers, nothing where the connection has ended."""
    streams[1].write(b"?")
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionError):
            return await streams[0].read(1)
    return b""


async def test_open_connections_stay_where_they_are_unless_they_are_dropped() -> None:
    async with AsyncExitStack() as exits:
        first, second = [await exits.enter_async_context(_echo(name)) for name in (b"1", b"2")]
        switch = await exits.enter_async_context(Switch(first).listening())
        old = await asyncio.open_connection("127.0.0.1", switch.port)
        assert await _ask(old) == b"1"
        switch.move(second, drop=False)
        new = await asyncio.open_connection("127.0.0.1", switch.port)
        assert (await _ask(old), await _ask(new)) == (b"1", b"2")
        switch.move(first, drop=True)
        assert (await _ask(old), await _ask(new)) == (b"", b"")
        for _, writer in (old, new):
            writer.close()
