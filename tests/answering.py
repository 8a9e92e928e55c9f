"""Run calls in this process from the bytes of a response to the result to store, and measure event-loop lag."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import httpx
from pydantic import SecretStr

from openapi_tool.engine.call import Call
from openapi_tool.engine.pagination import Pagination
from openapi_tool.isolation.pool import WorkerPool
from openapi_tool.isolation.service import Isolation
from openapi_tool.jina.backend import JinaBackend, JinaBackendOptions
from openapi_tool.jina.byte_semaphore import ByteSemaphore, ResponseMemory
from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.options import CacheOptions, EgressOptions, RetryOptions
from openapi_tool.jina.request_context import RequestContext
from openapi_tool.jina.url_policy import UrlPolicy
from openapi_tool.kernel.pipeline.ports import Kernel
from openapi_tool.options.tools import ToolOptions
from openapi_tool.protocol.cards import StoredText
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.records import DefinitionRecord
from openapi_tool.quotas.permits import Permits
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.cursors import Cursors
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.definition_parser import parse_definition
from openapi_tool.tools.output import ToolOutput
from openapi_tool.tools.result import RenderedResult, ResultFields, success
from tests.support import SentByMock

KEY = "a-key-of-the-test_0123456789"
MAX_BYTES = 10_000_000
OWNER = CallIdentity("proj", "agent")
QUESTIONS: Mapping[str, Mapping[str, Any]] = {"search": {"q": "a query"}, "reader": {"url": "https://a.example/"}}


def a_call(**changes: Any) -> Call:
    """Return a call without memory of its own."""
    return replace(call_within(ByteSemaphore(0).for_call("proj")), **changes)


def call_within(memory: ResponseMemory) -> Call:
    """Return a call that holds its responses in this memory."""
    return Call(replace(OWNER, project_id=memory.project or OWNER.project_id), memory)


def for_request(memory: ResponseMemory) -> RequestContext:
    """Return the context of a request of a new call."""
    return RequestContext(call_within(memory), memory)


Answer = Callable[[httpx.Request], httpx.Response] | Callable[[httpx.Request], Coroutine[None, None, httpx.Response]]


@dataclass(slots=True)
class Lag:
    """The longest iteration of the event loop, in seconds of the clock and of this thread's CPU time.

    Other processes lengthen only the time of the clock.
    """

    clock_s: float = 0.0
    cpu_s: float = 0.0


@asynccontextmanager
async def watched() -> AsyncIterator[Lag]:
    """Measure event-loop lag in the block: a task sleeps 1 ms at a time and records how late it wakes.

    Objects of earlier tests are frozen meanwhile: the garbage collector would need longer for them than for all objects
    of an executor.
    """
    gc.collect()
    gc.freeze()
    lag = Lag()

    async def watch() -> None:
        while True:
            began, used = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.001)
            lag.clock_s = max(lag.clock_s, time.perf_counter() - began - 0.001)
            lag.cpu_s = max(lag.cpu_s, time.thread_time() - used)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.01)
    lag.clock_s = lag.cpu_s = 0.0  # the start of the task does not count
    try:
        yield lag
        await asyncio.sleep(0.002)  # let the task record a delay at the end of the block
    finally:
        watching.cancel()
        gc.unfreeze()


@dataclass
class ToolsOverTransport:
    """The built-in tools on a mock transport, whose responses `answer` makes."""

    answer: Answer
    options: Mapping[str, Any] = field(default_factory=dict)
    max_chars: int = 40_000
    permits: Permits | None = None
    pool: WorkerPool | None = None

    def __post_init__(self) -> None:
        client = JinaClient(SentByMock(self.answer), MAX_BYTES, self.pool)
        values = {
            "retry": RetryOptions(0, 0.01, 0.01),
            "tools": ToolOptions(),
            "egress": EgressOptions(),
            "cache": CacheOptions(ttl_s=0),
            "url_policy": UrlPolicy(),
            **self.options,
        }
        self.tools = JinaBackend(client, JinaBackendOptions(**values), permits=self.permits)
        self.pagination = Pagination(
            cast("Kernel", None), Cursors(b"k" * 32), ToolOptions(max_result_chars=self.max_chars), Isolation(self.pool)
        )

    # `sent` are secrets in the request body (`tenant_` arguments); `values` are the arguments, by default QUESTIONS.
    async def output(
        self,
        mode: str = "reader",
        key: str = KEY,
        sent: tuple[str, ...] = (),
        memory: ResponseMemory | None = None,
        seconds: float = 60,
        **values: Any,
    ) -> ToolOutput:
        """Run a call of a mode, as a batch call if `values` has a list of urls or queries; return the tool's output."""
        jina: dict[str, Any] = {"mode": mode}
        if {"urls", "queries"} & values.keys():
            jina["tool"] = "jina.read_many" if mode == "reader" else "jina.search_many"
        definition = parse_definition(DefinitionRecord("a_tool", None, {}, {"jina": jina}))
        given = values or dict(QUESTIONS[mode])
        secrets = {f"tenant_token{place}": SecretStr(secret) for place, secret in enumerate(sent)}
        arguments = Arguments(given, frozenset(given), secrets, SecretStr(key), "session")
        return await self.tools.run(
            definition, arguments, Deadline.after(seconds), call_within(memory or self.tools.call_memory("proj"))
        )

    async def card(
        self, mode: str = "reader", key: str = KEY, sent: tuple[str, ...] = (), **values: Any
    ) -> tuple[ResultFields, RenderedResult, StoredText | None]:
        """Return the fields of the result card, the text that a model is shown, and the stored text if truncated."""
        with self.tools.call_memory("proj") as memory:
            output = await self.output(mode, key, sent, memory, **values)
            definition = parse_definition(DefinitionRecord("a_tool", None, {}, {"jina": {"mode": mode}}))
            shown = await self.pagination.show(a_call(), definition, output)
            return success(shown.output, shown.rendered, "text", 1), shown.rendered, shown.full_text


def serving(body: bytes, status: int = 200) -> Answer:
    """Return a handler for the mock transport that answers each request with this body and status."""
    return lambda _: httpx.Response(status, content=body)


# Responses that are slow to process or need much memory, as an attacker can serve them at a page's address.


SIZE = 9_800_000
"""Bytes of a response, just below MAX_BYTES."""

_LINK = b'"%d":"https://a.example/%d",'


def _page(content: bytes) -> bytes:
    return b'{"code":200,"data":{"title":"t","url":"https://a.example/","content":"' + content + b'"}}'


def _filled(unit: str | bytes, behind: str = "") -> Callable[[], bytes]:
    """Return a function that makes a page whose text is `unit` repeated, then `behind`."""
    raw = unit.encode() if isinstance(unit, str) else unit
    return lambda: _page(raw * (SIZE // len(raw)) + behind.encode())


def _field(name: str, value: str) -> Callable[[], bytes]:
    def body() -> bytes:
        text = value * (SIZE // len(value.encode()))
        return json.dumps({"data": {"content": "x", name: text}}, ensure_ascii=False).encode()

    return body


def _results(item: bytes, before: bytes = b"", behind: bytes = b"") -> Callable[[], bytes]:
    return lambda: b'{"data":[' + before + item * (SIZE // len(item)) + b"{}" + behind + b"]}"


def _links() -> bytes:
    many = b"".join(_LINK % (number, number) for number in range(79_000))
    return b'{"data":{"content":"x","links":{' + many + b'"":""}}}'


def _hidden_links() -> bytes:
    """Return links whose texts contain zero-width spaces, so that every character has to be examined."""
    text = "a\u200b" * 4_000
    pairs = [[text[:1_000], f"https://a.example/{text}"]] * 550
    return json.dumps({"data": {"content": "x", "links": pairs}}, ensure_ascii=False).encode()


def _wide_results() -> bytes:
    text = "\u200ba" * 5_000
    item = dict.fromkeys(("title", "url", "description", "date", "source", "imageUrl", "warning"), text)
    links = [{"title": text, "link": text, "snippet": text}] * 3
    return json.dumps({"data": [{**item, "siteLinks": links}] * 30}, ensure_ascii=False).encode()


PAGES: Mapping[str, Callable[[], bytes]] = {
    "words": _filled("lorem ipsum dolor "),
    "lines": _filled("\\n"),
    "paragraphs": _filled("word\\n\\n"),
    "one letter": _filled("a"),
    "commas and brackets": _filled("[{,"),
    "opening brackets": _filled("["),
    "escaped quotes": _filled('\\"'),
    "backslashes": _filled("\\\\"),
    "two-byte letters": _filled("\u0436\u0436\u0436 "),
    "four-byte signs": _filled("\U0001f600"),
    "ASCII with one four-byte sign": _filled("word ", "\U0001f600"),
    "look-alikes with one four-byte sign": _filled("[web content ", "\U0001f600"),
    "keys with one four-byte sign": _filled("jina_0123456789012345678901 ", "\U0001f600"),
    "escaped letters": _filled("\\u0436"),
    "control characters": _filled("\\u0001"),
    "NUL": _filled("\\u0000"),
    "half pairs": _filled("\\ud800"),
    "look-alikes of the frame": _filled("[ [end of web content."),
    "nearly look-alikes": _filled("web[[[[[[[["),
    "web": _filled("web "),
    "nearly keys": _filled("jina_"),
    "keys": _filled("jina_0123456789012345678901234567890 "),
    "title": _field("title", "a\u200b"),
    "warning": _field("warning", "a\u2028"),
    "links": _links,
    "links without blanks": _hidden_links,
    "values": lambda: b'{"data":[' + b"{}," * (SIZE // 3) + b"{}]}",
    "texts": lambda: b'{"data":[' + b'"",' * (SIZE // 3) + b'""]}',
    "keys of one object": lambda: b'{"data":{' + b",".join(b'"%090d":1' % number for number in range(79_000)) + b"}}",
    "nesting": lambda: b'{"data":' + b"[" * SIZE + b"}",
    "a number": lambda: b'{"data":' + b"9" * SIZE + b"}",
    "no JSON": lambda: b"<html>" + b"[{," * (SIZE // 3),
    "quotation marks": lambda: b'"' * SIZE,
    "no UTF-8": _filled(b"\xff"),
}
SEARCHES: Mapping[str, Callable[[], bytes]] = {
    "empty results": lambda: b'{"data":[' + b"{}," * 26_000 + b"{}]}",
    "small results": lambda: b'{"data":[' + b'{"a":{}},' * 26_000 + b"{}]}",
    "wide results": _wide_results,
    "one result": lambda: b'{"data":[{"title":"t","content":"' + b"a [" * (SIZE // 3) + b'"}]}',
}
