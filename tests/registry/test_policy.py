"""Authorization of calls by policy and hooks, time limits, and calls of the shipped definitions."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import SecretStr

from openapi_tool import bootstrap
from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.kernel.registration import ToolRows
from openapi_tool.options import ExecutorOptions, ToolOptions
from openapi_tool.protocol.errors import ToolNotAvailable
from openapi_tool.settings import Settings, SettingsError, load_settings
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.deadline import TimeLimits
from openapi_tool.tools.exports import stored_row
from openapi_tool.tools.policy import Authorizer, Denial, Hook, PlannedCall, Policy
from tests.conftest import PROJECT, search_tool
from tests.requirements import requirement
from tests.support import definition, owner
from tests.unit.test_time import left_s
from tests.wire.world import KNOWN, World

ARGUMENTS = Arguments({"query": "x", "site": ["a"]}, frozenset({"query"}), {}, SecretStr("key"), "session")
NAMES = set(CATALOGUE)


@dataclass(frozen=True)
class FakeEntryPoint:
    """Entry point of an installed package."""

    name: str
    hook: Any

    def load(self) -> Any:
        if isinstance(self.hook, Exception):
            raise self.hook
        return self.hook


def installed(monkeypatch: pytest.MonkeyPatch, **hooks: Any) -> None:
    points = [FakeEntryPoint(name, hook) for name, hook in hooks.items()]
    monkeypatch.setattr(bootstrap, "entry_points", lambda group: points if group == "openapi_tool.hooks" else [])


def settings(**sections: Any) -> Settings:
    return Settings(**{"postgres": {"dsn": "postgresql://127.0.0.1/kernel"}, **sections})


async def denial_of(authorizer: Authorizer) -> str | None:
    """Return why the call is denied, None if it is allowed."""
    try:
        await authorizer.authorize(definition({"tool": "jina.search"}), owner(), ARGUMENTS)
    except ToolNotAvailable as refusal:
        assert refusal.code == "tool_not_available"
        return refusal.message
    return None


@requirement("policy.tools")
@pytest.mark.parametrize(
    ("rules", "allowed"),
    [
        ({}, NAMES),
        ({"allow": []}, set()),
        ({"allow": ["jina.search"]}, {"jina.search"}),
        ({"allow": ["jina.search*"]}, {"jina.search", "jina.search_many"}),
        ({"allow": ["tag:read"]}, {"jina.read", "jina.read_many"}),
        ({"deny": ["tag:network"]}, set()),
        ({"deny": ["jina.*_many"]}, {"jina.search", "jina.read"}),
        ({"allow": ["jina.read"], "deny": ["jina.read"]}, set()),
        ({"projects": {"proj": {"deny": ["tag:search"]}}}, {"jina.read", "jina.read_many"}),
        ({"projects": {"other": {"deny": ["*"]}}}, NAMES),
        ({"deny": ["jina.read"], "projects": {"proj": {"allow": ["jina.read"]}}}, set()),
    ],
)
def test_deny_takes_precedence_and_a_project_can_only_restrict(rules: dict[str, Any], allowed: set[str]) -> None:
    policy = settings(policy=rules).policy
    assert {name for name, tool in CATALOGUE.items() if policy.permits("proj", tool)} == allowed


@requirement("policy.tools")
def test_a_pattern_that_matches_no_tool_is_a_settings_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_DSN", "postgresql://127.0.0.1/kernel")
    monkeypatch.setenv("OPENAPI_TOOL__POLICY__DENY", "jina.serach,tag:red")
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert len(caught.value.problems) == 2
    assert caught.value.problems[0].startswith("policy.deny.0 (OPENAPI_TOOL__POLICY__DENY): matches no tool")


@requirement("policy.tools")
async def test_a_denied_call_fails_without_an_upstream_request(
    idle_world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async with idle_world.executor(policy={"projects": {PROJECT: {"deny": ["tag:search"]}}}):
        outcome = await idle_world.send(await idle_world.place())
    assert outcome.content["error"]["code"] == "tool_not_available"
    assert "switched off" in outcome.content["error"]["message"]
    assert outcome.upstream_requests == []
    denied = [record for record in caplog.records if getattr(record, "action", "") == "call.denied"]
    assert [(record.levelno, vars(record)["tool"]) for record in denied] == [(logging.WARNING, "jina.search")]


@requirement("policy.tools")
async def test_a_hook_sees_the_call_and_denies_with_a_reason(
    idle_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[PlannedCall] = []

    async def no_hello(call: PlannedCall) -> Denial | None:
        seen.append(call)
        return Denial("say something else than hello") if "hello" in str(call.arguments["query"]) else None

    installed(monkeypatch, no_hello=no_hello)
    args = {"fixed": {"site": "example.org"}}
    await idle_world.caller.add_tool(PROJECT, search_tool(args=args))
    async with idle_world.executor(policy={"hooks": ("no_hello",)}):
        denied = await idle_world.send(await idle_world.place())
        allowed = await idle_world.send(await idle_world.place({"query": "good day"}))
    assert "say something else than hello" in denied.content["error"]["message"]
    assert denied.upstream_requests == []
    assert len(allowed.upstream_requests) == 1
    assert (seen[0].tool, seen[0].tool_name, seen[0].project_id) == ("jina.search", "jina_search", PROJECT)
    assert seen[0].arguments == {**KNOWN, "site": "example.org"}


@requirement("policy.tools")
async def test_hooks_run_before_the_policy() -> None:
    called: list[str] = []

    async def record(call: PlannedCall) -> None:
        called.append(call.tool)

    authorizer = Authorizer(Policy(deny=("*",)), {"record": record})
    assert "switched off" in str(await denial_of(authorizer))
    assert called == ["jina.search"]


async def slow(call: PlannedCall) -> None:
    await asyncio.sleep(10)


async def failing(call: PlannedCall) -> None:
    raise KeyError(call.tool)


async def cancelled(call: PlannedCall) -> None:
    raise asyncio.CancelledError


async def returning_true(call: PlannedCall) -> bool:
    return True


async def denying(call: PlannedCall) -> Denial:
    return Denial("no")


async def allowing(call: PlannedCall) -> None:
    arguments: Any = call.arguments
    arguments["query"] = "changed"
    arguments["site"].append("b")


@requirement("policy.tools")
@pytest.mark.parametrize("hook", [slow, failing, cancelled, returning_true, denying])
async def test_a_hook_without_a_valid_decision_denies(hook: Hook) -> None:
    authorizer = Authorizer(Policy(hook_timeout_s=0.02), {"allowing": allowing, "hook": hook})
    assert "not available" in str(await denial_of(authorizer))
    assert await denial_of(replace(authorizer, hooks={"allowing": allowing})) is None
    assert ARGUMENTS.values == {"query": "x", "site": ["a"]}, "a hook cannot change arguments"


@requirement("policy.tools")
async def test_a_call_cancelled_during_a_hook_stays_cancelled() -> None:
    task = asyncio.create_task(denial_of(Authorizer(Policy(hook_timeout_s=5), {"slow": slow})))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@requirement("policy.tools")
def test_unusable_hooks_are_reported_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, broken=ImportError("no such module"), plain=print, good=allowing)
    options = settings(policy={"hooks": ("absent", "broken", "plain", "good")})
    with pytest.raises(SettingsError) as caught:
        build_bootstrap(options, {})
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 3
    assert "policy.hooks.0: no installed package has this entry point" in text
    assert "broken cannot be loaded: ImportError" in text
    assert "plain is not an async callable" in text
    assert build_bootstrap(settings(policy={"hooks": ("good",)}), {}).authorizer.hooks == {"good": allowing}


@requirement("answer.time")
@pytest.mark.parametrize(
    ("suspend_s", "timeout_s", "expected"), [(None, None, 10), (60, None, 57), (None, 20, 27), (500, None, 120)]
)
def test_the_default_timeout_applies_to_definitions_without_time_limits(
    suspend_s: float | None, timeout_s: float | None, expected: float
) -> None:
    limits = TimeLimits(ExecutorOptions(), ToolOptions(default_timeout_s=10))
    assert left_s(0, suspend_s, limits, timeout_s) == pytest.approx(expected, abs=0.5)


@requirement("answer.time")
def test_the_default_timeout_may_not_exceed_the_maximum() -> None:
    with pytest.raises(ValueError, match="default_timeout_s must not be more than max_timeout_s"):
        settings(tools={"default_timeout_s": 200})
    tools = settings(tools={"default_timeout_s": 12.5}).tools
    assert (tools.default_timeout_s, tools.max_timeout_s) == (12.5, 120)


@requirement("tool.definition")
async def test_an_edited_definition_applies_from_the_next_call(idle_world: World) -> None:
    def search_tool_with_limit(maximum: int) -> dict[str, Any]:
        properties = {"query": {"type": "string"}, "count": {"type": "integer", "maximum": maximum}}
        return {**search_tool(), "parameters": {"type": "object", "properties": properties}}

    async with idle_world.executor():
        await idle_world.caller.add_tool(PROJECT, search_tool_with_limit(2))
        refused = await idle_world.send(await idle_world.place(KNOWN))
        await idle_world.caller.add_tool(PROJECT, search_tool_with_limit(5))
        answered = await idle_world.send(await idle_world.place(KNOWN))
    assert refused.content["error"]["code"] == "bad_request"
    assert answered.content["status"] == "success"


# Shipped definitions, registered like an operator and called like the kernel does.


TOOLS = Path(__file__).parent.parent.parent / "config" / "tools"
PAGE = "http://site.fixture.test:8099/article"
CALLS: dict[str, dict[str, Any]] = {
    "jina_search": {"query": "hello world", "count": 3},
    "jina_search_many": {"queries": ["hello world"], "count": 3},
    "jina_read": {"url": PAGE},
    "jina_read_many": {"urls": [PAGE]},
}


@requirement("definition.exports")
@pytest.mark.parametrize("tool", CALLS)
async def test_calls_of_a_shipped_definition_succeed(idle_world: World, tool: str) -> None:
    row = yaml.safe_load((TOOLS / f"{tool}.yaml").read_text(encoding="utf-8"))
    dsn = idle_world.stack.postgres.dsn(idle_world.database)
    async with ToolRows.open(dsn, 5) as registry:
        await registry.put(PROJECT, row)
        assert await registry.row(PROJECT, tool) == stored_row(row)
    async with idle_world.executor():
        outcome = await idle_world.send(await idle_world.place(CALLS[tool], tool=tool))
    assert outcome.content["status"] == "success", outcome.content["error"]
    assert len(outcome.upstream_requests) == 1
