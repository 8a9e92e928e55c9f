from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from openapi_tool.local.caller import Caller
from openapi_tool.local.stack import EmbeddedStack
from tests.wire.world import World, open_world


@pytest.fixture
async def idle_world(stack: EmbeddedStack, caller: Caller, database: str) -> AsyncIterator[World]:
    """World without the executor."""
    async with open_world(stack, caller, database) as world:
        yield world


@pytest.fixture
async def world(idle_world: World) -> AsyncIterator[World]:
    """World with a running executor."""
    async with idle_world.executor():
        yield idle_world
