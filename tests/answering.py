"""An upstream answer on its way from bytes to what is stored, in this process, and how long the loop stood still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
from pydantic import SecretStr

from openapi_tool.executor.continuation import Continuation, ContinuationOptions
from openapi_tool.executor.ports import Kernel
from openapi_tool.jina.budget import Grant
from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.retry import RetryOptions
from openapi_tool.jina.targets import TargetRules
from openapi_tool.jina.tools import JinaOptions, JinaTools
from openapi_tool.protocol.cards import ArtifactCard
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.records import ToolRecord
from openapi_tool.steps import Turns
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.cursor import Cursors
from openapi_tool.tools.deadline import Deadline
from openapi_tool.tools.definition import parse_definition
from openapi_tool.tools.result import ResultFields, Shown, ToolOutput, success

KEY = "a-key-of-the-test_0123456789"
MOST_BYTES = 10_000_000
IDENTITY = CallIdentity("proj", "public", "agent", "turn", 1, "call", "step", None, None, None, None)
QUESTIONS: Mapping[str, Mapping[str, Any]] = {"search": {"q": "a query"}, "reader": {"url": "https://a.example/"}}

Answer = Callable[[httpx.Request], httpx.Response]


@dataclass(slots=True)
class Lag:
    """The longest iteration of the event loop, in seconds of the clock and of this thread's CPU time.

    Other processes lengthen the one and not the other.
    """

    clock_s: float = 0.0
    cpu_s: float = 0.0


@asynccontextmanager
async def watched() -> AsyncIterator[Lag]:
    """Watch the event loop: a task that sleeps 1 ms notes how late it wakes."""
    lag = Lag()

    async def watch() -> None:
        while True:
            asleep, used = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.001)
            lag.clock_s = max(lag.clock_s, time.perf_counter() - asleep - 0.001)
            lag.cpu_s = max(lag.cpu_s, time.thread_time() - used)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.01)
    lag.clock_s = lag.cpu_s = 0.0
    try:
        yield lag
        await asyncio.sleep(0.002)  # what stood still until the very end is seen, too
    finally:
        watching.cancel()


@dataclass
class Answering:
    """The tools above a transport that answers as `answer` says; `secrets` are those of the process."""

    answer: Answer
    secrets: tuple[str, ...] = (KEY,)
    options: Mapping[str, Any] = field(default_factory=dict)
    max_chars: int = 40_000

    def __post_init__(self) -> None:
        turns, errors = Turns(), Redactor(self.secrets, "error")
        client = JinaClient(httpx.MockTransport(self.answer), MOST_BYTES, errors, turns)
        values = {
            "retry": RetryOptions(0, 0.01, 0.01),
            "max_batch_items": 10,
            "body_budget_bytes": 256_000_000,
            "cache_ttl_s": 0.0,
            "cache_bytes": 4_000_000,
            "targets": TargetRules((), (), 16_000),
            **self.options,
        }
        self.tools = JinaTools(client, JinaOptions(**values), errors, turns)
        options = ContinuationOptions(self.max_chars, 60, "tool.openapi")
        self.continuation = Continuation(cast("Kernel", None), Cursors(b"k" * 32), options, turns)

    async def output(
        self,
        mode: str = "reader",
        key: str = KEY,
        sent: tuple[str, ...] = (),
        memory: Grant | None = None,
        **values: Any,
    ) -> ToolOutput:
        """What the tool makes of the answer to a question."""
        jina: dict[str, Any] = {"mode": mode}
        if {"urls", "queries"} & values.keys():
            jina["tool"] = "jina.read_many" if mode == "reader" else "jina.search_many"
        definition = parse_definition(ToolRecord("a_tool", None, {}, {"jina": jina}))
        given = values or dict(QUESTIONS[mode])
        secrets = {f"token{place}": SecretStr(secret) for place, secret in enumerate(sent)}
        arguments = Arguments(given, frozenset(given), secrets, SecretStr(key), "session")
        return await self.tools.run(definition, arguments, Deadline.after(60), memory or self.tools.memory())

    async def card(
        self, mode: str = "reader", key: str = KEY, sent: tuple[str, ...] = (), **values: Any
    ) -> tuple[ResultFields, Shown, ArtifactCard | None]:
        """What is stored of it."""
        with self.tools.memory() as memory:
            output = await self.output(mode, key, sent, memory, **values)
            definition = parse_definition(ToolRecord("a_tool", None, {}, {"jina": {"mode": mode}}))
            shown, artifact = await self.continuation.show(output, definition, IDENTITY, None)
            return success(output, shown, "text", 1), shown, artifact


def serving(body: bytes, status: int = 200) -> Answer:
    """A transport that answers everything with this."""
    return lambda _: httpx.Response(status, content=body)
