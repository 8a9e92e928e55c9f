"""Arguments against the definition's JSON Schema: every problem at once, validators compiled once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema_rs
import orjson
from cachetools import LRUCache

from openapi_tool.protocol.errors import ToolMisconfigured

_MAX_PROBLEMS = 20
_MAX_PROBLEM_CHARS = 200
_compiled: LRUCache[bytes, jsonschema_rs.Draft202012Validator] = LRUCache(maxsize=1024)


def schema_problems(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[str]:
    """What is wrong with the arguments, a line per offending path; empty when they are valid.

    Raises ToolMisconfigured when `schema` itself is not usable. References are never fetched.
    """
    if not schema:
        return []
    problems: list[str] = []
    for error in _validator(schema).iter_errors(dict(arguments)):
        problems += [f"{path}: {says}"[:_MAX_PROBLEM_CHARS] for path, says in _described(error)]
        if len(problems) >= _MAX_PROBLEMS:
            break
    return problems[:_MAX_PROBLEMS]


def _described(error: jsonschema_rs.ValidationError) -> Iterator[tuple[str, str]]:
    """Each offending path of an error, and what is wrong there; what is missing or too much has a path of its own."""
    match error.kind:
        case jsonschema_rs.ValidationErrorKind.Required(property=name):
            yield _path(error, name), "is required"
        case jsonschema_rs.ValidationErrorKind.AdditionalProperties(unexpected=names):
            yield from ((_path(error, name), "is not an argument that this tool takes") for name in names)
        case _:
            yield _path(error), error.message


def _path(error: jsonschema_rs.ValidationError, *more: str) -> str:
    return ".".join(str(part) for part in (*error.instance_path, *more)) or "arguments"


def _validator(schema: Mapping[str, Any]) -> jsonschema_rs.Draft202012Validator:
    try:
        content = orjson.dumps(schema, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:
        raise _unusable(error) from error
    validator = _compiled.get(content)
    if validator is None:
        validator = _compile(dict(schema))
        _compiled[content] = validator
    return validator


def _compile(schema: dict[str, Any]) -> jsonschema_rs.Draft202012Validator:
    try:
        return jsonschema_rs.Draft202012Validator(schema, offline=True)
    except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
        raise _unusable(error) from error


def _unusable(error: Exception) -> ToolMisconfigured:
    return ToolMisconfigured(
        "The tool's definition holds parameters that are no usable JSON Schema; an operator must correct it: "
        + str(error).split("\n", 1)[0][:_MAX_PROBLEM_CHARS]
    )


def visible_schema(schema: Mapping[str, Any], hidden: frozenset[str]) -> Mapping[str, Any]:
    """The schema without the names that the model never sees (`fixed` and `envs`)."""
    properties, required = schema.get("properties"), schema.get("required")
    if not hidden or not (isinstance(properties, dict) or isinstance(required, list)):
        return schema
    visible = dict(schema)
    if isinstance(properties, dict):
        visible["properties"] = {name: rule for name, rule in properties.items() if name not in hidden}
    if isinstance(required, list):
        visible["required"] = [name for name in required if not (isinstance(name, str) and name in hidden)]
    return visible
