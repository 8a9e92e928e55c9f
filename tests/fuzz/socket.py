"""Any bytes at the client's socket: it stays connected or reconnects, and receives the messages after them.

A server on loopback sends the input to a connected client. If the first byte is even, the rest is sent as it is, as by
a broken server. If it is odd, the rest is subject, reply, headers and body of one message, with `|` between them,
framed as a real server frames what any client may publish: that message must arrive, and be one that can be settled.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from nats.aio.msg import Msg

from openapi_tool.bus.client import BusClient
from openapi_tool.bus.dead_letters import dead_letter, decode, encode
from openapi_tool.bus.wire import ForeignMessage, delivery_of
from openapi_tool.protocol.errors import Unanswerable
from openapi_tool.telemetry.redact import Redactor
from tests.support import V1R4

MAX_BYTES = 8_192
WAIT_S = 10.0
_HALF_A_FRAME_S = 0.02
_MAX_PAYLOAD = 1 << 20
_INFO = b'INFO {"server_id":"x","version":"2.11.0","max_payload":%d,"headers":true}\r\n' % _MAX_PAYLOAD
_NOT_IN_A_SUBJECT = re.compile(rb"[ \t\r\n]")
_ACK = b"$JS.ACK.stream.durable.1.7.7.1767225600000000000.0"


class Server:
    """Server for one client; `sid` is the id of its subscription."""

    def __init__(self) -> None:
        self.writer: asyncio.StreamWriter | None = None
        self.sid = b""
        self.ready = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send INFO, and read what a client sends until it disconnects."""
        writer.write(_INFO)
        with suppress(OSError):
            while line := await reader.readline():
                self._take(line, writer)
        if self.writer is writer:
            self.writer = None
            self.ready.clear()
        writer.close()

    def _take(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        match line.split():
            case [b"SUB", *_, sid]:
                self.sid = sid
                self.writer = writer
                self.ready.set()
            case [b"PING"]:
                writer.write(b"PONG\r\n")

    async def subscribed(self) -> bytes:
        """Wait for the client's subscription and return its id. Raises TimeoutError."""
        async with asyncio.timeout(WAIT_S):
            await self.ready.wait()
        return self.sid

    async def send(self, data: bytes) -> None:
        """Send to the current or next connection. Raises TimeoutError."""
        await self.subscribed()
        if self.writer is not None:
            self.writer.write(data)

    def hang_up(self) -> None:
        """Drop the connection."""
        if self.writer is not None:
            self.writer.close()
            self.ready.clear()


class LoopbackClient(BusClient):
    """Client that ignores other servers named in INFO."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:  # noqa: FBT001, FBT002
        info.pop("connect_urls", None)
        await super()._process_info(info, initial_connection)


@dataclass
class World:
    """Server, client and received messages; `mark` differs for each input, so that no input can contain it."""

    server: Server
    client: BusClient
    arrived: list[Msg] = field(default_factory=list)
    marked: asyncio.Event = field(default_factory=asyncio.Event)
    defects: list[str] = field(default_factory=list)
    mark: bytes = b""

    async def hear(self, message: Msg) -> None:
        """Record a message; the mark follows the input."""
        if message.data == self.mark:
            self.marked.set()
        else:
            self.arrived.append(message)

    async def check(self, data: bytes) -> None:
        """Send an input, then the mark."""
        self.arrived.clear()
        self.marked.clear()
        self.mark = secrets.token_bytes(8)
        framed = bool(data[:1] and data[0] & 1)
        sent = _frame(await self.server.subscribed(), data[1:]) if framed else data[1:]
        await self.server.send(sent + self._mark())
        if not await self._heard_in(WAIT_S if framed else _HALF_A_FRAME_S):
            assert not framed, "no message arrived after a well-framed one"
            self.server.hang_up()  # the client waits for the rest of a frame, or reconnects
            await self._assert_hears()
        assert not self.defects, self.defects
        assert not self.client.is_closed
        if framed:
            assert len(self.arrived) == 1
            _assert_settled(self.arrived[0])

    async def _assert_hears(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while not self.marked.is_set():
                await self.server.send(self._mark())
                await self._heard_in(_HALF_A_FRAME_S)

    def _mark(self) -> bytes:
        return b"MSG mark %b %d\r\n%b\r\n" % (self.server.sid, len(self.mark), self.mark)

    async def _heard_in(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.marked.wait()
        return self.marked.is_set()


def _frame(sid: bytes, data: bytes) -> bytes:
    subject, reply, headers, body = (data.split(b"|", 3) + [b""] * 4)[:4]
    subject = _NOT_IN_A_SUBJECT.sub(b"_", subject) or b"_"
    reply = _NOT_IN_A_SUBJECT.sub(b"_", reply) or _ACK
    if not headers:
        return b"MSG %b %b %b %d\r\n%b\r\n" % (subject, sid, reply, len(body), body)
    sizes = (len(headers), len(headers) + len(body))
    return b"HMSG %b %b %b %d %d\r\n%b%b\r\n" % (subject, sid, reply, *sizes, headers, body)


def _assert_settled(message: Msg) -> None:
    """Assert that a message is a command, a dead letter that can be stored and read again, or no delivery."""
    try:
        delivery = delivery_of(message)
    except ForeignMessage:
        return
    try:
        V1R4.decode(delivery)
    except Unanswerable as refusal:
        letter = dead_letter(delivery, refusal.reason, str(refusal), _REDACTOR)
        again = decode(encode(letter, _MAX_PAYLOAD), 1)
        assert (again.size, again.sha256, again.data) == (letter.size, letter.sha256, letter.data)


@asynccontextmanager
async def _world() -> AsyncIterator[World]:
    server, client = Server(), LoopbackClient()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    world = World(server, client)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: world.defects.append(str(context)))
    address = f"nats://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    await client.connect(
        address, error_cb=_ignore_error, max_reconnect_attempts=-1, reconnect_time_wait=0, ping_interval=3_600
    )
    await client.subscribe("mark", cb=world.hear)
    try:
        yield world
    finally:
        await client.close()
        server.hang_up()
        listening.close()
        await asyncio.sleep(_HALF_A_FRAME_S)  # until the transports are closed


async def _ignore_error(_: Exception) -> None:
    """Ignore errors, which are expected."""


class Player:
    """World that is used for all inputs."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._open = AsyncExitStack()
        self._world = self._loop.run_until_complete(self._open.enter_async_context(_world()))

    def check(self, data: bytes) -> None:
        """Check one input. Raises AssertionError and TimeoutError."""
        self._loop.run_until_complete(self._world.check(data))

    def close(self) -> None:
        """Close the world."""
        self._loop.run_until_complete(self._open.aclose())
        self._loop.close()


_REDACTOR = Redactor([])
_players: list[Player] = []


def check(data: bytes) -> None:
    """Send one input to a shared client. Raises AssertionError, or TimeoutError if it no longer receives."""
    if not _players:
        _players.append(Player())
    _players[0].check(data)


def forget() -> None:
    """Close the client, so that the next input gets a new one."""
    while _players:
        _players.pop().close()
