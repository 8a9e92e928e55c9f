"""Memory of responses: the byte semaphore and the response cache."""

from __future__ import annotations

import asyncio
import json
import random
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import fields, replace
from typing import Any

import httpx
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from pydantic import SecretStr

from openapi_tool.jina.byte_semaphore import ByteSemaphore, ResponseMemory
from openapi_tool.jina.cache import ResponseCache, cache_key
from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.memory_estimates import max_call_memory, memory_of
from openapi_tool.jina.options import CacheOptions, EgressOptions
from openapi_tool.jina.request import UpstreamRequest
from openapi_tool.jina.request_context import RequestContext
from openapi_tool.jina.response import Expected
from openapi_tool.protocol.errors import ToolError, ToolTimeout, UpstreamUnavailable
from openapi_tool.protocol.records import DefinitionRecord
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.definition_parser import parse_definition
from openapi_tool.tools.output import NO_USAGE, Item, Meter, ToolOutput, Usage
from openapi_tool.tools.session_identities import SessionIdentities
from tests.answering import MAX_BYTES, ToolsOverTransport, for_request, serving
from tests.requirements import requirement
from tests.support import assert_for_a_model
from tests.waiting import WAIT_S

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Return a function that runs a coroutine on one of the two event loops."""

    def run(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(asyncio.wait_for(work, 20))

    return run


async def _soon() -> None:
    """Let the other tasks run."""
    for _ in range(3):
        await asyncio.sleep(0)


@requirement("memory.limit")
async def test_call_waits_until_another_releases_memory() -> None:
    semaphore = ByteSemaphore(100)
    with semaphore.for_call() as first, semaphore.for_call() as second:
        context = for_request(first)
        await context.hold(70)
        waiting = asyncio.create_task(for_request(second).hold(60))
        await _soon()
        assert not waiting.done()
        await context.hold(40)
        await waiting
        assert semaphore.free_bytes == 0
    assert semaphore.free_bytes == 100


@requirement("memory.limit")
async def test_small_request_does_not_overtake_a_large_one() -> None:
    semaphore, order = ByteSemaphore(100), []

    async def hold(name: str, size: int) -> None:
        with semaphore.for_call() as memory:
            await for_request(memory).hold(size)
            order.append(name)

    with semaphore.for_call() as memory:
        await for_request(memory).hold(60)
        large = asyncio.create_task(hold("large", 90))
        await _soon()
        small = asyncio.create_task(hold("small", 10))
        await _soon()
        assert not for_request(memory).try_hold(1_000)
        assert order == []
    await asyncio.gather(large, small)
    assert order == ["large", "small"]
    assert semaphore.free_bytes == 100


@requirement("memory.limit")
async def test_call_that_holds_memory_is_served_before_one_that_holds_none() -> None:
    semaphore, order = ByteSemaphore(100), []
    with semaphore.for_call() as first, semaphore.for_call() as second, semaphore.for_call() as third:
        held, growing = for_request(first), for_request(second)
        await held.hold(60)
        await growing.hold(30)

        async def hold(name: str, memory: ResponseMemory, size: int) -> None:
            await for_request(memory).hold(size)
            order.append(name)

        newcomer = asyncio.create_task(hold("newcomer", third, 50))
        await _soon()
        grower = asyncio.create_task(hold("grower", second, 20))
        await _soon()
        await held.hold(0)
        await asyncio.gather(newcomer, grower)
    assert order == ["grower", "newcomer"]


@requirement("memory.limit")
async def test_calls_that_hold_memory_and_need_more_do_not_deadlock() -> None:
    """Each call holds memory and needs more than is free; they get the reserve one after the other."""
    semaphore, ended = ByteSemaphore(200, reserve_bytes=100), []

    async def call(name: int) -> None:
        with semaphore.for_call() as memory:
            await for_request(memory).hold(20)
            await asyncio.sleep(0)
            await asyncio.gather(*(for_request(memory).hold(40) for _ in range(2)))
            await asyncio.sleep(0)
            ended.append(name)

    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*map(call, range(12)))
    assert sorted(ended) == list(range(12))
    assert semaphore.free_bytes == 100


@requirement("memory.limit")
def test_cancelled_wait_takes_nothing_and_blocks_no_other(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def check() -> None:
        semaphore = ByteSemaphore(100)
        with semaphore.for_call() as first, semaphore.for_call() as second, semaphore.for_call() as third:
            held = for_request(first)
            await held.hold(60)
            cancelled = asyncio.create_task(for_request(second).hold(90))
            waiting = asyncio.create_task(for_request(third).hold(40))
            await _soon()
            cancelled.cancel()
            await asyncio.wait([cancelled])
            await waiting
        assert semaphore.free_bytes == 100

    run(check())


@pytest.mark.parametrize("first", ["holder", "waiter"])
@requirement("memory.limit")
def test_nothing_is_lost_if_holder_and_waiter_end_in_one_iteration_of_the_loop(
    first: str, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    """At the deadline of a batch, or in a drain, both are cancelled before either runs again."""

    async def check() -> None:
        semaphore, never = ByteSemaphore(100, reserve_bytes=40), asyncio.Event()

        async def hold(sizes: tuple[int, ...]) -> None:
            with semaphore.for_call() as memory:
                for size in sizes:
                    await for_request(memory).hold(size)
                await never.wait()

        for sizes in ((60,), (30, 30)):
            holder = asyncio.create_task(hold((50,)))
            await _soon()
            waiters = [asyncio.create_task(hold(sizes)) for _ in range(3)]
            await _soon()
            for task in [holder, *waiters] if first == "holder" else [*reversed(waiters), holder]:
                task.cancel()
            await asyncio.wait([holder, *waiters])
            assert all(task.cancelled() for task in [holder, *waiters]), "one of them failed instead"
            assert semaphore.free_bytes == 60
            with semaphore.for_call() as memory:
                assert for_request(memory).try_hold(60)

    run(check())


@pytest.mark.parametrize("seed", range(10))
@requirement("memory.limit")
def test_all_memory_is_released_whichever_calls_are_cancelled(
    seed: int, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    async def check() -> None:
        semaphore, dice = ByteSemaphore(300, reserve_bytes=120), random.Random(seed)  # noqa: S311 - a test's dice

        async def call() -> None:
            with semaphore.for_call() as memory:
                for _ in range(dice.randint(1, 3)):
                    context = for_request(memory)
                    await context.hold(dice.randint(1, 20))
                    await asyncio.sleep(0)
                    await context.hold(dice.randint(0, 40))
                    if dice.random() < 0.3:
                        context.clear()

        for _ in range(60):
            tasks = [asyncio.create_task(call()) for _ in range(dice.randint(1, 30))]
            for _ in range(dice.randint(0, 6)):
                await asyncio.sleep(0)
            for task in tasks:
                if dice.random() < 0.6:
                    task.cancel()
            await asyncio.wait(tasks)
            assert semaphore.free_bytes == 180
            assert not any(task.exception() for task in tasks if not task.cancelled())

    run(check())


@requirement("hostile.neighbour")
async def test_project_holds_at_most_half_and_does_not_block_others() -> None:
    semaphore = ByteSemaphore(100)
    with (
        semaphore.for_call("a") as one,
        semaphore.for_call("a") as two,
        semaphore.for_call("a") as three,
        semaphore.for_call("b") as other,
    ):
        await for_request(one).hold(40)
        waiting = asyncio.create_task(for_request(two).hold(20))
        await _soon()
        assert not for_request(three).try_hold(5), "a call overtakes another one of its project"
        assert for_request(other).try_hold(30)
        async with asyncio.timeout(WAIT_S):
            await for_request(other).hold(20)
        assert not waiting.done()
        semaphore.give_all(one)
        await waiting
    assert semaphore.free_bytes == 100


@requirement("hostile.neighbour")
async def test_a_project_that_holds_nothing_may_take_more_than_its_share_for_one_answer() -> None:
    with ByteSemaphore(100).for_call("a") as memory:
        assert for_request(memory).try_hold(90)


@requirement("hostile.neighbour", "memory.limit")
async def test_projects_take_turns_with_the_reserve() -> None:
    semaphore, order = ByteSemaphore(200, reserve_bytes=100), []

    async def call(project: str) -> None:
        with semaphore.for_call(project) as memory:
            await for_request(memory).hold(8)
            await asyncio.sleep(0)
            await for_request(memory).hold(90)
            order.append(project)
            await _soon()

    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*map(call, "aaaab"))
    assert order.index("b") < 2
    assert semaphore.free_bytes == 100


@requirement("memory.limit")
async def test_call_with_the_reserve_is_served_before_all_others() -> None:
    """Otherwise it would wait for a call that waits for the reserve."""
    semaphore, ended = ByteSemaphore(110, reserve_bytes=100), []

    async def hold(memory: ResponseMemory, size: int) -> None:
        await for_request(memory).hold(size)
        ended.append(memory)

    with semaphore.for_call() as first, semaphore.for_call() as one, semaphore.for_call() as two:
        for memory, size in ((first, 2), (one, 3), (two, 5), (first, 50)):  # the last one gets the reserve
            await for_request(memory).hold(size)
        tasks = [asyncio.create_task(hold(memory, 50)) for memory in (one, two, one)]
        await _soon()
        assert ended == []
        semaphore.give_all(first)
        await _soon()
        assert ended == [one, one]
        semaphore.give_all(one)
        await asyncio.gather(*tasks)


@requirement("memory.limit")
async def test_memory_is_held_until_the_last_user_exits() -> None:
    semaphore = ByteSemaphore(100)
    memory = semaphore.for_call()
    with memory:
        await for_request(memory).hold(30)
        with memory:
            pass
        assert semaphore.free_bytes == 70
    assert semaphore.free_bytes == 100


# Memory of a response.


@pytest.mark.parametrize(
    ("body", "times"),
    [
        (b"x" * 100, 6),
        ("\u0436".encode() * 50, 8),
        (b"x" * 96 + "\U0001f600".encode(), 14),
        (rb"\u0436" + b"x" * 94, 8),
        (rb"\uD83D\uDE00" + b"x" * 88, 14),
    ],
)
@requirement("memory.limit")
def test_memory_depends_on_the_widest_character(body: bytes, times: int) -> None:
    assert memory_of(body) == times * 100
    assert memory_of(body * 1_000) <= max_call_memory(100_000)


@requirement("memory.limit")
async def test_memory_is_held_until_the_commit_and_released_by_a_failure() -> None:
    text = "word " * 200_000
    answering = ToolsOverTransport(serving(json.dumps({"data": {"content": text}}).encode()))
    whole = answering.tools.semaphore.free_bytes
    with answering.tools.call_memory("proj") as memory:
        output = await answering.output(memory=memory)
        assert whole - answering.tools.semaphore.free_bytes >= 6 * len(text)
        del output
    assert answering.tools.semaphore.free_bytes == whole
    failing = ToolsOverTransport(serving(b'"' * 100_000, 503))
    with failing.tools.call_memory("proj") as memory:
        with pytest.raises(ToolError):
            await failing.output(memory=memory)
        assert (memory.held, memory.body_bytes) == (0, 0)


class _Chunks(httpx.AsyncByteStream):
    """Body without a declared length, in parts; `pause` is awaited before each."""

    def __init__(self, parts: list[bytes], pause: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        self._parts = parts
        self._pause = pause

    async def __aiter__(self) -> Any:
        for number, part in enumerate(self._parts):
            await self._pause(number)
            yield part


@requirement("memory.limit")
async def test_response_of_unknown_length_takes_memory_as_it_grows() -> None:
    taken: list[int] = []

    async def look(_: int) -> None:
        taken.append(whole - answering.tools.semaphore.free_bytes)

    body = json.dumps({"data": {"content": "y" * 300_000}}).encode()
    parts = [body[start : start + 50_000] for start in range(0, len(body), 50_000)]
    answering = ToolsOverTransport(lambda _: httpx.Response(200, stream=_Chunks(parts, look)))
    whole = answering.tools.semaphore.free_bytes
    await answering.card()
    assert taken[:6] == [0, 0, 131_072, 262_144, 262_144, 262_144]
    assert answering.tools.semaphore.free_bytes == whole


@pytest.mark.parametrize("declared", ["9999999", None])
@requirement("memory.limit")
async def test_response_takes_memory_for_received_bytes_whatever_it_declares(declared: str | None) -> None:
    taken: list[int] = []

    async def look(number: int) -> None:
        taken.append(whole - answering.tools.semaphore.free_bytes)
        if number == 2:
            raise httpx.ReadError("broke off")

    headers = {"Content-Length": declared} if declared else {}
    answering = ToolsOverTransport(
        lambda _: httpx.Response(200, headers=headers, stream=_Chunks([b"x" * 35_000] * 3, look))
    )
    whole = answering.tools.semaphore.free_bytes
    with pytest.raises(ToolError), answering.tools.call_memory("proj") as memory:
        await answering.output(memory=memory)
    assert taken == [0, 0, 131_072]
    assert answering.tools.semaphore.free_bytes == whole


class _Paced:
    """Client of an upstream that sends `parts`, and awaits `pause` before each."""

    def __init__(self, parts: list[bytes], pause: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        answer = httpx.Response(200, stream=_Chunks(parts, pause))
        self._client = JinaClient(httpx.MockTransport(lambda _: answer), MAX_BYTES, pace_s=0.05)

    async def fetch(self, context: RequestContext) -> Any:
        request = UpstreamRequest("POST", "r.jina.ai", "/", {}, b"{}", Expected("reader"))
        return await self._client.fetch(request, SecretStr("a-key"), Deadline.after(20), context)


@requirement("memory.limit")
async def test_stalled_response_that_holds_memory_is_aborted() -> None:
    async def hang(number: int) -> None:
        await asyncio.sleep(0 if number < 2 else 3_600)

    semaphore = ByteSemaphore(1_000_000)
    with semaphore.for_call() as memory:
        with pytest.raises(UpstreamUnavailable, match="too slowly") as failed:
            await _Paced([b"x" * 60_000] * 3, hang).fetch(for_request(memory))
        assert (failed.value.max_retries, failed.value.retryable) == (0, True)
    assert_for_a_model(failed.value)


@requirement("memory.limit")
async def test_a_small_answer_may_come_as_slowly_as_its_call_allows() -> None:
    async def slowly(_: int) -> None:
        await asyncio.sleep(0.1)

    with ByteSemaphore(1_000_000).for_call() as memory:
        outcome = await _Paced([b'{"data":', b"{}}"], slowly).fetch(for_request(memory))
    assert outcome.usage.requests == 1


@requirement("memory.limit")
async def test_wait_for_memory_does_not_count_as_a_slow_upstream() -> None:
    async def never(_: int) -> None:
        pass

    text = b"x" * 70_000
    semaphore = ByteSemaphore(1_000_000)
    with semaphore.for_call() as other, semaphore.for_call() as memory:
        context = for_request(other)
        await context.hold(1_000_000)
        fetching = asyncio.create_task(
            _Paced([b'{"data":{"content":"', text, b'"}}'], never).fetch(for_request(memory))
        )
        await asyncio.sleep(0.2)
        assert not fetching.done()
        await context.hold(0)
        outcome = await fetching
        assert isinstance(outcome, ToolOutput)
        assert outcome.items[0].body == text.decode()


@requirement("memory.limit")
async def test_a_small_answer_never_waits_behind_large_ones() -> None:
    small = ToolsOverTransport(serving(json.dumps({"data": {"content": "y" * 60_000}}).encode()))
    with small.tools.call_memory("proj") as all_of_it, small.tools.call_memory("proj") as waiting:
        await for_request(all_of_it).hold(small.tools.semaphore.free_bytes)
        large = asyncio.create_task(for_request(waiting).hold(1))
        await _soon()
        async with asyncio.timeout(WAIT_S):
            await small.card()
        assert not large.done()
        large.cancel()


@requirement("memory.limit", "upstream.errors")
async def test_pages_of_one_call_share_the_size_limit() -> None:
    body = json.dumps({"data": {"content": "y" * 3_000_000}}).encode()
    answering = ToolsOverTransport(serving(body))
    whole = answering.tools.semaphore.free_bytes
    output = await answering.output(urls=[f"https://a.example/{number}" for number in range(6)])
    assert (output.state["succeeded"], output.state["failed"]) == (3, 3)
    entries: Any = output.state["results"]
    failures = [entry["error"] for entry in entries if entry["status"] == "failed"]
    assert {failure["code"] for failure in failures} == {"response_too_large"}
    assert "all pages of a call together" in failures[0]["message"]
    assert answering.tools.semaphore.free_bytes == whole


@pytest.mark.parametrize(
    ("more_bytes", "end", "tokens"),
    [
        (500_000, '"meta": {"usage": {"tokens": 123456}}}', 123_456),
        (10, '"meta":{"usage":{"tokens":123456}}}\n', 123_456),
        (500_000, '"meta": {"usage": {"tokens": -5}}}', None),
        (500_000, '"more": "{\\\\"meta\\\\": {\\\\"usage\\\\": {\\\\"tokens\\\\": 1}}}"', None),
        (MAX_BYTES + 500_000, '"meta": {"usage": {"tokens": 123456}}}', None),
    ],
)
@requirement("usage.exact", "memory.limit")
async def test_a_page_that_is_too_large_costs_what_its_end_states(
    more_bytes: int, end: str, tokens: int | None
) -> None:
    """As much again as may be kept is read on for it; else the cost is estimated by the bytes."""
    body = b'{"data": {"content": "' + b"y" * (MAX_BYTES + more_bytes) + b'"}, ' + end.encode()

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 65_536):
            yield body[start : start + 65_536]

    answering = ToolsOverTransport(lambda _: httpx.Response(200, content=chunks()))
    with pytest.raises(ToolError) as raised:
        await answering.output(url="https://a.example/")
    assert raised.value.code == "response_too_large"
    assert raised.value.tokens == tokens if tokens else raised.value.tokens > MAX_BYTES / 10


@requirement("memory.limit")
async def test_many_batches_of_large_pages_at_once_all_end() -> None:
    body = json.dumps({"data": {"content": "y" * 2_000_000 + "\U0001f600"}}, ensure_ascii=False).encode()
    answering = ToolsOverTransport(serving(body))
    whole = answering.tools.semaphore.free_bytes

    async def call(number: int) -> None:
        fields, _, _ = await answering.card(urls=[f"https://a.example/{number}/{page}" for page in range(4)])
        assert fields.status == "success"

    async with asyncio.timeout(60):
        await asyncio.gather(*map(call, range(8)))
    assert answering.tools.semaphore.free_bytes == whole


@requirement("memory.limit", "cache")
async def test_cached_and_shared_responses_take_memory_too() -> None:
    body = json.dumps({"data": {"content": "y" * 1_000_000}}).encode()
    requests = 0

    def answer(_: httpx.Request) -> httpx.Response:
        nonlocal requests
        requests += 1
        return httpx.Response(200, content=body)

    answering = ToolsOverTransport(answer, options={"cache": CacheOptions(60.0)})
    whole = answering.tools.semaphore.free_bytes
    contexts = [answering.tools.call_memory("proj") for _ in range(4)]
    for memory in contexts:
        memory.__enter__()
    outputs = await asyncio.gather(*(answering.output(memory=memory) for memory in contexts[:3]))
    outputs.append(await answering.output(memory=contexts[3]))
    assert requests == 1
    assert all(memory.held >= 5 * len(body) - 1_000 for memory in contexts)
    assert len({output.content for output in outputs}) == 1
    for memory in contexts:
        memory.__exit__(None, None, None)
    assert answering.tools.semaphore.free_bytes == whole


@requirement("memory.limit", "cache")
async def test_call_does_not_hold_a_shared_response_while_it_waits_for_memory() -> None:
    body = json.dumps({"data": {"content": "y" * 5_000_000}}).encode()
    requests = 0

    def answer(_: httpx.Request) -> httpx.Response:
        nonlocal requests
        requests += 1
        return httpx.Response(200, content=body)

    answering = ToolsOverTransport(
        answer, options={"cache": CacheOptions(60.0), "egress": EgressOptions(body_budget_bytes=210_000_000)}
    )
    async with asyncio.timeout(WAIT_S):
        cards = await asyncio.gather(*(answering.card() for _ in range(6)))
    assert all(artifact is not None for _, _, artifact in cards)
    assert requests > 1


SESSIONS = SessionIdentities(b"k" * 32)
OUTPUT = ToolOutput((Item("text"),), {"results": []}, Usage(tokens=100, requests=1))
REQUEST = UpstreamRequest("POST", "s.jina.ai", "/", {"Accept": "application/json"}, b'{"q":"x"}', Expected("search"))
ENTRY_OVERHEAD_BYTES = 700
owners = st.tuples(st.text(max_size=5), st.text(max_size=5), st.none() | st.text(max_size=5))


def upstream_request(
    output: ToolOutput | Exception, log: list[str], delay_s: float = 0.0
) -> Callable[[Meter], Coroutine[Any, Any, ToolOutput]]:
    async def send(_: Meter) -> ToolOutput:
        log.append("sent")
        await asyncio.sleep(delay_s)
        if isinstance(output, Exception):
            raise output
        return output

    return send


def long(characters: int) -> ToolOutput:
    return replace(OUTPUT, items=(Item("x" * characters),))


def request_context() -> RequestContext:
    return for_request(ByteSemaphore(1_000_000_000).for_call())


def definition(name: str = "search") -> ToolDefinition:
    return parse_definition(DefinitionRecord(name, None, {}, {"jina": {"mode": "search"}}))


def arguments(project: str, agent: str, alias: str | None) -> Arguments:
    return Arguments({}, frozenset(), {}, SecretStr(""), SESSIONS.identity(project, agent, alias))


@requirement("cache")
async def test_cached_response_costs_nothing_and_is_marked_as_cached() -> None:
    cache, log = ResponseCache(CacheOptions(60, 100_000)), list[str]()
    assert (
        await cache.get(b"key", Deadline.after(1), upstream_request(OUTPUT, log), request_context(), Meter()) == OUTPUT
    )
    assert await cache.get(
        b"key", Deadline.after(1), upstream_request(OUTPUT, log), request_context(), Meter()
    ) == replace(OUTPUT, cached=True, usage=Usage())
    assert log == ["sent"]


@requirement("cache", "mcp.cancellation")
async def test_a_paid_response_whose_call_is_cancelled_while_it_is_stored_is_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storing = asyncio.Event()

    async def wait_for_another_step(_size: int) -> None:
        storing.set()
        await asyncio.sleep(0.1)

    monkeypatch.setattr("openapi_tool.jina.cache.without_other_long_steps", wait_for_another_step)
    cache, log = ResponseCache(CacheOptions(60, 100_000)), list[str]()
    call = asyncio.create_task(
        cache.get(b"key", Deadline.after(1), upstream_request(OUTPUT, log), request_context(), Meter())
    )
    await storing.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    again = await cache.get(b"key", Deadline.after(1), upstream_request(OUTPUT, log), request_context(), Meter())
    assert (again.cached, log) == (True, ["sent"])


def metric(name: str) -> float:
    return REGISTRY.get_sample_value(f"openapi_tool_cache_{name}") or 0.0


async def test_hits_misses_and_memory_are_counted() -> None:
    cache, log = ResponseCache(CacheOptions(60, 100_000)), list[str]()
    hits, misses = metric("hits_total"), metric("misses_total")
    together = [
        cache.get(b"key", Deadline.after(1), upstream_request(OUTPUT, log, 0.01), request_context(), Meter())
        for _ in range(3)
    ]
    await asyncio.gather(*together)
    await cache.get(b"key", Deadline.after(1), upstream_request(OUTPUT, log), request_context(), Meter())
    assert (metric("hits_total"), metric("misses_total")) == (hits + 3, misses + 1)
    assert 500 < metric("bytes") < 1_000  # OUTPUT has a few bytes, the overhead of an entry is about 500
    await ResponseCache(CacheOptions(0, 0)).get(
        b"key", Deadline.after(1), upstream_request(OUTPUT, log), request_context(), Meter()
    )
    assert metric("misses_total") == misses + 1, "a disabled cache counted a miss"


@requirement("cache")
async def test_expired_too_large_or_failed_responses_are_not_cached() -> None:
    log: list[str] = []
    brief = ResponseCache(CacheOptions(0.01, 100_000))
    await brief.get(b"key", Deadline.after(1), upstream_request(OUTPUT, log), request_context(), Meter())
    await asyncio.sleep(0.02)
    await brief.get(b"key", Deadline.after(1), upstream_request(OUTPUT, log), request_context(), Meter())
    small = ResponseCache(CacheOptions(60, 2_000))
    for characters in (1_800, 1_800, 3_000, 3_000):
        await small.get(
            b"key",
            Deadline.after(1),
            upstream_request(replace(OUTPUT, items=(Item("x" * characters),)), log),
            request_context(),
            Meter(),
        )
    none = ResponseCache(CacheOptions(0, 100_000))
    for _ in range(2):
        await none.get(b"key", Deadline.after(1), upstream_request(OUTPUT, log), request_context(), Meter())
    failing = ResponseCache(CacheOptions(60, 100_000))
    for _ in range(2):
        with pytest.raises(UpstreamUnavailable):
            await failing.get(
                b"key",
                Deadline.after(1),
                upstream_request(UpstreamUnavailable("connection refused"), log),
                request_context(),
                Meter(),
            )
    assert len(log) == 10  # 2 + 4 + 2 + 2 calls, each with a request of its own


@requirement("cache")
async def test_numbers_that_jsonb_rejects_are_cached_as_they_are() -> None:
    cache, log = ResponseCache(CacheOptions(60, 100_000)), list[str]()
    output = replace(OUTPUT, state={"results": [{"pages": 2**70}]})
    await cache.get(b"key", Deadline.after(1), upstream_request(output, log), request_context(), Meter())
    cached = await cache.get(b"key", Deadline.after(1), upstream_request(output, log), request_context(), Meter())
    assert cached == replace(output, usage=NO_USAGE, cached=True)
    assert log == ["sent"]


@requirement("cache")
def test_every_field_of_an_output_is_either_cached_or_reset() -> None:
    cached, reset = {"items", "state"}, {"usage", "cached", "may_store", "cost_advice"}
    assert {field.name for field in fields(ToolOutput)} == cached | reset


@pytest.mark.thorough
@requirement("cache")
@pytest.mark.parametrize("characters", [20, 2_000, 50_000])
async def test_full_cache_uses_its_memory_limit_within_15_percent(characters: int) -> None:
    max_bytes = 2_000_000
    cache, log = ResponseCache(CacheOptions(600, max_bytes)), list[str]()

    async def fill(answers: range) -> None:
        for number in answers:
            results = [{"title": f"title {number}", "url": f"https://example.com/{number}"}]
            output = replace(OUTPUT, items=(Item(f"{number} " + "x" * characters),), state={"results": results})
            await cache.get(
                f"{number:032}".encode(), Deadline.after(1), upstream_request(output, log), request_context(), Meter()
            )
            log.clear()

    await fill(range(10))
    tracemalloc.start()
    try:
        await fill(range(10, 10 + 2 * max_bytes // (characters + ENTRY_OVERHEAD_BYTES)))
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.85 * max_bytes < grown < 1.15 * max_bytes


@requirement("cache")
async def test_identical_calls_in_flight_share_one_request_and_its_failure() -> None:
    cache, log = ResponseCache(CacheOptions(60, 100_000)), list[str]()
    request = upstream_request(OUTPUT, log, 0.01)
    outputs = await asyncio.gather(
        *(cache.get(b"key", Deadline.after(1), request, request_context(), Meter()) for _ in range(5))
    )
    assert log == ["sent"]
    assert sorted(output.cached for output in outputs) == [False, True, True, True, True]
    failing = upstream_request(UpstreamUnavailable("connection refused"), log, 0.01)
    errors = await asyncio.gather(
        *(cache.get(b"x", Deadline.after(1), failing, request_context(), Meter()) for _ in range(3)),
        return_exceptions=True,
    )
    assert [type(error) for error in errors] == [UpstreamUnavailable] * 3
    assert log == ["sent"] * 2


@requirement("cache")
async def test_cancelling_one_call_keeps_the_shared_request_and_cancelling_the_last_ends_it() -> None:
    cache, log = ResponseCache(CacheOptions(60, 100_000)), list[str]()
    first = asyncio.create_task(
        cache.get(b"key", Deadline.after(1), upstream_request(OUTPUT, log, 0.05), request_context(), Meter())
    )
    second = asyncio.create_task(
        cache.get(b"key", Deadline.after(1), upstream_request(OUTPUT, log), request_context(), Meter())
    )
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).content == "text"
    alone = asyncio.create_task(
        cache.get(b"other", Deadline.after(1), upstream_request(OUTPUT, log, 60), request_context(), Meter())
    )
    await asyncio.sleep(0.01)
    alone.cancel()
    await asyncio.wait([alone])
    await asyncio.sleep(0)
    assert all("upstream_request" not in str(task.get_coro()) for task in asyncio.all_tasks())


@requirement("cache")
async def test_cancelled_request_is_not_joined() -> None:
    cache, log = ResponseCache(CacheOptions(60, 100_000)), list[str]()
    cancelled = asyncio.create_task(
        cache.get(b"key", Deadline.after(1), upstream_request(OUTPUT, log, 60), request_context(), Meter())
    )
    await asyncio.sleep(0.01)
    cancelled.cancel()
    await asyncio.sleep(0)  # the call has ended; its request is cancelled, but still running
    assert (
        await cache.get(b"key", Deadline.after(1), upstream_request(OUTPUT, log), request_context(), Meter()) == OUTPUT
    )
    assert log == ["sent"] * 2


@requirement("cache")
async def test_call_with_a_later_deadline_retries_after_the_shared_request_timed_out() -> None:
    cache, log = ResponseCache(CacheOptions(60, 100_000)), list[str]()
    hurried = cache.get(
        b"key", Deadline.after(0.05), upstream_request(ToolTimeout("too late"), log, 0.02), request_context(), Meter()
    )
    patient = cache.get(b"key", Deadline.after(5), upstream_request(OUTPUT, log), request_context(), Meter())
    outcomes = await asyncio.gather(hurried, patient, return_exceptions=True)
    assert isinstance(outcomes[0], ToolTimeout)
    assert outcomes[1] == OUTPUT


@requirement("cache")
@given(one=owners, other=owners)
def test_two_owners_never_share_a_response(
    one: tuple[str, str, str | None], other: tuple[str, str, str | None]
) -> None:
    same = cache_key(definition(), arguments(*one), REQUEST) == cache_key(definition(), arguments(*other), REQUEST)
    assert same == (one == other)


@pytest.mark.parametrize(
    "changed",
    [
        {"method": "GET"},
        {"host": "r.jina.ai"},
        {"target": "/x"},
        {"headers": {"Accept": "application/json", "X-Site": "a"}},
        {"body": b'{"q":"y"}'},
    ],
)
@requirement("cache")
def test_key_depends_on_everything_that_determines_the_response(changed: dict[str, Any]) -> None:
    owner = arguments("p", "a", None)
    key = cache_key(definition(), owner, REQUEST)
    assert cache_key(definition(), owner, replace(REQUEST, **changed)) != key
    assert cache_key(definition("another"), owner, REQUEST) != key


@requirement("secrets.output")
def test_cache_key_contains_no_secret() -> None:
    secret = "a-proxy-password"
    request = replace(REQUEST, target=f"/{secret}", body=b'{"proxyUrl":"http://user:%s@proxy"}' % secret.encode())
    key = cache_key(definition(), replace(arguments("p", "a", None), session_identity=secret), request)
    assert secret.encode() not in key
    assert len(key) == 32
