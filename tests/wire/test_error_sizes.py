"""However large a value of a call or of its definition is, the error in the result card is short."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import PROJECT, search_tool
from tests.requirements import requirement
from tests.wire.conftest import World

MAX_BYTES = 2_000
HUGE = "x" * 70_000

ARGUMENTS: list[dict[str, Any]] = [
    {"query": HUGE},
    {"query": ["a b " * 8_000] * 2},
    {"query": "a", "kind": HUGE},
    {"query": "a", "kind": {HUGE: HUGE}},
    {"query": "a", HUGE: HUGE},
    {"query": "a", "site": f"https://{HUGE}.test/"},
    {"cursor": HUGE},
    {HUGE: "x"},
]
PROPERTIES = {"query": {"type": "string"}, HUGE: {"type": "integer", "enum": [1, 2]}}
RULES: list[dict[str, Any]] = [
    {},
    {"enum": [HUGE, 1]},
    {"enum": ["y" * 30] * 900},
    {"const": HUGE},
    {"anyOf": [{"const": HUGE}, {"const": HUGE + "a"}]},
    {"type": HUGE},
    {"pattern": "(" + HUGE},
    {"$ref": f"#/{HUGE}"},
]
TOOLS = [
    search_tool(args={"fixed": {HUGE: HUGE}}),
    search_tool(args={"defaults": {HUGE: HUGE}}),
    search_tool(args={"defaults": {"site": f"{{{HUGE}}}"}}),
    search_tool(envs={HUGE: "A"}),
    search_tool(envs={"api_key": HUGE}),
    search_tool(jina={"mode": HUGE}),
    search_tool(jina={"mode": "search", "auth_env": HUGE}),
    search_tool(jina={"mode": "search", "params": {HUGE: HUGE}}),
    search_tool(**{HUGE: HUGE}),
    *(
        search_tool()
        | {
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "required": ["query", HUGE],
                "properties": {**PROPERTIES, "kind": rule},
            }
        }
        for rule in RULES
    ),
]


@requirement("errors.bounded", "answer.errors")
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=range(len(ARGUMENTS)))
async def test_no_argument_makes_the_error_of_a_result_long(world: World, arguments: dict[str, Any]) -> None:
    outcome = await world.send(await world.place(arguments))
    error = outcome.content["error"]
    assert error is not None
    assert len(json.dumps(error)) < MAX_BYTES


@requirement("errors.bounded", "answer.errors")
@pytest.mark.parametrize("tool", TOOLS, ids=range(len(TOOLS)))
async def test_no_definition_makes_the_error_of_a_result_long(world: World, tool: dict[str, Any]) -> None:
    await world.caller.add_tool(PROJECT, tool)
    outcome = await world.send(await world.place({"query": "hello world", "kind": "z"}))
    error = outcome.content["error"]
    assert error is None or len(json.dumps(error)) < MAX_BYTES, error["message"][:300]
