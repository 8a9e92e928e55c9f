"""Bounds below which work of tenants and pages is done in the event loop; beyond, in a worker process.

Each bound limits a factor of the cost. At the largest schema and arguments within all of them together, the first
validation of a call that fits nowhere (compile, validate, repair, describe each problem) took at most 2 ms of
CPU; `tests/hostile/test_inline_bounds.py` measures it and searches for more.

A schema with any other keyword is never validated inline: the cost of `allOf`, `contains`, `uniqueItems` and others
grows with products that no simple count shows. The linter refuses them in new definitions
(`tools/declaration_schema.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import orjson

from openapi_tool.protocol.jsontext import JsonValue, levels
from openapi_tool.tools.bounds import count_values

MAX_CPU_MS = 5.0
"""Limit of the CPU time of one computation in the event loop."""

SMALL = 64 * 1024
"""Bytes or characters that take a fraction of a millisecond, and no memory worth counting."""

MAX_BODY_BYTES, MAX_BODY_VALUES = 80_000, 2_000
"""Of a response that is read inline; commas within texts count as values, too."""

LONG_BODY_BYTES = 8_000
"""Of a response that may take over 0.5 ms inline, so that each is read in an iteration of the event loop of its own."""

MAX_SECRETS = 4
"""Whose marks are searched in a response inline, which takes up to 0.4 ms each. If one occurs, a worker masks it."""

MAX_DEFINITION_BYTES = 32_000
"""Bytes of a definition that is parsed inline; the largest built-in one has 2,900."""

MAX_SCHEMA_BYTES, MAX_SCHEMA_VALUES = 16_000, 500
MAX_LEVELS = 8
"""Of schemas in schemas. The error of an object or list copies the values below it, at each level."""

MAX_PATTERNS, MAX_PATTERN_CHARS = 4, 100
r"""Of regular expressions other than `\S`, which is of the built-in tools. Compiling one takes up to 0.4 ms."""

MAX_ARGUMENT_BYTES, MAX_ARGUMENT_VALUES = 20_000, 100

MAX_COMPARED_BYTES = 100_000
"""Bytes of `enum` and `const` times values of the arguments. Their values may only be texts, integers, booleans and
null: comparing two fractions takes up to 20 µs (1e-300), and lists and objects of them multiply that."""

MAX_MATCHED_BYTES = 20_000
"""Regular expressions times bytes of the arguments."""

MAX_ERRORS = 150
"""Errors, of 15 µs each: three per value, and one per required name and object."""

FRACTION = 4
"""A fraction among the arguments counts as this many values: its error shows up to 300 digits."""

MAX_NAME_PRODUCT = 5_000
"""Characters of unknown names times those of known ones: each pair is compared (difflib) to suggest the right one."""

_CHEAP_PATTERN = r"\S"
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "format"})
_CHECKED = frozenset(
    {
        *("type", "required", "minLength", "maxLength", "minItems", "maxItems"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    }
)


def body_fits_inline(body: bytearray, secrets: int) -> bool:
    """Return whether the body of a response is read inline, given the number of secrets that were sent."""
    if len(body) > MAX_BODY_BYTES or secrets > MAX_SECRETS:
        return False
    return sum(map(body.count, (b",", b"[", b"{"))) <= MAX_BODY_VALUES


@dataclass(frozen=True, slots=True)
class SchemaSize:
    """Factors of the cost of a schema within its bounds."""

    patterns: int = 0
    compared_bytes: int = 0
    required: int = 0
    name_chars: int = 0


class _Beyond(Exception):
    """A bound is exceeded."""


def schema_size(schema: Mapping[str, JsonValue]) -> SchemaSize | None:
    """Return the size of a schema, None if it is beyond the bounds."""
    if len(orjson.dumps(schema)) > MAX_SCHEMA_BYTES or count_values(schema) > MAX_SCHEMA_VALUES:
        return None
    try:
        nodes = list(_nodes(dict(schema), 1))
    except _Beyond:
        return None
    patterns = [pattern for node in nodes if (pattern := node.get("pattern", _CHEAP_PATTERN)) != _CHEAP_PATTERN]
    if len(patterns) > MAX_PATTERNS or any(not _is_short(pattern) for pattern in patterns):
        return None
    required = [name for node in nodes for name in _list(node.get("required"))]
    names = [*_object(schema.get("properties")), *map(str, _list(schema.get("required")))]
    compared = [value for node in nodes for value in (*_list(node.get("enum")), node.get("const"))]
    if not all(value is None or isinstance(value, str | int) for value in compared):
        return None
    return SchemaSize(
        patterns=len(patterns),
        compared_bytes=sum(len(orjson.dumps(value)) for value in compared),
        required=len(required),
        name_chars=sum(map(len, names)),
    )


def _nodes(schema: JsonValue, level: int) -> Iterator[Mapping[str, JsonValue]]:
    """Yield each schema in a schema. Raises _Beyond."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict) or level > MAX_LEVELS:
        raise _Beyond
    yield schema
    for word, value in schema.items():
        if word == "properties" and isinstance(value, dict):
            for below in value.values():
                yield from _nodes(below, level + 1)
        elif word == "items" or (word == "additionalProperties" and isinstance(value, bool)):
            yield from _nodes(value, level + 1)
        elif word not in _ANNOTATIONS and word not in _CHECKED and word not in ("enum", "const", "pattern"):
            raise _Beyond


def _is_short(pattern: JsonValue) -> bool:
    # `\p` and `(?i)` make a short text a large program: they stand for hundreds of ranges of characters.
    short = isinstance(pattern, str) and len(pattern) <= MAX_PATTERN_CHARS
    return short and "\\p" not in str(pattern) and "(?" not in str(pattern)


def fits_inline(size: SchemaSize, schema: Mapping[str, JsonValue], arguments: Mapping[str, JsonValue]) -> bool:
    """Return whether arguments are validated inline by a schema of this size."""
    try:
        length = len(orjson.dumps(arguments))
    except orjson.JSONEncodeError:  # a number beyond 64 bits, whose digits may be converted in quadratic time
        return False
    if length > MAX_ARGUMENT_BYTES or length * size.patterns > MAX_MATCHED_BYTES:
        return False
    values = sum(_weight(value) for level in levels(arguments) for value in level)
    if values > MAX_ARGUMENT_VALUES or values * size.compared_bytes > MAX_COMPARED_BYTES:
        return False
    known = _object(schema.get("properties"))
    unknown = sum(len(name) for name in arguments if name not in known)
    return values * 3 + (values + 1) * size.required <= MAX_ERRORS and unknown * size.name_chars <= MAX_NAME_PRODUCT


def _weight(value: object) -> int:
    return FRACTION if isinstance(value, float) else 1


def _object(value: JsonValue) -> dict[str, JsonValue]:
    return value if isinstance(value, dict) else {}


def _list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []
