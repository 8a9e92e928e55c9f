"""YAML source of a definition: its JSON value, and line and column of each member."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import yaml

from openapi_tool.protocol.jsontext import storable
from openapi_tool.protocol.jsonvalue import JsonValue
from openapi_tool.tools.problems import Path, Problem

MAX_NODES = 20_000
_MERGE = "<<"
_TEXT_TAG = "tag:yaml.org,2002:str"

Position = tuple[int, int]
"""Line and column, both from 1."""


@dataclass(frozen=True, slots=True)
class Source:
    """Parsed source of a definition. `problems` are mistakes in the YAML; `document` is then incomplete."""

    document: JsonValue
    problems: list[Problem]
    positions: Mapping[Path, Position]

    def position(self, path: Path) -> Position:
        """Return the position of a path, or of its nearest ancestor in the text."""
        while path and path not in self.positions:
            path = path[:-1]
        return self.positions.get(path, (1, 1))


def read_source(text: str) -> Source:
    """Parse YAML restricted to JSON's types; never raises."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        reader = _Reader()
        document = None if root is None else reader.value(root, ())
    except yaml.YAMLError as error:
        return Source(None, [Problem((), f"is no YAML: {_reason(error)}")], {(): _mark(error)})
    except RecursionError:
        return Source(None, [Problem((), "is nested too deeply")], {})
    return Source(document, reader.problems, reader.positions)


@dataclass(slots=True)
class _Reader:
    problems: list[Problem] = field(default_factory=list)
    positions: dict[Path, Position] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)
    nodes: int = 0

    def value(self, node: yaml.Node, path: Path) -> JsonValue:
        self.positions.setdefault(path, (node.start_mark.line + 1, node.start_mark.column + 1))
        self.nodes += 1
        if id(node) in self.open or self.nodes > MAX_NODES:
            return self._problem(path, "is too large, or refers to itself")
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*path, place)) for place, item in enumerate(node.value)]
            return self._scalar(node, path)
        finally:
            self.open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, JsonValue]:
        values: dict[str, JsonValue] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
            here = (*path, key)
            self.positions.setdefault(here, (key_node.start_mark.line + 1, key_node.start_mark.column + 1))
            if key == _MERGE:
                self._problem(here, "merge keys are not read; write the keys out")
            elif key_node.tag != _TEXT_TAG:
                self._problem(here, "a key must be a text; put it in quotes")
            elif key in values:
                self._problem(here, "is given twice")
            else:
                values[key] = self.value(value_node, here)
        return values

    def _scalar(self, node: yaml.Node, path: Path) -> JsonValue:
        try:
            value = yaml.constructor.SafeConstructor().construct_object(node)
        except (yaml.YAMLError, ValueError):
            return self._problem(path, "is not a JSON value; put it in quotes")
        if isinstance(value, float) and not math.isfinite(value):
            return self._problem(path, "must be a finite number")
        if value is None or isinstance(value, str | bool | int | float):
            return value if storable(value) == value else self._problem(path, "cannot be stored in the database")
        return self._problem(path, f"YAML reads this as a {type(value).__name__}; put it in quotes")

    def _problem(self, path: Path, message: str) -> JsonValue:
        self.problems.append(Problem(path, message))
        return None


def _reason(error: yaml.YAMLError) -> str:
    parts = (getattr(error, name, None) for name in ("context", "problem", "reason"))
    return ", ".join(str(part) for part in parts if part) or "it cannot be read"


def _mark(error: yaml.YAMLError) -> Position:
    mark = getattr(error, "problem_mark", None)
    return (mark.line + 1, mark.column + 1) if mark else (1, 1)
