"""An executor inside the test's own loop, with everything around it real; and what it left behind."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from nats.aio.msg import Msg
from nats.js.api import ConsumerInfo
from nats.js.errors import NotFoundError

from openapi_tool.assembly import Parts, assemble, open_shared
from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.bus.consumer import CommandConsumer
from openapi_tool.local.caller import STREAM, Answer, Caller, PlacedCall
from openapi_tool.local.executor import LoopbackResolver
from openapi_tool.local.recordings import RECORDED_HOSTS
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.protocol.subject import default_durable
from openapi_tool.settings import Settings
from tests.conftest import AGENT, PROJECT, search_tool
from tests.support import dead_letters, dsn_of

DURABLE = default_durable("v1r4", "jina")
KNOWN = {"query": "hello world", "count": 3}
SETTLED_S = 10.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Rows and messages of one call, after its command was settled."""

    answer: Answer
    doorbells: list[Msg]
    dead_letters: list[dict[str, Any]]
    terminated: int
    given_back: int
    deliveries: int
    upstream_requests: list[dict[str, Any]]

    @property
    def content(self) -> Mapping[str, Any]:
        content: Mapping[str, Any] = self.answer.card["content"]
        return content


@dataclass(slots=True, repr=False)
class World:
    """The kernel's side, the double, and ears on every subject that matters; `parts` are of the last executor."""

    stack: EmbeddedStack
    caller: Caller
    database: str
    doorbells: list[Msg] = field(default_factory=list)
    advisories: list[dict[str, Any]] = field(default_factory=list)
    parts: Parts | None = None

    @property
    def dsn(self) -> str:
        """Connection string of the executor."""
        return dsn_of(self.stack, self.database)

    async def listen(self) -> None:
        async def hear_doorbell(message: Msg) -> None:
            self.doorbells.append(message)

        async def hear_advisory(message: Msg) -> None:
            self.advisories.append(json.loads(message.data))

        await self.caller.client.subscribe("cg.v1r4.*.*.cmd.agent.*.wakeup", cb=hear_doorbell)
        await self.caller.client.subscribe("$JS.EVENT.ADVISORY.CONSUMER.>", cb=hear_advisory)

    async def place(self, arguments: Any = None, tool: str = "jina_search", **changes: Any) -> PlacedCall:
        """A call whose command is not yet sent."""
        agent = changes.pop("agent", AGENT)
        return await self.caller.place(
            PROJECT, agent, tool, KNOWN if arguments is None else arguments, publish=False, **changes
        )

    async def send(
        self,
        call: PlacedCall,
        *,
        headers: Mapping[str, str | None] | None = None,
        body: Mapping[str, Any] | None = None,
        data: bytes | None = None,
    ) -> Outcome:
        """Send a call's command, changed as said, and wait until it is settled. None takes a header away."""
        changed = {name: value for name, value in {**call.headers, **(headers or {})}.items() if value is not None}
        await self.caller.publish(replace(call, body={**call.body, **(body or {})}), headers=changed, data=data)
        return await self.outcome(call)

    async def outcome(self, call: PlacedCall) -> Outcome:
        """Return the state once nothing is pending. Raises TimeoutError."""
        info = await self.settled()
        await self.caller.client.flush()
        kinds = [advisory["type"].rpartition(".")[2] for advisory in self.advisories]
        return Outcome(
            answer=await self.caller.read_answer(call),
            doorbells=list(self.doorbells),
            dead_letters=await dead_letters(self.caller),
            terminated=kinds.count("terminated"),
            given_back=kinds.count("nak"),
            deliveries=info.delivered.consumer_seq,
            upstream_requests=await asyncio.to_thread(self.stack.upstream.requests),
        )

    async def settled(self, within_s: float = SETTLED_S) -> Any:
        """The consumer once every command that was sent is settled; its `num_pending` alone lags behind."""
        async with asyncio.timeout(within_s):
            while True:
                try:
                    info = await self.caller.client.jetstream().consumer_info(STREAM, DURABLE)
                except NotFoundError:  # the executor has not got so far
                    info = None
                if info and _all_settled(info, self.caller.last_sequence):
                    return info
                await asyncio.sleep(0.005)

    @asynccontextmanager
    async def executor(self, **sections: Any) -> AsyncIterator[CommandConsumer]:
        """Parts of `serve`, in this event loop."""
        settings = Settings(
            **{
                "postgres": {"dsn": self.dsn},
                "nats": {"servers": self.stack.nats.url},
                "secrets": {"allowed_env": ("SEARCH_API_KEY", "TENANT_TOKEN"), "env_parameters": ("tenant_token",)},
                "executor": {"requeue_delay_s": 0.05},
                "retry": {"initial_backoff_s": 0.01},
                "cache": {"ttl_s": 0},
                "url_policy": {"allow": (RECORDED_HOSTS,)},
                **sections,
            }
        )
        environment = {
            **self.stack.upstream.keys,
            "TENANT_TOKEN": "tenant-value",
            "PG_DSN": "not for tools",
            "SSL_CERT_FILE": str(self.stack.certificates.ca),
        }
        resolver = LoopbackResolver(self.stack.upstream.port)
        async with AsyncExitStack() as stack:
            bootstrap = build_bootstrap(settings, environment)
            parts = self.parts = await assemble(stack, bootstrap, open_shared(stack, bootstrap, resolver))
            parts.consumer.start()
            yield parts.consumer
            await parts.consumer.stop(1.0)


def _all_settled(info: ConsumerInfo, last_sequence: int) -> bool:
    """Return whether every command up to this place in the stream is settled."""
    floor = info.ack_floor.stream_seq if info.ack_floor else 0
    return floor >= last_sequence and not info.num_pending and not info.num_ack_pending


@asynccontextmanager
async def open_world(stack: EmbeddedStack, caller: Caller, database: str) -> AsyncIterator[World]:
    """A world with a search tool in it, and no executor yet."""
    world = World(stack, caller, database)
    await world.listen()
    await caller.add_tool(PROJECT, search_tool())
    yield world


# Both ends of a NATS connection, byte by byte: what no well-behaved client or server would send.


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
