"""A client of the kernel's management API (protocol section 4). The service never imports it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import httpx

from openapi_tool import __version__
from openapi_tool.tools.exports import as_yaml
from openapi_tool.tools.registry import RegistryError, stored_row

_TIMEOUT_S = 30.0
_PAGE = 100
_MAX_REASON_CHARS = 400


class ManagementApi:
    """The definitions of projects, through the kernel."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str) -> AsyncIterator[ManagementApi]:
        """A client of the API at `url`, which may hold a path, and a login that no message shows.

        Raises RegistryError for what is no URL.
        """
        try:
            client = httpx.AsyncClient(
                base_url=url,
                timeout=_TIMEOUT_S,
                trust_env=False,
                headers={"User-Agent": f"openapi-tool/{__version__}"},
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise RegistryError(f"--api is no URL: {error}") from None
        async with client:
            yield cls(client)

    async def rows(self, project_id: str) -> list[dict[str, Any]]:
        """Every definition of a project, page by page. Raises RegistryError."""
        found: list[dict[str, Any]] = []
        while True:
            query = {"limit": _PAGE, "offset": len(found)}
            page = _items(await self._ask("GET", _path(project_id), {HTTPStatus.OK}, params=query))
            found += [stored_row(row) for row in page]
            if len(page) < _PAGE:
                return sorted(found, key=lambda row: str(row["tool_name"]))

    async def row(self, project_id: str, tool_name: str) -> dict[str, Any] | None:
        """One definition, None where the API knows none. Raises RegistryError."""
        expected = {HTTPStatus.OK, HTTPStatus.NOT_FOUND}
        answer = await self._ask("GET", _path(project_id, tool_name), expected)
        return None if answer.status_code == HTTPStatus.NOT_FOUND else stored_row(_json(answer))

    async def put(self, project_id: str, row: Mapping[str, Any]) -> None:
        """Make or replace a definition: one YAML file in a form. Raises RegistryError."""
        file = ("tool.yaml", as_yaml(row).encode(), "application/yaml")
        await self._ask("POST", _path(project_id), {HTTPStatus.CREATED}, files={"file": file})

    async def delete(self, project_id: str, tool_name: str) -> bool:
        """Take a definition away; False where there was none. Raises RegistryError."""
        expected = {HTTPStatus.NO_CONTENT, HTTPStatus.NOT_FOUND}
        answer = await self._ask("DELETE", _path(project_id, tool_name), expected)
        return answer.status_code == HTTPStatus.NO_CONTENT

    async def _ask(self, method: str, path: str, expected: set[HTTPStatus], **request: Any) -> httpx.Response:
        try:
            answer = await self._client.request(method, path, **request)
        except httpx.HTTPError as error:
            raise RegistryError(f"{self._client.base_url.host}: {type(error).__name__}: {error}") from error
        if answer.status_code not in expected:
            raise RegistryError(f"HTTP {answer.status_code}: {_reason(answer)}")
        return answer


def _path(*names: str) -> str:
    project, *tool = (quote(name, safe="") for name in names)
    return "/".join(["projects", project, "tools", *tool])


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        raise RegistryError(f"{answer.url.host} answered with something that is no JSON") from None


def _items(answer: httpx.Response) -> list[Any]:
    """The rows of a page, whether it is a list or an object that holds one."""
    body = _json(answer)
    found = (
        body if isinstance(body, list) else next((item for item in dict(body).values() if isinstance(item, list)), [])
    )
    return [row for row in found if isinstance(row, dict)]


def _reason(answer: httpx.Response) -> str:
    """What an error says: the kernel's own form, a list for a malformed form, or the text."""
    try:
        body = answer.json()
    except ValueError:
        return answer.text[:_MAX_REASON_CHARS]
    detail = body.get("detail") if isinstance(body, dict) else body
    if isinstance(detail, dict):
        return f"{detail.get('error_code')}: {detail.get('error_message')}"[:_MAX_REASON_CHARS]
    if isinstance(detail, list):
        items = [item for item in detail if isinstance(item, dict)]
        return "; ".join(f"{'.'.join(map(str, item.get('loc', [])))}: {item.get('msg')}" for item in items)
    return str(detail)[:_MAX_REASON_CHARS]
