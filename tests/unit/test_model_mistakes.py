"""What becomes of a model's mistakes: a repair where the intent is plain, else an error that says what to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import respx
from pydantic import SecretStr

from openapi_tool.cooperative import at_once
from openapi_tool.jina.content import search_output
from openapi_tool.jina.inline_images import without_inline_images
from openapi_tool.jina.parameter_mapping import resolve_parameters
from openapi_tool.protocol.errors import BadRequest
from openapi_tool.testing import ToolResult
from openapi_tool.tools.arguments import Arguments, OperatorEnvs, prepare_arguments
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.names import meant
from openapi_tool.tools.schema import schema_problems
from openapi_tool.tools.session import SessionScope
from tests.answering import Answering, serving
from tests.requirements import requirement
from tests.support import definition, owner, tool_call

STORED = "This is a cached snapshot of the original page, consider retry with caching opt-out."
A, B = "https://a.example/x", "https://b.example/"


def prepared(tool: str, values: dict[str, Any], schema: dict[str, Any] | None = None) -> Arguments:
    found = definition({"tool": tool}, parameters=CATALOGUE[tool].schema() if schema is None else schema)
    source = {"JINA_API_KEY": SecretStr("a-key-of-the-test")}.__getitem__
    return prepare_arguments(found, tool_call(values), owner(), OperatorEnvs(), source, SessionScope(b"k" * 32))


def refusal(tool: str, values: dict[str, Any], schema: dict[str, Any] | None = None) -> str:
    """The message about a call that is refused before anything is sent."""
    found = definition({"tool": tool}, parameters=CATALOGUE[tool].schema() if schema is None else schema)
    with pytest.raises(BadRequest) as failed:
        resolve_parameters(found, prepared(tool, values, schema))
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
    found = prepared(tool, values)
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
        ("jina.search", {"query": "x", "country": "Germany"}, "country: must be a text of 2 characters"),
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
def test_an_error_says_the_rule_in_words_and_no_value(tool: str, values: dict[str, Any], says: str) -> None:
    message = refusal(tool, values)
    assert message.startswith(says)
    assert "; " not in message.replace("; did you", "")  # one problem, told once


@requirement("arguments.checked")
def test_both_validators_say_a_rule_alike() -> None:
    wrong = {"query": " ", "count": 50, "page": "x", "with_content": 3, "max_tokens": 1, "site": 3, "foo": 3}
    expected = {
        "query: must be a text of 1 to 2,000 characters, not blank",
        "count: must be an integer from 1 to 20",
        "page: must be an integer from 1 to 1,000",
        "max_tokens: must be an integer from 500 to 2,000,000",
        "with_content: must be true or false",
        "foo: is not an argument that this tool takes",
    }
    for schema in (None, {"type": "object"}):
        said = set(refusal("jina.search", wrong, schema).split("; "))
        assert expected <= said
        assert len(said) == len(expected) + 1


@requirement("arguments.checked")
def test_an_unknown_argument_is_named_in_place_of_a_required_one() -> None:
    opened = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    assert refusal("jina.search", {"q": "x"}, opened) == "query: is required; give it in place of q"
    assert refusal("jina.search", {"query": "x", "limit": 3}, {"type": "object"}).endswith("; did you mean count?")


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
    assert meant(name, known) == expected


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
def test_rules_of_own_definitions_are_said_in_words(rule: dict[str, Any], value: Any, says: str) -> None:
    assert schema_problems({"properties": {"a": rule}}, {"a": value}) == [f"a: must be {says}"]


@requirement("answer.errors")
async def test_the_address_of_a_batch_is_refused_under_its_own_name() -> None:
    output = await Answering(serving(b'{"data":{"content":"x"}}')).output(urls=[A, "http://10.0.0.1/"])
    assert "target_refused): urls: '10.0.0.1' is" in output.content


class _Counted(str):
    """A text that counts how many of its characters were searched."""

    searched = 0
    __slots__ = ()

    def find(self, wanted: str, start: int = 0, end: int | None = None) -> int:  # type: ignore[override]
        found = super().find(wanted, start, len(self) if end is None else end)
        _Counted.searched += (len(self) if found < 0 and end is None else end or 0 if found < 0 else found) - start
        return found


@requirement("loop.answers")
@pytest.mark.parametrize("mark", ["](blob:\n", "src='data:image/\n"])
def test_addresses_of_images_that_are_never_closed_are_looked_through_once(mark: str) -> None:
    text = _Counted(mark * 2_000 + ")'")
    _Counted.searched = 0
    assert at_once(without_inline_images([text])) == [text]
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
        text = run_tool(found, {"url": f"{A}{number}"}).text  # else the second would come from the cache
        assert {name for name in _TAKEN[1:] if f"with {name}" in text or f"larger {name}" in text} == expected
