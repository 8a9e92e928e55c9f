"""Servers that go away and come back, seen by a `serve` process and its health server."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import nats
import pytest

from openapi_tool.local.caller import Caller, PlacedCall, prepare_database
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.server import ServerFailed, accepts, free_port
from openapi_tool.local.stack import EmbeddedStack, kernel_schema
from tests.conftest import AGENT, PROJECT, search_tool
from tests.promises import requirement
from tests.role import dsn_of, make_role

DATABASE = "outages"
HELLO = {"query": "hello world", "count": 3}
_PATIENCE_S = 15.0


@pytest.fixture(scope="module")
def fragile() -> Iterator[EmbeddedStack]:
    """A stack of our own, because its servers are stopped."""
    with EmbeddedStack() as stack:
        yield stack


@dataclass(frozen=True, slots=True)
class Served:
    """An executor and its health server."""

    stack: EmbeddedStack
    executor: ExecutorProcess
    port: int

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def ready(self) -> dict[str, Any]:
        status, body = self.get("/readyz")
        shown: dict[str, Any] = json.loads(body)
        assert shown["ready"] == (status == 200)
        return shown

    def scraped(self, line: str) -> str:
        """All metrics, once `line` is among them: a call is counted a moment after its result is there."""
        give_up = time.monotonic() + _PATIENCE_S
        while line not in (metrics := self.get("/metrics")[1]):
            assert time.monotonic() < give_up, metrics
            time.sleep(0.05)
        return metrics

    def wait(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        give_up = time.monotonic() + _PATIENCE_S
        while not condition(shown := self.ready()):
            assert time.monotonic() < give_up, shown
            time.sleep(0.05)
        return shown


@pytest.fixture
async def served(fragile: EmbeddedStack) -> AsyncIterator[Served]:
    fragile.upstream.rules()
    fragile.upstream.forget()
    database = f"{DATABASE}_{time.monotonic_ns()}"
    await prepare_database(fragile.postgres.dsn(), database, kernel_schema())
    await make_role(fragile.postgres.dsn(database))
    async with Caller.connect(fragile.postgres.dsn(database), fragile.nats.url) as caller:
        await caller.add_project(PROJECT)
        await caller.add_agent(PROJECT, AGENT)
        await caller.add_tool(PROJECT, search_tool())
    port = free_port()
    settings = {
        "PG_DSN": dsn_of(fragile, database),
        "OPENAPI_TOOL__HEALTH__PORT": str(port),
        "OPENAPI_TOOL__CACHE__TTL_S": "0",
    }
    executor = fragile.executor(database, database, settings)
    executor.start()
    yield Served(fragile, executor, port)
    assert executor.stop() == 0
    async with Caller.connect(fragile.postgres.dsn(database), fragile.nats.url) as caller:
        await caller.forget_streams()


async def _placed(served: Served) -> PlacedCall:
    async with Caller.connect(served.stack.postgres.dsn(served.executor.process.name), served.stack.nats.url) as caller:
        return await caller.place(PROJECT, AGENT, "jina_search", HELLO, publish=False)


async def _answered(served: Served, call: PlacedCall) -> dict[str, Any]:
    dsn = served.stack.postgres.dsn(served.executor.process.name)
    async with Caller.connect(dsn, served.stack.nats.url) as caller:
        give_up = time.monotonic() + _PATIENCE_S
        while not ((answer := await caller.read_answer(call)).inbox_row and answer.card):
            assert time.monotonic() < give_up, served.executor.process.log_tail()
        content: dict[str, Any] = answer.card["content"]
        return content


@requirement("health.server")
async def test_health_metrics_and_readiness(served: Served) -> None:
    shown = served.wait(lambda shown: shown["ready"])
    assert {name: part["ok"] for name, part in shown["parts"].items()} == {
        "postgres": True,
        "nats": True,
        "consumer": True,
    }
    assert all(0 <= part["age_s"] < 20 for part in shown["parts"].values())
    assert served.get("/livez") == (200, '{"live": true}')
    assert served.get("/elsewhere")[0] == 404
    call = await _placed(served)
    async with Caller.connect(served.stack.postgres.dsn(served.executor.process.name), served.stack.nats.url) as caller:
        await caller.publish(call)
    assert (await _answered(served, call))["status"] == "success"
    metrics = served.scraped('openapi_tool_calls_total{error_code="",status="success"} 1.0')
    assert "openapi_tool_loop_lag_seconds_bucket" in metrics
    assert PROJECT not in metrics


@requirement("health.server")
async def test_a_port_that_is_taken_is_named(served: Served) -> None:
    second = served.stack.executor(
        "second", served.executor.process.name, {"OPENAPI_TOOL__HEALTH__PORT": str(served.port)}
    )
    with pytest.raises(ServerFailed, match=r"health\.port: cannot be listened on"):
        second.start()


@requirement("outage.postgres")
async def test_without_the_database_nothing_is_fetched_and_afterwards_everything_is_answered(served: Served) -> None:
    served.wait(lambda shown: shown["ready"])
    call = await _placed(served)
    served.stack.postgres.stop()
    shown = served.wait(lambda shown: not shown["parts"]["postgres"]["ok"])
    assert shown["parts"]["nats"]["ok"]
    await _publish(served, call)
    assert served.stack.upstream.requests() == []
    served.stack.postgres.start()
    assert (await _answered(served, call))["status"] == "success"
    served.wait(lambda shown: shown["ready"])
    assert len(served.stack.upstream.requests()) == 1


@requirement("outage.start")
async def test_servers_may_come_up_after_the_executor(served: Served) -> None:
    """One after the other; it says on /readyz what it waits for, and stops at once while it waits."""
    port, stack = free_port(), served.stack
    early = stack.executor("early", served.executor.process.name, {"OPENAPI_TOOL__HEALTH__PORT": str(port)})
    waiting = Served(stack, early, port)
    stack.postgres.stop()
    stack.nats.stop()
    early.process.start(lambda: accepts(port))
    assert waiting.ready()["parts"] == {name: {"ok": False, "age_s": None} for name in ("postgres", "nats", "consumer")}
    stack.postgres.start()
    waiting.wait(lambda shown: shown["parts"]["postgres"]["ok"] and not shown["parts"]["nats"]["ok"])
    stack.nats.start()
    waiting.wait(lambda shown: shown["ready"])
    assert early.stop() == 0


@requirement("outage.start")
async def test_it_stops_at_once_while_it_waits_for_servers(served: Served) -> None:
    port = free_port()
    lonely = served.stack.executor(
        "lonely",
        served.executor.process.name,
        {"OPENAPI_TOOL__HEALTH__PORT": str(port), "PG_DSN": "postgresql://127.0.0.1:1/nowhere"},
    )
    lonely.process.start(lambda: accepts(port))
    began = time.monotonic()
    assert lonely.stop() == 0
    assert time.monotonic() - began < 5


@requirement("outage.nats")
async def test_nats_may_restart_while_a_call_runs(served: Served) -> None:
    served.wait(lambda shown: shown["ready"])
    served.stack.upstream.rules({"delay_s": 1.0})
    call = await _placed(served)
    await _publish(served, call)
    served.stack.upstream.requests(1)
    served.stack.nats.stop()
    served.wait(lambda shown: not shown["parts"]["nats"]["ok"])
    served.stack.nats.start()
    assert (await _answered(served, call))["status"] == "success"
    served.wait(lambda shown: shown["ready"])
    again = await _placed(served)
    await _publish(served, again)
    assert (await _answered(served, again))["status"] == "success"
    assert len(served.stack.upstream.requests()) == 2


async def _publish(served: Served, call: PlacedCall) -> None:
    """Only the bus: the database may be away."""

    client = await nats.connect(served.stack.nats.url)
    await client.jetstream().publish(call.subject, json.dumps(call.body).encode(), headers=dict(call.headers))
    await client.close()
