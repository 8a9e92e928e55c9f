"""An executor and a gateway with one NATS share limits, budgets and switches of tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from typer.testing import CliRunner

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.cli import app
from openapi_tool.cli.kernel import NO_DATABASE
from openapi_tool.gateway.assembly import open_gateway
from openapi_tool.gateway.calls import Caller as GatewayCaller
from openapi_tool.gateway.calls import Gateway
from openapi_tool.gateway.opening import NATS, open_state
from openapi_tool.gateway.tokens import StoredTokens, new_token
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

ME = GatewayCaller(PROJECT, AGENT)


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
        content = (await caller.result(placed, 30.0)).card["content"]
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
            await texts.put_all({"a": b"a" * 300_000, "b": b""})
            assert await texts.get("a") == b"a" * 300_000
        variables = {"NATS_SERVERS": server.url, "OPENAPI_TOOL__NATS__USER": "gateway"}
        variables |= {"OPENAPI_TOOL__NATS__PASSWORD": "gateway-of-the-test"}
        for words in (["tokens", "list"], ["usage", "--project", PROJECT], ["tokens", "create", "--project", "p"]):
            done = await asyncio.to_thread(CliRunner().invoke, app, words, env=variables)
            assert done.exit_code == 0, done.output
    await asyncio.to_thread(server.stop)
    log = (stack.folder / "restricted_gateway" / "nats.log").read_text()
    assert "Violation" not in log
