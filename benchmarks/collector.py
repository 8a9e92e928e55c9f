"""OTLP collectors that respond, hang or drop connections, for `benchmarks.otlp`."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress

_LENGTH = re.compile(rb"content-length: (\d{1,9})\r\n", re.IGNORECASE)
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
_FILLERS = 4


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer each POST of a connection with 200."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(head)
            await reader.readexactly(int(length.group(1)) if length else 0)
            writer.write(_ANSWER)
    writer.close()


@asynccontextmanager
async def answering() -> AsyncIterator[int]:
    """Run a collector in its own process, so that its CPU is not counted as the load's; yield its port."""
    command = [sys.executable, "-m", "benchmarks.collector"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        yield int(await process.stdout.readline()) if process.stdout else 0
    finally:
        process.terminate()
        await process.wait()


@contextmanager
def hanging() -> Iterator[int]:
    """Accept connections and requests, and never respond; yield the port."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        yield listening.getsockname()[1]


@contextmanager
def black_hole() -> Iterator[int]:
    """Drop every attempt to connect, as a firewall does, by a full accept queue; yield the port."""
    with ExitStack() as sockets:
        listening = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port: int = listening.getsockname()[1]
        for _ in range(_FILLERS):
            filler = sockets.enter_context(socket.socket())
            filler.settimeout(0)
            filler.connect_ex(("127.0.0.1", port))
        yield port


async def main() -> None:
    """Answer until killed; print the port."""
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(main())
