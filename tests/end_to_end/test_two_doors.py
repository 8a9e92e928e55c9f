"""An executor and a gateway with one NATS share limits, budgets and switches of tools."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from typer.testing import CliRunner

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.cli import app
from openapi_tool.cli.kernel import NO_DATABASE
from openapi_tool.gateway.assembly import open_gateway
from openapi_tool.gateway.call import Caller as GatewayCaller
from openapi_tool.gateway.calls import Gateway
from openapi_tool.gateway.opening import NATS, open_state
from openapi_tool.gateway.stored import text_name
from openapi_tool.gateway.token_record import new_token
from openapi_tool.gateway.token_stores import StoredTokens
from openapi_tool.gateway.tools import built_in_tools
from openapi_tool.local.caller import Caller
from openapi_tool.local.executor import LoopbackResolver
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.nats_records.record_store import BUDGETS, LIMITS
from openapi_tool.reloading import Reloader
from openapi_tool.settings import Settings
from tests.conftest import AGENT, PROJECT, StartExecutor, search_tool
from tests.end_to_end.test_shared_quotas import RECORDED
from tests.requirements import requirement
from tests.support import another_nats
from tests.waiting import WAIT_S

ME = GatewayCaller(PROJECT, AGENT)
LIMIT = 240


@pytest.fixture
async def clean(caller: Caller) -> AsyncIterator[None]:
    """Remove in the end what a gateway stores in the NATS of all tests."""
    yield
    jetstream = caller.client.jetstream()
    for stream in await jetstream.streams_info():
        if stream.config.name and stream.config.name.startswith("openapi_tool_gateway"):
            await jetstream.delete_stream(stream.config.name)
    for bucket in (LIMITS.bucket, BUDGETS.bucket):
        await jetstream.delete_stream(bucket.stream)


@asynccontextmanager
async def gateway_of(stack: EmbeddedStack, connection: Mapping[str, Any], **settings: Any) -> AsyncIterator[Gateway]:
    environment = {**stack.upstream.keys, "SSL_CERT_FILE": str(stack.certificates.ca)}
    values: dict[str, Any] = {"nats": connection, "cache": {"ttl_s": 0}, **settings, **NO_DATABASE}

    def read() -> Settings:
        return Settings(**values)

    bootstrap = build_bootstrap(read(), environment)
    resolver = LoopbackResolver(stack.upstream.port)
    async with (
        open_state(bootstrap, NATS) as state,
        open_gateway(Reloader(bootstrap, read, environment), state, built_in_tools(), resolver) as gateway,
    ):
        yield gateway
    await asyncio.sleep(0.1)  # until closed connections have ended


async def codes_of_both(caller: Caller, gateway: Gateway, calls: int) -> list[str]:
    """Make `calls` calls through each door in turn; return the codes of their errors, empty ones for successes."""
    codes = []
    for _ in range(calls):
        placed = await caller.place(PROJECT, AGENT, "jina_search", RECORDED)
        content = (await caller.result(placed, WAIT_S)).card["content"]
        codes.append((content["error"] or {}).get("code", ""))
        codes.append((await gateway.call(ME, "jina_search", RECORDED)).fields.error_code or "")
    return codes


@requirement("gateway.shared", "gateway.replicated")
@pytest.mark.usefixtures("clean")
async def test_both_doors_share_a_budget(stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor) -> None:
    await caller.add_tool(PROJECT, search_tool())
    await asyncio.to_thread(start_executor, {"OPENAPI_TOOL__BUDGETS__PROJECT_DAY_REQUESTS": "3"})
    async with gateway_of(stack, {"servers": stack.nats.url}, budgets={"project_day_requests": 3}) as gateway:
        codes = await codes_of_both(caller, gateway, 3)
    assert codes == ["", "", "", *["budget_exceeded"] * 3]
    bucket = await caller.client.jetstream().key_value(BUDGETS.bucket.name)
    assert len(await bucket.keys()) == 1


@requirement("gateway.shared", "gateway.replicated", "limits.window")
@pytest.mark.usefixtures("clean")
async def test_both_doors_share_the_limit_of_a_key(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    await asyncio.to_thread(start_executor, {"OPENAPI_TOOL__LIMITS__SEARCH_REQUESTS_PER_MINUTE": "60"})
    limits = {"search_requests_per_minute": 60}
    async with gateway_of(stack, {"servers": stack.nats.url}, limits=limits) as gateway:
        assert await codes_of_both(caller, gateway, 3) == [""] * 6
        shown = await asyncio.to_thread(
            CliRunner().invoke, app, ["limits", "--json"], env={"NATS_SERVERS": stack.nats.url}
        )
    [limit] = json.loads(shown.stdout)["limits"]
    assert len(limit["replicas"]) == 2
    assert limit["used"] == 6
    assert [each["sent_per_minute"] for each in limit["replicas"].values()] == [3, 3]


@requirement("gateway.shared", "gateway.replicated", "limits.window", "budgets.exact")
@pytest.mark.usefixtures("clean")
async def test_two_gateways_and_an_executor_flooded_at_once_exceed_neither_budget_nor_limit(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    """First one project calls all three, with a budget of 12; then each gets a flood of a project of its own."""
    projects = {"shared": {"project_day_requests": 12}}
    for project in ("of_executor", "shared"):
        await caller.set_up_project(project, AGENT, [search_tool()])
    variables = {
        "OPENAPI_TOOL__LIMITS__SEARCH_REQUESTS_PER_MINUTE": str(LIMIT),
        "OPENAPI_TOOL__BUDGETS__PROJECTS": json.dumps(projects),
    }
    await asyncio.to_thread(start_executor, variables)
    stack.upstream.clear_requests()
    settings: dict[str, Any] = {
        "limits": {"search_requests_per_minute": LIMIT},
        "budgets": {"projects": projects},
        "gateway": {"call_timeout_s": 60},
    }
    connection = {"servers": stack.nats.url}

    async def by_executor(project: str) -> str:
        placed = await caller.place(project, AGENT, "jina_search", RECORDED)
        content = (await caller.result(placed, 90.0)).card["content"]
        return str((content["error"] or {}).get("code", ""))

    async def by_gateway(gateway: Gateway, project: str) -> str:
        return (await gateway.call(GatewayCaller(project, AGENT), "jina_search", RECORDED)).fields.error_code or ""

    async with gateway_of(stack, connection, **settings) as one, gateway_of(stack, connection, **settings) as two:
        doors: dict[str, Callable[[str], Coroutine[Any, Any, str]]] = {
            "of_one": partial(by_gateway, one),
            "of_two": partial(by_gateway, two),
            "of_executor": by_executor,
        }
        codes = await asyncio.gather(*(call("shared") for call in doors.values() for _ in range(10)))
        assert Counter(codes) == {"": 12, "budget_exceeded": 18}
        began = time.monotonic()
        ends: dict[str, list[float]] = {project: [] for project in doors}

        async def timed(project: str) -> None:
            if not await doors[project](project):
                ends[project].append(time.monotonic() - began)

        await asyncio.gather(*(timed(project) for _ in range(60) for project in doors))
    assert len(stack.upstream.requests()) == 12 + sum(map(len, ends.values()))
    # While all three have calls that wait: later the executor has none, as its calls have less time.
    shares = [sum(3 < end < 9 for end in each) for each in ends.values()]
    assert max(shares) - min(shares) <= 2, shares
    assert 0.5 < sum(shares) / (6 * LIMIT / 60) < 1.2, shares


@requirement("privilege.subjects", "gateway.replicated")
async def test_a_gateway_needs_only_the_listed_permissions(stack: EmbeddedStack) -> None:
    listed = CliRunner().invoke(app, ["nats", "permissions", "--for", "gateway", "--format", "server-config"])
    assert listed.exit_code == 0, listed.output
    user = f"{{ user: gateway, password: gateway-of-the-test, {listed.stdout} }}"
    server = another_nats(stack, "restricted_gateway", f"authorization {{ users: [ {user} ] }}")
    await asyncio.to_thread(server.start)
    connection = {"servers": server.url, "user": "gateway", "password": "gateway-of-the-test"}
    settings: dict[str, Any] = {"budgets": {"project_day_requests": 3}, "limits": {"search_requests_per_minute": 60}}
    async with gateway_of(stack, connection, **settings) as gateway:
        assert (await gateway.call(ME, "jina_search", RECORDED)).fields.error_code is None
        state = gateway._parts.state  # noqa: SLF001 - all that it does, without a server
        tokens = StoredTokens(state.tokens)
        _, token_id, token = new_token("p", "a", ("*",), any_agent=False, expires=None)
        await tokens.add(token_id, token)
        assert await tokens.revoke(token_id)
        assert list(await tokens.all()) == [token_id]
        assert len(await gateway.usage_of(ME, 0)) == 1
        for bucket in ("whole", "untaken", "idempotent"):
            texts = state.texts(bucket, 60)
            name = text_name(PROJECT, AGENT, bucket)
            await texts.put_all({name: b"a" * 300_000, text_name(PROJECT, AGENT, "empty"): b""})
            assert await texts.get(name) == b"a" * 300_000
            await texts.delete(name)
        variables = {"NATS_SERVERS": server.url, "OPENAPI_TOOL__NATS__USER": "gateway"}
        variables |= {"OPENAPI_TOOL__NATS__PASSWORD": "gateway-of-the-test"}
        for words in (["tokens", "list"], ["usage", "--project", PROJECT], ["tokens", "create", "--project", "p"]):
            done = await asyncio.to_thread(CliRunner().invoke, app, words, env=variables)
            assert done.exit_code == 0, done.output
    await asyncio.to_thread(server.stop)
    log = (stack.folder / "restricted_gateway" / "nats.log").read_text()
    assert "Violation" not in log
