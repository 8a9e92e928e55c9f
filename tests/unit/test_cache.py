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

from openapi_tool.jina.byte_semaphore import ByteSemaphore, MemoryGrant
from openapi_tool.jina.cache import ResponseCache, cache_key
from openapi_tool.jina.meter import Meter
from openapi_tool.jina.request import UpstreamRequest
from openapi_tool.options import CacheOptions
from openapi_tool.protocol.errors import ToolTimeout, UpstreamUnavailable
from openapi_tool.protocol.records import DefinitionRecord
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.deadline import Deadline
from openapi_tool.tools.definition import ToolDefinition, parse_definition
from openapi_tool.tools.result import Item, ToolOutput, Usage
from openapi_tool.tools.session import SessionScope
from tests.requirements import requirement

SCOPE = SessionScope(b"k" * 32)
OUTPUT = ToolOutput((Item("text"),), {"results": []}, Usage(tokens=100, requests=1))
REQUEST = UpstreamRequest("POST", "s.jina.ai", "/", {"Accept": "application/json"}, b'{"q":"x"}')
owners = st.tuples(st.text(max_size=5), st.text(max_size=5), st.none() | st.text(max_size=5))


def asked(
    output: ToolOutput | Exception, log: list[str], after_s: float = 0.0
) -> Callable[[Meter], Coroutine[Any, Any, ToolOutput]]:
    async def ask(_: Meter) -> ToolOutput:
        log.append("asked")
        await asyncio.sleep(after_s)
        if isinstance(output, Exception):
            raise output
        return output

    return ask


def long(characters: int) -> ToolOutput:
    return replace(OUTPUT, items=(Item("x" * characters),))


def grant() -> MemoryGrant:
    return ByteSemaphore(1_000_000_000).for_call().grant()


def definition(name: str = "search") -> ToolDefinition:
    return parse_definition(DefinitionRecord(name, None, {}, {"jina": {"mode": "search"}}))


def arguments(project: str, agent: str, alias: str | None) -> Arguments:
    return Arguments({}, frozenset(), {}, SecretStr(""), SCOPE.identity(project, agent, alias))


@requirement("cache")
async def test_a_kept_answer_costs_nothing_and_says_so() -> None:
    cache, log = ResponseCache(CacheOptions(60, 100_000)), list[str]()
    assert await cache.get(b"key", Deadline.after(1), asked(OUTPUT, log), grant(), Meter()) == OUTPUT
    assert await cache.get(b"key", Deadline.after(1), asked(OUTPUT, log), grant(), Meter()) == replace(
        OUTPUT, cached=True, usage=Usage()
    )
    assert log == ["asked"]


def metric(name: str) -> float:
    return REGISTRY.get_sample_value(f"openapi_tool_cache_{name}") or 0.0


async def test_hits_misses_and_memory_are_counted() -> None:
    cache, log = ResponseCache(CacheOptions(60, 100_000)), list[str]()
    hits, misses = metric("hits_total"), metric("misses_total")
    together = [cache.get(b"key", Deadline.after(1), asked(OUTPUT, log, 0.01), grant(), Meter()) for _ in range(3)]
    await asyncio.gather(*together)
    await cache.get(b"key", Deadline.after(1), asked(OUTPUT, log), grant(), Meter())
    assert (metric("hits_total"), metric("misses_total")) == (hits + 3, misses + 1)
    assert 600 < metric("bytes") < 1_000
    await ResponseCache(CacheOptions(0, 0)).get(b"key", Deadline.after(1), asked(OUTPUT, log), grant(), Meter())
    assert metric("misses_total") == misses + 1, "a cache that is switched off was asked"


@requirement("cache")
async def test_what_is_too_old_too_large_or_failed_is_not_kept() -> None:
    log: list[str] = []
    brief = ResponseCache(CacheOptions(0.01, 100_000))
    await brief.get(b"key", Deadline.after(1), asked(OUTPUT, log), grant(), Meter())
    await asyncio.sleep(0.02)
    await brief.get(b"key", Deadline.after(1), asked(OUTPUT, log), grant(), Meter())
    small = ResponseCache(CacheOptions(60, 2_000))
    for characters in (1_800, 1_800, 3_000, 3_000):
        await small.get(
            b"key", Deadline.after(1), asked(replace(OUTPUT, items=(Item("x" * characters),)), log), grant(), Meter()
        )
    none = ResponseCache(CacheOptions(0, 100_000))
    for _ in range(2):
        await none.get(b"key", Deadline.after(1), asked(OUTPUT, log), grant(), Meter())
    failing = ResponseCache(CacheOptions(60, 100_000))
    for _ in range(2):
        with pytest.raises(UpstreamUnavailable):
            await failing.get(b"key", Deadline.after(1), asked(UpstreamUnavailable("away"), log), grant(), Meter())
    assert len(log) == 10


@requirement("cache")
async def test_what_jsonb_cannot_hold_is_kept_as_its_result_shows_it() -> None:
    cache, log = ResponseCache(CacheOptions(60, 100_000)), list[str]()
    output = replace(OUTPUT, items=(Item("half \ud800", "a pair"),), state={"results": [{"pages": 2**70}]})
    await cache.get(b"key", Deadline.after(1), asked(output, log), grant(), Meter())
    kept = await cache.get(b"key", Deadline.after(1), asked(output, log), grant(), Meter())
    assert kept == ToolOutput(
        (Item("half \N{REPLACEMENT CHARACTER}", "a pair"),), {"results": [{"pages": str(2**70)}]}, cached=True
    )
    assert log == ["asked"]


@requirement("cache")
def test_no_part_of_an_answer_is_forgotten() -> None:
    kept, anew = {"items", "state"}, {"usage", "cached", "keep", "cheaper"}
    assert {field.name for field in fields(ToolOutput)} == kept | anew


@requirement("cache")
@pytest.mark.parametrize("characters", [20, 2_000, 50_000])
async def test_a_full_cache_takes_the_memory_that_it_may(characters: int) -> None:
    most = 2_000_000
    cache, log = ResponseCache(CacheOptions(600, most)), list[str]()

    async def fill(answers: range) -> None:
        for number in answers:
            results = [{"title": f"title {number}", "url": f"https://example.com/{number}"}]
            output = replace(OUTPUT, items=(Item(f"{number} " + "x" * characters),), state={"results": results})
            await cache.get(f"{number:032}".encode(), Deadline.after(1), asked(output, log), grant(), Meter())
            log.clear()

    await fill(range(10))
    tracemalloc.start()
    try:
        await fill(range(10, 10 + 2 * most // (characters + 700)))
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.85 * most < grown < 1.15 * most


@requirement("cache")
async def test_identical_calls_in_flight_share_one_request_and_its_failure() -> None:
    cache, log = ResponseCache(CacheOptions(60, 100_000)), list[str]()
    ask = asked(OUTPUT, log, 0.01)
    outputs = await asyncio.gather(*(cache.get(b"key", Deadline.after(1), ask, grant(), Meter()) for _ in range(5)))
    assert log == ["asked"]
    assert sorted(output.cached for output in outputs) == [False, True, True, True, True]
    failing = asked(UpstreamUnavailable("away"), log, 0.01)
    errors = await asyncio.gather(
        *(cache.get(b"x", Deadline.after(1), failing, grant(), Meter()) for _ in range(3)), return_exceptions=True
    )
    assert [type(error) for error in errors] == [UpstreamUnavailable] * 3
    assert log == ["asked"] * 2


@requirement("cache")
async def test_a_call_that_gives_up_takes_nobody_along_and_the_last_one_ends_the_request() -> None:
    cache, log = ResponseCache(CacheOptions(60, 100_000)), list[str]()
    first = asyncio.create_task(cache.get(b"key", Deadline.after(1), asked(OUTPUT, log, 0.05), grant(), Meter()))
    second = asyncio.create_task(cache.get(b"key", Deadline.after(1), asked(OUTPUT, log), grant(), Meter()))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).content == "text"
    alone = asyncio.create_task(cache.get(b"other", Deadline.after(1), asked(OUTPUT, log, 60), grant(), Meter()))
    await asyncio.sleep(0.01)
    alone.cancel()
    await asyncio.wait([alone])
    await asyncio.sleep(0)
    assert all("ask" not in str(task.get_coro()) for task in asyncio.all_tasks())


@requirement("cache")
async def test_nobody_joins_a_request_that_is_being_broken_off() -> None:
    cache, log = ResponseCache(CacheOptions(60, 100_000)), list[str]()
    given_up = asyncio.create_task(cache.get(b"key", Deadline.after(1), asked(OUTPUT, log, 60), grant(), Meter()))
    await asyncio.sleep(0.01)
    given_up.cancel()
    await asyncio.sleep(0)  # it has let the request go, which has not ended
    assert await cache.get(b"key", Deadline.after(1), asked(OUTPUT, log), grant(), Meter()) == OUTPUT
    assert log == ["asked"] * 2


@requirement("cache")
async def test_who_has_more_time_than_the_call_that_it_joined_asks_again() -> None:
    cache, log = ResponseCache(CacheOptions(60, 100_000)), list[str]()
    hurried = cache.get(b"key", Deadline.after(0.05), asked(ToolTimeout("too late"), log, 0.02), grant(), Meter())
    patient = cache.get(b"key", Deadline.after(5), asked(OUTPUT, log), grant(), Meter())
    outcomes = await asyncio.gather(hurried, patient, return_exceptions=True)
    assert isinstance(outcomes[0], ToolTimeout)
    assert outcomes[1] == OUTPUT


@requirement("cache")
@given(one=owners, other=owners)
def test_two_owners_never_share_an_answer(one: tuple[str, str, str | None], other: tuple[str, str, str | None]) -> None:
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
def test_whatever_changes_the_answer_changes_the_key(changed: dict[str, Any]) -> None:
    owner = arguments("p", "a", None)
    key = cache_key(definition(), owner, REQUEST)
    assert cache_key(definition(), owner, replace(REQUEST, **changed)) != key
    assert cache_key(definition("another"), owner, REQUEST) != key


@requirement("secrets.output")
def test_no_secret_stands_in_a_cache_key() -> None:
    secret = "a-proxy-password"
    request = replace(REQUEST, target=f"/{secret}", body=b'{"proxyUrl":"http://user:%s@proxy"}' % secret.encode())
    key = cache_key(definition(), replace(arguments("p", "a", None), session=secret), request)
    assert secret.encode() not in key
    assert len(key) == 32
