"""Two processes that serve two kernels on two NATS servers, and keep the records of quotas in one of these."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import nats
import pytest
from nats.js.errors import NotFoundError
from typer.testing import CliRunner

from openapi_tool.cli import app
from openapi_tool.local.caller import Caller
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.servers import NatsServer, free_port
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.nats_records.record_store import BUDGETS, LIMITS
from openapi_tool.protocol.subjects import subject_in_version
from tests.conftest import AGENT, PROJECT, StartExecutor, search_tool
from tests.requirements import requirement
from tests.support import another_nats, dsn_of
from tests.waiting import WAIT_S

LIMIT = 20
QUOTAS = "OPENAPI_TOOL__QUOTAS__"
RECORDED = {"query": "hello world", "count": 3}


@dataclass(frozen=True, slots=True)
class Kernels:
    """A kernel of v1r4 and one of v1r3, each with its own NATS; that of the first holds the records of both."""

    callers: tuple[Caller, Caller]
    settings: tuple[Mapping[str, str], Mapping[str, str]]


@pytest.fixture
async def other_nats(stack: EmbeddedStack, request: pytest.FixtureRequest) -> AsyncIterator[NatsServer]:
    server = another_nats(stack, request.node.name[:60], "")
    await asyncio.to_thread(server.start)
    yield server
    await asyncio.to_thread(server.stop)


@pytest.fixture
async def kernels(
    stack: EmbeddedStack, caller: Caller, v1r3_database: str, other_nats: NatsServer
) -> AsyncIterator[Kernels]:
    await caller.add_tool(PROJECT, search_tool())
    async with Caller.connect(stack.postgres.dsn(v1r3_database), other_nats.url, "v1r3") as other:
        await other.add_project(PROJECT)
        await other.add_agent(PROJECT, AGENT)
        tool = search_tool()
        await other.add_tool(PROJECT, {**tool, "target_subject": subject_in_version(tool["target_subject"], "v1r3")})
        settings = {
            "OPENAPI_TOOL__PROTOCOL__VERSION": "v1r3",
            "PG_DSN": dsn_of(stack, v1r3_database),
            "NATS_SERVERS": other_nats.url,
            f"{QUOTAS}NATS__SERVERS": stack.nats.url,
            f"{QUOTAS}KERNEL": "v1r3",
        }
        yield Kernels((caller, other), ({}, settings))
    for bucket in (LIMITS.bucket, BUDGETS.bucket):
        try:
            await caller.client.jetstream().delete_key_value(bucket.name)
        except NotFoundError:
            continue


async def contents(kernels: Kernels, calls: int) -> list[list[dict[str, Any]]]:
    """Make `calls` calls in each kernel at once; return the contents of their results by kernel."""
    placed = [
        [await one.place(PROJECT, AGENT, "jina_search", RECORDED) for _ in range(calls)] for one in kernels.callers
    ]
    return [
        [(await one.result(call, WAIT_S)).card["content"] for call in of_kernel]
        for one, of_kernel in zip(kernels.callers, placed, strict=True)
    ]


@requirement("quotas.elsewhere", "limits.window")
async def test_two_kernels_share_the_limit_of_a_key(
    stack: EmbeddedStack, kernels: Kernels, start_executor: StartExecutor
) -> None:
    for settings in kernels.settings:
        start_executor({**settings, "OPENAPI_TOOL__LIMITS__SEARCH_REQUESTS_PER_MINUTE": str(LIMIT)})
    results = [content for of_kernel in await contents(kernels, LIMIT) for content in of_kernel]
    requests = await asyncio.to_thread(stack.upstream.requests)
    assert [request["status"] for request in requests] == [200] * len(requests)
    assert LIMIT / 2 < len(requests) <= LIMIT, "the limit is paced: not all of it may be used at once"
    refused = [content["error"]["code"] for content in results if content["status"] != "success"]
    assert refused == ["rate_limited"] * (2 * LIMIT - len(requests))


@requirement("quotas.elsewhere")
async def test_projects_of_equal_ids_share_no_budget(kernels: Kernels, start_executor: StartExecutor) -> None:
    for settings in kernels.settings:
        start_executor({**settings, "OPENAPI_TOOL__BUDGETS__PROJECT_DAY_REQUESTS": "2"})
    for of_kernel in await contents(kernels, 3):
        codes = sorted((content["error"] or {}).get("code", "") for content in of_kernel)
        assert codes == ["", "", "budget_exceeded"]
    bucket = await kernels.callers[0].client.jetstream().key_value(BUDGETS.bucket.name)
    assert len(await bucket.keys()) == 2, "both are in the NATS of the first kernel"


@dataclass(frozen=True, slots=True)
class Served:
    """An executor with a health server, whose quotas are in another NATS than its kernel's."""

    executor: ExecutorProcess
    port: int

    def dependencies(self) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=5) as answer:
                shown = json.load(answer)
        except urllib.error.HTTPError as error:
            shown = json.load(error)
        assert shown["ready"] == all(each["ok"] for each in shown["dependencies"].values())
        found: dict[str, Any] = shown["dependencies"]
        return found

    async def wait(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        async with asyncio.timeout(WAIT_S):
            while not condition(found := await asyncio.to_thread(self.dependencies)):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.05)
        return found


@requirement("quotas.elsewhere")
async def test_an_outage_of_the_quotas_nats_stops_no_call(
    caller: Caller, other_nats: NatsServer, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    port = free_port()
    settings = {
        f"{QUOTAS}NATS__SERVERS": other_nats.url,
        f"{QUOTAS}KERNEL": "other",
        "OPENAPI_TOOL__LIMITS__SEARCH_REQUESTS_PER_MINUTE": "60",
        "OPENAPI_TOOL__BUDGETS__PROJECT_DAY_REQUESTS": "100",
        "OPENAPI_TOOL__HEALTH__PORT": str(port),
    }

    async def status() -> str:
        call = await caller.place(PROJECT, AGENT, "jina_search", RECORDED)
        return str((await caller.result(call, WAIT_S)).card["content"]["status"])

    await asyncio.to_thread(other_nats.stop)
    served = Served(await asyncio.to_thread(start_executor, settings), port)
    assert await status() == "success"
    found = await served.wait(lambda found: not found["quotas"]["ok"] and found["consumer"]["ok"])
    where = f"{QUOTAS}NATS__SERVERS"
    assert found["quotas"]["reason"].endswith(f"connection refused; check quotas.nats.servers ({where})")
    await asyncio.to_thread(other_nats.start)
    await served.wait(lambda found: all(each["ok"] for each in found.values()))
    assert await status() == "success"
    await asyncio.to_thread(other_nats.stop)
    await served.wait(lambda found: not found["quotas"]["ok"])
    assert await status() == "success"
    await served.wait(lambda found: found["nats"]["ok"] and found["jetstream"]["ok"])
    await asyncio.to_thread(other_nats.start)
    await served.wait(lambda found: all(each["ok"] for each in found.values()))


async def checked(environment: Mapping[str, str], code: int) -> dict[str, str]:
    invoked = await asyncio.to_thread(lambda: CliRunner().invoke(app, ["check", "--json"], env=dict(environment)))
    assert invoked.exit_code == code, invoked.output
    found: dict[str, str] = json.loads(invoked.stdout)["checks"]
    return found


@requirement("quotas.elsewhere", "cli.check")
async def test_check_tests_the_nats_of_the_quotas(
    stack: EmbeddedStack, caller: Caller, database: str, other_nats: NatsServer
) -> None:
    del caller
    environment = {
        "PG_DSN": dsn_of(stack, database),
        "NATS_SERVERS": stack.nats.url,
        f"{QUOTAS}NATS__SERVERS": other_nats.url,
        f"{QUOTAS}KERNEL": "other",
        **stack.upstream.keys,
    }
    assert (await checked(environment, 0))["quotas"] == ""
    await asyncio.to_thread(other_nats.stop)
    problem = (await checked(environment, 1))["quotas"]
    assert "connection refused; check quotas.nats.servers" in problem
    await asyncio.to_thread(other_nats.start)


@requirement("quotas.elsewhere", "privilege.subjects")
async def test_the_login_for_quotas_needs_only_the_listed_permissions(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    words = ["nats", "permissions", "--for", "quotas", "--format", "server-config"]
    listed = CliRunner().invoke(app, words, env={f"{QUOTAS}KERNEL": "other"})
    assert listed.exit_code == 0, listed.output
    admin = "{ user: admin, password: admin-of-the-test }"
    users = f"authorization {{ users: [ {admin}, {{ user: quotas, password: quotas-of-the-test, {listed.stdout} }} ] }}"
    server = another_nats(stack, "restricted_quotas", users)
    await asyncio.to_thread(server.start)
    await caller.add_tool(PROJECT, search_tool())
    port = free_port()
    settings = {
        f"{QUOTAS}NATS__SERVERS": server.url,
        f"{QUOTAS}NATS__USER": "quotas",
        f"{QUOTAS}NATS__PASSWORD": "quotas-of-the-test",
        f"{QUOTAS}KERNEL": "other",
        "OPENAPI_TOOL__LIMITS__SEARCH_REQUESTS_PER_MINUTE": "60",
        "OPENAPI_TOOL__BUDGETS__PROJECT_DAY_REQUESTS": "100",
        "OPENAPI_TOOL__HEALTH__PORT": str(port),
    }
    executor = await asyncio.to_thread(start_executor, settings)
    await Served(executor, port).wait(lambda found: all(each["ok"] for each in found.values()))
    call = await caller.place(PROJECT, AGENT, "jina_search", RECORDED)
    assert (await caller.result(call, WAIT_S)).card["content"]["status"] == "success"
    client = await nats.connect(server.url, user="admin", password="admin-of-the-test")
    try:
        for bucket in (LIMITS.bucket, BUDGETS.bucket):
            assert len(await (await client.jetstream().key_value(bucket.name)).keys()) == 1
    finally:
        await client.close()
    log = executor.log_text()
    assert "denied" not in log, log
    assert "quotas-of-the-test" not in log
    await asyncio.to_thread(server.stop)
