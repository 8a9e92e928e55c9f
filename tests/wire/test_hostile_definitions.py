"""Hostile rows of `resource.tools` that bypassed the linter: refused at little cost, or run within bounds."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.conftest import PROJECT, search_tool
from tests.requirements import requirement
from tests.support import peak_growth
from tests.wire.world import KNOWN, Outcome, World

LARGE_TEXT = "x" * 250_000
MAX_BYTES = 96_000_000
"""Peak memory of one call. The aim is 64 MB; the rest is used by the test in the same process."""

MAX_ANSWER_BYTES = 30_000
"""Limit of an error card: up to 20 problems of 200 characters, three times (message, detail, result)."""


def doubled(levels: int) -> dict[str, Any]:
    """Return a schema of about 100 bytes per level, whose branches double at each level."""
    schemas: dict[str, Any] = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(levels)}
    return {"$defs": {**schemas, f"d{levels}": {"type": "integer"}}, "properties": {"query": {"$ref": "#/$defs/d0"}}}


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def of_query(rule: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"query": rule}}


def many(count: int, **member: Any) -> list[Any]:
    return [member] * count


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "references that double": (doubled(13), "$ref: references are not read"),
    "a dynamic reference": (of_query({"$dynamicAnchor": "a", "$dynamicRef": "#a"}), "$dynamicRef: references"),
    "a recursive reference": (of_query({"$recursiveRef": "#"}), "$recursiveRef: references"),
    "a reference deep inside": (of_query({"allOf": [{"items": {"not": {"$ref": "#"}}}]}), "allOf[0].items.not.$ref"),
    "branches": (of_query({"anyOf": many(2_000, type="integer")}), "parameters: holds more than 2,000 values"),
    "nested branches": (of_query({"anyOf": [{"oneOf": many(500, const=1)}] * 3}), "more than 2,000 values"),
    "required names": ({"required": [f"n{n}" for n in range(4_000)]}, "more than 2,000 values"),
    "properties": (
        {"properties": {f"n{n}": {"type": "string"} for n in range(300)}},
        "parameters.properties: has more than 200 names",
    ),
    "choices": (of_query({"enum": list(range(600))}), "parameters.properties.query.enum: has more than 500 values"),
    "patterns": (
        {"properties": {f"n{n}": {"pattern": f"^a{n}"} for n in range(30)}},
        "more than 20 regular expressions",
    ),
    "a long pattern": (of_query({"pattern": "a" * 600}), "pattern: has more than 500 characters"),
    "a pattern that grows": (
        of_query({"pattern": "(a{1000}){60}"}),
        "query.pattern: is no supported regular expression",
    ),
    "a pattern of many classes": (of_query({"pattern": r"\S" * 41}), "query.pattern: uses \\d, \\D, \\s"),
    "patterns of many classes": (
        {"properties": {f"n{n}": {"pattern": r"\w" * 40} for n in range(3)}},
        "\\w and \\W more than 100 times",
    ),
    "a pattern that looks around": (of_query({"pattern": "^((a+)+)\\2(?=c)$"}), "with look-around or back-references"),
    "patterns of names": ({"patternProperties": {"(a{1000}){60}": {}}}, "is no supported regular expression"),
    "unevaluated properties": (
        of_query({"anyOf": [{"unevaluatedProperties": False}]}),
        "unevaluatedProperties: is not",
    ),
    "names as values": ({"propertyNames": {"maxLength": 3}}, "propertyNames: is not read"),
    "another dialect inside": (
        of_query({"$schema": "http://json-schema.org/draft-07/schema#"}),
        "$schema: is read only",
    ),
    "depth": (of_query({"const": nested(40)}), "is nested deeper than 32 levels"),
    "depth that no parser takes": (of_query({"const": nested(400)}), "is nested deeper than 32 levels"),
    "multiples": (of_query({"allOf": many(30, multipleOf=0.1)}), "uses multipleOf more than 20 times"),
    "a huge number": (of_query({"minimum": 10**400}), "query.minimum: is a number beyond 64 bits"),
    "no schema": (of_query({"type": "nope"}), "parameters.properties.query.type"),
    "a row of 300 kB": (of_query({"description": "x" * 300_000}), "it is larger than 262,144 bytes"),
    "a row of 300 kB that does not shrink": (
        of_query({"enum": ["".join(chr(33 + n * 7919 % 90) for n in range(k, k + 700)) for k in range(430)]}),
        "it is larger than 262,144 bytes",
    ),
}
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"too many {name}": ({"jina": {"mode": "search", name: value}}, f"options.jina.{name}: has more than 100 names")
        for name, value in (
            ("params", {f"n{n}": 1 for n in range(150)}),
            ("headers", {f"n{n}": "1" for n in range(150)}),
        )
    },
    "too many defaults": ({"args": {"defaults": {f"n{n}": 1 for n in range(150)}}}, "options.args.defaults: has more"),
    "too many fixed": ({"args": {"fixed": {f"n{n}": 1 for n in range(150)}}}, "options.args.fixed: has more than 100"),
    "too many envs": ({"envs": {f"n{n}": "A" for n in range(150)}}, "options.envs: has more than 100 names"),
    "20,000 envs": ({"envs": {f"n{n}": 1 for n in range(20_000)}}, "options: holds more than 2,000 values"),
    "many values": (
        {"jina": {"mode": "search", "params": {"viewport": {"a": [0] * 4_000}}}},
        "options: holds more than",
    ),
    "depth of options": ({"args": {"fixed": {"site": nested(60)}}}, "is nested deeper than 32 levels"),
    "a huge number in options": ({"args": {"fixed": {"count": 10**400}}}, "fixed.count: is a number beyond 64 bits"),
    "a large row": ({"ui_allowed": "x" * 300_000}, "it is larger than 262,144 bytes"),
}


@pytest.mark.parametrize("column", ["parameters", "options"])
@requirement("definition.bounds")
async def test_an_unparsable_definition_is_refused_not_run_without_a_schema(world: World, column: str) -> None:
    """Such a row counted as empty: the tool ran, and its arguments were not validated."""
    await world.caller.add_tool(PROJECT, search_tool())
    deep = '{"jina": {"mode": "search"}, "const": ' + "[" * 3_000 + "]" * 3_000 + "}"
    await world.caller.database.execute(f"update resource.tools set {column} = $1::text::jsonb", deep)  # noqa: S608
    assert_refused(await world.send(await world.place()), "it is nested too deeply, or contains a number that")


async def store(world: World, row: dict[str, Any]) -> None:
    """Store a row as another client could, with JSON that our encoder may refuse."""
    await world.caller.add_tool(PROJECT, {**row, "parameters": {}, "options": {}})
    await world.caller.database.execute(
        "update resource.tools set parameters = $1::text::jsonb, options = $2::text::jsonb where tool_name = $3",
        json.dumps(row.get("parameters", {})),
        json.dumps(row["options"]),
        row["tool_name"],
    )


async def call_stored(world: World, row: dict[str, Any], arguments: Any = None) -> Outcome:
    """Store a tool and call it; assert the limits of memory and of the result."""
    await store(world, row)
    call = await world.place(arguments)
    with peak_growth() as grown:
        outcome = await world.send(call)
    assert grown() < MAX_BYTES
    assert len(json.dumps(outcome.content)) < MAX_ANSWER_BYTES
    return outcome


def assert_refused(outcome: Outcome, says: str) -> None:
    error = outcome.content["error"]
    assert (error["code"], outcome.upstream_requests) == ("tool_misconfigured", []), error
    assert says in error["message"]
    assert "operator must" in error["message"]


@pytest.mark.parametrize("case", REFUSED)
@requirement("definition.bounds")
async def test_a_schema_beyond_the_bounds_is_tool_misconfigured(world: World, case: str) -> None:
    schema, says = REFUSED[case]
    query = (
        "x" * 1_000 if case == "references that double" else LARGE_TEXT
    )  # 250 kB took all memory before the limit existed
    assert_refused(await call_stored(world, {**search_tool(), "parameters": schema}, {"query": query}), says)


@pytest.mark.parametrize("case", OPTIONS)
@requirement("definition.bounds")
async def test_options_beyond_the_bounds_are_tool_misconfigured(world: World, case: str) -> None:
    options, says = OPTIONS[case]
    assert_refused(await call_stored(world, search_tool(**options)), says)


@pytest.mark.parametrize(
    "rule",
    [
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"type": ["string", "null"]},
        {"oneOf": [{"const": "a"}, {"type": "string", "minLength": 2}]},
        {"allOf": [{"type": "string"}, {"not": {"const": "b"}}]},
        {"if": {"minLength": 5}, "then": {"maxLength": 50}, "else": {"const": "a"}},
        {"type": "string", "pattern": "^[a-z ]+$", "maxLength": 2_000},
        {"enum": ["hello world", *map(str, range(300))]},
        {"anyOf": [*many(800, type="integer"), {"type": "string"}]},
    ],
)
@requirement("definition.bounds")
async def test_schemas_that_only_the_linter_refuses_work_within_the_bounds(world: World, rule: dict[str, Any]) -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://tools.example/search",
        "patternProperties": {"^co": {"type": "integer"}},
        "dependentRequired": {"count": ["query"]},
        **of_query(rule),
    }
    outcome = await call_stored(world, {**search_tool(), "parameters": schema})
    assert outcome.content["status"] == "success", outcome.content["error"]


LARGEST: dict[str, dict[str, Any]] = {
    "branches": of_query({"anyOf": many(930, type="integer")}),
    "branches at the root": {"anyOf": many(930, minProperties=9)},
    "all of many": of_query({"allOf": many(930, type="integer")}),
    "required names": {"required": [f"n{n}" for n in range(1_900)]},
    "choices": of_query({"enum": [f"{n}" * 100 for n in range(490)]}),
    "choices of items": {"properties": {"site": {"items": {"enum": [f"{n}" * 70 for n in range(490)]}}}},
    "lengths": of_query({"allOf": many(930, minLength=300_000)}),
    "a constant": of_query({"const": ["y" * 80] * 1_900}),
    "names that do not fit": {"patternProperties": {"a": False}, "additionalProperties": {"type": "integer"}},
}


@pytest.mark.parametrize("case", LARGEST)
@requirement("definition.bounds", "arguments.checked")
async def test_the_largest_schema_and_arguments_give_a_small_error(world: World, case: str) -> None:
    arguments = {"query": "x" * 120_000, "site": ["y" * 100] * 900}
    outcome = await call_stored(world, {**search_tool(), "parameters": LARGEST[case]}, arguments)
    assert (outcome.content["error"]["code"], outcome.upstream_requests) == ("bad_request", [])


@requirement("definition.bounds")
async def test_costly_patterns_are_refused_without_matching(world: World) -> None:
    """20 patterns that expand to large automata took seconds for one text."""
    rules = {f"n{n}": {"pattern": f"1[01]{{{150 + n}}}[^01]"} for n in range(20)}
    await world.caller.add_tool(
        PROJECT, {**search_tool(), "parameters": {"allOf": [of_query(one) for one in rules.values()]}}
    )
    began = time.process_time()
    refused = await world.send(await world.place({"query": "".join("01"[n * n % 7 % 2] for n in range(200_000))}))
    assert "more than 2,500 bytes together" in refused.content["error"]["message"]
    assert time.process_time() - began < 2.0  # took seconds before the limit, 50 ms with it


@requirement("definition.bounds")
async def test_numbers_beyond_64_bits_are_refused(world: World) -> None:
    schema = {"properties": {"count": {"allOf": many(19, multipleOf=1)}}}
    outcome = await call_stored(world, {**search_tool(), "parameters": schema}, {**KNOWN, "count": 3.0})
    assert outcome.content["status"] == "success", outcome.content["error"]
    call = await world.place({"query": "x"})
    await world.caller.database.execute(
        "update cards set content = jsonb_set(content, '{arguments,count}', $1::text::jsonb) where card_id = $2",
        "9" * 4_000,
        call.card_id,
    )
    refused = await world.send(call)
    assert refused.content["result"]["error_detail"]["problems"] == ["count: contains a number beyond 64 bits"]


@requirement("arguments.checked")
async def test_long_names_and_values_are_cut_in_error_messages(world: World) -> None:
    for arguments in (
        {"query": "x", LARGE_TEXT: 1},
        {"query": "x", **{f"{n}{'z' * 200}": 1 for n in range(900)}},
        {"query": "x", "count": LARGE_TEXT},
        {"query": "x", "country": LARGE_TEXT},
    ):
        for schema in ({}, {"additionalProperties": False, "properties": {"query": {}, "count": {"type": "integer"}}}):
            outcome = await call_stored(world, {**search_tool(), "parameters": schema}, arguments)
            error = outcome.content["error"]
            assert error["code"] == "bad_request"
            problems = outcome.content["result"]["error_detail"]["problems"]
            assert len(problems) <= 21
            assert all(len(problem) <= 200 for problem in problems)
            assert ("more" in error["message"]) is (len(arguments) > 100)


@requirement("terminal.text")
async def test_a_bad_definition_is_logged_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    unknown = {f"unknown_{n}": n for n in range(90)}
    rows = [
        search_tool(jina={"mode": "search", "params": unknown}, args={"defaults": {f"a_{n}": 1 for n in range(90)}}),
        search_tool(envs={"locale": "JINA_API_KEY"}),
        {**search_tool(), "parameters": doubled(3)},
    ]
    for row in rows:
        await world.caller.add_tool(PROJECT, row)
        for _ in range(3):
            await world.send(await world.place())
    logged = [getattr(record, "action", "") for record in caplog.records if record.levelno >= logging.WARNING]
    assert logged == ["parameter.ignored", "tool.misconfigured", "tool.misconfigured"]
    assert sum(len(record.getMessage()) for record in caplog.records) < 20_000


@requirement("arguments.prepared")
async def test_an_id_of_any_length_is_not_multiplied_by_a_definition(world: World) -> None:
    await world.caller.add_tool(PROJECT, search_tool(args={"fixed": {"site": "{tool_call_id}" * 140}}))
    call = await world.place()
    call_id = "c" * 20_000
    columns = {
        "cards": "tool_call_id",
        "state.agent_inbox": "correlation_id",
        "state.execution_edges": "correlation_id",
    }
    for table, column in columns.items():
        statement = f"update {table} set {column} = $1 where {column} = $2"  # noqa: S608 - constants only
        await world.caller.database.execute(statement, call_id, call.tool_call_id)
    with peak_growth() as grown:
        outcome = await world.send(replace(call, tool_call_id=call_id), headers={"CG-Tool-Call-Id": call_id})
    assert grown() < MAX_BYTES
    assert_refused(outcome, "{tool_call_id} has more than 1,000 characters")


@requirement("definition.bounds")
async def test_a_call_is_answered_beside_every_hostile_definition(world: World) -> None:
    await world.caller.add_tool(PROJECT, {**search_tool(), "tool_name": "victim"})
    for number, (schema, _) in enumerate(REFUSED.values()):
        name = f"attack_{number}"
        await store(world, {**search_tool(), "tool_name": name, "parameters": schema})
        await world.caller.publish(await world.place({"query": "x" * 1_000}, name))
    outcome = await world.send(await world.place(KNOWN, "victim"))
    assert outcome.content["status"] == "success"
