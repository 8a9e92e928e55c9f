"""Arguments as models give them: repaired where the meaning is clear, else an error that names the right argument."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import respx

from openapi_tool.testing import ToolResult
from openapi_tool.tools.argument_hints import MAIN_NAMES
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.operations import OPERATIONS
from tests.requirements import requirement
from tests.support import definition, each

PAGE = {"code": 200, "data": {"content": "x"}}
RESULTS = {"code": 200, "data": [{"title": "x", "url": "https://a.example/"}]}
Run = Callable[..., ToolResult]


def built_in(name: str, *, closed: bool = True) -> Any:
    return definition({"tool": name}, parameters=CATALOGUE[name].schema() if closed else None)


def repaired(result: ToolResult) -> list[str]:
    assert isinstance(result.fields.tool_output, dict)
    names: list[str] = result.fields.tool_output.get("repaired", [])
    return names


# Addresses.


@each(
    ("given", "sent"),
    [
        ("https://en.wikipedia.org/wiki/New York City", "https://en.wikipedia.org/wiki/New%20York%20City"),
        ("en.wikipedia.org/wiki/San Jose\u00a0City ", "https://en.wikipedia.org/wiki/San%20Jose%20City"),
        ("https://a.example/?q=two words&x=%41#a part", "https://a.example/?q=two%20words&x=%41#a%20part"),
        ("`https://a.example/a b`", "https://a.example/a%20b"),
        ("arxiv:2403.09060", "https://arxiv.org/abs/2403.09060"),
        ("arXiv: 2403.09060v2", "https://arxiv.org/abs/2403.09060v2"),
        ("arxiv:math.GT/0309136", "https://arxiv.org/abs/math.GT/0309136"),
        ("doi: 10.1000/182", "https://doi.org/10.1000/182"),
        ("https://a.example/?x=1&amp;y=2", "https://a.example/?x=1&y=2"),
        ('--url "https://a.example/learn"', "https://a.example/learn"),
        ("url: https://a.example/learn/2", "https://a.example/learn/2"),
        ("URL=https://a.example/learn/3", "https://a.example/learn/3"),
        ("Please read <https://a.example/4> for me.", "https://a.example/4"),
        ('{"url": "https://a.example/x"}', "https://a.example/x"),
        ('{"target_url": "a.example/y", "format": "text"}', "https://a.example/y"),
        ('["https://a.example/z"]', "https://a.example/z"),
        ('[{"url": "https://a.example/w"}]', "https://a.example/w"),
        ("(https://a.example/v)", "https://a.example/v"),
        ("(https://a.example/A_(b))", "https://a.example/A_(b)"),
        ("\u300ahttps://a.example/u\u300b", "https://a.example/u"),
        ("\uff08https://a.example/t\uff09\u3002", "https://a.example/t"),
    ],
)
@requirement("url.checked")
def test_an_address_is_repaired_and_listed(given: str, sent: str, jina: respx.Router, run_tool: Run) -> None:
    jina.post("https://r.jina.ai/").respond(json=PAGE)
    result = run_tool(built_in("jina.read"), {"url": given})
    assert json.loads(result.requests[0].content)["url"] == sent
    assert repaired(result) == ["url"]
    batch = run_tool(built_in("jina.read_many"), {"urls": [given, "https://b.example/"], "no_cache": True})
    assert {json.loads(request.content)["url"] for request in batch.requests} == {sent, "https://b.example/"}
    assert repaired(batch) == ["urls"]


@requirement("url.checked")
def test_a_valid_address_is_not_listed_as_repaired(jina: respx.Router, run_tool: Run) -> None:
    jina.post("https://r.jina.ai/").respond(json=PAGE)
    assert repaired(run_tool(built_in("jina.read"), {"url": "https://a.example/x%20y"})) == []


@each(
    ("given", "says"),
    [
        ("hello world", "is no address. To find pages by words, use the search tool."),
        ("What is the capital of France?", "To find pages by words, use the search tool."),
        ("see example.com please", "To find pages by words, use the search tool."),
        (
            "https://a.example/ https://b.example/",
            "holds several addresses. Give one; call the tool for each",
        ),
        ('["https://a.example/", "https://b.example/"]', "holds several addresses. Give one"),
        ("Who won? See https://a.example/x", "holds words beside the address. Give the address alone."),
        ("v1.2 of a.example/y https://a.example/x", "holds several addresses. Give one"),
        ('{"query": "hello"}', "is JSON without an address"),
        ('[{"query": "hello"}]', "is JSON without an address"),
        ("https://a.example/x\ny", "holds blanks, line breaks or control characters"),
        ("https://a b.example/", "holds blanks"),
    ],
)
@requirement("url.checked")
def test_what_is_no_address_says_what_to_do(given: str, says: str, run_tool: Run) -> None:
    result = run_tool(built_in("jina.read"), {"url": given})
    assert (result.error_code, result.requests) == ("bad_request", ())
    assert says in result.text


# Arguments that this tool does not take.


@requirement("catalogue")
def test_the_names_of_queries_and_addresses_are_those_of_the_catalogue() -> None:
    assert frozenset[str]().union(*(operation.main_parameter_names for operation in OPERATIONS)) == MAIN_NAMES


@each(
    ("tool", "values", "says"),
    [
        (
            "jina.search",
            {"query": "x", "type": "news"},
            "is not an argument that this tool takes; it searches",
        ),
        ("jina.search", {"query": "x", "topic": "news"}, "for news or images say so in query"),
        ("jina.search", {"query": "x", "time_range": "week"}, "for recent pages give recency"),
        ("jina.search", {"query": "x", "days": 7}, "for recent pages give recency"),
        ("jina.search", {"query": "x", "tbs": "qdr:w"}, "for recent pages give recency"),
        ("jina.search_many", {"queries": ["x"], "freshness": "pw"}, "for recent pages give recency"),
        ("jina.search", {"queries": ["a", "b"]}, "give query, and call the tool for each"),
        ("jina.read", {"urls": ["https://a.example/", "https://b.example/"]}, "give url, and call the tool for each"),
        (
            "jina.search",
            {"query": ["a", "b"]},
            "a text of 1 to 2,000 characters, not blank (it takes one",
        ),
        ("jina.read", {"url": ["https://a.example/", "https://b.example/"]}, "it takes one: call the tool for each"),
    ],
)
@requirement("answer.errors")
def test_an_argument_of_another_tool_names_the_right_one(
    tool: str, values: dict[str, Any], says: str, run_tool: Run
) -> None:
    result = run_tool(built_in(tool), values)
    assert result.error_code == "bad_request"
    assert says in result.text
    assert "did you mean" not in result.text


@each(
    ("tool", "values", "says"),
    [
        ("jina.search", {"query": ["a", "b"]}, "it takes one: call the tool for each"),
        ("jina.read", {"url": ["https://a.example/", "https://b.example/"]}, "it takes one: call the tool for each"),
    ],
)
@requirement("answer.errors")
def test_the_same_for_a_definition_that_declares_nothing(
    tool: str, values: dict[str, Any], says: str, run_tool: Run
) -> None:
    assert says in run_tool(built_in(tool, closed=False), values).text


@each("name", ["target_selector", "remove_selector", "wait_for_selector"])
@requirement("answer.errors")
def test_a_list_of_selectors_is_joined(name: str, jina: respx.Router, run_tool: Run) -> None:
    jina.post("https://r.jina.ai/").respond(json=PAGE)
    values = {"url": "https://a.example/", name: ["article", ".main > p", " "]}
    result = run_tool(built_in("jina.read"), values)
    body = json.loads(result.requests[0].content)
    assert "article, .main > p" in body.values()
    assert repaired(result) == [name]
