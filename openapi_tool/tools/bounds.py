"""Size limits of a stored definition, for linter and executor (tool-design section 2).

A definition is a row with two JSON columns, `parameters` (a JSON Schema) and `options`. It may have been written
without the linter. Without limits a row of 2 kB, with nested `$ref` and `anyOf`, made the schema validator allocate
memory until every process of this service was killed.
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

_Object = tuple[Path, dict[str, JsonValue]]
"""Object in a JSON value, with its path."""

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
        for each in level:
            total += sys.getsizeof(each) + _GC_HEADER_BYTES
            if isinstance(each, dict):
                total += sum(map(sys.getsizeof, each))  # its keys
    return total


def patterns(schema: object) -> list[str]:
    """Return the regular expressions of a schema, the keys of `patternProperties` included."""
    objects, _ = _objects(schema, ())
    return [pattern for _, members in objects for pattern in _patterns(members)]


def _schema_problems(schema: object) -> Iterator[Problem]:
    objects, problems = _objects(schema, ("parameters",))
    yield from _pattern_problems(objects)
    multiples = sum("multipleOf" in members for _, members in objects)
    if multiples > MAX_MULTIPLES:
        yield Problem(("parameters",), f"uses multipleOf more than {MAX_MULTIPLES} times; take some out")
    # Keywords only of a schema that was looked at as a whole.
    yield from problems or _keyword_problems(objects)


def _pattern_problems(objects: list[_Object]) -> Iterator[Problem]:
    found: list[str] = []
    for path, members in objects:
        for pattern in _patterns(members):
            found.append(pattern)
            place = (*path, "pattern")
            if len(pattern) > MAX_PATTERN_CHARS:
                yield Problem(place, f"has more than {MAX_PATTERN_CHARS} characters; shorten it")
            if _class_uses(pattern) > MAX_PATTERN_CLASSES:
                yield Problem(place, f"uses {_CLASSES} more than {MAX_PATTERN_CLASSES} times; shorten it")
    if sum(map(_class_uses, found)) > MAX_CLASSES:
        yield Problem(("parameters",), f"uses {_CLASSES} more than {MAX_CLASSES} times; take some out")
    if len(found) > MAX_PATTERNS:
        yield Problem(("parameters",), f"holds more than {MAX_PATTERNS} regular expressions; take some out")


def _keyword_problems(objects: list[_Object]) -> Iterator[Problem]:
    for path, members in objects:
        refused = _REFUSED_BELOW if len(path) > 1 else REFUSED_KEYWORDS
        for name in members:
            if name in refused:
                yield Problem((*path, name), refused[name])
        names = members.get("properties")
        if isinstance(names, dict) and len(names) > MAX_PROPERTIES:
            yield Problem((*path, "properties"), f"has more than {MAX_PROPERTIES} names; take some out")
        values = members.get("enum")
        if isinstance(values, list) and len(values) > MAX_ENUM_VALUES:
            excess = f"has more than {MAX_ENUM_VALUES} values; take some out, or use a pattern"
            yield Problem((*path, "enum"), excess)


def _patterns(members: dict[str, JsonValue]) -> list[str]:
    """Return the regular expressions right in an object of a schema."""
    pattern = members.get("pattern")
    found = [pattern] if isinstance(pattern, str) else []
    return [*found, *as_object(members.get("patternProperties"))]


def _class_uses(pattern: str) -> int:
    return sum(pattern.count(f"\\{letter}") for letter in "dDsSwW")


def _options_problems(options: object) -> Iterator[Problem]:
    objects, problems = _objects(options, ("options",))
    for path, members in objects:
        _, *names = path
        if tuple(names) in _LIMITED_MEMBERS and len(members) > MAX_NAMES:
            yield Problem(path, f"has more than {MAX_NAMES} names; take some out")
    yield from problems


_LIMITED_MEMBERS = frozenset(
    {
        ("envs",),
        ("args", "defaults"),
        ("args", "fixed"),
        *((section, name) for section in ("jina", "openapi") for name in ("params", "defaults", "headers")),
    }
)
"""Paths in `options` of the objects with at most MAX_NAMES members."""


def _objects(root: object, root_path: Path) -> tuple[list[_Object], list[Problem]]:
    """Return the objects in `root`, level by level, and problems: too large numbers, too many values, too many levels.

    The last two end the search. A level is counted before it is expanded, so that a hostile row costs no more than the
    largest allowed one.
    """
    objects: list[_Object] = []
    problems: list[Problem] = []
    level = [(root_path, root)]
    count = 0
    for _ in range(MAX_DEPTH + 1):
        count += sum(len(value) for _, value in level if isinstance(value, dict | list))
        if count > MAX_VALUES:
            excess = f"holds more than {MAX_VALUES:,} values, branches included; shorten it"
            problems.append(Problem(root_path, excess))
            return objects, problems
        objects += [(path, value) for path, value in level if isinstance(value, dict)]
        level = [((*path, key), member) for path, value in level for key, member in _members(value)]
        for path, value in level:
            if isinstance(value, int) and not MIN_INTEGER <= value <= MAX_INTEGER:
                problems.append(Problem(path, "is a number beyond 64 bits"))
        if not level:
            return objects, problems
    path, _ = level[0]
    problems.append(Problem(path, f"is nested deeper than {MAX_DEPTH} levels; flatten it"))
    return objects, problems


def _members(value: object) -> Iterator[tuple[str | int, JsonValue]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)
