"""Builds the upstream request of a call from its resolved parameters (jina-api 0-2).

A POST request has a JSON body, which can carry every parameter. A definition may ask for GET. Then each parameter
becomes a header or a part of the URL. The request is POST nevertheless if a parameter does not fit into GET: a secret
never goes into a URL, and some texts fit into no header.

The *main* parameter is the query of a search, or the address of a page. The upstream takes some other parameters only
if they are appended to that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from urllib.parse import quote

from pydantic import SecretStr

from openapi_tool import __version__
from openapi_tool.jina.endpoints import Endpoint, endpoint_of
from openapi_tool.jina.resolved_parameters import ResolvedParameters
from openapi_tool.jina.response import Expected
from openapi_tool.protocol.jsontext import dumps
from openapi_tool.tools.definition import ToolDefinition

USER_AGENT = f"openapi-tool/{__version__}"
MAX_GET_URL_CHARS = 8_000  # of path and query; some proxies refuse longer ones

_DNT = "DNT"  # the upstream expects a number in this header: `true` has no effect (jina-api section 9)


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """A request without its API key.

    - `target`: percent-encoded path and query.
    - `expected`: what the reading of its response depends on.
    - `secrets`: the secrets in the body, which are masked in the response.
    """

    method: str
    host: str
    target: str
    headers: Mapping[str, str]
    body: bytes | None
    expected: Expected = field(repr=False)
    secrets: tuple[SecretStr, ...] = field(default=(), repr=False)


class _Parts(NamedTuple):
    """What parameters are sent as; the members are those of `UpstreamRequest`."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes | None


def build_request(
    definition: ToolDefinition, resolved: ResolvedParameters, offered: frozenset[str] = frozenset()
) -> UpstreamRequest:
    """Return the request of a call: GET if the definition asks for it and every parameter fits, else POST.

    `offered` are the arguments that advice about the response may name.
    """
    endpoint = endpoint_of(definition)
    sent = resolved
    if not endpoint.separators.keys().isdisjoint(resolved.parameters):
        sent = replace(resolved, parameters=_with_appended(endpoint, resolved.parameters))
    parts = _get(endpoint, definition.path, sent) if definition.method == "GET" else None
    if parts is None:
        parts = _post(endpoint, definition.path, sent)
    method, target, headers, body = parts
    # `identity`: no compression, since a small compressed body could unpack to any size.
    headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": USER_AGENT, **headers}
    host = endpoint.operation.host
    secrets = tuple(resolved.secrets.values())
    # The response is read by the parameters as they were given, not by what was appended to the main one.
    expected = Expected(endpoint.operation.name, resolved.parameters, resolved.names, offered, resolved.denied)
    return UpstreamRequest(method, host, target, headers, body, expected, secrets)


def _with_appended(endpoint: Endpoint, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Append to the main parameter what the upstream takes only there: `after:2025-12-31` to the query of a search."""
    main = endpoint.operation.main_parameter
    text = parameters[main]
    for name, separator in endpoint.separators.items():
        if name not in parameters:
            continue
        if separator == "#":  # an address has one fragment, so drop the one that it may have
            text = text.partition("#")[0]
        text = f"{text}{separator}{parameters[name]}"
    others = {name: value for name, value in parameters.items() if name not in endpoint.separators}
    return {**others, main: text}


def _post(endpoint: Endpoint, path: str, resolved: ResolvedParameters) -> _Parts:
    """Return the parts of a POST request: parameters in the body, except those that the upstream reads as a header."""
    body: dict[str, Any] = {}
    headers = {"Content-Type": "application/json"}
    for name, value in resolved.parameters.items():
        parameter = endpoint.find(name)
        if parameter is not None and parameter.header_only and parameter.header:
            headers[parameter.header] = _header_text(value)
        else:
            _nest(body, name, value)
    for name, secret in resolved.secrets.items():
        _nest(body, name, secret.get_secret_value())
    # The path may be a template such as `/{url}`; a POST request has the page's address in its body instead.
    target = "/" if path == endpoint.operation.template else path
    return _Parts("POST", target, headers, dumps(body))


def _nest(body: dict[str, Any], name: str, value: Any) -> None:
    """Set a member of a body: `markdown.hr` is the member `hr` of the member `markdown`."""
    *parents, leaf = name.split(".")
    for parent in parents:
        body = body.setdefault(parent, {})
    body[leaf] = value


def _get(endpoint: Endpoint, path: str, resolved: ResolvedParameters) -> _Parts | None:
    """Return the parts of a GET request; None if a parameter does not fit."""
    if resolved.secrets:
        return None
    headers: dict[str, str] = {}
    query: list[str] = []
    operation = endpoint.operation
    for name, value in resolved.parameters.items():
        parameter = endpoint.find(name)
        header = parameter.header if parameter else None
        if header:
            if _would_be_split(name, value):
                return None
            headers[header] = "1" if header == _DNT else _header_text(value)
        elif name == operation.main_parameter and operation.template:
            path = "/" + quote(value, safe="")  # a page's address takes the place of the path
        elif isinstance(value, dict):
            return None
        else:
            query += _query_parts(name, value)
    target = f"{path}?{'&'.join(query)}" if query else path
    if len(target) > MAX_GET_URL_CHARS or not all(map(_fits_header, headers.values())):
        return None
    return _Parts("GET", target, headers, None)


def _would_be_split(name: str, value: Any) -> bool:
    """Return whether a value is a selector that the upstream would split: at each `, `, also in `:is(h1, h2)`."""
    texts = value if isinstance(value, list) else [value]
    return name.endswith("Selector") and any(", " in text for text in texts)


def _query_parts(name: str, value: Any) -> list[str]:
    """Return parts of a query: `site=a` and `site=b` for a list, `nfpr=true` for True."""
    parts = []
    for item in value if isinstance(value, list) else [value]:
        text = str(item).lower() if isinstance(item, bool) else str(item)
        parts.append(f"{name}={quote(text, safe='')}")
    return parts


def _fits_header(text: str) -> bool:
    return text.isascii() and text.isprintable()


def _header_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true"  # never False, which is not sent (`flag` in `conversions.py`)
    if isinstance(value, list):
        return ", ".join(value)
    return str(value)
