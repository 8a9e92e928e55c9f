"""Endpoints: everything that a call of an upstream operation needs.

To add one: an `Operation` in tools/catalogue.py, a table in jina/parameters.py and an `Endpoint` here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from openapi_tool.cooperative import Steps
from openapi_tool.jina import parameters as tables
from openapi_tool.jina.content import RenderContext, page_steps, search_steps
from openapi_tool.jina.failures import FAILURES, SEARCH_FAILURES, FailureTable
from openapi_tool.jina.parameters import MODEL_FORMATS, WITH_CONTENT, Parameter, by_name
from openapi_tool.jina.upstream_timeouts import READER_TIMEOUTS, SEARCH_TIMEOUTS, Parameters, Timeouts
from openapi_tool.jina.url_policy import UrlPolicy, checked_url
from openapi_tool.tools.argument_names import fold
from openapi_tool.tools.catalogue import READER, SEARCH, Operation
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.result import ToolOutput

_MIN_TEN_RESULTS_TOKENS = 10_000
_MIN_PAGE_TOKENS = {
    "withGeneratedAlt": 765,
    "injectPageScript": 4_000,
    "injectFrameScript": 4_000,
    "instruction": 12_000,
    "jsonSchema": 12_000,
}
"""Minimum tokens of a page that is read with a parameter."""

Renderer = Callable[[Mapping[str, Any], Parameters, RenderContext], Steps[ToolOutput]]
"""Renders a response envelope, given the parameters of its request, with secrets masked."""


@dataclass(frozen=True)
class Endpoint:
    """One operation of the upstream: parameters, timeouts, rendering of responses, meaning of errors.

    `own` are arguments of the built-in tools that set a parameter by other values, such as `with_content`. `formats`
    are the values of `respondWith` that a model may use. `defaults` are sent if nothing else sets them. `implied`
    values are not sent, since they are the upstream's defaults. `check_url` checks and repairs the main parameter, None
    if it is no address. `min_tokens` is the minimum charge for a successful request (jina-api section 5).
    """

    operation: Operation
    parameters: tuple[Parameter, ...]
    timeouts: Timeouts
    render: Renderer
    failures: FailureTable
    formats: tuple[str, ...] = MODEL_FORMATS
    own: tuple[Parameter, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    check_url: Callable[[str, UrlPolicy], str] | None = None
    min_tokens: Callable[[Parameters], int] = lambda _: 1

    def find(self, name: str) -> Parameter | None:
        """Return the parameter with this name, alias or header, None if there is none."""
        return self._by_name.get(fold(name).replace(".", ""))

    def own_argument(self, name: str) -> Parameter | None:
        """Return the parameter that a built-in tool's own argument sets, None if there is none."""
        return self._own_by_alias.get(fold(name))

    @cached_property
    def separators(self) -> Mapping[str, str]:
        """Return the separators of the parameters that are appended to the main one, by name."""
        return {parameter.name: parameter.separator for parameter in self.parameters if parameter.separator}

    @cached_property
    def _own_by_alias(self) -> Mapping[str, Parameter]:
        return {fold(alias): parameter for parameter in self.own for alias in parameter.aliases}

    @cached_property
    def _by_name(self) -> Mapping[str, Parameter]:
        return by_name(self.parameters)


def _render_search(envelope: Mapping[str, Any], parameters: Parameters, context: RenderContext) -> Steps[ToolOutput]:
    with_pages = parameters.get("respondWith") != "no-content"
    query, max_tokens = str(parameters.get("q", "")), parameters.get("maxTokens")
    return search_steps(envelope, query, with_pages=with_pages, max_tokens=max_tokens, context=context)


def _render_page(envelope: Mapping[str, Any], parameters: Parameters, context: RenderContext) -> Steps[ToolOutput]:
    return page_steps(envelope, parameters.get("maxTokens"), context)


def _min_search_tokens(parameters: Parameters) -> int:
    scale = 5 if parameters.get("type") in ("images", "news") else 3 if parameters.get("provider") == "bing" else 1
    number = parameters.get("num")
    return _MIN_TEN_RESULTS_TOKENS * scale * math.ceil((number if isinstance(number, int) else 1) / 10)


def _min_page_tokens(parameters: Parameters) -> int:
    return max((tokens for name, tokens in _MIN_PAGE_TOKENS.items() if parameters.get(name)), default=1)


ENDPOINTS: Mapping[str, Endpoint] = {
    endpoint.operation.name: endpoint
    for endpoint in (
        Endpoint(
            SEARCH,
            tables.SEARCH,
            SEARCH_TIMEOUTS,
            _render_search,
            SEARCH_FAILURES,
            formats=(*MODEL_FORMATS, "no-content"),
            own=(WITH_CONTENT,),
            defaults={"respondWith": "no-content"},
            implied={"respondWith": "content"},
            min_tokens=_min_search_tokens,
        ),
        Endpoint(
            READER,
            tables.READER,
            READER_TIMEOUTS,
            _render_page,
            FAILURES,
            check_url=checked_url,
            min_tokens=_min_page_tokens,
        ),
    )
}


def endpoint_of(definition: ToolDefinition) -> Endpoint:
    """Return the endpoint that a tool calls."""
    return ENDPOINTS[definition.built_in.operation.name]
