"""Endpoints: how requests of the upstream's operations are built, timed and priced (jina-api 2.2, 6.2).

`ENDPOINTS` has one for each operation. How the responses of an operation are read is in `response.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from openapi_tool.jina import parameters as tables
from openapi_tool.jina.cost_advice import cheaper_page, cheaper_search, quicker_search
from openapi_tool.jina.parameters import MAX_TIMEOUT_S, MODEL_FORMATS, RECENCY, WITH_CONTENT, Parameter, by_name
from openapi_tool.jina.remarks import Offers
from openapi_tool.jina.url_policy import UrlPolicy, checked_url
from openapi_tool.tools.argument_names import fold
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.operations import READER, SEARCH, Operation

MARGIN_S = 3.0  # that a request may take beside its stages (`Timeouts`)
RESERVE_S = 1.0  # of a call's remaining time, kept for the way of request and response
_MIN_RETRY_S = 5.0  # least time for a retry (`Timeouts.min_s`)
_ONE_STAGE_ENGINES = ("browser", "curl", "direct", "cf-browser-rendering")
"""Values of `engine` that name one way to load a page."""
_NETWORK_IDLE_FROM_S = 20  # from this `timeout` on the upstream waits until a page loads nothing more

Parameters = Mapping[str, Any]
"""Upstream parameters of one request, by the parameter's name in a JSON body."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How an operation uses the parameter `timeout`.

    The upstream works on a request in *stages*, and `timeout` limits each of them, not the whole request. A read has
    two stages: if the first way to load a page fails, the upstream tries a second one. It has one stage if `engine`
    names the way. A search has one.

    - `default_stage_s`: seconds of a stage if neither operator nor call sets a limit.
    - `stages`: returns the number of stages of a request.
    - `timing`: returns further parameters of a request whose stages take at most the given seconds.
    - `needs_timeout`: returns whether a request may take long enough to need a `timeout`.
    """

    default_stage_s: int
    stages: Callable[[Parameters], int] = lambda _: 1
    timing: Callable[[Parameters, float], Parameters] = lambda _, __: {}
    needs_timeout: Callable[[Parameters], bool] = lambda _: True

    def min_s(self, parameters: Parameters) -> float:
        """Return the seconds that must be left for a retry.

        With less the retry would time out, and its error would hide why the first request failed.
        """
        return _MIN_RETRY_S if self.needs_timeout(parameters) else 0.0

    def longest_s(self, parameters: Parameters) -> float | None:
        """Return the most seconds that a request may take by the operator's `timeout`; None without one."""
        stage_s = parameters.get("timeout")
        return None if stage_s is None else self.stages(parameters) * float(stage_s) + MARGIN_S

    def within(self, parameters: Parameters, left_s: float, *, has_own_limit: bool = False) -> Parameters:
        """Return the parameters with a `timeout` that makes the upstream answer within `left_s` seconds.

        A stage gets at most `default_stage_s`, unless the operator sets `timeout`, or the call `has_own_limit`: a time
        limit that definition or model set for it.
        """
        if not self.needs_timeout(parameters):
            return parameters
        each_s = _eighths((left_s - RESERVE_S) / self.stages(parameters))
        possible_s = max(1, min(each_s, MAX_TIMEOUT_S))
        usual_s = MAX_TIMEOUT_S if has_own_limit else self.default_stage_s
        stage_s = min(possible_s, parameters.get("timeout") or usual_s)
        return {**self.timing(parameters, stage_s), **parameters, "timeout": stage_s}


def _eighths(seconds: float) -> float:
    """Round down to an eighth of a second: 0.125 s is a whole number of milliseconds, and exact as a float."""
    rounded = math.floor(8 * seconds) / 8
    return int(rounded) if rounded.is_integer() else rounded


def _stages_of_reader(parameters: Parameters) -> int:
    return 1 if parameters.get("engine") in _ONE_STAGE_ENGINES else 2


def _timing_of_reader(parameters: Parameters, stage_s: float) -> Parameters:
    """Return what keeps the reader from waiting until a page loads nothing more.

    With a `timeout` of 20 s or more it does wait for that, unless `respondTiming` asks for another moment. A `timeout`
    of the operator stays without that parameter, and pages with frames need the wait.
    """
    if stage_s < _NETWORK_IDLE_FROM_S or "timeout" in parameters or parameters.get("withIframe"):
        return {}
    is_screenshot = "shot" in str(parameters.get("respondWith"))
    return {"respondTiming": "media-idle" if is_screenshot else "resource-idle"}


def _has_pages(parameters: Parameters) -> bool:
    """Return whether a search asks for page texts; only these take time."""
    return parameters.get("respondWith") != "no-content"


_MIN_PAGE_TOKENS = {
    "withGeneratedAlt": 765,
    # `parameters.REFUSED` has these, so they are not sent. If one is allowed one day, its price is not forgotten.
    "injectPageScript": 4_000,
    "injectFrameScript": 4_000,
    "instruction": 12_000,
    "jsonSchema": 12_000,
}
"""Minimum charge in tokens for a page read with a parameter (jina-api section 5)."""


@dataclass(frozen=True)
class Endpoint:
    """What is needed to call one operation of the upstream.

    How a request is built:

    - `parameters`: the upstream's parameters.
    - `formats`: values of `respondWith` that a model may use.
    - `own`: arguments that only this service has, by folded name, each with the parameter that it sets: the argument
      `with_content` sets `respondWith`.
    - `defaults`: values of parameters that nothing sets.
    - `implied`: values that are not sent, since the upstream assumes them without the parameter.
    - `check_url`: checks and repairs the main parameter, if that is an address.

    How long it takes and what it costs:

    - `timeouts`: how it uses the parameter `timeout`.
    - `price`: returns the minimum charge for a successful request, by its parameters (jina-api section 5). The
      operation's own minimum counts if that is more.
    - `cheaper`: returns ways to lower the cost of a call. It gets the parameters of one item, the charge for all items,
      their number, and which arguments the model may still give.
    - `quicker`: returns ways to get an answer in time. It gets the parameters of one item, the model's names for them,
      and which arguments the model may still give.
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
        """Whether a request may limit the tokens of each page."""
        return self.find("maxTokens") is not None

    @cached_property
    def separators(self) -> Mapping[str, str]:
        """Parameters that are appended to the main one, by name, each with what stands between."""
        return {parameter.name: parameter.separator for parameter in self.parameters if parameter.separator}

    @cached_property
    def _by_name(self) -> Mapping[str, Parameter]:
        return by_name(self.parameters)


def _min_search_tokens(parameters: Parameters) -> int:
    """Return the minimum charge for a search: per ten results, five times for images and news, three times for Bing."""
    scale = 1
    if parameters.get("type") in ("images", "news"):
        scale = 5
    elif parameters.get("provider") == "bing":
        scale = 3
    number = parameters.get("num")
    results = number if isinstance(number, int) else 1
    return SEARCH.min_tokens * scale * math.ceil(results / 10)


def _min_page_tokens(parameters: Parameters) -> int:
    """Return the highest minimum charge of the parameters that a request has."""
    return max((tokens for name, tokens in _MIN_PAGE_TOKENS.items() if parameters.get(name)), default=0)


ENDPOINTS: Mapping[str, Endpoint] = {
    endpoint.operation.name: endpoint
    for endpoint in (
        Endpoint(
            SEARCH,
            tables.SEARCH_PARAMETERS,
            Timeouts(default_stage_s=25, needs_timeout=_has_pages),
            price=_min_search_tokens,
            cheaper=cheaper_search,
            quicker=quicker_search,
            formats=(*MODEL_FORMATS, "no-content"),
            own={fold("with_content"): WITH_CONTENT, fold("recency"): RECENCY},
            defaults={"respondWith": "no-content"},  # without page texts, which nobody asked for
            implied={"respondWith": "content"},  # what the upstream does without the parameter
        ),
        Endpoint(
            READER,
            tables.READER_PARAMETERS,
            Timeouts(default_stage_s=15, stages=_stages_of_reader, timing=_timing_of_reader),
            price=_min_page_tokens,
            cheaper=cheaper_page,
            check_url=checked_url,
        ),
    )
}


def endpoint_of(definition: ToolDefinition) -> Endpoint:
    """Return the endpoint of a tool."""
    return ENDPOINTS[definition.built_in.operation.name]
