"""open-webui's external web search and web loader, as its source calls them."""

from __future__ import annotations

from typing import Any

import pytest

from openapi_tool.local.stack import UpstreamDouble
from tests.gateway.conftest import PAGE, Serve
from tests.gateway.test_mcp import page_of
from tests.requirements import requirement

SEARCH, LOAD = "/integrations/open-webui/search", "/integrations/open-webui/load"


@requirement("gateway.open_webui")
async def test_a_search_gets_links_titles_and_snippets(serve: Serve) -> None:
    async with serve() as served:
        token = await served.token()
        async with served.client(token, **{"X-OpenWebUI-Chat-Id": "c"}) as client:
            answer = await client.post(SEARCH, json={"query": "hello", "count": 3})
    assert answer.status_code == 200, answer.text
    results = answer.json()
    assert 1 <= len(results) <= 3
    for result in results:
        assert set(result) == {"link", "title", "snippet"}
        assert result["link"].startswith("http")
        assert result["title"]
        assert "[Untrusted" not in result["snippet"]
        assert result["link"] not in result["snippet"].splitlines()
    assert any(result["snippet"] for result in results)


@requirement("gateway.open_webui")
async def test_pages_are_loaded_whole_and_without_frames(serve: Serve, double: UpstreamDouble) -> None:
    long = "A sentence about lighthouses. " * 10_000
    double.rules({"match": "long", "body": page_of(long)})
    async with serve() as served, served.client(await served.token()) as client:
        answer = await client.post(LOAD, json={"urls": [PAGE, "ftp://x", f"{PAGE}?long"]})
    assert answer.status_code == 200, answer.text
    short, whole = answer.json()
    assert short["metadata"]["source"] == PAGE
    assert "A Fixture Article" in short["page_content"]
    assert whole["metadata"]["source"] == f"{PAGE}?long"
    assert whole["page_content"].count("lighthouses") == 10_000
    for page in (short, whole):
        assert "[Untrusted" not in page["page_content"]


@requirement("gateway.open_webui")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (SEARCH, {}),
        (SEARCH, {"query": 1, "count": 3}),
        (SEARCH, {"query": "x", "count": 0}),
        (SEARCH, {"query": "x", "count": "many"}),
        (SEARCH, {"query": "", "count": 1}),
        (LOAD, {}),
        (LOAD, {"urls": []}),
        (LOAD, {"urls": [1]}),
        (LOAD, {"urls": [PAGE] * 21}),
        (LOAD, {"urls": ["ftp://x"]}),
    ],
)
async def test_a_wrong_request_is_a_problem(serve: Serve, path: str, body: Any, double: UpstreamDouble) -> None:
    async with serve() as served, served.client(await served.token()) as client:
        answer = await client.post(path, json=body)
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")
    assert double.requests() == []
