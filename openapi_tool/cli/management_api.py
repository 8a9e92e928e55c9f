"""Client of the kernel's management API, which stores definitions of tools (protocol section 4).

Kernels differ in how they answer, so `_items` and `_reason` accept several forms.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import httpx

from openapi_tool import __version__
from openapi_tool.jina.network_failures import network_cause
from openapi_tool.tools.registry import NoSuchProject, RegistryError, RegistryUnreachable, stored_row
from openapi_tool.tools.stored_rows import as_yaml

_TIMEOUT_S = 30.0
_DEFAULT_PORTS = {"http": 80, "https": 443}
_PAGE_SIZE = 100
_MAX_REASON_CHARS = 400


class ManagementApi:
    """Definitions of projects. Every method raises RegistryError."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._existing_projects: set[str] = set()  # which `row` knows to exist

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str) -> AsyncIterator[ManagementApi]:
        """Open a client of the API at `url`, which may contain a path, and a login, which no message shows."""
        if not url.lower().startswith(("http://", "https://")):
            raise RegistryUnreachable("--api: must be a URL that begins with http:// or https://")
        try:
            client = httpx.AsyncClient(
                base_url=url,
                timeout=_TIMEOUT_S,
                trust_env=False,
                headers={"User-Agent": f"openapi-tool/{__version__}"},
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise RegistryUnreachable(f"--api is not a URL: {error}") from None
        async with client:
            yield cls(client)

    async def rows(self, project_id: str) -> list[dict[str, Any]]:
        """Return the definitions of a project."""
        stored: list[dict[str, Any]] = []
        while True:
            query = {"limit": _PAGE_SIZE, "offset": len(stored)}
            page = _items(await self._request("GET", _path(project_id), {HTTPStatus.OK}, params=query))
            stored += [stored_row(row) for row in page]
            if len(page) < _PAGE_SIZE:
                return sorted(stored, key=lambda row: str(row["tool_name"]))

    async def row(self, project_id: str, tool_name: str) -> dict[str, Any] | None:
        """Return a definition, or None. A project that does not exist is an error."""
        expected = {HTTPStatus.OK, HTTPStatus.NOT_FOUND}
        response = await self._request("GET", _path(project_id, tool_name), expected)
        if response.status_code != HTTPStatus.NOT_FOUND:
            return stored_row(_json(response))
        if project_id not in self._existing_projects:  # the tool is missing, or the whole project
            await self._request("GET", _path(project_id), {HTTPStatus.OK}, params={"limit": 1, "offset": 0})
            self._existing_projects.add(project_id)
        return None

    async def put(self, project_id: str, row: Mapping[str, Any]) -> None:
        """Create or replace a definition."""
        file = ("tool.yaml", as_yaml(row).encode(), "application/yaml")
        await self._request("POST", _path(project_id), {HTTPStatus.CREATED}, files={"file": file})

    async def delete(self, project_id: str, tool_name: str) -> bool:
        """Delete a definition; return False if there was none."""
        expected = {HTTPStatus.NO_CONTENT, HTTPStatus.NOT_FOUND}
        response = await self._request("DELETE", _path(project_id, tool_name), expected)
        return response.status_code == HTTPStatus.NO_CONTENT

    async def _request(self, method: str, path: str, expected: set[HTTPStatus], **options: Any) -> httpx.Response:
        """Return a response with an expected status; `options` are those of httpx."""
        try:
            response = await self._client.request(method, path, **options)
        except httpx.HTTPError as error:
            url = self._client.base_url
            port = url.port or _DEFAULT_PORTS[url.scheme]
            address = f"{url.host}:{port}"
            raise RegistryUnreachable(f"the kernel's API at {address}: {_describe(error)}; check --api") from error
        if response.status_code in expected:
            return response
        refusal = f"HTTP {response.status_code}: {_reason(response)}"
        if response.status_code == HTTPStatus.NOT_FOUND:
            raise NoSuchProject(refusal)
        raise RegistryError(refusal)


def _describe(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.TimeoutException):
        return f"no answer within {_TIMEOUT_S:g} s"
    if isinstance(error, httpx.TransportError):
        return network_cause(error)
    return f"no usable response ({str(error) or type(error).__name__})"


def _path(project_id: str, tool_name: str | None = None) -> str:
    tools = f"projects/{quote(project_id, safe='')}/tools"
    return tools if tool_name is None else f"{tools}/{quote(tool_name, safe='')}"


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        raise RegistryError(f"the response of {response.url.host} is not JSON") from None


def _items(response: httpx.Response) -> list[Any]:
    """Return the rows of a response: a list, or an object with a list in one of its members."""
    body = _json(response)
    candidates = [body] if isinstance(body, list) else dict(body).values()
    for candidate in candidates:
        if isinstance(candidate, list):
            return [row for row in candidate if isinstance(row, dict)]
    return []


def _reason(response: httpx.Response) -> str:
    """Return the message: in the kernel's own form, from a list of validation errors, or the text."""
    try:
        body = response.json()
    except ValueError:
        return response.text[:_MAX_REASON_CHARS]
    detail = body.get("detail") if isinstance(body, dict) else body
    if isinstance(detail, dict):
        return f"{detail.get('error_code')}: {detail.get('error_message')}"[:_MAX_REASON_CHARS]
    if isinstance(detail, list):
        return "; ".join(_validation_error(item) for item in detail if isinstance(item, dict))[:_MAX_REASON_CHARS]
    return str(detail)[:_MAX_REASON_CHARS]


def _validation_error(item: Mapping[str, Any]) -> str:
    """Return `body.tool_name: field required` of `{"loc": ["body", "tool_name"], "msg": "field required"}`."""
    place = ".".join(map(str, item.get("loc", [])))
    return f"{place}: {item.get('msg')}"
