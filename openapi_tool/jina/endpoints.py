"""Endpoints: all that a call of an upstream operation needs (jina-api 2.2, 6.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from openapi_tool.jina import parameters as tables
from openapi_tool.jina.cost_advice import cheaper_page, cheaper_search, quicker_search
from openapi_tool.jina.parameters import MODEL_FORMATS, RECENCY, WITH_CONTENT, Parameter, by_name
from openapi_tool.jina.remarks import Offers
from openapi_tool.jina.url_policy import UrlPolicy, checked_url
from openapi_tool.tools.argument_names import fold
from openapi_tool.tools.catalogue import READER, SEARCH, Operation
from openapi_tool.tools.definition import ToolDefinition

MARGIN_S = 3.0  # how long a request may take beside its stages (`Timeouts`)
RESERVE_S = 1.0  # kept of a call's remaining time for the way of request and response
MAX_STAGE_S = 180  # the upstream's limit
_MIN_RETRY_S = 5.0  # see `Timeouts.min_s`
_ONE_STAGE_ENGINES = ("browser", "curl", "direct", "cf-browser-rendering")
_NETWORK_IDLE_FROM_S = 20  # of `timeout`: from there on the upstream waits until a page loads nothing more

Parameters = Mapping[str, Any]
"""Upstream parameters of one request, by body name."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Use of the parameter `timeout` by an operation.

    The parameter limits each stage of the upstream's work, not the whole request: a read has two stages, one after the
    other, or one if `engine` names one; a search has one.

    `stages` returns the number of a request's stages, `timing` the extra parameters for a stage of the given seconds,
    `needs_timeout` whether a request may take long enough to need one.
    """

    default_stage_s: int
    stages: Callable[[Parameters], int] = lambda _: 1
    timing: Callable[[Parameters, float], Parameters] = lambda _, __: {}
    needs_timeout: Callable[[Parameters], bool] = lambda _: True

    def min_s(self, parameters: Parameters) -> float:
        """Return the least time for a retry: with less it would time out and hide why the first request failed."""
        return _MIN_RETRY_S if self.needs_timeout(parameters) else 0.0

    def longest_s(self, parameters: Parameters) -> float | None:
        """Return the maximum seconds of a request; None without the operator's `timeout`."""
        stage_s = parameters.get("timeout")
        return None if stage_s is None else self.stages(parameters) * float(stage_s) + MARGIN_S

    def within(self, parameters: Parameters, left_s: float, *, has_own_limit: bool = False) -> Parameters:
        """Return the parameters with a `timeout` that makes the upstream answer within `left_s` seconds.

        A stage gets at most `default_stage_s`, unless the operator sets `timeout` or the call `has_own_limit`.
        """
        if not self.needs_timeout(parameters):
            return parameters
        possible_s = max(1, min(_eighths((left_s - RESERVE_S) / self.stages(parameters)), MAX_STAGE_S))
        usual_s = MAX_STAGE_S if has_own_limit else self.default_stage_s
        stage_s = min(possible_s, parameters.get("timeout") or usual_s)
        return {**self.timing(parameters, stage_s), **parameters, "timeout": stage_s}


def _eighths(seconds: float) -> float:
    """Round down to an eighth of a second, which is a whole number of milliseconds also in binary."""
    rounded = math.floor(8 * seconds) / 8
    return int(rounded) if rounded.is_integer() else rounded


def _stages_of_reader(parameters: Parameters) -> int:
    return 1 if parameters.get("engine") in _ONE_STAGE_ENGINES else 2


def _timing_of_reader(parameters: Parameters, stage_s: float) -> Parameters:
    """Return what keeps a reader from waiting for an idle network, as it does with a `timeout` of 20 s or more."""
    if stage_s < _NETWORK_IDLE_FROM_S or "timeout" in parameters or parameters.get("withIframe"):
        return {}
    is_screenshot = "shot" in str(parameters.get("respondWith"))
    return {"respondTiming": "media-idle" if is_screenshot else "resource-idle"}


def _has_pages(parameters: Parameters) -> bool:
    """Return whether a search asks for page texts; only these take time."""
    return parameters.get("respondWith") != "no-content"


_MIN_PAGE_TOKENS = {
    "withGeneratedAlt": 765,
    "injectPageScript": 4_000,
    "injectFrameScript": 4_000,
    "instruction": 12_000,
    "jsonSchema": 12_000,
}
"""Minimum charge in tokens for a page read with one of these parameters (jina-api section 5).

Only the first is sent: `parameters.REFUSED` has the others.
"""


@dataclass(frozen=True)
class Endpoint:
    """One operation of the upstream; `response.py` has how its responses are read.

    - `own`: arguments of this service, by folded name, each with the parameter that it sets: `with_content: true` sets
      `respondWith`.
    - `defaults`: sent if nothing sets these parameters.
    - `implied`: values that are not sent, since the upstream assumes them.
    - `check_url`: checks and repairs the main parameter, if that is an address.
    - `price`: minimum charge for a successful request if above the operation's (jina-api section 5).
    - `cheaper`: ways to lower the cost of a call, by the parameters of one item, the charge for all, and their number.
    - `quicker`: ways to get an answer in time, by the parameters of one item and the model's names for them.
    """

    operation: Operation
    parameters: tuple[Parameter, ...]
    timeouts: Timeouts
    price: Callable[[Parameters], int] = lambda _: 0
    cheaper: Callable[[Parameters, int, int, Offers], Sequence[str]] = lambda *_: ()
    quicker: Callable[[Parameters, Mapping[str, str], Offers], Sequence[str]] = lambda *_: ()
    formats: tuple[str, ...] = MODEL_FORMATS
    own: Mapping[str, Parameter] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    check_url: Callable[[str, UrlPolicy], str] | None = None

    def min_tokens(self, parameters: Parameters) -> int:
        """Return the minimum charge for a successful request."""
        return max(self.operation.min_tokens, self.price(parameters))

    def find(self, name: str) -> Parameter | None:
        """Return the parameter with this name, alias or header."""
        return self._by_name.get(fold(name).replace(".", ""))

    @cached_property
    def limits_tokens(self) -> bool:
        """Return whether a request may limit the tokens of each page."""
        return self.find("maxTokens") is not None

    @cached_property
    def separators(self) -> Mapping[str, str]:
        """Separators of the parameters that are appended to the main one, by name."""
        return {parameter.name: parameter.separator for parameter in self.parameters if parameter.separator}

    @cached_property
    def _by_name(self) -> Mapping[str, Parameter]:
        return by_name(self.parameters)


def _min_search_tokens(parameters: Parameters) -> int:
    """Return the minimum charge for each ten results asked for: times 5 for images and news, times 3 for Bing."""
    scale = 1
    if parameters.get("type") in ("images", "news"):
        scale = 5
    elif parameters.get("provider") == "bing":
        scale = 3
    number = parameters.get("num")
    results = number if isinstance(number, int) else 1
    return SEARCH.min_tokens * scale * math.ceil(results / 10)


def _min_page_tokens(parameters: Parameters) -> int:
    return max((tokens for name, tokens in _MIN_PAGE_TOKENS.items() if parameters.get(name)), default=0)


ENDPOINTS: Mapping[str, Endpoint] = {
    endpoint.operation.name: endpoint
    for endpoint in (
        Endpoint(
            SEARCH,
            tables.SEARCH_PARAMETERS,
            Timeouts(default_stage_s=25, needs_timeout=_has_pages),
            _min_search_tokens,
            cheaper_search,
            quicker_search,
            formats=(*MODEL_FORMATS, "no-content"),
            own={fold("with_content"): WITH_CONTENT, fold("recency"): RECENCY},
            defaults={"respondWith": "no-content"},
            implied={"respondWith": "content"},
        ),
        Endpoint(
            READER,
            tables.READER_PARAMETERS,
            Timeouts(default_stage_s=15, stages=_stages_of_reader, timing=_timing_of_reader),
            _min_page_tokens,
            cheaper_page,
            check_url=checked_url,
        ),
    )
}


def endpoint_of(definition: ToolDefinition) -> Endpoint:
    """Return the endpoint of a tool."""
    return ENDPOINTS[definition.built_in.operation.name]
