"""However calls end: results report exactly the upstream's requests, and all memory is given back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from openapi_tool.jina.backend import JinaBackend, JinaBackendOptions
from openapi_tool.jina.byte_semaphore import max_call_memory
from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.url_policy import UrlPolicy
from openapi_tool.options import CacheOptions, RetryOptions, ToolOptions
from openapi_tool.protocol.records import DefinitionRecord
from tests.races.fakes import Run, Scene, iterate_loop
from tests.races.virtual import run_virtually
from tests.requirements import requirement

HANG = 3_600.0
TOKENS = 7
LARGE_CHARS = 70_000


@dataclass(frozen=True)
class Answer:
    """Outcome of an upstream request, and its delay in milliseconds."""

    kind: str
    after_ms: float = 0


@dataclass(frozen=True)
class Call:
    """Call that reads these pages; it begins after `begins_ms`, and its time is limited."""

    begins_ms: int
    pages: tuple[int, ...]
    limit_ms: int | None = None
    batch: bool = False
    fresh: bool = False


class Upstream:
    """Upstream that gives these answers in the order of requests, and counts requests and tokens."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers, self.seen, self.tokens = list(answers), 0, 0

    async def handle(self, _: httpx.Request) -> httpx.Response:
        answer = self.answers[self.seen % len(self.answers)]
        self.seen += 1
        await asyncio.sleep(HANG if answer.kind == "hang" else answer.after_ms / 1000)
        match answer.kind:
            case "busy":
                return httpx.Response(503)
            case "refused":
                return httpx.Response(422, content=b"{}")
            case "dropped":
                raise httpx.ReadError("dropped")
            case "defect":
                raise LookupError("a defect")
        content = "x" * (LARGE_CHARS if answer.kind == "large" else 4)
        page = {"url": "https://a.example/", "content": content, "usage": {"tokens": TOKENS}}
        return httpx.Response(200, content=json.dumps({"code": 200, "data": page, "meta": {}}).encode())


def record(call: Call) -> tuple[DefinitionRecord, dict[str, Any]]:
    """Return definition and arguments of a call."""
    jina: dict[str, Any] = {"mode": "reader", "timeout_s": (call.limit_ms or 20_000) / 1000}
    urls = [f"https://a.example/{page}" for page in call.pages]
    if call.batch:
        jina["tool"] = "jina.read_many"
    if call.fresh:
        jina["params"] = {"noCache": True}
    return DefinitionRecord("jina_search", None, {}, {"jina": jina}), {"urls": urls} if call.batch else {"url": urls[0]}


async def play(calls: Sequence[Call], answers: Sequence[Answer], cache_ttl_s: float) -> None:
    """Run calls of one agent through pipeline and tools; assert that usage and memory are exact."""
    upstream = Upstream(answers)
    options = JinaBackendOptions(
        RetryOptions(2, 0.01, 0.02),
        CacheOptions(cache_ttl_s, 100_000),
        ToolOptions(),
        UrlPolicy(),
        max_call_memory(100_000) + 10 * LARGE_CHARS,
    )
    scene = Scene(
        tools=JinaBackend(JinaClient(httpx.MockTransport(upstream.handle), 100_000), options), concurrency=100
    )
    whole = scene.tools.semaphore.free_bytes
    scene.kernel.calls = {f"call-{number}": record(call) for number, call in enumerate(calls, start=1)}

    async def place(number: int, call: Call) -> None:
        await asyncio.sleep(call.begins_ms / 1000)
        await asyncio.wait([scene.deliver(number)])

    await asyncio.gather(*(place(number, call) for number, call in enumerate(calls, start=1)))
    cards = scene.kernel.committed
    assert len(cards) == len(calls)
    await iterate_loop()
    assert scene.tools.semaphore.free_bytes == whole
    usages = [_usage(card.content, card.metadata) for card in cards]
    assert sum(usage["requests"] for usage in usages) == upstream.seen, [card.content for card in cards]


def _usage(content: dict[str, Any], metadata: dict[str, Any]) -> dict[str, int]:
    usage: dict[str, int] = metadata["tool_output"]["usage"]
    return usage


answer_mixes = st.lists(
    st.builds(
        Answer,
        st.sampled_from(["success", "large", "large", "busy", "refused", "dropped", "defect", "hang"]),
        st.sampled_from([0, 5, 30, 100]),
    ),
    min_size=1,
    max_size=6,
)
call_mixes = st.lists(
    st.builds(
        Call,
        st.sampled_from([0, 0, 1, 5, 30, 60]),
        st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple),
        st.sampled_from([None, 5, 30, 31, 60]),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@requirement("usage.exact", "memory.limit")
@given(calls=call_mixes, answers=answer_mixes, cache_ttl_s=st.sampled_from([0, 60]))
@example([Call(0, (0,), limit_ms=30)], [Answer("hang")], 60)
def test_every_request_is_in_exactly_one_result(calls: list[Call], answers: list[Answer], cache_ttl_s: float) -> None:
    run_virtually(play(calls, answers, cache_ttl_s))


MIXES = {
    "too late": ([Call(0, (0,), limit_ms=5)], [Answer("hang")]),
    "too late in a batch": ([Call(0, (0, 1, 2), limit_ms=5, batch=True)], [Answer("success"), Answer("hang")]),
    "a failure that is shared": ([Call(0, (0,)), Call(0, (0,)), Call(0, (0, 1), batch=True)], [Answer("refused", 2)]),
    "a page that batches share": (
        [Call(0, (0, 1), batch=True), Call(0, (0, 1), batch=True)],
        [Answer("refused", 2), Answer("success", 2)],
    ),
    "the first times out": ([Call(0, (0,), limit_ms=5), Call(1, (0,))], [Answer("success", 20)]),
    "a defect cancels its siblings": ([Call(0, (0, 1, 2), batch=True)], [Answer("hang"), Answer("defect", 2)]),
    "retries": ([Call(0, (0,)), Call(1, (0,))], [Answer("busy"), Answer("dropped"), Answer("success")]),
}


@pytest.mark.parametrize("mix", MIXES)
@requirement("usage.exact", "memory.limit")
def test_every_request_is_in_exactly_one_result_on_each_loop(mix: str, run: Run) -> None:
    run(play(*MIXES[mix], 60))


@requirement("hostile.neighbour")
def test_memory_of_a_call_is_accounted_to_its_project() -> None:
    async def call() -> None:
        scene = Scene()
        await scene.ended(scene.deliver())
        assert scene.tools.projects == ["proj"]

    asyncio.run(call())
