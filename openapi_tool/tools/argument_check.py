"""Validation and repair of the arguments that a model gave (protocol section 5).

Models often give a value in a wrong form, such as the text `"3"` for a number. Such a value is *repaired* if its rule,
the schema of the argument, leaves no doubt what is meant. Pure functions, so that a worker process can run them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import orjson

from openapi_tool.protocol.jsontext import JsonObject, JsonValue, as_object
from openapi_tool.tools.schema import fits, schema_problems

_INTEGER = re.compile(r"-?[0-9]{1,12}")
_NUMBER = re.compile(r"-?[0-9]{1,12}(?:\.[0-9]{1,12})?")
_BOOLEANS = {"true": True, "false": False}
_MAX_LIST_CHARS = 20_000
"""Longest text to parse as a list. `protocol/cards.py` limits the values of a call, but counts a text as one value."""

_LIST_STARTS = ('["', "['")
_SEPARATORS = re.compile(r"[\s,;]+")  # between the items of a list in a text

# Possessive quantifiers (`++`), so that a text that does not match takes linear time.
_HOST_LABEL = r"[^\s.,;/?#:@\[\]\"'|()]++"
_HOST_NAME = rf"{_HOST_LABEL}(?:\.{_HOST_LABEL})++\.?"
# `example.com`, `https://example.com/docs`, `site:example.com`
_SITE = re.compile(rf"(?:site:)?(?:https?://)?{_HOST_NAME}(?:/[^\s,;]*+)?", re.IGNORECASE)
# `example.com/page?a=1`, `https://example.com:8080`
_ADDRESS = re.compile(rf"(?:https?://)?{_HOST_NAME}(?::[0-9]++)?(?:[/?#]\S*+)?", re.IGNORECASE)
_ITEM_MATCHERS = {"urls": _ADDRESS.fullmatch, "site": _SITE.fullmatch, "exclude_sites": _SITE.fullmatch}
"""Match one item of these list arguments; it contains no blank, so that a text can be split into several."""

# The beginning of a second address, as in `https://a.example,https://b.example`.
_SECOND_ADDRESS = re.compile(r"[\s,;]https?://", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ArgumentCheck:
    """Arguments to validate: those of the model (`given`) and the definition's defaults for the others.

    - `schema`: what the model sees.
    - `rules`: the definition's own schemas of the arguments in `defaults`, by name.
    """

    schema: Mapping[str, JsonValue]
    given: Mapping[str, JsonValue]
    defaults: Mapping[str, JsonValue]
    rules: Mapping[str, JsonValue]

    def as_text(self) -> bytes:
        """Return what `of_text` reads. By `json`, as orjson changes numbers that are infinite or beyond 64 bits."""
        return json.dumps([self.schema, self.given, self.defaults, self.rules]).encode()

    @staticmethod
    def of_text(text: bytes | bytearray | memoryview) -> ArgumentCheck:
        """Return the check of `as_text`."""
        return ArgumentCheck(*map(as_object, json.loads(bytes(text))))


@dataclass(frozen=True, slots=True)
class CheckedArguments:
    """Repaired arguments, with None for one to omit; or the problems of the arguments, or those of the defaults."""

    repairs: Mapping[str, JsonValue] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    default_problems: tuple[str, ...] = ()

    def as_text(self) -> bytes:
        """Return what `of_text` reads."""
        return json.dumps([self.repairs, self.problems, self.default_problems]).encode()

    @staticmethod
    def of_text(text: bytes | bytearray | memoryview) -> CheckedArguments:
        """Return the result of `as_text`. Raises ValueError."""
        match json.loads(bytes(text)):
            case [dict() as repairs, list() as problems, list() as default_problems]:
                return CheckedArguments(repairs, tuple(map(str, problems)), tuple(map(str, default_problems)))
        raise ValueError("the text holds no checked arguments")


def check_arguments(check: ArgumentCheck) -> CheckedArguments:
    """Validate arguments, and repair those that violate their rule. Raises UnusableSchema.

    A default that the schema does not declare is not validated: definitions hide an argument from the model that way.
    """
    schema, given = check.schema, check.given
    known = given.keys() | as_object(schema.get("properties"))
    checked = {name: value for name, value in {**check.defaults, **given}.items() if name in known}
    problems = schema_problems(schema, checked)
    if not problems:
        return CheckedArguments()
    repairs = repaired(schema, given)
    if repairs:
        omitted = {name for name, value in repairs.items() if value is None}
        merged = {name: value for name, value in {**checked, **repairs}.items() if name not in omitted}
        problems = schema_problems(schema, merged)
        if not problems:
            return CheckedArguments(repairs)
    return CheckedArguments({}, tuple(problems), tuple(default_problems(check.rules, check.defaults)))


def default_problems(rules: Mapping[str, JsonValue], defaults: Mapping[str, JsonValue]) -> list[str]:
    """Return how defaults violate the definition's own `rules` by name."""
    declared = {name: rules[name] for name in defaults if name in rules}
    if not declared:
        return []
    problems = schema_problems({"properties": declared}, {name: defaults[name] for name in declared})
    return [f"options.args.defaults.{problem}" for problem in problems]


def repaired(schema: Mapping[str, JsonValue], given: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return, by name, the repaired values of arguments that violate their rule in the schema.

    An empty optional argument becomes None: omitted. If every interpretation of a value violates the rule, too, the
    value becomes the first interpretation, so that the error is about the number and not about its quotes.
    """
    properties, required = as_object(schema.get("properties")), schema.get("required")
    needed = required if isinstance(required, list) else []
    found: dict[str, JsonValue] = {}
    for name, value in given.items():
        rule = properties.get(name)
        if not isinstance(rule, dict) or not _refuses(name, rule, value):
            continue
        if value in (None, "", []):
            if name not in needed:
                found[name] = None
            continue
        interpretations = list(_interpretations(name, rule, value))
        if interpretations:
            found[name] = _first_fitting(name, rule, interpretations)
    return found


def _first_fitting(name: str, rule: JsonObject, interpretations: list[JsonValue]) -> JsonValue:
    """Return the first interpretation that fits the rule, else the first one."""
    for interpretation in interpretations:
        if not _refuses(name, rule, interpretation):
            return interpretation
    return interpretations[0]


def _refuses(name: str, rule: JsonObject, value: JsonValue) -> bool:
    return not fits({"properties": {name: rule}}, {name: value})


def _interpretations(name: str, rule: JsonObject, value: JsonValue) -> Iterator[JsonValue]:
    """Yield the possible meanings of a value, the likeliest first."""
    types = rule.get("type")
    wanted: list[JsonValue] = types if isinstance(types, list) else [types]
    if isinstance(value, str):
        yield from _interpretations_of_text(name, value, wanted, rule.get("enum"))
    elif "string" in wanted:
        if isinstance(value, list):
            yield from _joined(name, value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield str(value)


def _interpretations_of_text(name: str, value: str, wanted: list[JsonValue], choices: JsonValue) -> Iterator[JsonValue]:
    text = value.strip()
    if isinstance(choices, list) and text.lower() in choices:
        yield text.lower()
    if "integer" in wanted and _INTEGER.fullmatch(text):
        yield int(text)
    if "number" in wanted and _NUMBER.fullmatch(text):
        yield float(text)
    if "boolean" in wanted and text.lower() in _BOOLEANS:
        yield _BOOLEANS[text.lower()]
    if "array" in wanted:
        yield from _lists(name, text, value)


def _joined(name: str, value: list[JsonValue]) -> Iterator[JsonValue]:
    """Yield the only text of a list, or a list of CSS selectors as one selector."""
    texts = [text.strip() for text in value if isinstance(text, str) and text.strip()]
    if len(texts) == len(value) == 1:
        yield value[0]
    elif name.endswith("_selector") and texts:
        yield ", ".join(texts)


def _lists(name: str, text: str, value: str) -> Iterator[JsonValue]:
    """Yield the list that a text means: the JSON list in it, the items in it, or the text itself as only item.

    `text` is `value` without blanks at its ends.
    """
    if text.startswith("[") and len(text) <= _MAX_LIST_CHARS:
        try:
            parsed = orjson.loads(text)
        except orjson.JSONDecodeError:
            parsed = None
        if isinstance(parsed, list):
            yield parsed
            return
    if text.startswith(_LIST_STARTS):
        return  # no valid JSON list: Python's notation, or truncated
    is_item = _ITEM_MATCHERS.get(name)
    if is_item is None or len(text) > _MAX_LIST_CHARS or not _SEPARATORS.search(text):
        yield [value]
        return
    if is_item(text):
        if not _SECOND_ADDRESS.search(text):  # else it may be two addresses, or one with another in its path
            yield [value]
        return
    pieces = [piece for piece in _SEPARATORS.split(text) if piece]
    if all(map(is_item, pieces)):
        yield pieces
