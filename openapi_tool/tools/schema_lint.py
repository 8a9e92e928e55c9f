"""Rules for a definition's `parameters` that compare several values, which a meta-schema cannot express."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from openapi_tool.protocol.errors import ToolMisconfigured
from openapi_tool.protocol.jsonvalue import JsonValue
from openapi_tool.tools.problems import Path, Problem, did_you_mean
from openapi_tool.tools.schema import schema_problems

MAX_DEPTH = 12
"""Levels of schemas. At run time `bounds` allows 32 levels of objects and lists, which are 15 of these."""

_LIMITS = (("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems"))


def schema_conflicts(schema: JsonValue, path: Path, depth: int = 0) -> Iterator[Problem]:
    """Yield every conflict in a schema and the schemas below it."""
    if not isinstance(schema, dict):
        return
    if depth > MAX_DEPTH:
        yield Problem(path, f"is nested more than {MAX_DEPTH} levels deep; flatten it")
        return
    properties = schema.get("properties")
    named = properties if isinstance(properties, dict) else {}
    yield from _limit_conflicts(schema, path)
    yield from _required_conflicts(schema.get("required"), named, (*path, "required"))
    for keyword in ("default", "const"):
        if keyword in schema and not fits(schema, schema[keyword]):
            yield Problem((*path, keyword), "does not fit its own schema; change one of them")
    for name, rule in named.items():
        yield from schema_conflicts(rule, (*path, "properties", name), depth + 1)
    yield from schema_conflicts(schema.get("items"), (*path, "items"), depth + 1)


def _limit_conflicts(schema: Mapping[str, JsonValue], path: Path) -> Iterator[Problem]:
    for low, high in _LIMITS:
        minimum, maximum = schema.get(low), schema.get(high)
        if isinstance(minimum, int | float) and isinstance(maximum, int | float) and minimum > maximum:
            yield Problem((*path, low), f"is more than {high}, so no value fits; change one of them")


def _required_conflicts(required: JsonValue, named: Mapping[str, JsonValue], path: Path) -> Iterator[Problem]:
    required = required if isinstance(required, list) else []
    for place, name in enumerate(required):
        if not isinstance(name, str) or name not in named:
            hint = did_you_mean(str(name), named) or "; declare it there, or take it out"
            yield Problem((*path, place), f"is not in `properties`, so no call fits{hint}")
        elif name in required[:place]:
            yield Problem((*path, place), "is named twice; take one out")


def fits(schema: Mapping[str, JsonValue], value: JsonValue) -> bool:
    """Return whether a value is valid; True for a schema that cannot be compiled, which is reported elsewhere."""
    try:
        return not schema_problems({"properties": {"value": schema}}, {"value": value})
    except ToolMisconfigured:
        return True
