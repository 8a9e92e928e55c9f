"""Endpoints: everything that a call of an upstream operation needs, and the upstream's `timeout` (jina-api 2.2, 6.2).

To add one: an `Operation` in tools/catalogue.py, a table in jina/parameters.py and an `Endpoint` here.

For a reader request it applies to each of its stages: two, or one if an engine is named. For a search it
applies to all result pages together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from openapi_tool.concurrency import Steps
from openapi_tool.jina import parameters as tables
from openapi_tool.jina.content import RenderContext, page_steps, search_steps
from openapi_tool.jina.failures import FAILURES, SEARCH_FAILURES, FailureTable
from openapi_tool.jina.parameters import MODEL_FORMATS, WITH_CONTENT, Parameter, by_name
from openapi_tool.jina.url_policy import UrlPolicy, checked_url
from openapi_tool.tools.catalogue import READER, SEARCH, Operation
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.names import fold
from openapi_tool.tools.result import ToolOutput

MARGIN_S = 3.0
MAX_STAGE_S = 180  # the upstream's limit
MIN_S = 5.0
_ONE_STAGE_ENGINES = ("browser", "curl", "direct", "cf-browser-rendering")
_NETWORK_IDLE_FROM_S = 20

Parameters = Mapping[str, Any]
"""Upstream parameters of one request, by body name."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Use of the parameter `timeout` by an operation.

    `stages` returns the number of stages of a request, `timing` the extra parameters for a stage of the given seconds.
    A request gets a `timeout` if `needs_timeout`, by default at most `default_stage_s`.
    """

    stages: Callable[[Parameters], int]
    timing: Callable[[Parameters, int], Parameters]
    needs_timeout: Callable[[Parameters], bool]
    default_stage_s: int

    def min_s(self, parameters: Parameters) -> float:
        """Return the least time for a retry: with less it would time out and hide why the first request failed."""
        return MIN_S if self.needs_timeout(parameters) else 0.0

    def longest_s(self, parameters: Parameters) -> float | None:
        """Return the maximum seconds of the upstream with the operator's `timeout`; None without one."""
        stage_s = parameters.get("timeout")
        return None if stage_s is None else self.stages(parameters) * float(stage_s) + MARGIN_S

    def within(self, parameters: Parameters, left_s: float, *, has_own_limit: bool = False) -> Parameters:
        """Return the parameters with a `timeout` that makes the upstream answer within `left_s` seconds.

        A stage gets at most `default_stage_s`, unless the operator sets `timeout` or the call `has_own_limit`.
        """
        if not self.needs_timeout(parameters):
            return parameters
        stage_s = max(1, min(int((left_s - MARGIN_S) / self.stages(parameters)), MAX_STAGE_S))
        stage_s = min(stage_s, parameters.get("timeout") or (MAX_STAGE_S if has_own_limit else self.default_stage_s))
        return {**self.timing(parameters, stage_s), **parameters, "timeout": stage_s}


def _stages_of_reader(parameters: Parameters) -> int:
    return 1 if parameters.get("engine") in _ONE_STAGE_ENGINES else 2


def _timing_of_reader(parameters: Parameters, stage_s: int) -> Parameters:
    """Return `respondTiming`: with a `timeout` of 20 s or more a reader would wait until the network is idle."""
    if stage_s < _NETWORK_IDLE_FROM_S or "timeout" in parameters or parameters.get("withIframe"):
        return {}
    shot = "shot" in str(parameters.get("respondWith"))
    return {"respondTiming": "media-idle" if shot else "resource-idle"}


READER_TIMEOUTS = Timeouts(_stages_of_reader, _timing_of_reader, needs_timeout=lambda _: True, default_stage_s=15)

SEARCH_TIMEOUTS = Timeouts(
    stages=lambda _: 1,
    timing=lambda _, __: {},
    needs_timeout=lambda parameters: parameters.get("respondWith") != "no-content",  # only page texts take time
    default_stage_s=25,
)


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
