"""Build the upstream request from resolved parameters (jina-api 0-2).

POST with a JSON body can carry every parameter. A definition that asks for GET gets it, unless a parameter does not
fit: secrets never go into a URL, and some texts fit into no header.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import Any
from urllib.parse import quote

from pydantic import SecretStr

from openapi_tool import __version__
from openapi_tool.frozen import frozen
from openapi_tool.jina.endpoints import Endpoint, endpoint_of
from openapi_tool.jina.failures import FAILURES, FailureTable
from openapi_tool.jina.parameter_mapping import ResolvedParameters
from openapi_tool.protocol.jsontext import dumps
from openapi_tool.tools.definition import ToolDefinition

USER_AGENT = f"openapi-tool/{__version__}"
_DNT = "DNT"  # the upstream parses a number: `true` has no effect (jina-api section 9)
MAX_GET_URL_CHARS = 8_000


@frozen
class UpstreamRequest:
    """Request without its API key; `target` is the percent-encoded path and query.

    `names` maps parameters to the model's names for them, `failures` maps error responses to errors.
    """

    method: str
    host: str
    target: str
    headers: Mapping[str, str]
    body: bytes | None
    failures: FailureTable = field(default=FAILURES, repr=False)
    names: Mapping[str, str] = field(default_factory=dict, repr=False)


def build_request(definition: ToolDefinition, resolved: ResolvedParameters) -> UpstreamRequest:
    """Return the request of a call, in the form that its definition asks for."""
    endpoint = endpoint_of(definition)
    if not endpoint.separators.keys().isdisjoint(resolved.parameters):
        resolved = replace(resolved, parameters=_with_appended(endpoint, resolved.parameters))
    if definition.method == "GET" and (request := _get(endpoint, definition.path, resolved)) is not None:
        return request
    return _post(endpoint, definition.path, resolved)


def _with_appended(endpoint: Endpoint, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Append the parameters that the upstream takes only as part of the query or page address."""
    name = endpoint.operation.main_parameter
    text = parameters[name]
    for other, separator in endpoint.separators.items():
        if other in parameters:
            start = text.partition("#")[0] if separator == "#" else text  # an address has one fragment
            text = f"{start}{separator}{parameters[other]}"
    rest = {other: value for other, value in parameters.items() if other not in endpoint.separators}
    return {**rest, name: text}


def _post(endpoint: Endpoint, path: str, resolved: ResolvedParameters) -> UpstreamRequest:
    body: dict[str, Any] = {}
    headers = {"Content-Type": "application/json"}
    for name, value in (*resolved.parameters.items(), *_revealed(resolved.secrets)):
        parameter = endpoint.find(name)
        if parameter is not None and parameter.header_only and parameter.header:
            headers[parameter.header] = _header_text(value)
        else:
            _nest(body, name, value)
    operation = endpoint.operation
    path = "/" if path == operation.template else path  # the page address is in the body
    return UpstreamRequest(
        "POST", operation.host, path, _headers(headers), dumps(body), endpoint.failures, resolved.names
    )


def _revealed(secrets: Mapping[str, SecretStr]) -> Iterator[tuple[str, str]]:
    return ((name, value.get_secret_value()) for name, value in secrets.items())


def _nest(body: dict[str, Any], name: str, value: Any) -> None:
    *parents, leaf = name.split(".")
    for parent in parents:
        body = body.setdefault(parent, {})
    body[leaf] = value


def _get(endpoint: Endpoint, path: str, resolved: ResolvedParameters) -> UpstreamRequest | None:
    if resolved.secrets:
        return None
    headers: dict[str, str] = {}
    query: list[str] = []
    operation = endpoint.operation
    for name, value in resolved.parameters.items():
        parameter = endpoint.find(name)
        header = parameter.header if parameter else None
        if header is not None:
            if _would_be_split(name, value):
                return None
            headers[header] = "1" if header == _DNT else _header_text(value)
        elif name == operation.main_parameter and operation.template:
            path = "/" + quote(value, safe="")
        elif isinstance(value, dict):
            return None
        else:
            query.extend(_query(name, value))
    target = path + ("?" + "&".join(query) if query else "")
    if len(target) > MAX_GET_URL_CHARS or not all(map(_fits_header, headers.values())):
        return None
    return UpstreamRequest("GET", operation.host, target, _headers(headers), None, endpoint.failures, resolved.names)


def _would_be_split(name: str, value: Any) -> bool:
    """Return whether the server would split a selector in a header: it splits at each comma, also in `:is(h1, h2)`."""
    texts = value if isinstance(value, list) else [value]
    return name.endswith("Selector") and any(", " in text for text in texts)


def _query(name: str, value: Any) -> Iterator[str]:
    for item in value if isinstance(value, list) else [value]:
        text = str(item).lower() if isinstance(item, bool) else str(item)
        yield f"{name}={quote(text, safe='')}"


def _header_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true"  # never False, which is not sent: the upstream takes any value as true (jina/parameters.py)
    return ", ".join(value) if isinstance(value, list) else str(value)


def _fits_header(text: str) -> bool:
    return text.isascii() and text.isprintable()


def _headers(parameters: Mapping[str, str]) -> dict[str, str]:
    """Return all headers. `identity` asks for no compression: a small body could unpack to any size."""
    return {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": USER_AGENT, **parameters}
