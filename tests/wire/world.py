"""An executor inside the test's own loop, with everything around it real; and what it left behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from openapi_tool.bus.consumer import CommandConsumer
from openapi_tool.local.caller import STREAM, Answer, Caller, PlacedCall
from openapi_tool.local.executor import LoopbackResolver
from openapi_tool.local.recordings import RECORDED_HOSTS
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.prepared import prepare
from openapi_tool.protocol.subject import default_durable
from openapi_tool.service import assemble
from openapi_tool.settings import Settings
from tests.conftest import AGENT, PROJECT, search_tool
from tests.role import dsn_of
from tests.support import dead_letters

DURABLE = default_durable("v1r4", "jina")
KNOWN = {"query": "hello world", "count": 3}
SETTLED_S = 10.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that one call left behind, once its command was settled."""

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
    """The kernel's side, the double, and ears on every subject that matters."""

    stack: EmbeddedStack
    caller: Caller
    database: str
    doorbells: list[Msg] = field(default_factory=list)
    advisories: list[dict[str, Any]] = field(default_factory=list)

    @property
    def dsn(self) -> str:
        """How the executor connects to the database."""
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
        """What is there once nothing is pending. Raises TimeoutError."""
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

    async def settled(self) -> Any:
        """The consumer once every command that was sent is settled; its `num_pending` alone lags behind."""
        async with asyncio.timeout(SETTLED_S):
            while True:
                try:
                    info = await self.caller.client.jetstream().consumer_info(STREAM, DURABLE)
                except NotFoundError:  # the executor has not got so far
                    continue
                floor = info.ack_floor.stream_seq if info.ack_floor else 0
                if floor >= self.caller.last_sequence and not info.num_pending and not info.num_ack_pending:
                    return info
                await asyncio.sleep(0.005)

    @asynccontextmanager
    async def executor(self, **sections: Any) -> AsyncIterator[CommandConsumer]:
        """Everything that `serve` puts together, in this loop."""
        settings = Settings(
            **{
                "postgres": {"dsn": self.dsn},
                "nats": {"servers": self.stack.nats.url},
                "secrets": {"allowed_env": ("SEARCH_API_KEY", "TENANT_TOKEN"), "env_parameters": ("tenant_token",)},
                "executor": {"retry_delay_s": 0.05},
                "retry": {"first_wait_s": 0.01},
                "cache": {"ttl_s": 0},
                "targets": {"allow": (RECORDED_HOSTS,)},
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
            parts = await assemble(stack, prepare(settings, environment), resolver)
            parts.consumer.start()
            yield parts.consumer
            await parts.consumer.stop(1.0)


@asynccontextmanager
async def open_world(stack: EmbeddedStack, caller: Caller, database: str) -> AsyncIterator[World]:
    """A world with a search tool in it, and no executor yet."""
    world = World(stack, caller, database)
    await world.listen()
    await caller.add_tool(PROJECT, search_tool())
    yield world
