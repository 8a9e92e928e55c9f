"""Shipped definitions, registered as an operator would, then called as the kernel would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from openapi_tool.kernel.registration import ToolRows
from openapi_tool.tools.registry import stored_row
from tests.conftest import PROJECT
from tests.promises import requirement
from tests.wire.world import World

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
async def test_a_shipped_definition_answers_calls(idle_world: World, tool: str) -> None:
    row = yaml.safe_load((TOOLS / f"{tool}.yaml").read_text(encoding="utf-8"))
    dsn = idle_world.stack.postgres.dsn(idle_world.database)
    async with ToolRows.open(dsn, 5) as registry:
        await registry.put(PROJECT, row)
        assert await registry.row(PROJECT, tool) == stored_row(row)
    async with idle_world.executor():
        outcome = await idle_world.send(await idle_world.place(CALLS[tool], tool=tool))
    assert outcome.content["status"] == "success", outcome.content["error"]
    assert len(outcome.upstream_requests) == 1
