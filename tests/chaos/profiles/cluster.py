"""Three NATS servers as one cluster, the command stream on all three; leaders and the quorum are lost."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext

from openapi_tool.local.stack import EmbeddedStack
from tests.chaos import faults
from tests.chaos.checker import COMMANDS, DEAD_LETTERS
from tests.chaos.harness import DATABASE, DURABLE, Fault, Profile, Run, Site, nats_client, outage
from tests.chaos.servers import NatsCluster

LEASES, SESSIONS = "KV_openapi_tool_leases", "KV_openapi_tool"
DOWN_S = 8.0
"""Longer than AckWait, so that commands are delivered again while the node is down."""

LONG_DOWN_S = 35.0
"""Longer than a worker waits: what only this node has must not be needed to answer."""

_UP_S, _POLL_S, _ASK_S = 30.0, 0.1, 0.5


class Cluster(Profile):
    """Executors know all three servers; `nats.replicas` stays what it is by default."""

    rest_s = 4.0

    def __init__(self, stack: EmbeddedStack) -> None:
        super().__init__(stack)
        self._cluster: NatsCluster | None = None

    @property
    def cluster(self) -> NatsCluster:
        if self._cluster is None:
            raise AssertionError("the profile was not opened")
        return self._cluster

    async def open(self, exits: AsyncExitStack) -> Site:
        del exits  # the stack's guard ends the nodes
        self._cluster = NatsCluster(self.stack)
        await self._cluster.start()
        await until_led(self._cluster.urls, _can_make_a_stream)
        settings = {"NATS_SERVERS": ",".join(self._cluster.urls)}
        return Site(self.stack.postgres.dsn(DATABASE), self._cluster.urls, settings, copies=3)

    def faults(self) -> Mapping[str, Fault]:
        streams = {"commands": COMMANDS, "durable": COMMANDS, "leases": LEASES, "sessions": SESSIONS}
        streams["letters"] = DEAD_LETTERS
        return {
            "poison": faults.poison,
            "kill_executor": faults.kill,
            "kill_leases": partial(self.lose_leader, "leases", LEASES, "kill", LONG_DOWN_S),
            **{
                f"{how}_{name}": partial(self.lose_leader, name, stream, how, DOWN_S)
                for name, stream in streams.items()
                for how in ("kill", "freeze")
                if (name, how) != ("leases", "kill")
            },
            "quorum_lost": self.lose_quorum,
            "all_frozen": self.freeze_all,
        }

    async def lose_leader(self, name: str, stream: str, how: str, down_s: float, run: Run) -> int:
        """Take away the node that leads a stream or the durable, and an executor, whose calls need leases then."""
        leader = await self._leader(name, stream)
        if leader is None:  # nobody has made the stream yet
            return 0
        others = self.cluster.urls_without(leader)
        async with self._down(leader) if how == "kill" else self._frozen(leader):
            await self._led_again(run, f"{how} of the leader of {name}", others)
            hit = await faults.kill(run)
            await run.load.unanswerable()
            await asyncio.sleep(down_s)
        return hit

    async def lose_quorum(self, run: Run) -> int:
        """Stop two of three."""
        names = run.random.sample(sorted(self.cluster.nodes), 2)

        @asynccontextmanager
        async def broken() -> AsyncIterator[None]:
            for name in names:
                await asyncio.to_thread(self.cluster.nodes[name].stop)
            yield
            await asyncio.gather(*(asyncio.to_thread(self.cluster.nodes[name].start) for name in names))
            await until_led(self.cluster.urls, _has_leaders)

        return await outage(run, "quorum of the NATS cluster lost", broken())

    async def freeze_all(self, run: Run) -> int:
        """Stop all servers without a word: no connection ends."""

        @asynccontextmanager
        async def broken() -> AsyncIterator[None]:
            async with AsyncExitStack() as exits:
                for name in self.cluster.nodes:
                    await exits.enter_async_context(self._frozen(name))
                yield
            await until_led(self.cluster.urls, _has_leaders)

        return await outage(run, "all NATS servers silent", broken())

    async def _leader(self, name: str, stream: str) -> str | None:
        try:
            async with nats_client(self.cluster.urls) as client:
                jetstream = client.jetstream()
                if name == "durable":
                    found: Any = await jetstream.consumer_info(stream, DURABLE)
                else:
                    found = await jetstream.stream_info(stream)
        except nats.js.errors.NotFoundError:
            return None
        return found.cluster.leader if found.cluster else None

    async def _led_again(self, run: Run, why: str, urls: list[str]) -> None:
        """Wait until command stream and durable have leaders again; the time without them is an outage."""
        began = time.time()
        unled_until = await until_led(urls, _has_leaders)
        times = {"began": began, "since": began, "until": max(began, unled_until), "over": time.time()}
        run.journal.note(outage=why, fetched=None, **times)

    @asynccontextmanager
    async def _down(self, name: str) -> AsyncIterator[None]:
        await self.cluster.signal(name, signal.SIGKILL)
        try:
            yield
        finally:
            await asyncio.to_thread(self.cluster.nodes[name].start)

    @asynccontextmanager
    async def _frozen(self, name: str) -> AsyncIterator[None]:
        await self.cluster.signal(name, signal.SIGSTOP)
        try:
            yield
        finally:
            await self.cluster.signal(name, signal.SIGCONT)


async def until_led(urls: list[str], led: Callable[[JetStreamContext], Awaitable[bool]]) -> float:
    """Wait until a cluster says `led`; when it was last found without (seconds since the epoch), 0 if never.

    Raises TimeoutError.
    """
    unled_at = 0.0
    async with asyncio.timeout(_UP_S):
        while not await _asked(urls, led):
            unled_at = time.time()
            await asyncio.sleep(_POLL_S)
    return unled_at


async def _asked(urls: list[str], led: Callable[[JetStreamContext], Awaitable[bool]]) -> bool:
    with contextlib.suppress(nats.errors.Error, nats.js.errors.Error, OSError, TimeoutError):
        async with asyncio.timeout(4 * _ASK_S), nats_client(urls) as client:
            return await led(client.jetstream(timeout=_ASK_S))
    return False


async def _can_make_a_stream(jetstream: JetStreamContext) -> bool:
    await jetstream.add_stream(name="probe", subjects=["probe"], num_replicas=3)
    return await jetstream.delete_stream("probe")


async def _has_leaders(jetstream: JetStreamContext) -> bool:
    """Only a leader answers these questions."""
    durable, stream = await jetstream.consumer_info(COMMANDS, DURABLE), await jetstream.stream_info(COMMANDS)
    return all(info.cluster is not None and bool(info.cluster.leader) for info in (durable, stream))
