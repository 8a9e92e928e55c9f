"""Tests of the tool without servers; run with `pytest` in this folder (pip install 'openapi-tool[testing]')."""

import json
from pathlib import Path

from openapi_tool.testing import recorded

TOOL = Path(__file__).parent.parent / "tools" / "product_docs.yaml"


def test_the_search_stays_on_our_site(jina, run_tool):
    jina.post("https://s.jina.ai/").mock(recorded("s-post-json", site="docs.example.org"))
    result = run_tool(TOOL, {"query": "install"})
    assert result.status == "success"
    [request] = result.requests
    sent = json.loads(request.content)
    assert (sent["q"], sent["num"], sent["site"]) == ("install", 3, "docs.example.org")


def test_the_model_reads_titles_and_addresses(jina, run_tool):
    found = [{"title": "How to install", "url": "https://docs.example.org/install", "description": "In three steps."}]
    jina.post("https://s.jina.ai/").respond(json={"code": 200, "data": found})
    result = run_tool(TOOL, {"query": "install"})
    assert "How to install" in result.text
    assert "https://docs.example.org/install" in result.text


def test_the_model_cannot_choose_another_site(jina, run_tool):
    jina.post("https://s.jina.ai/").mock(recorded("s-post-json", site="docs.example.org"))
    result = run_tool(TOOL, {"query": "install", "site": "elsewhere.example"})
    assert [json.loads(request.content)["site"] for request in result.requests] == ["docs.example.org"]


def test_an_argument_of_the_wrong_type_costs_nothing(run_tool):
    result = run_tool(TOOL, {"query": ["install"], "count": "many"})
    assert (result.error_code, result.requests) == ("bad_request", ())


def test_an_exhausted_key_is_an_error_that_says_what_to_do(jina, run_tool):
    jina.post("https://s.jina.ai/").mock(recorded("InsufficientBalanceError"))
    result = run_tool(TOOL, {"query": "install"})
    assert (result.status, result.error_code) == ("failed", "budget_exceeded")
