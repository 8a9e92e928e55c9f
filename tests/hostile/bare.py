"""`python -m tests.hostile.bare`: delay of small messages behind the largest ones, with a minimal consumer.

Messages reach a durable consumer in the order of the stream. So with any client a small message waits until the large
ones before it have been transferred. The case `large_headers_without_identity` of `make hostile` includes this time.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import sys
import time

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig

from openapi_tool.local.stack import EmbeddedStack
from tests.hostile.scene import hpub
from tests.hostile.wire import LARGE_BYTES, LARGE_COMMANDS, LARGEST_HEADERS

STREAM = DURABLE = "bare"
SMALL_CALLS, EVERY_S, MAX_IN_FLIGHT = 60, 0.05, 64


class Bare:
    """Consumer with a request for MAX_IN_FLIGHT messages, acknowledged at once; `delays_s` are those of small ones."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._requested = 0
        self._inbox = client.new_inbox()
        self.delays_s: list[float] = []
        self.all_received = asyncio.Event()

    async def run(self) -> None:
        await self._client.subscribe(self._inbox, cb=self._receive)
        await self._top_up()

    async def _receive(self, message: Msg) -> None:
        self._requested = self._requested - 1 if message.reply else 0
        if message.subject.endswith(".small"):
            self.delays_s.append(time.time() - float(message.data))
            if len(self.delays_s) == SMALL_CALLS:
                self.all_received.set()
        if message.reply:
            await message.ack()
        await self._top_up()

    async def _top_up(self) -> None:
        missing = MAX_IN_FLIGHT - self._requested
        if missing * 2 >= MAX_IN_FLIGHT:
            self._requested += missing
            request = json.dumps({"batch": missing, "expires": 30_000_000_000}).encode()
            await self._client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{DURABLE}", request, self._inbox)


def publish_large(url: str) -> None:
    """Publish LARGE_COMMANDS large messages as fast as the server takes them."""
    host, _, port = url.removeprefix("nats://").rpartition(":")
    block = b"NATS/1.0\r\nX-Large: " + b"x" * LARGEST_HEADERS + b"\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.recv(4096)
        connection.sendall(b'CONNECT {"verbose":false,"headers":true}\r\n')
        connection.sendall(hpub(f"{STREAM}.large".encode(), block, b"x" * LARGE_BYTES) * LARGE_COMMANDS + b"PING\r\n")
        while not connection.recv(4096).endswith(b"PONG\r\n"):
            pass


async def measured(url: str) -> list[float]:
    """Return the delays of small messages in seconds, some of them behind LARGE_COMMANDS large ones."""
    client, sender = await nats.connect(url), await nats.connect(url)
    jetstream = client.jetstream()
    await jetstream.add_stream(name=STREAM, subjects=[f"{STREAM}.>"])
    await jetstream.add_consumer(STREAM, ConsumerConfig(durable_name=DURABLE, ack_policy=AckPolicy.EXPLICIT))
    bare = Bare(client)
    await bare.run()
    publisher = await asyncio.create_subprocess_exec(sys.executable, "-m", __spec__.name, url)
    for _ in range(SMALL_CALLS):
        await sender.publish(f"{STREAM}.small", str(time.time()).encode())
        await asyncio.sleep(EVERY_S)
    await publisher.wait()
    await asyncio.wait_for(bare.all_received.wait(), 20)
    await client.close()
    await sender.close()
    return bare.delays_s


def main() -> None:
    """Print median and longest delay as one JSON object."""
    with EmbeddedStack() as stack:
        delays_s = asyncio.run(measured(stack.nats.url))
    figures = {"p50_ms": statistics.median(delays_s) * 1000, "longest_ms": max(delays_s) * 1000}
    sys.stdout.write(json.dumps({name: round(value, 1) for name, value in figures.items()}) + "\n")


if __name__ == "__main__":
    publish_large(sys.argv[1]) if sys.argv[1:] else main()
