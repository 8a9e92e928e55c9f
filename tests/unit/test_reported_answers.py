"""Answers that people reported as misleading: what the upstream sends, and what a model must read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import respx

from openapi_tool.testing import ToolResult
from tests.requirements import requirement
from tests.support import definition, each

RunTool = Callable[..., ToolResult]
SEARCH, READER = {"tool": "jina.search"}, {"tool": "jina.read"}
SEARCH_URL, READER_URL = "https://s.jina.ai/", "https://r.jina.ai/"
QUERY, PAGE = {"query": "x"}, {"url": "https://a.example/"}
CHARGED = {"usage": {"tokens": 10_000}}


def state(result: ToolResult) -> Mapping[str, Any]:
    """Return what a user interface gets of a success."""
    output = result.fields.tool_output
    assert output is not None
    found: Mapping[str, Any] = output["state"]
    return found


def message(result: ToolResult) -> str:
    """Return the message of a failure."""
    assert result.error is not None
    return result.error["message"]


# Bodies of failures with the HTTP status 200.


@each(
    "body",
    [
        {},
        {"error": "no credits"},
        {"error": {"code": 500, "message": "boom"}},
        {"message": "boom"},
        {"results": [{"title": "a", "url": "https://a.example/"}]},
        {"code": 200, "data": None},
        {"code": 200, "data": {"results": []}},
        {"code": "ENOENT", "message": "open '/srv/data'"},
    ],
)
@requirement("upstream.errors")
def test_a_body_without_a_list_of_results_is_no_empty_search(
    body: dict[str, Any], jina: respx.Router, run_tool: RunTool
) -> None:
    jina.post(SEARCH_URL).respond(json=body)
    result = run_tool(definition(SEARCH), QUERY)
    assert (result.status, result.error_code) == ("failed", "upstream_unavailable")
    assert "No results" not in result.text


_FAILURE = {"data": None, "name": "SomeError", "readableMessage": "SomeError: no"}


@each(
    ("body", "code", "http_status"),
    [
        ({"code": 402, "status": 40201}, "budget_exceeded", 402),
        ({"code": 200, "status": 40201}, "budget_exceeded", 402),
        ({"status": 40201}, "budget_exceeded", 402),
        ({"status": 402}, "budget_exceeded", 402),
        ({"code": "429"}, "rate_limited", 429),
        ({"code": 429.0}, "rate_limited", 429),
        ({"code": 200, "status": "45102"}, "target_refused", 451),
        ({"code": "ENOENT", "status": 50000}, "upstream_unavailable", 500),
        ({"code": 500, "status": 400}, "upstream_unavailable", 500),
    ],
)
@requirement("upstream.errors")
def test_code_and_status_in_a_200_count_as_the_http_status(
    body: dict[str, Any], code: str, http_status: int, jina: respx.Router, run_tool: RunTool
) -> None:
    for url, tool, values in ((SEARCH_URL, SEARCH, QUERY), (READER_URL, READER, PAGE)):
        jina.post(url).respond(json=_FAILURE | body)
        result = run_tool(definition(tool), values)
        assert result.error is not None
        assert (result.error["code"], result.error.get("http_status")) == (code, http_status)


@each("status", [200, 20000, 20001, "20000", 7, None, "ok"])
@requirement("upstream.errors")
def test_a_status_of_success_or_of_no_meaning_is_a_success(status: Any, jina: respx.Router, run_tool: RunTool) -> None:
    jina.post(READER_URL).respond(json={"code": 200, "status": status, "data": {"content": "x"}})
    assert run_tool(definition(READER), PAGE).status == "success"


@requirement("upstream.errors", "content.search")
def test_nothing_found_is_no_error_inside_a_200_either(jina: respx.Router, run_tool: RunTool) -> None:
    body = {"data": None, "code": 422, "status": 42206, "message": "No search results available for query x"}
    jina.post(SEARCH_URL).respond(json=body)
    result = run_tool(definition(SEARCH), QUERY)
    assert result.status == "success"
    assert "No results for 'x'" in result.text


# Damaged items and numbers of a search that is charged.


@requirement("content.search", "usage.exact")
@pytest.mark.parametrize("damaged", [None, "text", 7, []])
def test_a_damaged_item_of_a_search_is_left_out_and_counted(
    damaged: Any, jina: respx.Router, run_tool: RunTool
) -> None:
    results = [{"title": "a", "url": "https://a.example/"}, damaged, {"title": "b", "url": "https://b.example/"}]
    jina.post(SEARCH_URL).respond(json={"code": 200, "data": results, "meta": CHARGED})
    result = run_tool(definition(SEARCH), QUERY)
    assert "1. a" in result.text
    assert "2. b" in result.text
    assert "[1 further result came damaged and is left out.]" in result.text
    assert [one["title"] for one in state(result)["results"]] == ["a", "b"]
    assert result.usage["tokens"] == 10_000


@requirement("content.search", "usage.exact")
def test_a_search_of_damaged_items_only_is_a_failure_with_its_cost(jina: respx.Router, run_tool: RunTool) -> None:
    jina.post(SEARCH_URL).respond(json={"code": 200, "data": [None, None], "meta": CHARGED})
    result = run_tool(definition(SEARCH), QUERY)
    assert result.error_code == "upstream_unavailable"
    assert result.usage["tokens"] == 10_000


@requirement("usage.exact")
@pytest.mark.parametrize("tokens", [10_000, "10000", 10_000.0])
def test_tokens_are_read_from_any_form_of_the_number(tokens: Any, jina: respx.Router, run_tool: RunTool) -> None:
    for url, tool, values, data in (
        (SEARCH_URL, SEARCH, QUERY, [{"title": "a"}]),
        (READER_URL, READER, PAGE, {"content": "x"}),
    ):
        jina.post(url).respond(json={"code": 200, "data": data, "meta": {"usage": {"tokens": tokens}}})
        assert run_tool(definition(tool), values).usage["tokens"] == 10_000
