"""A kernel of each protocol version, served by one executor."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from openapi_tool.local.caller import Caller
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.protocol.identity import subject_in_version
from tests.conftest import PROJECT, StartExecutor, search_tool
from tests.support import dsn_of

PREFIX = "OPENAPI_TOOL__DIALECTS__V1R3__"


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels by protocol version, all served by one executor."""

    callers: Mapping[str, Caller]
    executor: ExecutorProcess
    stack: EmbeddedStack


def tool_of(version: str, **options: Any) -> dict[str, Any]:
    """Return the search tool for a kernel of this version."""
    tool = search_tool(**options)
    return {**tool, "target_subject": subject_in_version(tool["target_subject"], version)}


@pytest.fixture
async def kernels(
    stack: EmbeddedStack, caller: Caller, v1r3_caller: Caller, v1r3_database: str, start_executor: StartExecutor
) -> Kernels:
    callers = {one.version: one for one in (caller, v1r3_caller)}
    for one in callers.values():
        await one.add_tool(PROJECT, tool_of(one.version))
    executor = start_executor(
        {
            f"{PREFIX}POSTGRES__DSN": dsn_of(stack, v1r3_database),
            "OPENAPI_TOOL__CACHE__TTL_S": "300",
            "OPENAPI_TOOL__EXECUTOR__REQUEUE_DELAY_S": "0.05",
        }
    )
    async with asyncio.timeout(10):
        while executor.log_text().count('"consumer.started"') < len(callers):  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0.05)
    return Kernels(callers, executor, stack)
