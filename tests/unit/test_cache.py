"""Response cache: scope of entries, single-flight, memory."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable, Coroutine
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from pydantic import SecretStr

from openapi_tool.jina.byte_semaphore import ByteSemaphore, RequestContext
from openapi_tool.jina.cache import ResponseCache, cache_key
from openapi_tool.jina.request import UpstreamRequest
from openapi_tool.options import CacheOptions
from openapi_tool.protocol.errors import ToolTimeout, UpstreamUnavailable
from openapi_tool.protocol.records import DefinitionRecord
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.deadline import Deadline
from openapi_tool.tools.definition import ToolDefinition, parse_definition
from openapi_tool.tools.result import Item, Meter, ToolOutput, Usage
from openapi_tool.tools.scopes import SessionScope
from tests.requirements import requirement

SCOPE = SessionScope(b"k" * 32)
OUTPUT = ToolOutput((Item("text"),), {"results": []}, Usage(tokens=100, requests=1))
REQUEST = UpstreamRequest("POST", "s.jina.ai", "/", {"Accept": "application/json"}, b'{"q":"x"}')
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
    return ByteSemaphore(1_000_000_000).for_call().for_request()


def definition(name: str = "search") -> ToolDefinition:
    return parse_definition(DefinitionRecord(name, None, {}, {"jina": {"mode": "search"}}))


def arguments(project: str, agent: str, alias: str | None) -> Arguments:
    return Arguments({}, frozenset(), {}, SecretStr(""), SCOPE.identity(project, agent, alias))


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
    assert 600 < metric("bytes") < 1_000  # OUTPUT has a few bytes, the overhead of an entry is about 700
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
    assert len(log) == 10  # 2 + 4 + 2 + 2: each call sent a request


@requirement("cache")
async def test_values_that_jsonb_rejects_are_cached_as_the_result_shows_them() -> None:
    cache, log = ResponseCache(CacheOptions(60, 100_000)), list[str]()
    output = replace(OUTPUT, items=(Item("half \ud800", "a pair"),), state={"results": [{"pages": 2**70}]})
    await cache.get(b"key", Deadline.after(1), upstream_request(output, log), request_context(), Meter())
    cached = await cache.get(b"key", Deadline.after(1), upstream_request(output, log), request_context(), Meter())
    assert cached == ToolOutput(
        (Item("half \N{REPLACEMENT CHARACTER}", "a pair"),), {"results": [{"pages": str(2**70)}]}, cached=True
    )
    assert log == ["sent"]


@requirement("cache")
def test_every_field_of_an_output_is_either_cached_or_reset() -> None:
    cached, reset = {"items", "state"}, {"usage", "cached", "may_store", "cost_advice"}
    assert {field.name for field in fields(ToolOutput)} == cached | reset


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
    key = cache_key(definition(), replace(arguments("p", "a", None), session=secret), request)
    assert secret.encode() not in key
    assert len(key) == 32
