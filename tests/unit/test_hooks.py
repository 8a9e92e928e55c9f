"""Operators' hooks deny a call unless they allow it in time."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from openapi_tool.protocol.errors import ToolNotAvailable
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.policy import Authorizer, Denial, Hook, PlannedCall, Policy
from tests.requirements import requirement

TIMEOUT_S = 0.05


async def authorize(hook: Hook) -> None:
    tool = next(iter(CATALOGUE.values()))
    definition = cast("ToolDefinition", SimpleNamespace(built_in=tool, tool_name="t"))
    arguments = cast("Arguments", SimpleNamespace(values={"query": "x"}))
    identity = CallIdentity(project_id="p", agent_id="a")
    await Authorizer(Policy(hook_timeout_s=TIMEOUT_S), {"hook": hook}).authorize(definition, identity, arguments)


def returning(verdict: object) -> Hook:
    async def hook(_: PlannedCall) -> object:
        return verdict

    return hook


def raising(error: BaseException) -> Hook:
    async def hook(_: PlannedCall) -> object:
        raise error

    return hook


async def blocks(_: PlannedCall) -> None:
    time.sleep(2 * TIMEOUT_S)  # noqa: ASYNC251 - as a careless hook does


async def suppresses_the_timeout(_: PlannedCall) -> None:
    try:
        await asyncio.sleep(5)
    except asyncio.CancelledError:
        return


REASONS: list[Any] = [None, "", 0, {"a": 1}, "\ud800"]


@pytest.mark.parametrize(
    "hook",
    [
        *(returning(Denial(reason)) for reason in REASONS),
        *(returning(verdict) for verdict in (False, 0, "", True)),
        *(raising(error) for error in (SystemExit(3), GeneratorExit(), BaseException(), ValueError())),
        raising(asyncio.CancelledError()),
        blocks,
        suppresses_the_timeout,
    ],
)
@requirement("policy.tools")
async def test_a_hook_that_does_not_allow_the_call_in_time_denies_it(hook: Hook) -> None:
    with pytest.raises(ToolNotAvailable):
        await authorize(hook)


@requirement("policy.tools")
async def test_a_hook_that_returns_none_in_time_allows_the_call() -> None:
    await authorize(returning(None))


@requirement("policy.tools")
async def test_a_long_reason_is_truncated() -> None:
    with pytest.raises(ToolNotAvailable) as denied:
        await authorize(returning(Denial("x" * 10_000_000 + "\x00")))
    assert len(str(denied.value)) < 1_200


@requirement("policy.tools")
async def test_a_hook_cannot_suppress_the_cancellation_of_the_call() -> None:
    task = asyncio.create_task(authorize(suppresses_the_timeout))
    await asyncio.sleep(TIMEOUT_S / 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
