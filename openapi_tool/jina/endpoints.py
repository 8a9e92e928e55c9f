"""Endpoints: how requests of the upstream's operations are built, timed and priced (jina-api 2.2, 6.2).

The operations are search and reader; ENDPOINTS has an endpoint for each. How their responses are read is in
`response.py`.
"""

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
from openapi_tool.jina.timeouts import READER_TIMEOUTS, SEARCH_TIMEOUTS, Parameters, Timeouts
from openapi_tool.jina.url_policy import UrlPolicy, checked_url
from openapi_tool.tools.argument_names import fold
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.operations import READER, SEARCH, Operation


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
    - `price`: returns the minimum charge for a successful request, in tokens, by its parameters (jina-api section 5).
      The operation's own minimum counts if that is more.
    - `cheaper`: returns ways to lower the cost of a call, such as `a lower count`. It gets the parameters of one item
      of the call, the charge for all items, their number, and which arguments advice may name.
    - `quicker`: returns ways to get an answer in time, such as `fewer results`. It gets the parameters of one item, the
      model's names for them, and which arguments advice may name.
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
        """Parameters that are appended to the main one, by name, each with what stands between.

        For example `after` to the query of a search, behind a blank.
        """
        return {parameter.name: parameter.separator for parameter in self.parameters if parameter.separator}

    @cached_property
    def _by_name(self) -> Mapping[str, Parameter]:
        return by_name(self.parameters)


def _min_search_tokens(parameters: Parameters) -> int:
    """Return the minimum charge for a search.

    Each ten results cost the operation's minimum, five times as much for images and news, three times for Bing.
    """
    factor = 1
    if parameters.get("type") in ("images", "news"):
        factor = 5
    elif parameters.get("provider") == "bing":
        factor = 3
    number = parameters.get("num")
    results = number if isinstance(number, int) else 1
    return SEARCH.min_tokens * factor * math.ceil(results / 10)


_MIN_PAGE_TOKENS = {
    "withGeneratedAlt": 765,
    # No call can send these yet (`parameters.REFUSED`). Their prices are here for the day on which one is allowed.
    "injectPageScript": 4_000,
    "injectFrameScript": 4_000,
    "instruction": 12_000,
    "jsonSchema": 12_000,
}
"""Minimum charge in tokens for a page read with a parameter (jina-api section 5)."""


def _min_page_tokens(parameters: Parameters) -> int:
    """Return the highest minimum charge of the parameters that a request has."""
    return max((tokens for name, tokens in _MIN_PAGE_TOKENS.items() if parameters.get(name)), default=0)


ENDPOINTS: Mapping[str, Endpoint] = {
    SEARCH.name: Endpoint(
        SEARCH,
        tables.SEARCH_PARAMETERS,
        SEARCH_TIMEOUTS,
        price=_min_search_tokens,
        cheaper=cheaper_search,
        quicker=quicker_search,
        formats=(*MODEL_FORMATS, "no-content"),
        own={fold("with_content"): WITH_CONTENT, fold("recency"): RECENCY},
        defaults={"respondWith": "no-content"},  # without page texts, which nobody asked for
        implied={"respondWith": "content"},  # what the upstream does without the parameter
    ),
    READER.name: Endpoint(
        READER,
        tables.READER_PARAMETERS,
        READER_TIMEOUTS,
        price=_min_page_tokens,
        cheaper=cheaper_page,
        check_url=checked_url,
    ),
}
"""By the name of the operation."""


def endpoint_of(definition: ToolDefinition) -> Endpoint:
    """Return the endpoint of a tool."""
    return ENDPOINTS[definition.built_in.operation.name]
