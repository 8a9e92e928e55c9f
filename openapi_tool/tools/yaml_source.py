"""Parser of YAML files with definitions, which knows the line and column of every value.

It accepts only what is JSON, too. Where YAML means something else than its author, as in `country: no` or `1:30`, it
reports a problem.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import yaml

from openapi_tool.protocol.jsontext import JsonValue, storable
from openapi_tool.tools.placeholders import PLACEHOLDERS
from openapi_tool.tools.problems import Path, Problem

MAX_NODES = 20_000
"""Values of a document; one to which it refers several times counts each time."""

MAX_FILE_NODES = 50_000
"""Values and keys of a file: the parser takes about 0.1 ms for each."""

MAX_BYTES = 8_000_000
"""Bytes of a file: more than a definition may have, so that a larger one is parsed and its error gets a line."""

_MERGE_KEY = "<<"
_NULL_TAG = "tag:yaml.org,2002:null"
_TEXT_TAG = "tag:yaml.org,2002:str"
_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MAX_EXAMINED_CHARS = 40  # of a text or number, to say that it looks like another; longer ones were meant as they are

_MAX_NUMBER_CHARS = 400
"""Python converts at most 4,300 digits; numbers of this length have fewer, also sexagesimal ones such as `1:1:1`."""

_NOT_DECIMAL = re.compile(r"[-+]?0[0-9_]+|[^:]*:.*")
"""Octal and sexagesimal numbers of YAML 1.1: `010` is 8, `1:30` is 90."""

_TEXT_LIKE_A_NUMBER = re.compile(r"[-+]?(?:0o?[0-9]+|[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+)")
"""Texts of YAML 1.1 that look like numbers: `08`, `0o17`, `1e3`."""

_TEXT_LIKE_A_NUMBER_MESSAGE = (
    "YAML reads this as a text; write the number in plain digits, or put it in quotes to mean the text"
)

LineColumn = tuple[int, int]
"""Both from 1."""


@dataclass(frozen=True, slots=True)
class Source:
    """Parsed definition.

    - `problems`: those of the YAML. If one is not only a warning, `document` is incomplete.
    - `positions`: where each value stands, by its path.
    """

    document: JsonValue
    problems: list[Problem]
    positions: Mapping[Path, LineColumn]

    def position(self, path: Path) -> LineColumn:
        """Return the position of a path, or of its nearest ancestor."""
        while path and path not in self.positions:
            path = path[:-1]
        return self.positions.get(path, (1, 1))


def read_source(text: str) -> Source:
    """Parse YAML with one document; never raises."""
    first, *others = read_sources(text)
    if others:
        return Source(None, [Problem((), f"there are {1 + len(others)} documents; give one")], first.positions)
    return first


def read_sources(text: str) -> list[Source]:
    """Parse YAML documents, up to an invalid one, which becomes a problem; never raises.

    Empty documents are ignored unless there is nothing else.
    """
    sources: list[Source] = []
    try:
        for root in yaml.compose_all(text, Loader=_Loader):
            reader = _YamlReader()
            document = reader.value(root, ())
            if document is not None or reader.problems:
                sources.append(Source(document, reader.problems, reader.positions))
    except yaml.YAMLError as error:
        sources.append(_unparsed(text, error))
    except _TooManyNodes as error:
        problem = Problem((), f"the file has more than {MAX_FILE_NODES:,} keys and values; split it, or shorten it")
        sources.append(Source(None, [problem], {(): _position(error.mark)}))
    except RecursionError:
        sources.append(Source(None, [Problem((), "is nested too deeply; flatten it")], {}))
    return sources or [Source(None, [], {})]


def _unparsed(text: str, error: yaml.YAMLError) -> Source:
    """Return the source of a document that is no YAML, with the reason and a remedy."""
    parts = [getattr(error, name, None) for name in ("context", "problem", "reason")]
    reason = ", ".join(str(part) for part in parts if part) or "it cannot be read"
    mark: yaml.Mark | None = getattr(error, "problem_mark", None)
    remedy = _placeholder_remedy(text, mark) or "check indentation, brackets and quotes there"
    problem = Problem((), f"is no YAML: {reason}; {remedy}")
    return Source(None, [problem], {(): _position(mark)} if mark else {})


class _TooManyNodes(Exception):
    def __init__(self, mark: yaml.Mark) -> None:
        super().__init__()
        self.mark = mark


class _Loader(yaml.SafeLoader):
    """Loader of a file with at most MAX_FILE_NODES keys and values. Raises _TooManyNodes."""

    nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.nodes += 1
        if self.nodes > MAX_FILE_NODES:
            raise _TooManyNodes(self.get_mark())
        return super().compose_node(parent, index)


_UNQUOTED_PLACEHOLDER = re.compile(rf"(?:^|[\s,\[:-])\{{({'|'.join(PLACEHOLDERS)})\}}")
"""Placeholder at the start of a text without quotes, which YAML reads as the start of an object."""


def _placeholder_remedy(text: str, mark: yaml.Mark | None) -> str:
    """Return the remedy for `{project_id}.example` in the line of an error, empty if there is none."""
    if mark is None:
        return ""
    lines = text.splitlines()
    found = _UNQUOTED_PLACEHOLDER.search(lines[mark.line]) if mark.line < len(lines) else None
    return f'quote the braces: "{{{found[1]}}}…"' if found else ""


def _position(mark: yaml.Mark) -> LineColumn:
    return mark.line + 1, mark.column + 1


def _unquoted_placeholder(node: yaml.MappingNode) -> str | None:
    """Return the placeholder of `{project_id}` without quotes, an object with one key and no value."""
    if not node.flow_style or len(node.value) != 1:
        return None
    key, value = node.value[0]
    is_empty = isinstance(value, yaml.ScalarNode) and value.tag == _NULL_TAG and not value.value
    if is_empty and isinstance(key, yaml.ScalarNode) and key.value in PLACEHOLDERS:
        return str(key.value)
    return None


@dataclass(slots=True)
class _YamlReader:
    """Reads the values of one document, and collects their positions and problems.

    `ancestors` are the ids of the nodes above the one that is read: a document can refer to itself.
    """

    problems: list[Problem] = field(default_factory=list)
    positions: dict[Path, LineColumn] = field(default_factory=dict)
    ancestors: set[int] = field(default_factory=set)
    nodes: int = 0

    def value(self, node: yaml.Node, path: Path) -> JsonValue:
        """Return the value of a node, with None in place of what has a problem."""
        self.positions.setdefault(path, _position(node.start_mark))
        self.nodes += 1
        if id(node) in self.ancestors or self.nodes > MAX_NODES:
            return self._problem(path, "is too large, or refers to itself; write it out, shorter")
        self.ancestors.add(id(node))
        try:
            if isinstance(node, yaml.ScalarNode):
                return self._scalar(node, path)
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        finally:
            self.ancestors.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: Path) -> JsonValue:
        placeholder = _unquoted_placeholder(node)
        if placeholder is not None:
            return self._problem(path, f'YAML reads this as an object; quote the braces: "{{{placeholder}}}"')
        values: dict[str, JsonValue] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
            path_of_key = (*path, key)
            self.positions.setdefault(path_of_key, _position(key_node.start_mark))
            if key == _MERGE_KEY:
                self._problem(path_of_key, "merge keys are not read; write the keys out")
            elif key_node.tag != _TEXT_TAG:
                self._problem(path_of_key, "a key must be a text; put it in quotes")
            elif key in values:
                self._problem(path_of_key, "is given twice; take one out")
            else:
                values[key] = self.value(value_node, path_of_key)
        return values

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> JsonValue:
        is_number = node.tag in _NUMBER_TAGS
        if is_number and len(node.value) > _MAX_NUMBER_CHARS:
            return self._problem(path, "is too long for a number; shorten it, or put it in quotes to mean the text")
        try:
            value = yaml.constructor.SafeConstructor().construct_object(node)
        except (yaml.YAMLError, ValueError):
            return self._problem(path, "is not a JSON value; put it in quotes")
        plain = _unquoted_text(node)
        if node.tag == _TEXT_TAG and _TEXT_LIKE_A_NUMBER.fullmatch(plain):
            self.problems.append(Problem(path, _TEXT_LIKE_A_NUMBER_MESSAGE, warning=True))
        if is_number and _NOT_DECIMAL.fullmatch(plain):
            message = f"YAML reads {plain} as {value}; write {value}, or put it in quotes to mean the text"
            return self._problem(path, message)
        why_not = _not_storable(value)
        return value if why_not is None else self._problem(path, why_not)

    def _problem(self, path: Path, message: str) -> JsonValue:
        """Record a problem, and return None as the value that has it."""
        self.problems.append(Problem(path, message))
        return None


def _unquoted_text(node: yaml.ScalarNode) -> str:
    """Return the text of a value, empty if it is in quotes or a block, or long."""
    is_unquoted = node.style is None
    return node.value if is_unquoted and len(node.value) <= _MAX_EXAMINED_CHARS else ""


def _not_storable(value: object) -> str | None:
    """Return why a value cannot be stored as JSON; None if it can."""
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if value is not None and not isinstance(value, str | bool | int | float):  # such as a date
        return f"YAML reads this as a {type(value).__name__}; put it in quotes"
    if storable(value) != value:
        return "cannot be stored in the database: NUL, half a character, or more than 64 bits; change it"
    return None
