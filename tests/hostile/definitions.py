"""Attacks by definitions and arguments."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from tests.hostile.case import Cases
from tests.hostile.scene import Scene, assert_failed, assert_succeeded

CASES = Cases()
_OPERATORS = "tool_misconfigured"  # code of an error that an operator must correct
_LEVELS = 30
_STRING = {"type": "string"}
_SEARCH = {"mode": "search"}


def _object(properties: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), **more}


def multiplying_references(levels: int) -> dict[str, Any]:
    """Return a schema of less than 2 kB in which each level refers to the next one twice."""
    below = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(levels)}
    return _object({"query": {"$ref": "#/$defs/a0"}}) | {"$defs": {**below, f"a{levels}": {"const": 1}}}


def multiplying_branches(levels: int, keyword: str = "anyOf") -> Any:
    """Return a binary tree of branches."""
    schema: Any = {"const": 1}
    for _ in range(levels):
        schema = {keyword: [schema, schema]}
    return schema


async def _refused(scene: Scene, parameters: Any, arguments: Any = None, options: Any = None) -> str:
    """Return the error message of a definition that an operator must correct."""
    tool = await scene.define(options, parameters)
    return assert_failed(await scene.call(tool, arguments or {"query": "x"}), _OPERATORS)


@CASES.case("4")
async def references_that_multiply(scene: Scene) -> None:
    await _refused(scene, multiplying_references(_LEVELS))


@CASES.case("4")
async def references_of_any_kind(scene: Scene) -> None:
    for reference in ("$ref", "$dynamicRef", "$recursiveRef"):
        await _refused(scene, _object({"query": {reference: "#"}}))
        await _refused(scene, _object({"query": {"items": {"anyOf": [{"not": {reference: "#/properties/query"}}]}}}))


@CASES.case("4")
async def reference_to_itself(scene: Scene) -> None:
    await _refused(scene, {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})


@CASES.case("4")
async def branches_that_multiply(scene: Scene) -> None:
    for keyword in ("anyOf", "oneOf", "allOf"):
        await _refused(scene, _object({"query": multiplying_branches(12, keyword)}))


@CASES.case("4")
async def branches_with_unevaluated_properties(scene: Scene) -> None:
    schema: Any = {"const": 1}
    for level in range(8):
        schema = {"unevaluatedProperties": False, "anyOf": [schema, {"properties": {f"p{level}": schema}}]}
    nested: Any = "x"
    for level in range(8):
        nested = {f"p{level}": nested, "q": nested}
    tool = await scene.define(None, _object({"query": schema}))
    assert_failed(await scene.call(tool, {"query": nested}), _OPERATORS, "bad_request")


@CASES.case("4")
async def usual_branches_stay_valid(scene: Scene) -> None:
    nullable = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    schema = _object(
        {
            "query": nullable,
            "site": {"type": ["string", "null"]},
            "count": {"oneOf": [{"type": "integer", "minimum": 1, "maximum": 20}, {"type": "null"}]},
            "country": {"enum": ["de", "fr", None]},
            "language": {"allOf": [_STRING, {"pattern": "^[a-z]{2}$"}]},
        },
        additionalProperties=False,
        required=["query"],
    )
    tool = await scene.define(None, schema)
    assert_succeeded(await scene.call(tool, {"query": "hello {n}", "count": 3, "language": "de"}))


@CASES.case("4")
async def numbers_that_grow(scene: Scene) -> None:
    """As stored they take 600 bytes, as text 262 MB, if PostgreSQL makes a text of them."""
    for number in ("1e131071", "1." + "0" * 16_383):
        tool = await scene.define_text(parameters=f'{{"enum": [{", ".join([number] * 2_000)}]}}')
        assert_failed(await scene.call(tool, {"query": "x"}), _OPERATORS)


@CASES.case("4")
async def deep_schema(scene: Scene) -> None:
    for levels in (200, 3_000):
        deep = '{"properties":{"query":' * levels + "{}" + "}}" * levels
        tool = await scene.define_text(parameters=deep)
        assert_failed(await scene.call(tool, {"query": "x"}), _OPERATORS)


@CASES.case("4")
async def deep_options(scene: Scene) -> None:
    for levels in (200, 3_000):
        deep = '{"jina":{"mode":"search","params":{"locale":' + "[" * levels + "]" * levels + "}}}"
        tool = await scene.define_text(deep)
        assert_failed(await scene.call(tool, {"query": "x"}), _OPERATORS)


@CASES.case("4")
async def schema_of_many_properties(scene: Scene) -> None:
    properties: dict[str, Any] = {f"p{number}": {} for number in range(15_000)}
    await _refused(scene, _object(properties, required=sorted(properties), additionalProperties=False))


@CASES.case("4")
async def schema_of_a_long_enum(scene: Scene) -> None:
    await _refused(scene, _object({"query": {"enum": [f"value {number}" for number in range(14_000)]}}))


@CASES.case("4")
async def schema_of_large_patterns(scene: Scene) -> None:
    patterns = (
        *("(a{1000}){1000}", "((a{100}){100}){100}", "[\\p{L}\\d_-]{1,5000}" * 20, "(" * 20_000, "a" * 90_000),
        *(r"\S" * 250, r"\s\D" * 125),  # rewritten in quadratic time before they are compiled
    )
    for pattern in patterns:
        await _refused(scene, _object({"query": {"pattern": pattern}}))


@CASES.case("4")
async def schema_of_many_patterns(scene: Scene) -> None:
    patterns: dict[str, Any] = {f"^[\\p{{L}}\\d]{{1,900}}{number}$": {} for number in range(2_000)}
    tool = await scene.define(None, _object({}, patternProperties=patterns))
    assert_failed(await scene.call(tool, {"query": "x"}), _OPERATORS)


@CASES.case("4")
async def schema_of_patterns_that_backtrack(scene: Scene) -> None:
    patterns = (r"^(a+)+$", r"^(?=(a+)+b)", r"(a*)*\1b", r"^(?:(?<x>a+)+)+(?!\k<x>)$", r"(?:a?){60}a{60}")
    for pattern in patterns:
        tool = await scene.define(None, _object({"query": {"pattern": pattern}}))
        answer = await scene.call(tool, {"query": "a" * 60_000 + "!"})
        assert_failed(answer, _OPERATORS, "bad_request")


@CASES.case("4")
async def arguments_slow_to_compare(scene: Scene) -> None:
    rules = {"uniqueItems": True, "contains": {"const": 7}, "minContains": 9}
    tool = await scene.define(None, _object({"query": rules}))
    items = ",".join(f'{{"a":[{number},{{"b":{number % 7}}}]}}' for number in range(3_000))
    assert_failed(await scene.call_text(tool, f'{{"query":[{items}]}}'), "bad_request", _OPERATORS)


@CASES.case("4")
async def arguments_that_break_every_rule(scene: Scene) -> None:
    """The message lists a few mistakes, without the whole value."""
    tool = await scene.define(None, _object({"query": {"enum": ["a" * 200] * 90}}, additionalProperties=False))
    long = {f"{number}" + "n" * 200: "v" * 50 for number in range(700)} | {"query": "q" * 50_000}
    assert_failed(await scene.call(tool, long), "bad_request", _OPERATORS)


@CASES.case("4")
async def endless_argument_names(scene: Scene) -> None:
    opened = await scene.define()
    closed = await scene.define(None, _object({"query": {"type": "string"}}, additionalProperties=False))
    long: Any = {"n" * 200_000: 1, "query": "x"}
    assert "nnn" not in assert_succeeded(await scene.call(opened, long)), "an open schema drops them"
    assert_failed(await scene.call(closed, long), "bad_request")
    many = {f"n{number}": 1 for number in range(9_000)} | {"query": "x"}
    for tool in (opened, closed):
        assert_failed(await scene.call(tool, many), "bad_request")


@CASES.case("4")
async def row_of_a_large_compressible_text(scene: Scene) -> None:
    tool = await scene.define_text(json.dumps({"jina": _SEARCH, "note": "a" * scene.scaled(40_000_000)}))
    assert_failed(await scene.call(tool, {"query": "x"}), _OPERATORS)


@CASES.case("4")
async def row_of_a_large_incompressible_text(scene: Scene) -> None:
    tool = await scene.define_text(json.dumps({"jina": _SEARCH, "note": secrets.token_hex(4_000_000)}))
    assert_failed(await scene.call(tool, {"query": "x"}), _OPERATORS)


@CASES.case("4")
async def row_of_a_large_schema(scene: Scene) -> None:
    schema = _object({"query": {"enum": [secrets.token_hex(20) for _ in range(8_000)]}})
    await _refused(scene, schema)


@CASES.case("4")
async def thousands_of_unknown_parameters(scene: Scene) -> None:
    """Two calls: problems of a definition are logged once."""
    options = {"jina": _SEARCH | {"params": {f"unknown{number}": 1 for number in range(9_000)}}}
    tool = await scene.define(options)
    for _ in range(2):
        assert_failed(await scene.call(tool, {"query": "x"}), _OPERATORS)


@CASES.case("4")
async def unknown_parameters(scene: Scene) -> None:
    """A few are ignored as usual, and logged once, not per parameter and call."""
    options = {"jina": _SEARCH | {"params": {f"unknown{number}": 1 for number in range(20)}}}
    tool = await scene.define(options)
    for answer in await scene.calls(5, tool, {"query": "unknown {n}"}):
        assert_succeeded(answer)
    assert scene.log().count("unknown19") <= 1


@CASES.case("4")
async def thousands_of_refused_parameters(scene: Scene) -> None:
    for names in ("params", "headers"):
        given = {f"x-header-{number}": "v" for number in range(9_000)} | {"url": "x", "customHeader": "x"}
        await _refused(scene, {}, None, {"jina": _SEARCH | {names: given}})


@CASES.case("4")
async def thousands_of_options(scene: Scene) -> None:
    for kind in ("defaults", "fixed"):
        await _refused(scene, {}, None, {"jina": _SEARCH, "args": {kind: {f"a{n}": n for n in range(9_000)}}})
    await _refused(scene, {}, None, {"jina": _SEARCH, "envs": {f"a{n}": "JINA_API_KEY" for n in range(9_000)}})
    await _refused(scene, {}, None, {"jina": _SEARCH, "envs": {f"a{n}": n for n in range(9_000)}})


@CASES.case("4")
async def large_option_of_a_wrong_type(scene: Scene) -> None:
    large = "x" * 100_000
    for jina in ({"mode": large}, {"mode": "search", "method": large}, {"mode": "search", "auth_env": large}):
        await _refused(scene, {}, None, {"jina": jina})


@CASES.case("own")
async def templates_that_multiply(scene: Scene) -> None:
    """A definition of 200 kB of placeholders for an id of 60 kB."""
    for kind in ("defaults", "fixed"):
        tool = await scene.define({"jina": _SEARCH, "args": {kind: {"site": "{step_id}" * 20_000}}})
        call = await scene.place(tool, {"query": "x"}, publish=False)
        await scene.caller.publish(call, headers={**call.headers, "CG-Step-Id": "s" * 60_000})
        assert_failed(await scene.caller.result(call, 20), _OPERATORS, "bad_request")


@CASES.case("5", memory_bytes=300_000_000)
async def definitions_of_the_largest_kind(scene: Scene) -> None:
    """Forty tools of maximum size after parsing and compilation."""
    for number in range(40):
        words = [f"{number} {secrets.token_hex(8)}" for _ in range(180)]
        rule: Any = {"enum": words[:20], "description": "d" * 900}
        properties = {f"p{n}_{secrets.token_hex(40)}": rule for n in range(60)}
        properties["query"] = {"type": "string", "pattern": "^[\\p{L}\\d _-]{1,200}$"}
        tool = await scene.define(None, _object(properties))
        await scene.call(tool, {"query": f"hello {number}"})


@CASES.case("5", memory_bytes=300_000_000)
async def definitions_that_change_with_every_call(scene: Scene) -> None:
    """The same tool with another definition each time: the cache of old ones is limited."""
    for number in range(60):
        properties = {f"p{number}_{n}": {"type": "string", "pattern": f"^[a-z{n}]{{1,50}}$"} for n in range(150)}
        tool = await scene.define(None, _object({"query": _STRING, **properties}), name="changing")
        await scene.call(tool, {"query": f"hello {number}"})


_LONGEST = 15_900
_ITEMS = 10
_BAD = ("bad_request", "target_refused", "blocked_target", "all_failed")

SLOW_ADDRESSES = (
    "r.jina.ai/" * 1_590 + "example.com",
    "https://r.jina.ai/" * 880 + "example.com",
    "https://" * 1_980 + "example.com",
    "http:" * 3_100 + "//example.com",
    "https%3a" * 1_980 + "//example.com",
    "'" * 7_900 + "example.com" + "'" * 7_900,
    "'\"" * 3_950 + "example.com" + "\"'" * 3_950,
    "<" * 7_900 + ">" * 7_900,
    "[" * 7_900 + "](" + "x" * 7_900,
    "[a](" * 3_900 + ")",
    "[a](b " + '"' * 15_000 + ")",
    "https://" + "a." * 7_900 + "com/",
    "https://" + "a" * 15_000 + ".com/",
    "https://" + "\ufdfa" * 1_700 + ".com/",
    "https://" + "xn--a." * 2_600 + "com/",
    "https://" + "0x." * 5_200 + "1/",
    "https://" + "1" * 15_000 + "/",
    "https://[" + "1:" * 7_500 + "]/",
    "https://" + "%31" * 5_200 + "/",
    "https://" + "\u200b" * 15_000 + "example.com/",
    "\u00a0" * 15_000,
    "https://" + "@" * 15_000,
    "https://example.com:" + "0" * 15_000,
    "//" * 7_900,
    "r.jina.ai/" * 40 + "'" * 3_000 + "r.jina.ai/" * 40,
)

LONG_ADDRESS = "https://example.com/" + "%25" * 5_200

INTERNAL = (
    *("https://[2001:db8::5efe:127.0.0.1]/", "https://[fe80::5efe:10.0.0.1]/", "https://[2a00::5efe:a00:1]/"),
    *("https://[2a00::200:5efe:7f00:1]/", "https://[2001:0:4136:e378:8000:63bf:3fff:fdd2]/"),
    *("https://a.consul/", "https://a.cluster/", "https://a.svc.cluster.local/", "https://a.kube/", "https://a.test/"),
    *("https://a.invalid/", "https://a.onion/", "https://a.ONION./", "https://a.%63onsul/", "https://a\u3002consul/"),
    *("https://eu.r.jina.ai/http://127.0.0.1", "https://eu.s.jina.ai/", "eu.r.jina.ai/http://a.consul/"),
    *("https://r.jina.ai/https://eu.r.jina.ai/http://localhost/", "https://a.home.arpa/", "https://a.internal/"),
)


@CASES.case("11")
async def addresses_slow_to_parse(scene: Scene) -> None:
    for address in SLOW_ADDRESSES:
        urls = [address[:_LONGEST] + str(number) for number in range(_ITEMS)]
        assert_failed(await scene.read({"urls": urls}), *_BAD)


@CASES.case("11")
async def long_addresses(scene: Scene) -> None:
    assert_succeeded(await scene.read({"urls": [f"{LONG_ADDRESS}{number}" for number in range(_ITEMS)]}))


@CASES.case("11")
async def addresses_behind_the_reader_many_times(scene: Scene) -> None:
    urls = ["r.jina.ai/" * 1_590 + f"example.com/{number}" for number in range(_ITEMS)]
    assert_failed(await scene.read({"urls": urls}), *_BAD)


@CASES.case("11")
async def address_behind_the_reader_once(scene: Scene) -> None:
    assert_succeeded(await scene.read("https://r.jina.ai/https://example.com/once"))
    assert b"r.jina.ai/https" not in scene.sent()


@CASES.case("smaller")
async def internal_addresses(scene: Scene) -> None:
    for address in INTERNAL:
        assert_failed(await scene.read(address), *_BAD)
    assert scene.sent() == b"", "something was asked for"


@CASES.case("own")
async def arguments_of_every_shape_at_once(scene: Scene) -> None:
    """Arguments of the largest card: names, lists, texts, numbers, depth."""
    tool = await scene.define(None, _object({"query": {"type": "string"}}, additionalProperties=False))
    texts = (
        '{"query":' + "[" * 90 + "]" * 90 + "}",
        '{"query":"' + "\\ud83d\\ude00" * 20_000 + '"}',
        '{"query":' + "9" * 100_000 + "}",
        '{"query":1e-16000}',
        '{"query":"x","count":' + "1" * 4_000 + "}",
        '{"' + "a" * 200_000 + '":{"b":1},"query":"x"}',
        "{" + ",".join(f'"q{n}":"x"' for n in range(9_500)) + "}",
        '{"query":"' + "x" * 250_000 + '"}',
        '{"query":"' + "x" * 9_000_000 + '"}',
        '{"query":[' + ",".join(['"x"'] * 9_900) + "]}",
    )
    for text in texts:
        assert_failed(await scene.call_text(tool, text), "bad_request")


@CASES.case("own")
async def batch_of_too_many_queries(scene: Scene) -> None:
    many = await scene.define({"jina": {"mode": "search", "tool": "jina.search_many"}})
    assert_failed(await scene.call(many, {"queries": ["x"] * 9_000}), "bad_request")
    assert_failed(await scene.call(many, {"queries": [""] * 9_000}), "bad_request")
    assert_failed(await scene.call(many, {"queries": [{"a": n} for n in range(9_000)]}), "bad_request")
    assert scene.sent() == b"", "something was asked for"


@CASES.case("own")
async def guessed_cursors(scene: Scene) -> None:
    reader = await scene.define({"jina": {"mode": "reader"}})
    for cursor in ("", "A" * 44, "A" * 200_000, "=" * 44, "\U0001f600" * 100):
        assert_failed(await scene.call(reader, {"cursor": cursor}), "bad_request", "not_found")
