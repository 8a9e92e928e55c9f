"""World of these tests: the kernel's side, an executor in this process, and the rows and messages of calls."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import pytest
from nats.aio.msg import Msg
from nats.js.api import ConsumerInfo
from nats.js.errors import NoKeysError, NotFoundError

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.isolation.pool import WorkerPool
from openapi_tool.kernel.jetstream.consumer import CommandConsumer
from openapi_tool.kernel.jetstream.parked_records import PARKED_BUCKET
from openapi_tool.local.caller import STREAM, Caller, ResultRows
from openapi_tool.local.executor import LoopbackResolver
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.local.recordings import RECORDED_HOSTS
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.protocol.subjects import default_durable
from openapi_tool.service.kernel_parts import Parts, assemble
from openapi_tool.service.process_parts import open_process_parts
from openapi_tool.settings import Settings
from tests.conftest import AGENT, PROJECT, search_tool
from tests.support import ONE_WORKER, dead_letters, dsn_of
from tests.waiting import WAIT_S

DURABLE = default_durable("v1r4", "jina")
RECORDED_ARGUMENTS = {"query": "hello world", "count": 3}  # arguments for which the double has a recording


@pytest.fixture(autouse=True)
def _workers_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start worker processes of services within this process at the first task; each takes 0.1 s of CPU time."""
    monkeypatch.setattr(WorkerPool, "start", lambda _: None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Rows and messages of one call, after its command was settled."""

    rows: ResultRows
    doorbells: list[Msg]
    dead_letters: list[dict[str, Any]]
    term_acks: int  # commands that no executor may get again
    handed_back: int
    deliveries: int
    upstream_requests: list[dict[str, Any]]

    @property
    def content(self) -> Mapping[str, Any]:
        content: Mapping[str, Any] = self.rows.card["content"]
        return content


@dataclass(slots=True, repr=False)
class World:
    """The kernel's side, the double, and all doorbells and advisories; `components` are those of the last executor.

    A drain waits for `grace_s`.
    """

    stack: EmbeddedStack
    caller: Caller
    database: str
    doorbells: list[Msg] = field(default_factory=list)
    advisories: list[dict[str, Any]] = field(default_factory=list)
    components: Parts | None = None
    grace_s: float = 1.0

    @property
    def dsn(self) -> str:
        """Connection string of the executor."""
        return dsn_of(self.stack, self.database)

    async def listen(self) -> None:
        async def record_doorbell(message: Msg) -> None:
            self.doorbells.append(message)

        async def record_advisory(message: Msg) -> None:
            self.advisories.append(json.loads(message.data))

        await self.caller.client.subscribe("cg.v1r4.*.*.cmd.agent.*.wakeup", cb=record_doorbell)
        await self.caller.client.subscribe("$JS.EVENT.ADVISORY.CONSUMER.>", cb=record_advisory)

    async def assert_no_result_is_parked(self) -> None:
        bucket = await self.caller.client.jetstream().key_value(PARKED_BUCKET)
        with pytest.raises(NoKeysError):
            await bucket.keys()

    async def place(self, arguments: Any = None, tool: str = "jina_search", **changes: Any) -> PlacedCall:
        """Save card and rows of a call without sending its command."""
        agent = changes.pop("agent", AGENT)
        return await self.caller.place(
            PROJECT, agent, tool, RECORDED_ARGUMENTS if arguments is None else arguments, publish=False, **changes
        )

    async def send(
        self,
        call: PlacedCall,
        *,
        headers: Mapping[str, str | None] | None = None,
        body: Mapping[str, Any] | None = None,
        data: bytes | None = None,
    ) -> Outcome:
        """Send a call's command with these changes, and wait until it is settled. None removes a header."""
        changed = {name: value for name, value in {**call.headers, **(headers or {})}.items() if value is not None}
        await self.caller.publish(replace(call, body={**call.body, **(body or {})}), headers=changed, data=data)
        return await self.outcome(call)

    async def outcome(self, call: PlacedCall) -> Outcome:
        """Return rows and messages of a call once every command is settled. Raises TimeoutError."""
        info = await self.settled()
        await self.caller.client.flush()
        kinds = [advisory["type"].rpartition(".")[2] for advisory in self.advisories]
        return Outcome(
            rows=await self.caller.read_result(call),
            doorbells=list(self.doorbells),
            dead_letters=await dead_letters(self.caller),
            term_acks=kinds.count("terminated"),
            handed_back=kinds.count("nak"),
            deliveries=info.delivered.consumer_seq,
            upstream_requests=await asyncio.to_thread(self.stack.upstream.requests),
        )

    async def settled(self, within_s: float = WAIT_S) -> Any:
        """Return the durable's info once every sent command is settled. Raises TimeoutError."""
        async with asyncio.timeout(within_s):
            while True:
                try:
                    info = await self.caller.client.jetstream().consumer_info(STREAM, DURABLE)
                except NotFoundError:  # not created yet
                    info = None
                if info and _all_settled(info, self.caller.last_sequence):
                    return info
                await asyncio.sleep(0.005)

    @asynccontextmanager
    async def executor(self, **sections: Any) -> AsyncIterator[CommandConsumer]:
        """Run the parts of `serve` in this event loop; `sections` replaces sections of the settings."""
        settings = Settings(
            **{
                "postgres": {"dsn": self.dsn},
                "nats": {"servers": self.stack.nats.url},
                "secrets": {"allowed_env": ("SEARCH_API_KEY", "TENANT_TOKEN"), "env_parameters": ("tenant_token",)},
                "executor": {"requeue_delay_s": 0.05},
                "retry": {"initial_backoff_s": 0.01},
                "cache": {"ttl_s": 0},
                "url_policy": {"allow": (RECORDED_HOSTS,)},
                "isolation": ONE_WORKER,
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
            components = self.components = await assemble(
                stack, bootstrap, open_process_parts(stack, bootstrap, resolver)
            )
            components.consumer.start()
            yield components.consumer
            await components.consumer.stop(self.grace_s)


def _all_settled(info: ConsumerInfo, last_sequence: int) -> bool:
    """Return whether every command up to this stream sequence is settled; `num_pending` alone may lag behind."""
    floor = info.ack_floor.stream_seq if info.ack_floor else 0
    return floor >= last_sequence and not info.num_pending and not info.num_ack_pending


@asynccontextmanager
async def open_world(stack: EmbeddedStack, caller: Caller, database: str) -> AsyncIterator[World]:
    """Yield a world with a search tool and without an executor."""
    world = World(stack, caller, database)
    await world.listen()
    await caller.add_tool(PROJECT, search_tool())
    yield world


# A NATS client and a NATS server that send arbitrary bytes, also invalid ones.


INFO = {"server_id": "fake", "version": "2.15.0", "headers": True, "max_payload": 1_048_576}


async def publish(url: str, subject: bytes, body: bytes, headers: bytes | None = None) -> None:
    """Publish these bytes unchanged, and wait until the server has processed them."""
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
    """A client's connection to the fake server; `received` are all bytes that the client sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self.received = b""
        self.logged_in = asyncio.Event()
        self.subscribed = asyncio.Event()
        self.task = _this_task()

    async def serve(self, greeting: bytes, tls: ssl.SSLContext | None) -> None:
        """Greet, upgrade to TLS if there is a context, then answer pings until the client disconnects."""
        self.writer.write(greeting)
        if tls is not None:
            await self.writer.start_tls(tls)
        while line := await self._reader.readline():
            self.received += line
            if line.startswith(b"CONNECT"):
                self.logged_in.set()
            if line.startswith(b"SUB"):
                self.subscribed.set()
            if line == b"PING\r\n":
                self.writer.write(b"PONG\r\n")

    def drop(self) -> None:
        """Abort the connection: under TLS a graceful close would wait for the client."""
        self.writer.transport.abort()

    @property
    def sid(self) -> bytes:
        """Id of the client's last subscription."""
        return self.received.rpartition(b"SUB ")[2].splitlines()[0].split()[-1]


class FakeServer:
    """Minimal NATS server on loopback, at `url`; upgrades connections to TLS if `tls` is set."""

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
    def received(self) -> bytes:
        """All bytes that clients sent."""
        return b"".join(connection.received for connection in self.connections)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[FakeServer]:
        """Accept connections inside the block."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            await _run_loop()  # accept pending connections: asyncio leaks them if the server closes first
            server.close()
            for connection in self.connections:
                connection.task.cancel()
                await asyncio.wait([connection.task])
            await _run_loop()  # close aborted connections


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def _run_loop() -> None:
    """Let callbacks run that are scheduled now, and those that they schedule in turn."""
    for _ in range(10):
        await asyncio.sleep(0)


def info(**changes: Any) -> bytes:
    """Return the INFO line of a NATS server with these changes."""
    return b"INFO " + json.dumps(INFO | changes).encode() + b"\r\n"


@asynccontextmanager
async def fake_server(greeting: bytes | None = None, **changes: Any) -> AsyncIterator[FakeServer]:
    """Yield a fake server with this greeting, by default the usual one with changes."""
    async with FakeServer(info(**changes) if greeting is None else greeting).listening() as server:
        yield server


def header_block(headers: Mapping[str, str], *lines: bytes) -> bytes:
    """Return a header block of these headers, followed by these lines unchanged."""
    named = [f"{name}: {value}".encode() for name, value in headers.items()]
    return b"\r\n".join([b"NATS/1.0", *named, *lines, b"", b""])


@pytest.fixture
async def world_without_executor(stack: EmbeddedStack, caller: Caller, database: str) -> AsyncIterator[World]:
    """World without the executor."""
    async with open_world(stack, caller, database) as world:
        yield world


@pytest.fixture
async def world(world_without_executor: World) -> AsyncIterator[World]:
    """World with a running executor."""
    async with world_without_executor.executor():
        yield world_without_executor
