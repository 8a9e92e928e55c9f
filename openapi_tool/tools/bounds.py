"""Size limits of a stored definition, for linter and executor (tool-design section 2).

Without them a row of 2 kB (nested `$ref` and `anyOf`), written without the linter, made the schema validator allocate
memory until every replica was killed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import chain

from openapi_tool.protocol.jsontext import MAX_INTEGER, MIN_INTEGER, JsonValue, as_object, levels
from openapi_tool.tools.problems import MAX_PROBLEMS, Path, Problem

MAX_ROW_BYTES = 256 * 1024
"""Bytes of `parameters` and `options` together, as JSON text of PostgreSQL."""

MAX_VALUES = 2_000
"""Values (`count_values`) of `parameters`, and of `options`; the largest built-in tool has 81.

A compiled validator takes about 1 kB for each value, and its errors may copy them.
"""

MAX_DEPTH = 32
"""Levels of objects and lists. The linter allows 12 levels of schemas, which take 26 of these."""

MAX_PROPERTIES = 200
"""Names in one `properties`; model providers accept at most 128."""

MAX_ENUM_VALUES = 500
"""Values of one `enum`; the validator compares each item of a list with all of them."""

MAX_PATTERNS = 20
"""Regular expressions, the keys of `patternProperties` included."""

MAX_PATTERN_CHARS = 500
"""Characters of one regular expression; `compiled_schema.py` limits its compiled size."""

MAX_PATTERN_CLASSES = 40
r"""Uses of `\d`, `\s`, `\w` and their opposites in one regular expression. jsonschema-rs rewrites them in quadratic
time: 250 uses took 160 ms."""

MAX_CLASSES = 100
"""The same in all regular expressions of a definition."""

_CLASSES = r"\d, \D, \s, \S, \w and \W"

MAX_MULTIPLES = 20
"""Uses of `multipleOf`: each takes over 1 µs per checked value, so 930 uses took a second for one long list."""

MAX_NAMES = 100
"""Members of each of `params`, `headers`, `defaults`, `fixed` and `envs`; the upstream has some 60 parameters."""

REFUSED_KEYWORDS = {
    **dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef"), "references are not read; write the schema out"),
    **dict.fromkeys(
        ("unevaluatedProperties", "unevaluatedItems", "propertyNames"),
        "is not read: what it costs grows with the product of branches and values",
    ),
}
"""Why no stored row may use a keyword."""

# Below the root, these could select another draft of JSON Schema, with other keywords and formats.
_REFUSED_BELOW = REFUSED_KEYWORDS | dict.fromkeys(
    ("$schema", "$id"), "is read only at the root of parameters; take it out"
)

_GC_HEADER_BYTES = 16  # before each object, not included in sys.getsizeof


def row_problems(parameters: object, options: object) -> list[Problem]:
    """Return the limits that a definition exceeds, at most MAX_PROBLEMS + 1."""
    problems = [*_schema_problems(parameters), *_options_problems(options)]
    if not problems and row_bytes(parameters, options) > MAX_ROW_BYTES:
        problems.append(Problem((), f"is larger than {MAX_ROW_BYTES:,} bytes; shorten descriptions and values"))
    return problems[: MAX_PROBLEMS + 1]


def row_bytes(parameters: object, options: object) -> int:
    """Return the bytes of both JSON columns, as PostgreSQL writes them."""
    return sum(len(json.dumps(value, ensure_ascii=False).encode()) for value in (parameters, options))


def count_values(value: object) -> int:
    """Return the number of members of objects and items of lists, at all levels."""
    return sum(map(len, levels(value)))


def memory_bytes(value: object) -> int:
    """Return the memory of a JSON value in bytes; shared objects count each time."""
    total = 0
    for level in chain([[value]], levels(value)):
        total += sum(sys.getsizeof(one) + _GC_HEADER_BYTES for one in level)
        total += sum(sys.getsizeof(key) for one in level if isinstance(one, dict) for key in one)
    return total


def patterns(schema: object) -> list[str]:
    """Return the regular expressions of a schema, the keys of `patternProperties` included."""
    return [pattern for _, value in _objects(schema, (), []) for pattern in _patterns(value)]


def _schema_problems(schema: object) -> Iterator[Problem]:
    problems: list[Problem] = []
    found: list[str] = []
    multiples = 0
    for path, value in _objects(schema, ("parameters",), problems):
        found += _patterns(value)
        multiples += "multipleOf" in value
        for pattern in _patterns(value):
            place = (*path, "pattern")
            if len(pattern) > MAX_PATTERN_CHARS:
                yield Problem(place, f"has more than {MAX_PATTERN_CHARS} characters; shorten it")
            if _class_uses(pattern) > MAX_PATTERN_CLASSES:
                yield Problem(place, f"uses {_CLASSES} more than {MAX_PATTERN_CLASSES} times; shorten it")
    counts = (
        (sum(map(_class_uses, found)), MAX_CLASSES, f"uses {_CLASSES} more than {MAX_CLASSES} times"),
        (len(found), MAX_PATTERNS, f"holds more than {MAX_PATTERNS} regular expressions"),
        (multiples, MAX_MULTIPLES, f"uses multipleOf more than {MAX_MULTIPLES} times"),
    )
    for number, limit, excess in counts:
        if number > limit:
            yield Problem(("parameters",), f"{excess}; take some out")
    yield from problems or _keyword_problems(schema)


def _keyword_problems(schema: object) -> Iterator[Problem]:
    for path, value in _objects(schema, ("parameters",), []):
        refused = _REFUSED_BELOW if len(path) > 1 else REFUSED_KEYWORDS
        yield from (Problem((*path, name), refused[name]) for name in value if name in refused)
        names = value.get("properties")
        if isinstance(names, dict) and len(names) > MAX_PROPERTIES:
            yield Problem((*path, "properties"), f"has more than {MAX_PROPERTIES} names; take some out")
        values = value.get("enum")
        if isinstance(values, list) and len(values) > MAX_ENUM_VALUES:
            excess = f"has more than {MAX_ENUM_VALUES} values; take some out, or use a pattern"
            yield Problem((*path, "enum"), excess)


def _patterns(value: dict[str, JsonValue]) -> list[str]:
    pattern = value.get("pattern")
    found = [pattern] if isinstance(pattern, str) else []
    return [*found, *as_object(value.get("patternProperties"))]


def _class_uses(pattern: str) -> int:
    return sum(pattern.count(f"\\{letter}") for letter in "dDsSwW")


def _options_problems(options: object) -> Iterator[Problem]:
    problems: list[Problem] = []
    for path, value in _objects(options, ("options",), problems):
        if path[1:] in _LIMITED_NAMES and len(value) > MAX_NAMES:
            yield Problem(path, f"has more than {MAX_NAMES} names; take some out")
    yield from problems


_LIMITED_NAMES = frozenset(
    {
        ("envs",),
        ("args", "defaults"),
        ("args", "fixed"),
        *((section, name) for section in ("jina", "openapi") for name in ("params", "defaults", "headers")),
    }
)


def _objects(root: object, path: Path, problems: list[Problem]) -> Iterator[tuple[Path, dict[str, JsonValue]]]:
    """Yield each object in `root` with its path, level by level.

    Append too large numbers to `problems`, and too many values or levels, which end the iteration. A level is counted
    before it is expanded, so that a hostile row costs no more than the largest allowed one.
    """
    level = [(path, root)]
    count = 0
    for _ in range(MAX_DEPTH + 1):
        count += sum(len(value) for _, value in level if isinstance(value, dict | list))
        if count > MAX_VALUES:
            problems.append(Problem(path, f"holds more than {MAX_VALUES:,} values, branches included; shorten it"))
            return
        yield from ((where, value) for where, value in level if isinstance(value, dict))
        level = [((*where, key), member) for where, value in level for key, member in _members(value)]
        problems += (
            Problem(where, "is a number beyond 64 bits")
            for where, value in level
            if isinstance(value, int) and not MIN_INTEGER <= value <= MAX_INTEGER
        )
        if not level:
            return
    where, _ = level[0]
    problems.append(Problem(where, f"is nested deeper than {MAX_DEPTH} levels; flatten it"))


def _members(value: object) -> Iterator[tuple[str | int, JsonValue]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)
