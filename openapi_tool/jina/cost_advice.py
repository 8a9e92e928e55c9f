"""Advice for the model on how to lower a high cost, or how to get an answer in time.

The functions are the `cheaper` and `quicker` of an `Endpoint`. Each returns short texts, which end the sentences
"Cheaper: …" and "Ask for less: …". `offers` tells whether advice may name an argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from openapi_tool.jina.parameters import MIN_MAX_TOKENS
from openapi_tool.jina.remarks import Offers
from openapi_tool.tools.operations import SEARCH

_DEFAULT_COUNT = 10  # results of a search that gives no count; each ten cost the same


def cheaper_page(parameters: Mapping[str, Any], _tokens: int, items: int, offers: Offers) -> list[str]:
    """Return what would lower the cost of reading `items` pages."""
    ways = ["fewer pages"] if items > 1 else []
    if offers("max_tokens") and parameters.get("maxTokens", math.inf) > MIN_MAX_TOKENS:
        ways.append("a lower max_tokens")
    return ways


def cheaper_search(parameters: Mapping[str, Any], tokens: int, items: int, offers: Offers) -> list[str]:
    """Return what would lower the cost of `items` searches, which cost `tokens` together."""
    count = parameters.get("num", _DEFAULT_COUNT)
    # A search costs its base price, or the tokens of its pages if these are more (jina-api 5).
    base = items * SEARCH.min_tokens * math.ceil(count / _DEFAULT_COUNT)
    has_pages = parameters.get("respondWith") != "no-content" and tokens > base
    ways = ["fewer searches"] if items > 1 else []
    if offers("count"):
        if count > _DEFAULT_COUNT:
            ways.append(f"a count of at most {_DEFAULT_COUNT}")
        elif has_pages:
            ways.append("a lower count")
    if has_pages:
        ways += cheaper_page(parameters, tokens, 1, offers)
    return ways


def quicker_search(parameters: Mapping[str, Any], names: Mapping[str, str], offers: Offers) -> list[str]:
    """Return what would make a search answer in time: only the pages of its results take long.

    `names` has the model's names for the parameters that it gave.
    """
    if parameters.get("respondWith") == "no-content":
        return []
    ways = []
    if offers("count") and parameters.get("num", _DEFAULT_COUNT) > 1:
        ways.append("fewer results")
    if "respondWith" in names:
        ways.append("no page content")
    return ways
