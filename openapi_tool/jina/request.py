"""From a plan to the bytes of one upstream request, built from scratch (jina-api sections 0 to 2).

POST with a JSON body is the lossless form. A definition that says GET gets its GET, unless the plan
cannot travel in one: a secret never goes into a URL, and neither do texts that no header can hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from pydantic import SecretStr

from openapi_tool import __version__
from openapi_tool.jina.parameters import find_parameter
from openapi_tool.jina.plan import Plan
from openapi_tool.protocol.jsontext import dumps
from openapi_tool.tools.catalogue import Mode
from openapi_tool.tools.definition import ToolDefinition

USER_AGENT = f"openapi-tool/{__version__}"
MAX_GET_URL_CHARS = 8_000
_READER_URL = "/{url}"


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """A request as it leaves, but for the key; `target` is the percent-encoded path and query."""

    method: str
    host: str
    target: str
    headers: Mapping[str, str]
    body: bytes | None


def build_request(definition: ToolDefinition, plan: Plan) -> UpstreamRequest:
    """The one request of a call, in the form that its definition asks for."""
    if definition.method == "GET" and (request := _get(definition, plan)) is not None:
        return request
    return _post(definition, plan)


def _post(definition: ToolDefinition, plan: Plan) -> UpstreamRequest:
    body: dict[str, Any] = {}
    headers = {"Content-Type": "application/json"}
    for name, value in (*plan.parameters.items(), *_opened(plan.secrets)):
        parameter = find_parameter(definition.mode, name)
        if parameter is not None and parameter.header_only and parameter.header:
            headers[parameter.header] = _header_text(value)
        else:
            _nest(body, name, value)
    path = "/" if definition.path == _READER_URL else definition.path
    return UpstreamRequest("POST", definition.host, path, _headers(headers), dumps(body))


def _opened(secrets: Mapping[str, SecretStr]) -> Iterator[tuple[str, str]]:
    return ((name, value.get_secret_value()) for name, value in secrets.items())


def _nest(body: dict[str, Any], name: str, value: Any) -> None:
    *parents, leaf = name.split(".")
    for parent in parents:
        body = body.setdefault(parent, {})
    body[leaf] = value


def _get(definition: ToolDefinition, plan: Plan) -> UpstreamRequest | None:
    """The GET form, or None where only a body holds the plan."""
    if plan.secrets:
        return None
    headers: dict[str, str] = {}
    query: list[str] = []
    path = definition.path
    for name, value in plan.parameters.items():
        header = _header_of(definition.mode, name)
        if header is not None:
            headers[header] = _header_text(value)
        elif name == "url":
            path = "/" + quote(value, safe="")
        elif isinstance(value, dict):
            return None
        else:
            query.extend(_query(name, value))
    target = path + ("?" + "&".join(query) if query else "")
    if len(target) > MAX_GET_URL_CHARS or not all(map(_fits_header, headers.values())):
        return None
    return UpstreamRequest("GET", definition.host, target, _headers(headers), None)


def _header_of(mode: Mode, name: str) -> str | None:
    parameter = find_parameter(mode, name)
    return parameter.header if parameter else None


def _query(name: str, value: Any) -> Iterator[str]:
    for item in value if isinstance(value, list) else [value]:
        text = str(item).lower() if isinstance(item, bool) else str(item)
        yield f"{name}={quote(text, safe='')}"


def _header_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true"
    return ", ".join(value) if isinstance(value, list) else str(value)


def _fits_header(text: str) -> bool:
    return text.isascii() and text.isprintable()


def _headers(parameters: Mapping[str, str]) -> dict[str, str]:
    return {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": USER_AGENT, **parameters}
