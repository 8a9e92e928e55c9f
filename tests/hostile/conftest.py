"""One stage for all cases; the executor is replaced after a case that failed."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator

import pytest

from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.protocol.dialect import ProtocolVersion
from tests.conftest import TEMPLATE
from tests.hostile.play import forget, make_world, replace_executor
from tests.hostile.scene import Stage


@pytest.fixture(scope="module")
def shared_stage(stack: EmbeddedStack) -> Iterator[Stage]:
    database = f"hostile_{uuid.uuid4().hex[:8]}"
    asyncio.run(make_world(stack, database, TEMPLATE, None))
    with Stage(stack, database, short=True) as stage:
        yield stage
    asyncio.run(forget(stage))


@pytest.fixture(scope="module")
def older_stage(stack: EmbeddedStack, v1r3_template: str) -> Iterator[Stage]:
    """Yield a stage whose kernel is of protocol v1r3."""
    database = f"hostile_{uuid.uuid4().hex[:8]}"
    asyncio.run(make_world(stack, database, v1r3_template, None, ProtocolVersion.V1R3))
    with Stage(stack, database, short=True, version=ProtocolVersion.V1R3) as stage:
        yield stage
    asyncio.run(forget(stage))


@pytest.fixture
async def stage(shared_stage: Stage) -> Stage:
    if shared_stage.has_failed:
        await replace_executor(shared_stage)
    shared_stage.has_failed = True  # until the test has passed
    return shared_stage
