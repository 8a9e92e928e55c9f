"""Bounds below which work on input of tenants and pages is done in the event loop; beyond, in a worker process.

*Inline* means in the event loop. A worker process costs some time for each task, so small work is done inline; but what
takes long there would delay all other calls.

Each bound limits a factor of the cost. At the largest schema and arguments within all of them together, the first
validation of a call that fits nowhere (compile, validate, repair, describe each problem) took at most 2 ms of CPU;
`tests/hostile/test_inline_bounds.py` measures it and searches for more.

A schema with any other keyword is never validated inline: the cost of `allOf`, `contains`, `uniqueItems` and others
grows with products that no simple count shows. The linter refuses them in new definitions
(`tools/declaration_schema.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import orjson

from openapi_tool.protocol.jsontext import JsonValue, levels
from openapi_tool.tools.bounds import count_values

MAX_CPU_MS = 5.0
"""Limit of the CPU time of one computation in the event loop."""

SMALL = 64 * 1024
"""Bytes or characters that take a fraction of a millisecond, and no memory worth counting."""

MAX_BODY_BYTES, MAX_BODY_VALUES = 80_000, 2_000
"""Bytes and JSON values of a response that is read inline; commas within texts count as values, too."""

LONG_BODY_BYTES = 8_000
"""Bytes of a response from which on reading it inline may take over 0.5 ms. Each such response is read in an iteration
of the event loop of its own."""

MAX_SECRETS = 4
"""Secrets that are searched in a response inline, each by a short part of it, which takes up to 0.4 ms. If a part
occurs, a worker process masks the secret."""

MAX_DEFINITION_BYTES = 32_000
"""Bytes of a definition that is parsed inline; the largest built-in one has 2,900."""

# Of a schema that validates arguments inline:
MAX_SCHEMA_BYTES, MAX_SCHEMA_VALUES = 16_000, 500

MAX_LEVELS = 8
"""Levels of schemas in schemas. The error of an object or list copies the values below it, at each level."""

MAX_PATTERNS, MAX_PATTERN_CHARS = 4, 100
r"""Number of regular expressions, and characters of each. `\S`, which the built-in tools use, does not count. Compiling
one takes up to 0.4 ms."""

# Of arguments that are validated inline:
MAX_ARGUMENT_BYTES, MAX_ARGUMENT_VALUES = 20_000, 100

# Of schema and arguments together:

MAX_COMPARED_BYTES = 100_000
"""Bytes of `enum` and `const`, times values of the arguments: each value may be compared with all of them. `enum` and
`const` may only hold texts, integers, booleans and null: comparing two fractions takes up to 20 µs (1e-300), and lists
and objects of them multiply that."""

MAX_MATCHED_BYTES = 20_000
"""Number of regular expressions, times bytes of the arguments."""

MAX_ERRORS = 150
"""Errors that a validation may find, of 15 µs each: three per value, and one per required name and object."""

FRACTION_WEIGHT = 4
"""A fraction among the arguments counts as this many values: its error shows up to 300 digits."""

MAX_NAME_PRODUCT = 5_000
"""Characters of unknown names times those of known ones: each pair is compared (difflib) to suggest the right one."""

_CHEAP_PATTERN = r"\S"
# Keywords that cost nothing, and keywords whose cost does not depend on their value.
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
    """Factors of the cost of a schema within its bounds.

    - `patterns`: number of regular expressions.
    - `compared_bytes`: bytes of all values of `enum` and `const`.
    - `required`: number of required names.
    - `name_chars`: characters of the names of arguments that it knows.
    """

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
        subschemas = list(_subschemas(dict(schema), 1))
        patterns = _costly_patterns(subschemas)
        compared = _compared_values(subschemas)
    except _Beyond:
        return None
    names = [*_object(schema.get("properties")), *map(str, _list(schema.get("required")))]
    return SchemaSize(
        patterns=len(patterns),
        compared_bytes=sum(len(orjson.dumps(value)) for value in compared),
        required=sum(len(_list(subschema.get("required"))) for subschema in subschemas),
        name_chars=sum(map(len, names)),
    )


def _subschemas(schema: JsonValue, level: int) -> Iterator[Mapping[str, JsonValue]]:
    """Yield a schema and each schema in it. Raises _Beyond."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict) or level > MAX_LEVELS:
        raise _Beyond
    yield schema
    for keyword, value in schema.items():
        if keyword == "properties" and isinstance(value, dict):
            for subschema in value.values():
                yield from _subschemas(subschema, level + 1)
        elif keyword == "items" or (keyword == "additionalProperties" and isinstance(value, bool)):
            yield from _subschemas(value, level + 1)
        elif keyword not in _ANNOTATIONS and keyword not in _CHECKED and keyword not in ("enum", "const", "pattern"):
            raise _Beyond


def _costly_patterns(subschemas: Sequence[Mapping[str, JsonValue]]) -> list[JsonValue]:
    """Return the regular expressions but the cheap one. Raises _Beyond."""
    patterns = [subschema.get("pattern", _CHEAP_PATTERN) for subschema in subschemas]
    costly = [pattern for pattern in patterns if pattern != _CHEAP_PATTERN]
    if len(costly) > MAX_PATTERNS or not all(map(_is_short, costly)):
        raise _Beyond
    return costly


def _is_short(pattern: JsonValue) -> bool:
    # `\p` and `(?i)` make a short text a large program: they stand for hundreds of ranges of characters.
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARS:
        return False
    return "\\p" not in pattern and "(?" not in pattern


def _compared_values(subschemas: Sequence[Mapping[str, JsonValue]]) -> list[JsonValue]:
    """Return the values of `enum` and `const`. Raises _Beyond."""
    values: list[JsonValue] = []
    for subschema in subschemas:
        values += [*_list(subschema.get("enum")), subschema.get("const")]
    if not all(value is None or isinstance(value, str | int) for value in values):
        raise _Beyond
    return values


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
    errors = values * 3 + (values + 1) * size.required
    known = _object(schema.get("properties"))
    unknown_chars = sum(len(name) for name in arguments if name not in known)
    return errors <= MAX_ERRORS and unknown_chars * size.name_chars <= MAX_NAME_PRODUCT


def _weight(value: object) -> int:
    return FRACTION_WEIGHT if isinstance(value, float) else 1


def _object(value: JsonValue) -> dict[str, JsonValue]:
    return value if isinstance(value, dict) else {}


def _list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []
