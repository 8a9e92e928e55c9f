"""Schemas of arguments for OpenAPI: as strict as the checks of a call, as clients may take a schema at its word.

The schema that a model reads is shorter: what it lacks, the model is told by the error of a call.
"""

from __future__ import annotations

from collections.abc import Mapping

from openapi_tool.gateway.tools import GatewayTool
from openapi_tool.protocol.jsontext import JsonObject, JsonValue, object_at

_LETTERS = "A-Za-zß-öø-ƿα-ωа-яא-ת\u0620-\u064aก-ฮअ-हぁ-ゖァ-ヺ一-鿿가-힣"
"""Letters of most scripts for host names; the server accepts some more."""

_LABEL = f"[0-9{_LETTERS}](?:[0-9{_LETTERS}]|-[0-9{_LETTERS}]){{0,30}}"  # `my-site` of `my-site.example.org`
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"  # 0 to 255, of an IPv4 address
_ADDRESS = (
    rf"^https?://(?:(?:{_LABEL}\.){{1,4}}[{_LETTERS}]{{2,30}}|{_OCTET}(?:\.{_OCTET}){{3}})(?::[1-9][0-9]{{0,3}})?"
    rf"(?:[/?#][!-\[\]-~{_LETTERS}]*)?$"
)
"""Such as `https://my-site.example.org:8443/page?id=1#top`, or with an IPv4 address instead of the name."""

# Such as `example.org/docs`.
_SITE: Mapping[str, JsonValue] = {"pattern": r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$", "maxLength": 2_000}
_NOT_BLANK: Mapping[str, JsonValue] = {"pattern": r"\S"}

_RULES: Mapping[str, Mapping[str, JsonValue]] = {
    "url": {"pattern": _ADDRESS},
    "urls": {"pattern": _ADDRESS},
    "site": _SITE,
    "exclude_sites": _SITE,
    "title_words": {**_NOT_BLANK, "maxLength": 2_000},
    "after": {"format": "date"},
    "language": _NOT_BLANK,
    "country": _NOT_BLANK,
    "location": _NOT_BLANK,
    "file_type": _NOT_BLANK,
    "cursor": _NOT_BLANK,
    "find": _NOT_BLANK,
    "question": {"pattern": r"[0-9A-Za-z]{3}"},  # a word to look for
    "timeout": {"minimum": 1},  # with less every page is late
}
"""Rules in addition to those that a model is shown, by argument; if it is a list, they are for each of its texts."""


def strict_schema(tool: GatewayTool) -> JsonObject:
    """Return the schema of a tool's arguments, with all that its checks demand and JSON Schema can say."""
    shown = tool.shown.parameters
    properties = object_at(shown, "properties")
    built_in_arguments = tool.definition.built_in.arguments.model_fields  # a definition may have others of its own
    stricter = {name: _stricter(name, rule) for name, rule in properties.items() if name in built_in_arguments}
    schema: JsonObject = dict(shown) | {"properties": {**properties, **stricter}}
    # A page is read by its url, or read on by the cursor that an earlier result gave: by one of them.
    if {"url", "cursor"} <= properties.keys():
        schema["oneOf"] = [{"required": ["url"]}, {"required": ["cursor"]}]
    # The text of a cursor may be searched instead, in one of two ways.
    searches = [name for name in ("find", "question") if name in properties]
    if searches and "cursor" in properties:
        needed: JsonObject = {name: ["cursor"] for name in searches}
        schema["dependentRequired"] = needed
    if len(searches) > 1:
        schema["not"] = {"required": [*searches]}
    return schema


def _stricter(name: str, rule: JsonValue) -> JsonValue:
    """Return the stricter rule of an argument; one with a choice, a default or a pattern of the definition is kept."""
    additions = _RULES.get(name)
    if additions is None or not isinstance(rule, dict) or {"enum", "const", "default"} & rule.keys():
        return rule
    if rule.get("type") == "array":
        return rule | {"items": _stricter(name, rule.get("items"))}
    has_own_pattern = rule.get("pattern") not in (None, r"\S")  # `\S` is that of the built-in tools
    return rule if has_own_pattern else {**rule, **additions}
