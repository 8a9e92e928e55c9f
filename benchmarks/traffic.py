"""Commands of several projects at once: publish them as demanded, and record when each gets its doorbell."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from benchmarks.calls import Command
from openapi_tool.bus.stats import gather_stats
from openapi_tool.local.caller import VERSION

_CONFIRM_EVERY = 500
_STATS_S = 1.0
_ANSWER_TIMEOUT_S = 30.0
"""Seconds after the last command until those without an answer count as unanswered."""


@dataclass(frozen=True, slots=True)
class Demand:
    """`count` commands of `projects` projects in turn, from number `first`: `per_second`, or all at once without it.

    With `wait` the measurement lasts until all are answered.
    """

    count: int
    per_second: float | None = None
    projects: int = 1
    first: int = 0
    wait: bool = False


@dataclass(slots=True)
class Outcome:
    """Seconds from due time to doorbell of each command, infinite without one; answers by project in the window."""

    latencies: list[float] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)

    def p95(self) -> float:
        """Return the 95th percentile of the latencies in seconds (nearest rank)."""
        return sorted(self.latencies)[math.ceil(0.95 * len(self.latencies)) - 1]

    def unanswered(self) -> int:
        """Return the number of commands without a doorbell."""
        return sum(map(math.isinf, self.latencies))


class Traffic:
    """One connection that publishes commands and receives all doorbells; times are on the performance counter."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._due: dict[str, float] = {}
        self._doorbell_at: dict[str, float] = {}
        self._received = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str) -> AsyncIterator[Traffic]:
        """Connect and subscribe to doorbells."""
        client = await nats.connect(url, name="load")
        traffic = cls(client)
        subject = f"cg.{VERSION}.*.*.cmd.agent.*.wakeup"
        await client.subscribe(subject, cb=traffic._receive, pending_msgs_limit=-1, pending_bytes_limit=-1)
        await client.flush()
        try:
            yield traffic
        finally:
            await client.close()

    async def run(
        self, demands: Sequence[tuple[Demand, Sequence[Command]]], seconds: float, warm_s: float
    ) -> list[Outcome]:
        """Publish queued demands, then those at a rate together; return the outcome of each.

        The window of `Outcome.answered` begins `warm_s` seconds after the queued commands and lasts `seconds`.
        """
        for demand, commands in demands:
            if demand.per_second is None:
                await self.queue(commands)
        began = time.perf_counter() + warm_s
        steady = [(demand.per_second, commands) for demand, commands in demands if demand.per_second]
        await asyncio.gather(*(self._publish(commands, rate) for rate, commands in steady))
        await asyncio.sleep(began + seconds - time.perf_counter())
        await self.answers(command for demand, commands in demands if demand.wait for command in commands)
        return [self.outcome(commands, began, began + seconds) for _, commands in demands]

    async def queue(self, commands: Sequence[Command]) -> None:
        """Publish all commands at once."""
        for number, command in enumerate(commands, start=1):
            self._due[command.turn_id] = time.perf_counter()
            send = self._client.publish if number % _CONFIRM_EVERY else self._client.jetstream().publish
            await send(command.subject, command.data, headers=command.headers)
        await self._client.flush()

    async def _publish(self, commands: Sequence[Command], per_second: float) -> None:
        began = time.perf_counter()
        for number, command in enumerate(commands):
            due = began + number / per_second
            if (early := due - time.perf_counter()) > 0:
                await asyncio.sleep(early)
            self._due[command.turn_id] = due
            await self._client.publish(command.subject, command.data, headers=command.headers)

    async def answers(self, commands: Iterable[Command]) -> None:
        """Wait for the doorbells of commands, at most `_ANSWER_TIMEOUT_S` seconds."""
        turns = {command.turn_id for command in commands}
        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                while not turns <= self._doorbell_at.keys():
                    self._received.clear()
                    await self._received.wait()

    async def _receive(self, message: Msg) -> None:
        turn_id = (message.headers or {}).get("CG-Turn-Id", "")
        self._doorbell_at.setdefault(turn_id, time.perf_counter())
        self._received.set()

    async def writes(self, stream: str) -> int:
        """Return the number of messages that a stream has ever received; 0 if there is none."""
        try:
            return (await self._client.jetstream().stream_info(stream)).state.last_seq
        except NotFoundError:
            return 0

    async def operations(self, bucket: str) -> list[str]:
        """Return a list to which the subject of each read and write of a KV bucket is added from now on."""
        subjects: list[str] = []

        async def add(message: Msg) -> None:
            subjects.append(message.subject)

        stream = f"KV_{bucket}"
        for subject in (f"$KV.{bucket}.>", f"$JS.API.DIRECT.GET.{stream}.>", f"$JS.API.STREAM.MSG.GET.{stream}"):
            await self._client.subscribe(subject, cb=add)
        await self._client.flush()
        return subjects

    async def limits_by_replica(self) -> tuple[list[int], list[int]]:
        """Return each replica's requests of the last 60 s with limited keys, and those that it refused early."""
        limits = [replica["upstream_limits"] for replica in await gather_stats(self._client, _STATS_S)]
        sent, refused = ([sum(one[name] for one in each) for each in limits] for name in ("sent", "refused"))
        return sent, refused

    def outcome(self, commands: Sequence[Command], since: float, until: float) -> Outcome:
        """Return the latencies of commands, and the answers by project in a window of the performance counter."""
        outcome = Outcome()
        for command in commands:
            doorbell_at = self._doorbell_at.get(command.turn_id, math.inf)
            outcome.latencies.append(doorbell_at - self._due[command.turn_id])
            if since <= doorbell_at < until:
                outcome.answered[command.subject.split(".")[2]] += 1
        return outcome
