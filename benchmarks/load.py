"""Load generator: publishes commands, receives doorbells, measures the time between."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from benchmarks.calls import Command
from openapi_tool.local.caller import VERSION

_CONFIRM_EVERY = 500
_STALLED_AFTER_S = 60.0


class Unanswered(Exception):
    """Some calls of a window have no result."""


@dataclass(slots=True)
class Window:
    """Measurement of some calls: seconds from due time to doorbell of each, and of the whole window."""

    latencies: list[float] = field(default_factory=list)
    seconds: float = 0.0


class Load:
    """One connection that publishes commands and receives all doorbells."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._due: dict[str, float] = {}
        self._latencies: list[float] = []
        self._answered: Callable[[], None] = lambda: None

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str) -> AsyncIterator[Load]:
        """Connect and subscribe to doorbells."""
        client = await nats.connect(url, name="load")
        load = cls(client)
        await client.subscribe(
            f"cg.{VERSION}.*.*.cmd.agent.*.wakeup",
            cb=load._receive,
            pending_msgs_limit=-1,
            pending_bytes_limit=-1,
        )
        await client.flush()
        try:
            yield load
        finally:
            await client.close()

    async def _receive(self, message: Msg) -> None:
        now = time.perf_counter()
        due = self._due.pop((message.headers or {}).get("CG-Turn-Id", ""), None)
        if due is not None:
            self._latencies.append(now - due)
            self._answered()

    async def _send(self, command: Command, due: float | None = None) -> None:
        self._due[command.turn_id] = time.perf_counter() if due is None else due
        await self._client.publish(command.subject, command.data, headers=command.headers)

    async def closed(self, commands: Sequence[Command], in_flight: int) -> Window:
        """Keep a constant number of calls in flight: each doorbell triggers the next command."""
        waiting, in_flight_limit = deque(commands), asyncio.Semaphore(in_flight)
        self._answered = in_flight_limit.release

        async def send() -> None:
            while waiting:
                await in_flight_limit.acquire()
                await self._send(waiting.popleft())

        return await self._window(send, commands)

    async def open(self, commands: Sequence[Command], per_second: float) -> Window:
        """Publish each command at its time, independent of the others; latency counts from its due time."""

        async def send() -> None:
            began = time.perf_counter()
            for number, command in enumerate(commands):
                due = began + number / per_second
                if (early := due - time.perf_counter()) > 0:
                    await asyncio.sleep(early)
                await self._send(command, due)

        return await self._window(send, commands)

    async def burst(self, commands: Sequence[Command]) -> Window:
        """Publish all commands at once."""
        return await self._window(lambda: self.enqueue(commands), commands)

    async def enqueue(self, commands: Sequence[Command]) -> None:
        """Publish all commands into the stream, waiting for its acknowledgements."""
        for number, command in enumerate(commands, start=1):
            if number % _CONFIRM_EVERY:
                await self._send(command)
            else:
                self._due[command.turn_id] = time.perf_counter()
                await self._client.jetstream().publish(command.subject, command.data, headers=command.headers)

    async def answers(self, count: int) -> Window:
        """Wait for a number of further doorbells of enqueued commands; only `seconds` of the window is meaningful."""
        self._latencies.clear()
        return await self._until(count, time.perf_counter())

    def expect_none(self) -> None:
        """Expect no more doorbells."""
        self._due.clear()

    async def _window(self, send: Callable[[], Coroutine[None, None, None]], commands: Sequence[Command]) -> Window:
        self._latencies = []
        began = time.perf_counter()
        sending = asyncio.create_task(send())
        try:
            return await self._until(len(commands), began)
        finally:
            sending.cancel()
            self._answered = lambda: None

    async def _until(self, count: int, began: float) -> Window:
        progressed_at, answered = time.perf_counter(), 0
        while len(self._latencies) < count:
            await asyncio.sleep(0.005)
            if len(self._latencies) > answered:
                progressed_at, answered = time.perf_counter(), len(self._latencies)
            elif time.perf_counter() - progressed_at > _STALLED_AFTER_S:
                raise Unanswered(f"{count - answered} of {count} calls were not answered within {_STALLED_AFTER_S:g} s")
        return Window(self._latencies[:count], time.perf_counter() - began)
