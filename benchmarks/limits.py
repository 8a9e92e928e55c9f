"""Limit of the double in requests per second, measured with a minimal client."""

from __future__ import annotations

import asyncio
import ssl
import time

from benchmarks.double import question
from benchmarks.harness import Stand

_CONNECTIONS = 32
_REQUESTS = 8_000
_SIZE = 2_000
_HOST = "s.jina.ai"


class _Client(asyncio.Protocol):
    """Sends the next request as soon as a response is complete."""

    def __init__(self, asked: list[int], done: asyncio.Event) -> None:
        self._asked = asked
        self._done = done
        self._request = b""
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._ask()

    def _ask(self) -> None:
        self._asked[0] += 1
        wanted = question(0, _SIZE, self._asked[0])
        self._transport.write(f"GET /?q={wanted} HTTP/1.1\r\nHost: {_HOST}\r\n\r\n".encode())

    def data_received(self, data: bytes) -> None:
        if not self._left:
            head = data.index(b"\r\n\r\n") + 4
            self._left = head + int(data[:head].rpartition(b"Content-Length: ")[2])
        self._left -= len(data)
        if self._left:
            return
        if self._asked[0] < _REQUESTS:
            self._ask()
        else:
            self._transport.close()
            self._done.set()


async def double_limit(stand: Stand) -> float:
    """Return the requests per second over several connections."""
    tls = ssl.create_default_context(cafile=stand.stack.certificates.ca)
    loop, asked, done = asyncio.get_running_loop(), [0], asyncio.Event()
    began = time.perf_counter()
    clients = [
        loop.create_connection(
            lambda: _Client(asked, done), "127.0.0.1", stand.upstream_port, ssl=tls, server_hostname=_HOST
        )
        for _ in range(_CONNECTIONS)
    ]
    opened = await asyncio.gather(*clients)
    await done.wait()
    seconds = time.perf_counter() - began
    for transport, _ in opened:
        transport.abort()
    return _REQUESTS / seconds
