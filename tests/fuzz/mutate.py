"""Mutations of an input of `whole` that keep its structure: JSON stays JSON, a response stays a response."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import orjson

from openapi_tool.jina.parameters import REFUSED
from openapi_tool.tools.catalogue import CATALOGUE
from tests.fuzz.whole import MAX_BYTES, SEPARATOR, parts

_MAX_TIMES = 2_000
_DEPTHS = (2, 10, 60, 200)
_NAMES = (
    *(
        "parameters",
        "options",
        "jina",
        "args",
        "envs",
        "defaults",
        "fixed",
        "params",
        "headers",
        "mode",
        "tool",
        "method",
    ),
    *("path", "base_url", "auth_env", "timeout_s", "endpoint_template", "result_format", "suspend_timeout_seconds"),
    *("type", "properties", "required", "items", "enum", "const", "pattern", "anyOf", "oneOf", "allOf", "not", "$ref"),
    *("$defs", "if", "then", "else", "patternProperties", "additionalProperties", "unevaluatedProperties", "minLength"),
    *("uniqueItems", "contains", "dependentSchemas", "propertyNames", "prefixItems", "multipleOf", "format", "$id"),
    *(
        "query",
        "queries",
        "url",
        "urls",
        "cursor",
        "find",
        "count",
        "site",
        "session_id",
        "api_key",
        "timeout",
        "with_content",
    ),
    *(
        "data",
        "title",
        "content",
        "description",
        "warning",
        "links",
        "images",
        "chunks",
        "siteLinks",
        "usage",
        "tokens",
    ),
    *("meta", "code", "status", "message", "readableMessage", "name", "publishedTime", "numPages", "metadata", "text"),
    *("tool_args_defaults_applied", "tool_args_fixed_applied", "step_id", "trace_id", "0", "1", "html", "doNotTrack"),
    *sorted(REFUSED),
    *(name for tool in CATALOGUE.values() for name in tool.arguments.model_fields),
)
_TEXTS = (
    *_NAMES,
    *("", "search", "reader", "string", "object", "array", "https://example.com/", "https://r.jina.ai", "JINA_API_KEY"),
    *("{agent_id}", "{step_id}{trace_id}", "{nobody}", "(a+)+$", "^[a-z]{1,500}$", "a,https://a.b/", "#/$defs/a", "#"),
    *("a-key-of-the-fuzzer", "[End of web content.]", "[web content", "\u0000", "\u202e", "x://y@", "Error(", "jina_"),
    *("\ud7ff", "\U0001f600", "a" * 300, "No search results available for query x", "&#97;-key", "\\_"),
)
_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    0.5,
    1e308,
    2**53,
    -(2**63),
    2**64 - 1,
    "",
    [],
    {},
    [[]],
    {"": {}},
)
_NUMBER = (0, 1, 20, 10_000)

Change = Callable[[Any, random.Random], Any]


def mutate(data: bytes, most: int, seed: int, flip: Callable[[bytes, int], bytes]) -> bytes:
    """Return a mutated input of at most `most` bytes; `flip` changes bytes as libFuzzer does."""
    chance = random.Random(seed)  # noqa: S311 - libFuzzer's own seed
    pieces = list(parts(data))
    for _ in range(chance.choice((1, 1, 2, 4))):
        place = chance.randrange(3)
        pieces[place] = _answer(pieces[place], chance, flip) if place == 2 else _json(pieces[place], chance)
    changed = SEPARATOR.join(pieces)
    return changed if len(changed) <= min(most, MAX_BYTES) else flip(data, min(most, MAX_BYTES))


def _answer(piece: bytes, chance: random.Random, flip: Callable[[bytes, int], bytes]) -> bytes:
    status, body = piece[:1] or b"\0", piece[1:]
    if chance.random() < 0.1:
        status = bytes([chance.randrange(14)])
    if chance.random() < 0.15:
        return status + flip(body, len(body) + 64)
    return status + _json(body, chance)


def _json(text: bytes, chance: random.Random) -> bytes:
    """Return a JSON text with one random change."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = {}
    try:
        return orjson.dumps(_changed(value, chance))
    except TypeError:  # nested too deeply
        return text


def _changed(value: Any, chance: random.Random) -> Any:
    """Descend randomly, then change the value there."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        name = chance.choice(list(value))
        return {**value, name: _changed(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        return [*value[:place], _changed(value[place], chance), *value[place + 1 :]]
    return chance.choice(_CHANGES)(value, chance)


def _replace(_: Any, chance: random.Random) -> Any:
    return chance.choice(_VALUES) if chance.random() < 0.5 else chance.choice(_TEXTS)


def _most_times(value: Any) -> int:
    """Return how often a value may be repeated in an input without exhausting the fuzzer's memory."""
    return max(1, MAX_BYTES // len(orjson.dumps(value)))


def _grow(value: Any, chance: random.Random) -> Any:
    times = chance.randrange(1, min(_MAX_TIMES, _most_times(value) + 1))
    if isinstance(value, str):
        return value[:100] * times
    if isinstance(value, list):
        return (value[:10] or [None]) * times
    if isinstance(value, dict):
        filler = chance.choice(_VALUES)
        return value | {f"{chance.choice(_NAMES)}{number}": filler for number in range(times)}
    return [value] * times


def _nest(value: Any, chance: random.Random) -> Any:
    name = chance.choice(_NAMES)
    for _ in range(chance.choice(_DEPTHS)):
        value = {name: value} if name != "items" else [value]
    return value


def _branch(value: Any, chance: random.Random) -> Any:
    keyword = chance.choice(("anyOf", "oneOf", "allOf"))
    for _ in range(chance.randrange(1, 9)):
        if _most_times(value) == 1:
            break
        value = {keyword: [value, value]}
    return value


def _add(value: Any, chance: random.Random) -> Any:
    new = chance.choice((*_VALUES, *_TEXTS))
    if isinstance(value, dict):
        return {**value, chance.choice(_NAMES): new}
    return [*value, new] if isinstance(value, list) else {chance.choice(_NAMES): value}


def _drop(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict) and value:
        gone = chance.choice(list(value))
        return {name: inner for name, inner in value.items() if name != gone}
    return value[: len(value) // 2] if isinstance(value, str | list) else None


def _rename(value: Any, chance: random.Random) -> Any:
    if not isinstance(value, dict) or not value:
        return _replace(value, chance)
    old, new = chance.choice(list(value)), chance.choice(_TEXTS)
    return {new if name == old else name: inner for name, inner in value.items()}


def _splice(value: Any, chance: random.Random) -> Any:
    if not isinstance(value, str):
        return _add(value, chance)
    place = chance.randrange(len(value) + 1)
    return value[:place] + chance.choice(_TEXTS) + value[place:]


_CHANGES: tuple[Change, ...] = (_replace, _replace, _add, _add, _drop, _rename, _splice, _grow, _nest, _branch)
