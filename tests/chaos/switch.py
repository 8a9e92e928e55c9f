"""A TCP switch: one address on loopback, behind which servers can be exchanged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

_CHUNK = 65_536


class Switch:
    """Forwards connections to `target`, a port of loopback; `move` changes it for new connections."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self._open: set[asyncio.StreamWriter] = set()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Switch]:
        """Forward until the end of the block."""
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.move(self.target, drop=True)

    def move(self, target: int, *, drop: bool) -> None:
        """Forward new connections to `target`; `drop` ends those that are open, else they stay where they are."""
        self.target = target
        if drop:
            for writer in self._open:
                writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", self.target)
            self._open.add(forth)
            try:
                await asyncio.gather(_pump(reader, forth), _pump(back, writer))
            finally:
                self._open.discard(forth)
                forth.transport.abort()
        except OSError:
            pass  # one side ended; the other learns it from its own connection
        finally:
            self._open.discard(writer)
            writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
