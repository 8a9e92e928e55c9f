"""Limits of a stored definition, and whether its schema compiles. Pure: a worker process may run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from openapi_tool.protocol.jsontext import JsonObject, JsonValue, as_object, object_at
from openapi_tool.tools.bounds import row_problems
from openapi_tool.tools.problems import Path, Problem
from openapi_tool.tools.schema import schema_defect, visible_schema


@dataclass(frozen=True, slots=True)
class CheckedDefinition:
    """Limits that a definition exceeds (then its schema is not compiled), and the defect of its schema."""

    beyond: tuple[Problem, ...] = ()
    defect: Problem | None = None

    def as_json(self) -> JsonObject:
        """Return the members of `of_json`."""
        defects = [self.defect] if self.defect is not None else []
        return {"beyond": [_as_json(problem) for problem in self.beyond], "defects": [*map(_as_json, defects)]}

    @staticmethod
    def of_json(value: Mapping[str, JsonValue]) -> CheckedDefinition:
        """Return the result of `as_json`."""
        beyond = map(_of_json, cast("list[JsonValue]", value["beyond"]))
        defects = map(_of_json, cast("list[JsonValue]", value["defects"]))
        return CheckedDefinition(tuple(beyond), next(defects, None))


def check_definition(parameters: JsonValue, options: JsonValue) -> CheckedDefinition:
    """Check both JSON columns of a row."""
    beyond = row_problems(parameters, options)
    if beyond:
        return CheckedDefinition(tuple(beyond))
    hidden = frozenset(object_at(options, "args", "fixed")) | frozenset(object_at(options, "envs"))
    return CheckedDefinition((), schema_defect(visible_schema(as_object(parameters), hidden)))


def _as_json(problem: Problem) -> JsonObject:
    return {"path": list(problem.path), "message": problem.message, "warning": problem.warning}


def _of_json(value: JsonValue) -> Problem:
    problem = as_object(value)
    return Problem(tuple(cast("Path", problem["path"])), str(problem["message"]), warning=bool(problem["warning"]))
