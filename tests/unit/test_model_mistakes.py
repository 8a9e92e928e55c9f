"""Mistakes of a model: repaired if the intent is plain, else an error that says what to change."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import respx
from pydantic import SecretStr

from openapi_tool.concurrency import at_once
from openapi_tool.jina.content import search_output
from openapi_tool.jina.inline_images import without_inline_images
from openapi_tool.jina.parameter_mapping import resolve_parameters
from openapi_tool.protocol.errors import BadRequest
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.testing import ToolResult
from openapi_tool.tools.arguments import Arguments, OperatorEnvs, prepare_arguments
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.names import probably_meant
from openapi_tool.tools.schema import schema_problems
from openapi_tool.tools.scopes import SessionScope
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
    """Return the error message of a call that is refused before anything is sent."""
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
    output = await Answering(serving(b'{"data":{"content":"x"}}')).output(urls=[A, "http://10.0.0.1/"])
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
def test_secrets_in_a_large_state_are_masked_in_steps() -> None:
    redactor = Redactor(["a-secret-of-the-test"])
    clean = {"results": [{"title": "jina_ " * 2_000, "url": "jina_ " * 2_000, "n": 1, "f": None}] * 40}
    dirty = {"results": [*clean["results"], {"a-secret-of-the-test": ["jina_ a-secret-of-the-test", 1.5, True]}]}
    values: list[dict[str, Any]] = [clean, dirty, {"n": 2**70, "s": "a-secret-of-the-test"}]
    for value in values:
        steps, counted = redactor.value_steps(value), 0
        try:
            while True:
                next(steps)
                counted += 1
        except StopIteration as done:
            assert done.value == redactor.value(value)
        assert counted > (9 if "results" in value else 0)
