"""Values that a JSON schema allows, one or a few for each of its keywords.

The lint of a definition (`definition_checks.py`) tries each of them as an argument. If the executor refuses all values
of a keyword, the schema allows what cannot work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from openapi_tool.protocol.jsontext import JsonObject, JsonValue
from openapi_tool.tools.lint import value_fits
from openapi_tool.tools.problems import Path

_SAMPLES: Mapping[str, list[JsonValue]] = {
    "string": [],  # none: a parameter that refuses some texts may take others
    "integer": [1, 500],
    "number": [1, 500],
    "boolean": [True],
    "array": [["a"]],
    "object": [{"a": 1}],
}
"""Values of each JSON type; a parameter that refuses all of them refuses the type."""
SIZE_KEYWORDS = ("minLength", "minItems")
_ABOVE_LIMITS = 2_001  # characters of a text, items of a list: more than the executor accepts

Samples = tuple[Path, list[JsonValue]]
"""Where a schema allows values, as a path in it, and some of these."""


def samples(rule: JsonObject, *, of_list: bool = False) -> Iterator[Samples]:
    """Yield values that a schema allows, by keyword; `of_list` if it is the schema of a batch's list.

    For example `("minimum",), [3]` and `("items", "type"), [["a"]]`.
    """
    json_type = str(rule.get("type"))
    yield ("type",), (["a"] if of_list and json_type == "string" else _SAMPLES.get(json_type, []))
    yield from _set_values(rule)
    yield from _limits(rule, json_type)
    max_items = rule.get("maxItems")
    if of_list and isinstance(max_items, int):
        yield ("maxItems",), [["a"] * min(max(max_items, 0), _ABOVE_LIMITS)]
    yield from _choices(rule)
    lists: list[list[JsonValue]] = [["a"]]  # of one item each
    items = rule.get("items")
    is_list = json_type == "array" or (of_list and json_type not in _SAMPLES)
    if isinstance(items, dict) and is_list:
        for where, values in samples(items):
            lists_of_one = [[value] for value in values]
            lists += lists_of_one
            yield ("items", *where), [*lists_of_one]
    yield from _nearest_to_limits(rule, json_type, lists)


def _set_values(rule: JsonObject) -> Iterator[Samples]:
    for keyword in ("default", "const"):
        if keyword in rule:
            yield (keyword,), [rule[keyword]]


def _limits(rule: JsonObject, json_type: str) -> Iterator[Samples]:
    for keyword, round_inwards in (("minimum", math.ceil), ("maximum", math.floor)):
        limit = rule.get(keyword)
        if json_type == "integer" and isinstance(limit, float) and math.isfinite(limit):
            limit = round_inwards(limit)
        if keyword in rule and value_fits(rule, limit):  # an exclusive limit may exclude it
            yield (keyword,), [limit]


def _choices(rule: JsonObject) -> Iterator[Samples]:
    choices = rule.get("enum")
    if isinstance(choices, list):
        for place, value in enumerate(choices):
            yield ("enum", place), [value]


def _nearest_to_limits(rule: JsonObject, json_type: str, lists: list[list[JsonValue]]) -> Iterator[Samples]:
    """Yield the values next to an exclusive limit, and those of the least size; `lists` are allowed lists of one."""
    for keyword in ("exclusiveMinimum", "exclusiveMaximum", *SIZE_KEYWORDS):
        limit = rule.get(keyword)
        if not isinstance(limit, int) or json_type not in _SAMPLES:
            continue
        if keyword in SIZE_KEYWORDS and not limit:  # as without the keyword: any text or list has at least that size
            continue
        size = min(max(limit, 0), _ABOVE_LIMITS)
        nearest: dict[str, list[JsonValue]] = {
            "exclusiveMinimum": [limit + 1],
            "exclusiveMaximum": [limit - 1],
            "minLength": ["a" * size],
            "minItems": [one * size for one in lists],
        }
        yield (keyword,), [value for value in nearest[keyword] if value_fits(rule, value, if_broken=False)]
