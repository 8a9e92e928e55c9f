"""Attacks by schemas and arguments whose product is costly, though each is small and valid."""

from __future__ import annotations

import secrets
from typing import Any

from openapi_tool.isolation.pool import MAX_KILLS
from tests.hostile.case import Cases
from tests.hostile.scene import Scene, assert_failed

CASES = Cases()
LAG_S = 0.05
_REFUSED = ("bad_request", "tool_misconfigured", "tool_timeout")


def _members(number: int, last: Any = 777) -> list[Any]:
    return [*([member] for member in range(number)), [last]]


_ITEMS = [*[[777]] * 495, [888]]
"""Lists that are the last of `_members`, but for one. A call has at most 1,000 values."""


def _branches(keyword: str) -> dict[str, Any]:
    return {keyword: [{"items": {"enum": _members(190)}, "minItems": number} for number in range(5)]}


PRODUCTS: dict[str, tuple[dict[str, Any], Any]] = {
    "allOf": ({"items": {"allOf": [{"enum": _members(320), "description": "d" * 1_500} for _ in range(3)]}}, _ITEMS),
    "contains": ({"allOf": [{"contains": {"enum": _members(320, -1)}}] * 3}, _ITEMS),
    "anyOf": (_branches("anyOf"), _ITEMS),
    "oneOf": (_branches("oneOf"), _ITEMS),
    "not": ({"not": {"allOf": [{"items": {"enum": _members(320)}}] * 3}}, [[777]] * 495),
    "if": ({"allOf": [{"if": _branches("anyOf"), "then": False, "else": False}]}, _ITEMS),
    "enum": ({"items": {"enum": _members(490)}}, _ITEMS),
    "uniqueItems": ({"uniqueItems": True}, [*({"a": [number, number % 7]} for number in range(240)), [1], [1]]),
    "prefixItems": ({"prefixItems": [{"enum": _members(60)}] * 9, "items": False}, _ITEMS),
    "multipleOf": ({"items": {"allOf": [{"multipleOf": 0.0001}] * 19}}, [0.00001 + number for number in range(990)]),
    "patternProperties": (
        {"patternProperties": {f"^[a-z]{{1,{number}}}x": {"maximum": 1} for number in range(20, 38)}},
        {"a" * 10 + f"{number}": number for number in range(180)},
    ),
    "dependentSchemas": (
        {"dependentSchemas": {f"p{n}": {"additionalProperties": {"enum": _members(230)}} for n in range(4)}},
        {f"p{number}": [888] for number in range(495)},
    ),
    "fractions": (
        {"items": {"allOf": [{"enum": [[(number + 1) / 3] for number in range(310)] + [[259.0]]}] * 3}},
        [*[[259.0]] * 490, [300.0]],
    ),
    "small fractions": (
        {"items": {"enum": [[number * 1e-300] for number in range(490)]}},
        [*[[489 * 1e-300]] * 490, [1e-299]],
    ),
}
"""Schema of the argument `query`, and its value, by the keyword that makes them costly."""


async def _attack(scene: Scene, keyword: str, number: int) -> None:
    rule, value = PRODUCTS[keyword]
    tool = await scene.define(None, {"type": "object", "properties": {"query": rule}})
    for answer in await scene.calls(number, tool, {"query": value}):
        assert_failed(answer, *_REFUSED)


@CASES.case("cpu", lag_s=LAG_S)
async def items_of_long_enums(scene: Scene) -> None:
    await _attack(scene, "allOf", 1)


@CASES.case("cpu", lag_s=LAG_S)
async def lists_that_contain_lists(scene: Scene) -> None:
    await _attack(scene, "contains", 1)


@CASES.case("cpu", lag_s=LAG_S)
async def every_keyword_that_multiplies(scene: Scene) -> None:
    for keyword in PRODUCTS:
        await _attack(scene, keyword, 1)


@CASES.case("cpu", lag_s=LAG_S)
async def costly_calls_at_once(scene: Scene) -> None:
    """At most half of them are answered in time: the pool takes them one by one, and other projects between."""
    await _attack(scene, "allOf", scene.scaled(48))


@CASES.case("cpu", lag_s=LAG_S)
async def schema_that_exceeds_the_cpu_limit(scene: Scene) -> None:
    """Only the first two calls of a definition are tried."""
    rule, value = PRODUCTS["small fractions"]
    tool = await scene.define(None, {"type": "object", "properties": {"query": rule}})
    for _ in range(MAX_KILLS + 2):
        message = assert_failed(await scene.call(tool, {"query": value}), "tool_misconfigured")
        assert repr(tool) in message
    assert scene.log().count('"isolation.task_killed"') == MAX_KILLS


@CASES.case("cpu", lag_s=LAG_S)
async def large_definitions_in_turn(scene: Scene) -> None:
    """Definitions that are parsed and compiled once each."""
    for _ in range(scene.scaled(150)):
        patterns = {f"p{n}": {"pattern": rf"1[01]{{{150 + n}}}[^01]"} for n in range(20)}
        rule = {"enum": [secrets.token_hex(20) for _ in range(20)], "description": "d" * 2_000}
        properties = {**patterns, **{f"q{n}_{secrets.token_hex(20)}": rule for n in range(70)}}
        tool = await scene.define(None, {"type": "object", "properties": properties, "required": ["missing"]})
        assert_failed(await scene.call(tool, {"query": "x"}), *_REFUSED)
