"""End points for open-webui, a chat program, as its external web search and external web loader.

Requests and responses have the form that its source has (`retrieval/web/external.py` and
`retrieval/loaders/external_web.py`):

- It sends a search with `query` and `count`, and expects a list of `link`, `title` and `snippet`.
- It sends up to 20 `urls` to load, and expects a list of `page_content` and `metadata`, of which it reads `source`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from openapi_tool.gateway.call import Answer, Caller
from openapi_tool.gateway.calls import Gateway
from openapi_tool.gateway.results import text_of
from openapi_tool.http.calls import ClientGone, caller_of, json_object, while_connected
from openapi_tool.http.problems import Problem, failed_call
from openapi_tool.http.tools import json_response
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.jsontext import whole_number
from openapi_tool.tools.frames import contents

MAX_URLS = 20  # of one request of its loader
MAX_PAGE_CHARS = 1_000_000  # of each page
_MAX_RESULTS = 20  # of one request of its search


class OpenWebuiRoutes:
    """End points for open-webui."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @property
    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/integrations/open-webui/search", self.search, methods=["POST"]),
            Route("/integrations/open-webui/load", self.load, methods=["POST"]),
        ]

    async def search(self, request: Request) -> Response:
        """Search the web."""
        given = await json_object(request)
        query = given.get("query")
        count = whole_number(given.get("count", 10))
        if not isinstance(query, str) or count is None or count < 1:
            raise Problem(
                HTTPStatus.BAD_REQUEST, "bad_request", "Give query, a text, and count, a whole number from 1."
            )
        arguments = {"query": query, "count": min(count, _MAX_RESULTS)}
        try:
            answer, is_connected = await while_connected(
                request, self._call(caller_of(request), "jina.search", arguments)
            )
        except ClientGone:
            return Response(status_code=HTTPStatus.REQUEST_TIMEOUT)
        if not is_connected:
            self._gateway.keep_soon(answer)  # the client may repeat the search
        if answer.fields.error is not None:
            return failed_call(answer)
        return json_response(_results(answer, count))

    async def load(self, request: Request) -> Response:
        """Read pages. Those that cannot be read are left out; if none can be, the first one's error is the answer."""
        given = await json_object(request)
        urls = given.get("urls")
        if (
            not isinstance(urls, list)
            or not 1 <= len(urls) <= MAX_URLS
            or not all(isinstance(url, str) for url in urls)
        ):
            raise Problem(HTTPStatus.BAD_REQUEST, "bad_request", f"Give urls, a list of 1 to {MAX_URLS} addresses.")
        caller = caller_of(request)
        try:
            answers, _ = await while_connected(request, self._read_all(caller, urls))
        except ClientGone:
            return Response(status_code=HTTPStatus.REQUEST_TIMEOUT)
        pages = []
        for url, answer in zip(urls, answers, strict=True):
            if answer.fields.error is None:
                pages.append(await self._page(caller, url, answer))
        return json_response(pages) if pages else failed_call(answers[0])

    async def _read_all(self, caller: Caller, urls: list[str]) -> list[Answer]:
        async with asyncio.TaskGroup() as group:
            reading = [group.create_task(self._call(caller, "jina.read", {"url": url})) for url in urls]
        return [task.result() for task in reading]

    async def _call(self, caller: Caller, built_in: str, arguments: dict[str, Any]) -> Answer:
        """Call the caller's first tool that does what a built-in one does, such as `jina.search`."""
        return await self._gateway.call(caller, self._tool_name(caller, built_in), arguments)

    def _tool_name(self, caller: Caller, built_in: str) -> str:
        for tool in self._gateway.tools_of(caller):
            if tool.definition.built_in.name == built_in:
                return tool.name
        return built_in.replace(".", "_")  # the call fails, and its error names the tools that there are

    async def _page(self, caller: Caller, url: str, answer: Answer) -> dict[str, Any]:
        """Return a page in open-webui's form: its whole text, or what the answer has of it if that is not stored."""
        text = None
        with suppress(Unavailable):
            text = await self._gateway.whole_text(caller, answer, MAX_PAGE_CHARS)
        if text is None:
            text = "\n\n".join(contents(text_of(answer)))[:MAX_PAGE_CHARS]
        metadata = {"source": url}
        state = _state(answer)
        if "title" in state:
            metadata["title"] = state["title"]
        return {"page_content": text, "metadata": metadata}


def _state(answer: Answer) -> dict[str, Any]:
    """Return addresses and titles of a result."""
    return answer.facts.get("state") or {}


def _results(answer: Answer, count: int) -> list[dict[str, str]]:
    """Return the results, each with the lines of its text that are neither its title nor its address."""
    found: Any = _state(answer).get("results", [])
    shown = contents(text_of(answer))  # the text of each result, without its frame; its first line is the title
    results = []
    for number, facts in enumerate(found[:count]):
        link = str(facts.get("url", ""))
        lines = shown[number].splitlines()[1:] if number < len(shown) else []
        snippet = "\n".join(line for line in lines if line.strip() not in ("", link))
        results.append({"link": link, "title": str(facts.get("title", "")), "snippet": snippet})
    return results
