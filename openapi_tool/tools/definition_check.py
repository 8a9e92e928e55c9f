"""Checks of a stored definition that a tenant can make costly: its limits, and whether its schema compiles.

Pure functions of the row, so that a worker process can run them (`isolation/`). The result is sent back as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from openapi_tool.protocol.jsontext import JsonObject, JsonValue, as_object, object_at
from openapi_tool.tools.bounds import row_problems
from openapi_tool.tools.compiled_schema import schema_defect
from openapi_tool.tools.problems import Path, Problem
from openapi_tool.tools.schema import visible_schema


@dataclass(frozen=True, slots=True)
class CheckedDefinition:
    """Problems that the checks found: limits that the definition exceeds, and the defect of its schema.

    The schema of a definition that exceeds a limit is not compiled.
    """

    exceeded_limits: tuple[Problem, ...] = ()
    schema_defect: Problem | None = None

    def as_json(self) -> JsonObject:
        """Return the members of `of_json`."""
        return {
            "exceeded_limits": [_as_json(problem) for problem in self.exceeded_limits],
            "schema_defect": None if self.schema_defect is None else _as_json(self.schema_defect),
        }

    @staticmethod
    def of_json(value: Mapping[str, JsonValue]) -> CheckedDefinition:
        """Return the result of `as_json`."""
        exceeded_limits = cast("list[JsonValue]", value["exceeded_limits"])
        defect = value["schema_defect"]
        return CheckedDefinition(
            tuple(_of_json(problem) for problem in exceeded_limits), None if defect is None else _of_json(defect)
        )


def check_definition(parameters: JsonValue, options: JsonValue) -> CheckedDefinition:
    """Check both JSON columns of a row."""
    exceeded_limits = row_problems(parameters, options)
    if exceeded_limits:
        return CheckedDefinition(tuple(exceeded_limits))
    hidden = frozenset(object_at(options, "args", "fixed")) | frozenset(object_at(options, "envs"))
    shown_to_model = visible_schema(as_object(parameters), hidden)
    return CheckedDefinition(schema_defect=schema_defect(shown_to_model))


def _as_json(problem: Problem) -> JsonObject:
    return {"path": list(problem.path), "message": problem.message, "warning": problem.warning}


def _of_json(value: JsonValue) -> Problem:
    problem = as_object(value)
    return Problem(tuple(cast("Path", problem["path"])), str(problem["message"]), warning=bool(problem["warning"]))
