from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from openapi_tool.local.caller import Caller
from openapi_tool.local.stack import EmbeddedStack
from tests.wire.world import World, open_world


@pytest.fixture
async def world(stack: EmbeddedStack, caller: Caller, database: str) -> AsyncIterator[World]:
    """World without executor and worker."""
    async with open_world(stack, caller, database) as world:
        yield world
