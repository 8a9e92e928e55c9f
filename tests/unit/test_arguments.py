"""Arguments: any that a model could send, its usual mistakes, and what both cost."""

from __future__ import annotations

import difflib
import gc
import json
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest
import respx
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from openapi_tool.jina.batches import batch_items, item_arguments
from openapi_tool.jina.egress import ALLOWED_HEADERS
from openapi_tool.jina.endpoints import endpoint_of
from openapi_tool.jina.inline_data import without_inline_images
from openapi_tool.jina.parameters import READER_PARAMETERS, REFUSED, SEARCH_PARAMETERS
from openapi_tool.jina.request import UpstreamRequest, build_request
from openapi_tool.jina.resolved_parameters import resolve_parameters
from openapi_tool.jina.url_policy import UrlPolicy, checked_url
from openapi_tool.protocol.errors import BadRequest, TargetRefused, ToolMisconfigured
from openapi_tool.protocol.jsontext import object_at
from openapi_tool.protocol.records import DefinitionRecord
from openapi_tool.telemetry.redact import MASK, Redactor
from openapi_tool.testing import ToolResult
from openapi_tool.tools import bounds, compiled_schema, definition_parser, schema
from openapi_tool.tools.argument_names import fold, probably_meant
from openapi_tool.tools.arguments import IDENTITY_ARGUMENTS, Arguments, ArgumentSources, OperatorEnvs
from openapi_tool.tools.bounds import (
    MAX_ENUM_VALUES,
    MAX_PROPERTIES,
    MAX_ROW_BYTES,
    MAX_VALUES,
    REFUSED_KEYWORDS,
    count_values,
    memory_bytes,
    row_bytes,
    row_problems,
)
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.definition_parser import parse_definition
from openapi_tool.tools.problems import MAX_PROBLEMS, argument_path
from openapi_tool.tools.schema import schema_problems
from openapi_tool.tools.session_identities import SessionIdentities
from openapi_tool.tools.stored_rows import registration
from tests.answering import ToolsOverTransport, serving
from tests.requirements import requirement
from tests.support import definition, identity, resident_bytes, search_output, tool_call

SESSIONS = SessionIdentities(b"k" * 32)
RULES = UrlPolicy()
MAX = 10
MAY_SET = {
    mode: {entry.name for entry in table if entry.model and not entry.declared} | {"timeout", "respondTiming"}
    for mode, table in (("search", SEARCH_PARAMETERS), ("reader", READER_PARAMETERS))
}
HEADERS = {
    mode: {
        entry.header.lower()
        for entry in (*SEARCH_PARAMETERS, *READER_PARAMETERS)
        if entry.header and entry.name in names
    }
    | {"accept", "accept-encoding", "content-type", "user-agent"}
    for mode, names in MAY_SET.items()
}

known_names = sorted(
    {
        name
        for entry in (*SEARCH_PARAMETERS, *READER_PARAMETERS)
        for name in (entry.name, entry.header, *entry.aliases)
        if name
    }
    | {name for tool in CATALOGUE.values() for name in object_at(tool.schema(), "properties")}
)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)  # characters that jsonb accepts
names = st.one_of(
    st.sampled_from(known_names),
    st.sampled_from(sorted(REFUSED.keys() | IDENTITY_ARGUMENTS | {"__cg_control", "X-Forwarded-For", "session_id"})),
    texts.map(lambda text: text[:12] or "_"),
).flatmap(lambda name: st.sampled_from([name, name.upper(), name.replace("_", "-"), name.title()]))
words = st.one_of(
    st.sampled_from(["content", "no-content", "html", "vlm", "images", "de", "true", "false", "none", "all", "7", ""]),
    st.sampled_from(["a\r\nX-Injected: 1", "b\nHost: evil.example", "c\td", "ü\u2028", "x" * 2_001]),
    texts,
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 200_000), st.floats(allow_nan=False), words),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
subjects = st.sampled_from(["https://site.example/a?b=c#d", "plain words", "http://127.0.0.1/", "a\r\nb", "", "x"])
definitions = st.builds(
    lambda name, schema, method, session: definition(
        {"tool": name, "method": method},
        parameters=CATALOGUE[name].schema() if schema else {},
        args={"defaults": {"session_id": "{agent_turn_id}"}} if session else {},
    ),
    st.sampled_from(sorted(CATALOGUE)),
    st.booleans(),
    st.sampled_from(["GET", "POST"]),
    st.booleans(),
)


hopeful = st.sampled_from(
    [
        *(("engine", "browser"), ("X-Engine", "curl"), ("proxy", "de"), ("locale", "de"), ("provider", "bing")),
        *(("session_id", "s"), ("projectId", "p"), ("X-Forwarded-For", "1.2.3.4"), ("api_key", "k")),
        *(("target_selector", "a\r\nX-Injected: 1"), ("site", "ü"), ("max_tokens", 500), ("with_links", True)),
        *(("count", 3), ("format", "text"), ("location", "b\nHost: evil.example"), ("link_style", "discarded")),
    ]
)


@st.composite
def calls(draw: st.DrawFn) -> tuple[ToolDefinition, dict[str, Any]]:
    """Draw a definition and arguments: mostly a query or address, and few others."""
    found = draw(definitions)
    arguments: dict[str, Any] = dict(draw(st.lists(hopeful, max_size=2)))
    if draw(st.integers(0, 2)) == 0:
        arguments |= draw(st.dictionaries(names, values, max_size=4))
    if draw(st.integers(0, 9)):
        single = "https://site.example/a?b=c#d" if draw(st.booleans()) else draw(subjects)
        key = found.built_in.list_argument or found.operation.argument
        arguments[key] = [single, draw(subjects)] if found.built_in.list_argument else single
    return found, arguments


def prepared(found: ToolDefinition, arguments: dict[str, Any]) -> Arguments:
    return ArgumentSources(OperatorEnvs(), lambda _: SecretStr("the-key"), SESSIONS).resolve(
        found, tool_call(arguments), identity()
    )


def requests_of(found: ToolDefinition, arguments: dict[str, Any]) -> list[UpstreamRequest]:
    ready = prepared(found, arguments)
    items = batch_items(found, ready, MAX)
    each = [ready] if items is None else [item_arguments(found, ready, item) for item in items]
    requests = []
    for one in each:
        resolved = resolve_parameters(found, one)
        resolved = replace(resolved, parameters=endpoint_of(found).timeouts.within(resolved.parameters, 27))
        url = resolved.parameters.get("url")
        if url is not None:
            checked_url(url, RULES)
        requests.append(build_request(found, resolved))
    return requests


@requirement("arguments.any")
@settings(max_examples=400)
@given(call=calls())
def test_arguments_make_an_allowed_request_or_a_refusal(call: tuple[ToolDefinition, dict[str, Any]]) -> None:
    found, arguments = call
    try:
        requests = requests_of(found, arguments)
    except (BadRequest, TargetRefused) as refused:
        assert refused.message
        return
    assert requests
    for request in requests:
        assert (request.host, request.method) in {(found.operation.host, "GET"), (found.operation.host, "POST")}
        assert {name.lower() for name in request.headers} <= HEADERS[found.operation.name] <= ALLOWED_HEADERS
        assert all(value.isascii() and value.isprintable() for value in request.headers.values())
        assert re.fullmatch(r"/[!-~]*", request.target)
        assert keys(request) <= MAY_SET[found.operation.name]
        assert not {fold(name) for name in keys(request)} & (REFUSED.keys() | IDENTITY_ARGUMENTS)


def keys(request: UpstreamRequest) -> set[str]:
    """Return the names of the parameters in a request's body and query."""
    body = json.loads(request.body or b"{}")
    nested = {f"markdown.{name}" for name in body.pop("markdown", {})}
    return {*body, *nested, *(name for name, _ in parse_qsl(urlsplit(request.target).query))}


@requirement("arguments.any")
@settings(max_examples=400)
@given(call=calls())
@example(call=(definition({"tool": "jina.read"}, parameters={}), {"DNT": None, "URL": "a\r\nX-Injected: 1"}))
def test_a_refusal_names_everything_that_is_wrong(call: tuple[ToolDefinition, dict[str, Any]]) -> None:
    """Without the arguments that a refusal named, no further refusal of that kind follows.

    A refused address is named `url`, however the argument was spelled.
    """
    found, arguments = call
    for _ in range(4):  # refused by schema, batch, parameter mapping, and once more if a required one is missing
        try:
            requests_of(found, arguments)
        except TargetRefused:
            return
        except BadRequest as refused:
            if found.built_in.list_argument and refused.message.startswith("url:"):
                return  # a failure of one item, reported with that item
            problems = refused.detail["problems"] if isinstance(refused.detail, dict) else [refused.message]
            named = {
                name
                for name in arguments
                if any(
                    problem.startswith(f"{shown_name}{end}")
                    for problem in problems
                    for shown_name in {name, argument_path((name,)), fold(name)}
                    for end in ":. "
                )
            }
            if not named:
                assert all("required" in problem or "must be a list" in problem for problem in problems), problems
                return
            arguments = {name: value for name, value in arguments.items() if name not in named}
        else:
            return
    raise AssertionError(arguments)


# Memory of definitions and compiled schemas, and limits of their caches.


TOOLS = 40
SLACK_BYTES = 8_000_000
"""Allowance in bytes for the process itself: buffers, arenas of the allocator, imports."""


def filled(value: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose description fills the row up to its limit."""
    space = MAX_ROW_BYTES - row_bytes({**value, "description": ""}, OPTIONS)
    return {**value, "description": "é" * (space // 2)}


def of_members(make: Callable[[int], Any], weight: int) -> dict[str, Any]:
    """Return as many branches as are allowed, each with this number of values."""
    return {"anyOf": [make(n) for n in range((MAX_VALUES - 40) // weight)]}


OPTIONS: dict[str, Any] = {"jina": {"mode": "search"}}
ORDINARY: dict[str, Callable[[int], dict[str, Any]]] = {
    name: lambda n, tool=tool: {**tool.schema(), "title": f"tool {n}"}  # type: ignore[misc]
    for name, tool in CATALOGUE.items()
}
LARGEST: dict[str, Callable[[int], dict[str, Any]]] = {
    "texts": lambda n: filled({"title": str(n)}),
    "branches": lambda n: {"title": str(n), **of_members(lambda _: {"type": "integer"}, 2)},
    "nested branches": lambda n: {"title": str(n), **of_members(lambda _: {"not": {"not": {"type": "null"}}}, 4)},
    "items": lambda n: {"title": str(n), **of_members(lambda _: {"items": {"type": "null"}}, 3)},
    "properties": lambda n: {"title": str(n), **of_members(lambda m: {"properties": {f"p{m}": {}}}, 3)},
    "objects to choose": lambda n: {"title": str(n), "anyOf": [{"enum": [{"a": m} for m in range(450)]}] * 2},
    "patterns": lambda n: {
        "title": str(n),
        "properties": {f"p{m}": {"pattern": f"1[01]{{{150 + m}}}[^01]"} for m in range(20)},
    },
}


def record(parameters: Any, options: Any = OPTIONS) -> DefinitionRecord:
    return DefinitionRecord("a_tool", "suspend", parameters, options)


@pytest.fixture(scope="module")
def measured() -> dict[str, tuple[float, float]]:
    """Return the measured and the estimated memory of each kind of compiled schema, in bytes.

    Measured in another process: Rust's memory shows only in the resident size, which varies too much in this process.
    """
    done = subprocess.run(  # noqa: S603 - our own code
        [sys.executable, "-m", __name__], capture_output=True, text=True, check=True, timeout=60
    )
    found: dict[str, tuple[float, float]] = json.loads(done.stdout)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("case", [*ORDINARY, *LARGEST])
@requirement("definition.bounds")
def test_compiled_schema_needs_no_more_memory_than_estimated(
    case: str, measured: dict[str, tuple[float, float]]
) -> None:
    needed, estimate = measured[case]
    assert needed < estimate * 1.25 + SLACK_BYTES / TOOLS
    if case in ORDINARY:
        assert estimate < needed * 6, "the cache would hold so few ordinary schemas that each call compiles one"


def measure(make: Callable[[int], dict[str, Any]], alive: list[Any]) -> tuple[float, float]:
    """Compile many schemas of a kind and use them; return the measured and the estimated memory of each."""
    texts = [json.dumps(make(n)) for n in range(TOOLS)]
    gc.collect()
    before = resident_bytes()
    for text in texts:
        compiled = compiled_schema._compile(json.loads(text), len(text))  # noqa: SLF001 - its estimate is tested
        alive.append(compiled)
        compiled.validator.is_valid({f"p{m}": f"{m * 7919:b}" * 150 for m in range(20)})
    gc.collect()
    return (resident_bytes() - before) / TOOLS, alive[-1].memory


@pytest.mark.thorough
@pytest.mark.parametrize("case", [*ORDINARY, *LARGEST])
@requirement("definition.bounds")
def test_definition_needs_no_more_memory_than_estimated(case: str) -> None:
    rows = [json.dumps((ORDINARY | LARGEST)[case](n)) for n in range(TOOLS)]
    tracemalloc.start()
    values = [json.loads(row) for row in rows]
    needed, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert needed <= sum(map(memory_bytes, values)) * 1.1
    assert sum(map(memory_bytes, values)) < needed * 3


@requirement("definition.bounds")
def test_forty_of_the_largest_tools_stay_within_the_cache_limits() -> None:
    gc.collect()
    before = resident_bytes()
    for number in range(TOOLS):
        for case in ("texts", "nested branches", "patterns"):
            found = parse_definition(record(LARGEST[case](number)))
            schema_problems(found.schema, {"query": "x"})
    gc.collect()
    assert compiled_schema._cache.currsize <= compiled_schema.MAX_CACHE_BYTES  # noqa: SLF001
    assert (
        resident_bytes() - before
        < compiled_schema.MAX_CACHE_BYTES + definition_parser.MAX_CACHE_BYTES + 3 * SLACK_BYTES
    )


@requirement("definition.bounds")
def test_cache_of_definitions_is_limited_in_bytes() -> None:
    results = definition_parser._parse_cache  # noqa: SLF001
    for number in range(200):
        parse_definition(record(filled({"title": f"one of many {number}"})))
        with pytest.raises(ToolMisconfigured):
            parse_definition(record({"$ref": f"#{number}"}))
    cached = sum(memory_bytes(result.definition.schema) for result in results.values() if result.definition)
    assert cached <= results.currsize <= definition_parser.MAX_CACHE_BYTES
    assert len(results) > 20


@requirement("definition.bounds")
def test_definition_is_parsed_once_and_refused_with_a_new_error_each_time() -> None:
    row = registration(CATALOGUE["jina.search"])
    good = record(row["parameters"], row["options"])
    assert parse_definition(good) is parse_definition(good)
    raised = []
    for _ in range(2):
        with pytest.raises(ToolMisconfigured) as refused:
            parse_definition(record({"$ref": "#"}))
        raised.append(refused.value)
    assert raised[0] is not raised[1]
    assert raised[0].as_error() == raised[1].as_error()


@requirement("definition.bounds")
def test_size_of_the_largest_allowed_row_is_that_of_the_database() -> None:
    largest = filled({"type": "object"})
    assert row_problems(largest, OPTIONS) == []
    assert MAX_ROW_BYTES - 2 <= row_bytes(largest, OPTIONS) <= MAX_ROW_BYTES
    (problem,) = row_problems({**largest, "a": 1}, OPTIONS)
    assert "262,144 bytes" in problem.message


@requirement("definition.bounds")
def test_refusing_a_hostile_row_costs_no_more_than_parsing_an_allowed_one() -> None:
    """Members are counted before they are expanded: the walk stops at too many."""
    seen = 0

    class Counted(dict[str, Any]):
        def items(self) -> Any:
            nonlocal seen
            seen += len(self)
            return super().items()

    row = Counted({f"a{n}": Counted({f"b{m}": Counted() for m in range(1_000)}) for n in range(100)})
    (problem,) = row_problems(row, OPTIONS)
    assert "holds more than 2,000 values" in problem.message
    assert seen <= MAX_VALUES


@requirement("definition.bounds")
def test_the_documented_bounds_are_those_of_the_code() -> None:
    text = (Path(__file__).parent.parent.parent / "docs" / "registering-tools.md").read_text(encoding="utf-8")
    section = text.partition("## Limits of stored rows")[2].partition("\n## ")[0]
    documented = re.findall(r"\| ([0-9][0-9,]*)(?:, ([0-9]+))?(?: bytes)? \|", section)
    assert [int(number.replace(",", "")) for pair in documented for number in pair if number] == [
        *(bounds.MAX_ROW_BYTES, bounds.MAX_VALUES, bounds.MAX_DEPTH, MAX_PROPERTIES, MAX_ENUM_VALUES),
        *(bounds.MAX_PATTERNS, bounds.MAX_PATTERN_CHARS, bounds.MAX_PATTERN_CLASSES, bounds.MAX_CLASSES),
        *(bounds.MAX_MULTIPLES, bounds.MAX_NAMES),
    ]
    assert all(f"`{word}`" in section for word in REFUSED_KEYWORDS)


@requirement("definition.bounds")
def test_built_in_tools_are_far_within_the_bounds() -> None:
    for tool in CATALOGUE.values():
        row = registration(tool)
        assert row_problems(row["parameters"], row["options"]) == []
        assert count_values(row["parameters"]) < MAX_VALUES / 10


STORED = "This is a cached snapshot of the original page, consider retry with caching opt-out."
A, B = "https://a.example/x", "https://b.example/"


def arguments_for(tool: str, values: dict[str, Any], schema: dict[str, Any] | None = None) -> Arguments:
    found = definition({"tool": tool}, parameters=CATALOGUE[tool].schema() if schema is None else schema)
    source = {"JINA_API_KEY": SecretStr("a-key-of-the-test")}.__getitem__
    return ArgumentSources(OperatorEnvs(), source, SessionIdentities(b"k" * 32)).resolve(
        found, tool_call(values), identity()
    )


def refusal(tool: str, values: dict[str, Any], schema: dict[str, Any] | None = None) -> str:
    """Return the error message of a call that is refused before anything is sent."""
    found = definition({"tool": tool}, parameters=CATALOGUE[tool].schema() if schema is None else schema)
    with pytest.raises(BadRequest) as failed:
        resolve_parameters(found, arguments_for(tool, values, schema))
    return failed.value.message.partition("call again: ")[2]


@requirement("arguments.checked")
@pytest.mark.parametrize(
    ("tool", "name", "value", "expected"),
    [
        ("jina.search_many", "queries", '["a","b"]', ["a", "b"]),
        ("jina.search_many", "queries", ' ["a"] ', ["a"]),
        ("jina.search_many", "queries", "a, b", ["a, b"]),
        ("jina.search_many", "queries", "[1] in texts", ["[1] in texts"]),
        ("jina.search", "site", '["a.example","b.example"]', ["a.example", "b.example"]),
        ("jina.search", "site", "a.example, b.example/docs", ["a.example", "b.example/docs"]),
        ("jina.search", "exclude_sites", "a.example b.example", ["a.example", "b.example"]),
        ("jina.search", "site", "a.example", ["a.example"]),
        ("jina.search", "title_words", "annual report", ["annual report"]),
        ("jina.read_many", "urls", f'["{A}", "{B}"]', [A, B]),
        ("jina.read_many", "urls", f"{A}, {B}", [A, B]),
        ("jina.read_many", "urls", f"{A}\n{B}", [A, B]),
        ("jina.read_many", "urls", "a.example,https://b.example", ["a.example", "https://b.example"]),
        ("jina.read_many", "urls", f"{A}?q=1,2", [f"{A}?q=1,2"]),
        ("jina.read", "format", "Markdown", "markdown"),
        ("jina.search", "after", 20250301, "20250301"),
        ("jina.search", "query", 2024, "2024"),
        ("jina.search", "site", [], None),
    ],
)
def test_a_value_in_another_form_is_repaired(tool: str, name: str, value: Any, expected: Any) -> None:
    values = {name: value} if name in ("queries", "urls", "query") else {"query": "x", name: value}
    if tool == "jina.read":
        values = {"url": A, name: value}
    found = arguments_for(tool, values)
    assert found.values[name] == expected
    assert found.repaired == (name,)


@requirement("arguments.checked")
@pytest.mark.parametrize(
    ("tool", "values", "says"),
    [
        ("jina.read_many", {"urls": f"{A} and {B}"}, "urls: must be a list of 1 to 10 texts"),
        ("jina.read_many", {"urls": f"{A},{B}"}, "urls: must be a list of 1 to 10 texts"),  # one address or two
        ("jina.read_many", {"urls": f"['{A}', '{B}']"}, "urls: must be a list of 1 to 10 texts"),
        ("jina.search_many", {"queries": '["a", "b'}, "queries: must be a list of 1 to 10 texts"),
        ("jina.search_many", {"queries": "[]"}, "queries: must be a list of 1 to 10 texts"),
        (
            "jina.search_many",
            {"queries": ["a", " "]},
            "queries item 2: must be a text of 1 to 2,000 characters, not blank",
        ),
        ("jina.search", {"query": "x", "count": "50"}, "count: must be an integer from 1 to 20"),
        ("jina.search", {"query": "x", "count": "three"}, "count: must be an integer from 1 to 20"),
        ("jina.search", {"query": "x", "max_tokens": "100"}, "max_tokens: must be an integer from 500 to 2,000,000"),
        ("jina.search", {"query": "   "}, "query: must be a text of 1 to 2,000 characters, not blank"),
        ("jina.search", {"query": ""}, "query: must be a text of 1 to 2,000 characters, not blank"),
        ("jina.search", {"query": None}, "query: is required"),
        ("jina.search", {"query": "x", "country": "Germany"}, "country: must be a text of 2 characters, such as de"),
        ("jina.search", {"query": "x", "site": 3}, 'site: must be a list of 1 to 20 texts, such as ["example.com"]'),
        ("jina.read", {"url": A, "timeout": "0"}, "timeout: must be a number above 0 and at most 3,600"),
        ("jina.read", {"url": A, "retain_links": True}, "retain_links: must be one of none, all, text, gpt-oss"),
        ("jina.read", {"url": [A, B]}, "url: must be a text of 1 to 16,000 characters, not blank"),
        ("jina.read", {"url": A, "with_links": "3"}, "with_links: must be true or false"),
        ("jina.search", {"query": "x", "num": 3}, "num: is not an argument that this tool takes; did you mean count?"),
        (
            "jina.search",
            {"query": "x", "max_results": 3},
            "max_results: is not an argument that this tool takes; did you",
        ),
        ("jina.search_many", {"queries": ["x"], "q": 3}, "q: is not an argument that this tool takes"),
        (
            "jina.read",
            {"url": A, "maxTokens": 900},
            "maxTokens: is not an argument that this tool takes; did you mean max",
        ),
        ("jina.read", {"URL": A}, "URL: is not an argument that this tool takes; did you mean url?"),
        ("jina.search", {"query": "x", "site": ["a.example, b.example"]}, "site: must be names of sites, such as"),
        ("jina.search", {"query": "x", "exclude_sites": ["a.example|b"]}, "exclude_sites: must be names of sites"),
    ],
)
def test_error_describes_the_rule_in_words_without_the_value(tool: str, values: dict[str, Any], says: str) -> None:
    message = refusal(tool, values)
    assert message.startswith(says)
    assert "; " not in message.replace("; did you", "")  # one problem, reported once


@requirement("arguments.checked")
def test_both_validators_describe_a_rule_in_the_same_words() -> None:
    wrong = {"query": " ", "count": 50, "page": "x", "with_content": 3, "max_tokens": 1, "site": 3, "foo": 3}
    expected = {
        "query: must be a text of 1 to 2,000 characters, not blank",
        "count: must be an integer from 1 to 20",
        "page: must be an integer from 1 to 1,000",
        "max_tokens: must be an integer from 500 to 2,000,000",
        "with_content: must be true or false",
        "foo: is not an argument that this tool takes",
    }
    for parameters in (None, {"type": "object"}):
        said = set(refusal("jina.search", wrong, parameters).split("; "))
        assert expected <= said
        assert len(said) == len(expected) + 1


@requirement("arguments.checked")
def test_an_unknown_argument_is_named_in_place_of_a_required_one() -> None:
    opened = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    assert refusal("jina.search", {"querry": "x"}, opened) == "query: is required; give it in place of querry"
    closed = {"type": "object", "properties": {"query": {}, "count": {}}, "additionalProperties": False}
    assert refusal("jina.search", {"query": "x", "limit": 3}, closed).endswith("; did you mean count?")


@requirement("arguments.checked")
def test_few_unknown_arguments_are_compared_and_each_with_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 100 others, 400 unknown arguments took 65 ms."""
    compared: list[int] = []

    def get_close_matches(_: str, others: Collection[str], n: int) -> list[str]:
        compared.append(len(others))
        return []

    monkeypatch.setattr(difflib, "get_close_matches", get_close_matches)
    opened = {"type": "object", "properties": {f"declared{number}": {} for number in range(200)}}
    refusal("jina.search", {f"unknown{number}": "x" for number in range(400)}, opened)
    assert 0 < len(compared) <= 3 * MAX_PROBLEMS
    assert max(compared) <= 40


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("q", ["queries"], "queries"),
        ("Limit", ["count", "query"], "count"),
        ("querry", ["query", "count"], "query"),
        ("x" * 41, ["x" * 41], None),
        ("frobnicate", ["query", "count"], None),
    ],
)
def test_the_argument_that_is_meant_by_another_name(name: str, known: list[str], expected: str | None) -> None:
    assert probably_meant(name, known) == expected


@requirement("arguments.checked")
@pytest.mark.parametrize(
    ("rule", "value", "says"),
    [
        ({"type": "string", "pattern": "^[a-z]+$"}, "A" * 300, "a text that fits its pattern"),
        ({"type": ["string", "array"]}, 3, "a text or a list of items"),
        ({"type": "integer", "exclusiveMinimum": 0}, 0, "an integer above 0"),
        ({"type": "number", "maximum": 2.5}, 3, "a number of at most 2.5"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, 3, "of one of the forms in the tool's parameters"),
        ({"type": "object"}, [], "an object"),
    ],
)
def test_rules_of_custom_definitions_are_described_in_words(rule: dict[str, Any], value: Any, says: str) -> None:
    assert schema_problems({"properties": {"a": rule}}, {"a": value}) == [f"a: must be {says}"]


@requirement("answer.errors")
async def test_the_address_of_a_batch_is_refused_under_its_own_name() -> None:
    output = await ToolsOverTransport(serving(b'{"data":{"content":"x"}}')).output(urls=[A, "http://10.0.0.1/"])
    assert "target_refused): urls: '10.0.0.1' is" in output.content


class _Counted(str):
    """Text that counts how many of its characters were searched."""

    searched = 0
    __slots__ = ()

    def find(self, wanted: str, start: int = 0, end: int | None = None) -> int:  # type: ignore[override]
        found = super().find(wanted, start, len(self) if end is None else end)
        _Counted.searched += (len(self) if found < 0 and end is None else end or 0 if found < 0 else found) - start
        return found


@requirement("loop.answers")
@pytest.mark.parametrize("mark", ["](blob:\n", "src='data:image/\n"])
def test_unclosed_addresses_of_images_are_searched_once(mark: str) -> None:
    text = _Counted(mark * 2_000 + ")'")
    _Counted.searched = 0
    assert without_inline_images([text]) == [text]
    assert _Counted.searched < 10 * len(text)


@requirement("content.search")
@pytest.mark.parametrize("link", [5, True, 2.5])
def test_a_site_link_that_is_no_text_does_not_break_a_search(link: Any) -> None:
    output = search_output({"data": [{"title": "x", "siteLinks": [{"title": "a", "link": link}]}]}, "q")
    assert f"- a: {link}" in output.content


_TAKEN = ("url", "wait_for_selector", "max_tokens", "target_selector", "no_cache")


@requirement("content.reader")
@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"content": "Please enable JavaScript to view this page."}, {"wait_for_selector"}),
        ({"content": "x", "usage": {"tokens": 500}}, {"max_tokens", "target_selector"}),
        ({"content": "x", "warning": STORED}, {"no_cache"}),
    ],
)
def test_a_remedy_names_only_arguments_that_the_tool_takes(
    data: dict[str, Any], named: set[str], jina: respx.Router, run_tool: Callable[..., ToolResult]
) -> None:
    jina.post("https://r.jina.ai/").respond(json={"code": 200, "data": data})
    tools: list[tuple[Any, ...]] = [(_TAKEN, (), named), (("url",), (), set()), (_TAKEN, named, set())]
    for number, (taken, fixed, expected) in enumerate(tools):
        schema = {"type": "object", "additionalProperties": False, "properties": {name: {} for name in taken}}
        jina_options = {"mode": "reader", "params": {"maxTokens": 500}}
        found = definition(jina_options, parameters=schema, args={"fixed": dict.fromkeys(fixed)})
        text = run_tool(found, {"url": f"{A}{number}"}).text  # a new address each time, or the cache would answer
        assert {name for name in _TAKEN[1:] if f"with {name}" in text or f"larger {name}" in text} == expected


_SYNTAX = "AssertionFailureError: Failed to process the page: Expected name, found ["
_NO_MATCH = "AssertionFailureError: No content available for URL https://a.example/x with target selector #nope"
_TIME = "AssertionFailureError: Navigation timeout of 15000 ms exceeded"


@requirement("answer.errors")
@pytest.mark.parametrize(
    ("values", "readable", "says"),
    [
        ({"target_selector": "#nope"}, _NO_MATCH, "target_selector: matches nothing on the page; use another selector"),
        ({"targetSelector": "#nope"}, _NO_MATCH, "targetSelector: matches nothing on the page; use another selector"),
        ({"target_selector": "a["}, _SYNTAX, "target_selector: is no CSS selector that the service understands; corr"),
        (
            {"wait_for_selector": "a[", "remove_selector": "b"},
            _SYNTAX,
            "wait_for_selector or remove_selector: is no CSS selector",
        ),
        ({"wait_for_selector": "#late"}, _TIME, "The page took too long: perhaps nothing on it matches wait_for_sel"),
        ({}, _NO_MATCH, "The page could not be read; check the address or use another source. The service says: "),
        (
            {"wait_for_selector": "#x"},
            "AssertionFailureError: Invalid TLD",
            "The page could not be read; check the add",
        ),
    ],
)
def test_an_error_of_a_selector_names_its_argument(
    values: dict[str, Any], readable: str, says: str, jina: respx.Router, run_tool: Callable[..., ToolResult]
) -> None:
    body = {"code": 422, "status": 42206, "readableMessage": readable}
    jina.post("https://r.jina.ai/").respond(422, json=body)
    error = run_tool(definition({"mode": "reader"}), {"url": A, **values}).error
    assert error is not None
    assert error["message"].startswith(says)


@requirement("content.search")
@pytest.mark.parametrize(
    ("values", "advises"),
    [
        ({}, "Use other or fewer words."),
        ({"count": 5}, "Use other or fewer words."),
        ({"site": ["a.example"], "language": "de"}, "Use other or fewer words, or drop site or language."),
        ({"page": 3}, "Use other or fewer words. The results may end before this page."),
    ],
)
def test_a_search_without_results_names_only_filters_that_were_given(
    values: dict[str, Any], advises: str, jina: respx.Router, run_tool: Callable[..., ToolResult]
) -> None:
    jina.post("https://s.jina.ai/").respond(json={"code": 200, "data": []})
    assert run_tool(definition({"mode": "search"}), {"query": "x", **values}).text == f"No results for 'x'. {advises}"


@requirement("answer.errors")
def test_problem_appears_once_in_the_text_for_the_model(
    jina: respx.Router, run_tool: Callable[..., ToolResult]
) -> None:
    jina.post("https://r.jina.ai/").respond(451, json={"code": 451, "readableMessage": "Of law."})
    batch = {"tool": "jina.read_many"}
    for tool, values, said in (
        (definition({"tool": "jina.search"}), {"query": "x", "count": 50}, "count: must be"),
        (definition(batch), {"urls": []}, "urls: must be"),
        (definition(batch), {"urls": [A, "http://10.0.0.1/"]}, "2 (http://10.0.0.1/): urls: '10.0.0.1' is"),
        (definition(batch), {"urls": [A, B]}, "Of law."),
        (definition({"tool": "jina.read"}), {"url": A, "find": "x", "question": "y"}, "searches an earlier"),
    ):
        result = run_tool(tool, values)
        assert result.status == "failed"
        assert result.text.count(said) == 1


@requirement("arguments.checked")
@pytest.mark.parametrize(
    ("values", "cut"),
    [
        ({"cursor": ""}, False),
        ({"cursor": "", "find": "", "question": ""}, False),
        ({"max_result_tokens": ""}, False),
        ({"max_result_tokens": "800"}, True),
        ({"max_result_tokens": 800.0}, True),
    ],
)
def test_a_reader_that_declares_only_url_is_lenient_too(
    values: dict[str, Any], jina: respx.Router, run_tool: Callable[..., ToolResult], *, cut: bool
) -> None:
    jina.post("https://r.jina.ai/").respond(json={"code": 200, "data": {"content": "word " * 1_000}})
    schema = {"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]}
    found = definition({"mode": "reader"}, parameters=schema)
    result = run_tool(found, {"url": A, **values})
    assert result.status == "success"
    assert (result.cursor is not None) == cut
    if result.cursor:
        again = run_tool(found, {"url": A, "cursor": f'"{result.cursor}"'})
        assert again.text.startswith("[Continued: ")


@requirement("answer.errors", "url.checked")
@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"url": "A" * 44}, "url: is no address. If it is a cursor, give it as cursor, without url."),
        ({"url": A, "timeout": 7}, "A longer timeout may help."),
        ({"url": "10.1000/182"}, "asked for https://doi.org/10.1000/182"),
        ({"url": "doi:10.1000/x.y(1)"}, "asked for https://doi.org/10.1000/x.y(1)"),
        ({"url": "10.0.0.1/x"}, "is a private, local or reserved address"),
    ],
)
def test_an_address_and_a_time_that_a_model_gets_wrong(
    values: dict[str, Any], says: str, jina: respx.Router, run_tool: Callable[..., ToolResult]
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if "timeout" in values:
            raise TimeoutError
        return httpx.Response(451, json={"readableMessage": f"asked for {json.loads(request.content)['url']}"})

    jina.post("https://r.jina.ai/").mock(side_effect=answer)
    error = run_tool(definition({"tool": "jina.read"}), values).error
    assert error is not None
    assert says in error["message"]


@requirement("loop.answers", "secrets.output")
def test_secrets_in_a_large_state_are_masked() -> None:
    redactor = Redactor(["a-secret-of-the-test"])
    clean = {"results": [{"title": "jina_ " * 2_000, "url": "jina_ " * 2_000, "n": 1, "f": None}] * 40}
    dirty = {"results": [*clean["results"], {"a-secret-of-the-test": ["jina_ a-secret-of-the-test", 1.5, True]}]}
    values: list[dict[str, Any]] = [clean, dirty, {"n": 2**70, "s": "a-secret-of-the-test"}]
    assert redactor.value(clean) is clean
    for value in values[1:]:
        masked = redactor.value(value)
        assert "a-secret" not in str(masked)
        assert str(masked).replace(MASK, "a-secret-of-the-test") == str(value)


if __name__ == "__main__":
    everything: list[Any] = []
    for make_warm in ORDINARY.values():
        measure(make_warm, everything)
    sys.stdout.write(json.dumps({case: measure(make, everything) for case, make in (ORDINARY | LARGEST).items()}))


@requirement("definition.bounds")
def test_many_errors_of_many_arguments_are_not_all_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by a fuzzer: 14,000 errors took 160 ms."""
    rule: Any = False
    for _ in range(6):
        rule = {"allOf": [rule, rule]}
    located: list[int] = []
    find = schema._problems_of  # noqa: SLF001

    def counted(*given: Any) -> Any:
        located.append(1)
        return find(*given)

    monkeypatch.setattr(schema, "_problems_of", counted)
    problems = schema_problems({"type": "object", "additionalProperties": rule}, {f"a{n}": n for n in range(218)})
    assert problems
    assert 0 < len(located) <= 3_000
