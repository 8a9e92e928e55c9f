"""Cost of many pods for NATS: open pull requests, heartbeats and acks, on a real server.

`python -m benchmarks.pods --pods 1000`. A simulated pod is only its consumer, whose calls sleep. All pods
run in one process, whose own cost says nothing; only the server's is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

import nats
import uvloop
from nats.aio.client import Client

from benchmarks.harness import CONNECTIONS, Harness
from benchmarks.measure import cpu_seconds
from openapi_tool.kernel.jetstream.consumer import CommandConsumer
from openapi_tool.kernel.jetstream.dead_letters import DeadLetters
from openapi_tool.kernel.jetstream.streams import ensure_durable
from openapi_tool.local.placed_call import VERSION
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.options import ConsumerOptions, DurableOptions, NatsOptions
from openapi_tool.options.executor import ExecutorOptions
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.settlement import Acknowledge, Settlement
from openapi_tool.protocol.subjects import command_filter, default_durable
from openapi_tool.telemetry.redact import Redactor

_PODS_PER_CONNECTION = 50
_CONCURRENCY = 64
_ACK_WAIT_S = 6.0
_SETTLE_S = 3.0  # until every pod has opened its pull request
_SUBJECT = f"cg.{VERSION}.proj_bench.public.cmd.tool.jina.search"


class _Pods:
    """Consumers of one durable; `taken` counts the messages of each, `waited` are seconds until delivery."""

    def __init__(self, call_s: float, calls: int) -> None:
        self._call_s = call_s
        self._calls = calls
        self._consumers: list[CommandConsumer] = []
        self.taken: Counter[int] = Counter()
        self.waited: list[float] = []
        self.all_taken = asyncio.Event()

    async def start(self, count: int, clients: list[BusClient]) -> None:
        durable = DurableOptions(
            VERSION,
            default_durable(VERSION, "jina"),
            command_filter(VERSION, "*", "*", "jina"),
            NatsOptions(ack_wait_s=_ACK_WAIT_S, max_ack_pending=count * _CONCURRENCY),
        )
        await ensure_durable(clients[0], durable)
        options = ConsumerOptions(durable, ExecutorOptions(concurrency=_CONCURRENCY), max_run_s=60.0)
        for number in range(count):
            client = clients[number % len(clients)]
            consumer = CommandConsumer(client, options, DeadLetters(client, Redactor()), self._handler(number))
            consumer.start()
            self._consumers.append(consumer)

    def _handler(self, number: int) -> Any:
        async def handle(delivery: Delivery) -> Settlement:
            self.waited.append(time.time() - float(delivery.data))
            self.taken[number] += 1
            if len(self.waited) == self._calls:
                self.all_taken.set()
            await asyncio.sleep(self._call_s)
            return Acknowledge()

        return handle

    async def stop(self) -> None:
        await asyncio.gather(*(consumer.stop(5.0) for consumer in self._consumers))


async def _counted(harness: Harness, work: Coroutine[Any, Any, None]) -> dict[str, float]:
    """Return messages of all pods, the server's CPU milliseconds, and seconds, while `work` runs."""
    pid, began = harness.servers()["nats"], time.perf_counter()
    cpu, (sent, received) = cpu_seconds(pid), await harness.messages("executor")
    await work
    after = await harness.messages("executor")
    return {
        "sent": after[0] - sent,
        "received": after[1] - received,
        "nats_cpu_ms": (cpu_seconds(pid) - cpu) * 1000,
        "seconds": time.perf_counter() - began,
    }


async def _send(client: Client, calls: int, per_second: float, pods: _Pods) -> None:
    began = time.perf_counter()
    for number in range(calls):
        if (early := began + number / per_second - time.perf_counter()) > 0:
            await asyncio.sleep(early)
        await client.publish(_SUBJECT, str(time.time()).encode())
    await pods.all_taken.wait()


async def simulate(count: int, calls: int, per_second: float, call_s: float, idle_s: float) -> dict[str, Any]:
    """Measure idle pods, then working pods: the server's cost, and the distribution of calls."""
    async with Harness() as harness, AsyncExitStack() as stack:
        await harness.clean(database := await harness.database())
        stack.push_async_callback(database.close)
        clients = [await _connect(stack, harness) for _ in range(-(-count // _PODS_PER_CONNECTION))]
        pods = _Pods(call_s, calls)
        await pods.start(count, clients)
        await asyncio.sleep(_SETTLE_S)
        idle = await _counted(harness, asyncio.sleep(idle_s))
        sender = await nats.connect(harness.nats.url, name="load")
        stack.push_async_callback(sender.close)

        async def work() -> None:
            async with asyncio.timeout(calls / per_second + 60):
                await _send(sender, calls, per_second, pods)
            await asyncio.sleep(call_s)

        busy = await _counted(harness, work())
        await pods.stop()
    cuts = statistics.quantiles(pods.waited, n=100)
    return {
        "pods": count,
        "idle_per_s": {name: round(idle[name] / idle["seconds"], 2) for name in ("sent", "received", "nats_cpu_ms")},
        "per_call": {name: round(busy[name] / calls, 2) for name in ("sent", "received", "nats_cpu_ms")},
        "calls_per_s": round(calls / busy["seconds"]),
        "delivered_p50_ms": round(cuts[49] * 1000, 1),
        "delivered_p99_ms": round(cuts[98] * 1000, 1),
        "pods_that_worked": len(pods.taken),
        "most_calls_of_a_pod": max(pods.taken.values()),
        "delivered": pods.taken.total(),
    }


async def _connect(stack: AsyncExitStack, harness: Harness) -> BusClient:
    client = BusClient()
    await client.connect(harness.nats.url, name=CONNECTIONS["executor"])
    stack.push_async_callback(client.close)
    return client


def main() -> None:
    """Simulate, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=1_000)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--per-second", type=float, default=500.0)
    parser.add_argument("--call-s", type=float, default=5.0, help="seconds that a call takes")
    parser.add_argument("--idle-s", type=float, default=30.0, help="seconds of idling first; a pull request lasts 30 s")
    arguments = parser.parse_args()
    logging.getLogger("nats").setLevel(logging.CRITICAL)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(
            simulate(arguments.pods, arguments.calls, arguments.per_second, arguments.call_s, arguments.idle_s)
        )
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
