"""What the rendering of search results and of pages shares (`search_content.py`, `page_content.py`).

A successful response of the upstream is an *envelope*: a JSON object whose member `data` holds the search results or
the page, with the cost in `meta` or beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from openapi_tool.jina import remarks
from openapi_tool.protocol.jsontext import whole_number
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.tools.output import Usage

_MAX_TOKENS = 10**9  # of a charge


@dataclass(frozen=True, slots=True)
class RenderContext:
    """What the rendering of a response depends on, beside its envelope and the parameters of its request.

    - `redactor` masks the secrets that were sent with the call (`of_call`).
    - `offers` returns whether a remedy may name an argument.
    - `names`: the model's names for the parameters that it gave, by the parameter's name.
    - `denied`: hosts that are not shown.
    """

    redactor: Redactor
    offers: remarks.Offers
    names: Mapping[str, str] = field(default_factory=dict)
    denied: tuple[str, ...] = ()


def usage_of(envelope: Mapping[str, Any]) -> Usage:
    """Return the charged tokens: of the whole response, else the sum over its results (jina-api section 5).

    Each number is limited, so that metrics and cards can add up any value of the upstream.
    """
    data = envelope.get("data")
    tokens = tokens_of(envelope.get("meta"))
    if tokens is None:
        tokens = tokens_of(data)
    if tokens is None and isinstance(data, list):
        tokens = sum(tokens_of(result) or 0 for result in data)
    return Usage(tokens=tokens or 0, requests=1)


def tokens_of(value: Any) -> int | None:
    """Return `usage.tokens` of an object, None if it has none."""
    usage = value.get("usage") if isinstance(value, dict) else None
    tokens = whole_number(usage.get("tokens")) if isinstance(usage, dict) else None
    return None if tokens is None else min(max(tokens, 0), _MAX_TOKENS)
