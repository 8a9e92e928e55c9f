"""Bounds of a stored definition, shared by the linter and the executor (tool-design section 2).

Rows come from the database, past the linter, and every call of a project reads one. Without these bounds a row of
2 kB (nested `$ref` and `anyOf`) made the schema validator allocate until every replica was killed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from openapi_tool.tools.problems import MAX_PROBLEMS, Path, Problem

MAX_ROW_BYTES = 256 * 1024
"""Of `parameters` and `options` together, as PostgreSQL writes them; as much as a tool.call card may hold."""

MAX_PARTS = 2_000
"""Values of `parameters`, and of `options`: members of objects and items of lists, all branches counted.

The largest built-in tool has 81. A compiled validator takes about 1 kB for each, an error message may repeat all.
"""

MAX_DEPTH = 32
"""Levels of objects and lists; the linter's 12 levels of schemas are 26 of these."""

MAX_PROPERTIES = 200
"""Names in one `properties`; providers of models stop at 100 to 128 arguments of a tool."""

MAX_ENUM_VALUES = 500
"""Values of one `enum`: every country fits. Each item of a list is compared with all of them."""

MAX_PATTERNS = 20
"""Regular expressions, the keys of `patternProperties` included."""

MAX_PATTERN_CHARS = 500
"""Characters of one regular expression; what it compiles to is bounded in `tools.schema`."""

MAX_MULTIPLES = 20
"""Uses of `multipleOf`: one takes over 1 µs for each value, 930 of them a second for one list."""

MAX_NAMES = 100
"""Members of each of `params`, `headers`, `defaults`, `fixed` and `envs`; the upstream has some 60 parameters."""

_COLLECTED = 16  # bytes that the garbage collector puts before each object
_MAX_INTEGER, _MIN_INTEGER = 2**64 - 1, -(2**63)
_REFERENCES = "references are not read; write the schema out"
_COSTLY = "is not read: what it costs grows with the product of branches and values"
_REFUSED = {
    "$ref": _REFERENCES,
    "$dynamicRef": _REFERENCES,
    "$recursiveRef": _REFERENCES,
    "unevaluatedProperties": _COSTLY,
    "unevaluatedItems": _COSTLY,
    "propertyNames": _COSTLY,
}
_ONLY_AT_THE_ROOT = ("$schema", "$id")  # below it they switch to a dialect with other keywords and asserted formats


def row_problems(parameters: Any, options: Any) -> list[Problem]:
    """Return what of a definition goes beyond the bounds, each with its path; 21 problems at most."""
    problems = [*_schema_problems(parameters), *_options_problems(options)]
    if not problems and row_bytes(parameters, options) > MAX_ROW_BYTES:
        problems.append(Problem((), f"is larger than {MAX_ROW_BYTES:,} bytes; shorten descriptions and values"))
    return problems[: MAX_PROBLEMS + 1]


def row_bytes(parameters: Any, options: Any) -> int:
    """Size in bytes of a definition's two JSON columns, as PostgreSQL writes them."""
    return sum(len(json.dumps(value, ensure_ascii=False).encode()) for value in (parameters, options))


def parts(value: Any) -> int:
    """Number of values below a value: members of objects and items of lists, at all levels."""
    count, level = 0, [value]
    while level:
        level = [member for one in level for _, member in _members(one)]
        count += len(level)
    return count


def memory_bytes(value: Any) -> int:
    """Memory of a JSON value in bytes; what its parts share counts for each."""
    total, level = 0, [value]
    while level:
        total += sum(sys.getsizeof(one) + _COLLECTED for one in level)
        total += sum(sys.getsizeof(key) for one in level if isinstance(one, dict) for key in one)
        level = [member for one in level for _, member in _members(one)]
    return total


def patterns(schema: Any) -> list[str]:
    """Regular expressions of a schema, the keys of `patternProperties` included."""
    return [pattern for path, value in _objects(schema, (), []) for pattern in _patterns(value)]


def _schema_problems(schema: Any) -> Iterator[Problem]:
    problems: list[Problem] = []
    found: list[str] = []
    multiples = 0
    for path, value in _objects(schema, ("parameters",), problems):
        yield from _word_problems(value, path)
        yield from _count_problems(value, path)
        found += _patterns(value)
        multiples += "multipleOf" in value
        for pattern in _patterns(value):
            if len(pattern) > MAX_PATTERN_CHARS:
                yield Problem((*path, "pattern"), f"has more than {MAX_PATTERN_CHARS} characters; shorten it")
    if len(found) > MAX_PATTERNS:
        yield Problem(("parameters",), f"holds more than {MAX_PATTERNS} regular expressions; take some out")
    if multiples > MAX_MULTIPLES:
        yield Problem(("parameters",), f"uses multipleOf more than {MAX_MULTIPLES} times; take some out")
    yield from problems


def _word_problems(value: dict[str, Any], path: Path) -> Iterator[Problem]:
    for word in _REFUSED.keys() & value.keys():
        yield Problem((*path, word), _REFUSED[word])
    for word in _ONLY_AT_THE_ROOT:
        if word in value and len(path) > 1:
            yield Problem((*path, word), "is read only at the root of parameters; take it out")


def _count_problems(value: dict[str, Any], path: Path) -> Iterator[Problem]:
    properties, choices = value.get("properties"), value.get("enum")
    if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
        yield Problem((*path, "properties"), f"has more than {MAX_PROPERTIES} names; take some out")
    if isinstance(choices, list) and len(choices) > MAX_ENUM_VALUES:
        yield Problem((*path, "enum"), f"has more than {MAX_ENUM_VALUES} values; take some out, or use a pattern")


def _patterns(value: dict[str, Any]) -> list[str]:
    by_name = value.get("patternProperties")
    return [
        *([value["pattern"]] if isinstance(value.get("pattern"), str) else []),
        *(by_name if isinstance(by_name, dict) else []),
    ]


def _options_problems(options: Any) -> Iterator[Problem]:
    problems: list[Problem] = []
    for path, value in _objects(options, ("options",), problems):
        if path[1:] in _NAMED and len(value) > MAX_NAMES:
            yield Problem(path, f"has more than {MAX_NAMES} names; take some out")
    yield from problems


_NAMED = frozenset(
    {
        ("envs",),
        ("args", "defaults"),
        ("args", "fixed"),
        *((section, name) for section in ("jina", "openapi") for name in ("params", "defaults", "headers")),
    }
)


def _objects(root: Any, path: Path, problems: list[Problem]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield each object of a value with its path, level by level; stop where there are too many values or levels.

    Members are counted before they are looked at, so that a hostile row costs no more than the largest allowed one.
    """
    count, level = 0, [(path, root)]
    for _ in range(MAX_DEPTH + 1):
        count += sum(len(value) for _, value in level if isinstance(value, dict | list))
        if count > MAX_PARTS:
            problems.append(Problem(path, f"holds more than {MAX_PARTS:,} values, branches included; shorten it"))
            return
        yield from ((where, value) for where, value in level if isinstance(value, dict))
        level = [((*where, key), member) for where, value in level for key, member in _members(value)]
        problems += [Problem(where, "is a number beyond 64 bits") for where, value in level if _is_huge(value)]
        if not level:
            return
    where, _ = level[0]
    problems.append(Problem(where, f"is nested deeper than {MAX_DEPTH} levels; flatten it"))


def _members(value: Any) -> Iterator[tuple[str | int, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)


def _is_huge(value: Any) -> bool:
    return isinstance(value, int) and not _MIN_INTEGER <= value <= _MAX_INTEGER
