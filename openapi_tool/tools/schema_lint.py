"""Which JSON Schema a definition's `parameters` may be: the subset of tool-design section 2."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema_rs

from openapi_tool.protocol.errors import ToolMisconfigured
from openapi_tool.tools.problems import Path, Problem, any_of, did_you_mean
from openapi_tool.tools.schema import schema_problems

MAX_DEPTH = 12
TYPES = ("object", "string", "number", "integer", "boolean", "array", "null")
FORMATS = ("date", "date-time", "email", "hostname", "ipv4", "ipv6", "regex", "time", "uri", "uuid")
_ANYWHERE = frozenset({"type", "title", "description", "default", "enum", "const", "examples", "deprecated"})
_NUMBER = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_LENGTHS = frozenset({"minLength", "maxLength", "minItems", "maxItems"})
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": _NUMBER,
    "integer": _NUMBER,
    "boolean": frozenset(),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "null": frozenset(),
}
_KNOWN = _ANYWHERE.union(*_OF_TYPE.values())
_BOUNDS = (("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems"))
_REFUSED: Mapping[str, str] = {
    "$ref": "references are not read; write the schema out",
    "$defs": "references are not read; write the schema out",
    "definitions": "references are not read; write the schema out",
    "anyOf": "alternatives are not read; an optional field is left out of `required`",
    "oneOf": "alternatives are not read; say in the descriptions which fields exclude each other",
    "allOf": "combinations are not read; write one schema",
    "not": "negations are not read",
    "if": "conditionals are not read",
    "then": "conditionals are not read",
    "else": "conditionals are not read",
    "dependentRequired": "conditionals are not read",
    "dependentSchemas": "conditionals are not read",
    "patternProperties": "name every property in `properties`",
}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def parameters_problems(schema: Any, path: Path = ("parameters",)) -> Iterator[Problem]:
    """Every defect of a definition's `parameters`."""
    if not isinstance(schema, dict):
        return
    if not schema:
        yield Problem(path, "is empty; leave it out to take the built-in tool's own")
        return
    if schema.get("type", "object") != "object":
        yield Problem((*path, "type"), "must be 'object': arguments are named")
        return
    if "additionalProperties" not in schema:
        yield Problem(
            path, "lacks `additionalProperties: false`, so a model may give what is not declared", warning=True
        )
    yield from _schema_problems(schema, path, 0)


def _schema_problems(schema: Any, path: Path, depth: int) -> Iterator[Problem]:
    if not isinstance(schema, dict):
        yield Problem(path, "must be a schema, which is an object with a `type`")
        return
    if depth > MAX_DEPTH:
        yield Problem(path, f"is nested more than {MAX_DEPTH} levels deep")
        return
    kind = schema.get("type")
    known = isinstance(kind, str) and kind in TYPES
    if not known:
        says_otherwise = any(word in schema for word in ("enum", "const", *_REFUSED))
        yield from _type_problems(kind, path, needed=not says_otherwise)
    yield from _keyword_problems(schema, kind if known else None, path)
    yield from _bound_problems(schema, path)
    yield from _choice_problems(schema, path)
    yield from _text_problems(schema, path)
    yield from _object_problems(schema, path, depth)
    yield from _array_problems(schema, path, depth)
    yield from _value_problems(schema, path)


def _type_problems(kind: Any, path: Path, *, needed: bool) -> Iterator[Problem]:
    if kind is None:
        if needed:
            yield Problem((*path, "type"), f"is missing; it is one of {any_of(TYPES)}")
    elif isinstance(kind, list):
        yield Problem((*path, "type"), "must be one type; an optional field is left out of `required`, never null")
    else:
        near = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array"}
        hint = f"; did you mean {near[kind]!r}?" if kind in near else did_you_mean(str(kind), TYPES)
        yield Problem((*path, "type"), f"must be {any_of(TYPES)}{hint}")


def _keyword_problems(schema: Mapping[str, Any], kind: str | None, path: Path) -> Iterator[Problem]:
    for word in schema:
        if word in _REFUSED:
            yield Problem((*path, word), _REFUSED[word])
        elif word not in _KNOWN:
            yield Problem((*path, word), f"is no keyword that is read{did_you_mean(word, _KNOWN)}")
        elif kind is not None and word not in _ANYWHERE | _OF_TYPE[kind]:
            yield Problem((*path, word), f"says nothing about type {kind!r}")


def _bound_problems(schema: Mapping[str, Any], path: Path) -> Iterator[Problem]:
    for word in sorted((_NUMBER | _LENGTHS) & schema.keys()):
        value = schema[word]
        if word in _LENGTHS and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            yield Problem((*path, word), "must be a whole number from 0")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            yield Problem((*path, word), "must be a number")
    for low, high in _BOUNDS:
        least, most = schema.get(low), schema.get(high)
        if isinstance(least, int | float) and isinstance(most, int | float) and least > most:
            yield Problem((*path, low), f"is more than {high}, so no value fits")


def _choice_problems(schema: Mapping[str, Any], path: Path) -> Iterator[Problem]:
    choices = schema.get("enum")
    if "enum" not in schema:
        return
    if not isinstance(choices, list) or not choices:
        yield Problem((*path, "enum"), "must be a list of at least one value")
    elif any(value in choices[:place] for place, value in enumerate(choices)):
        yield Problem((*path, "enum"), "names a value twice")


def _text_problems(schema: Mapping[str, Any], path: Path) -> Iterator[Problem]:
    for word in ("description", "title"):
        if word in schema and not (isinstance(schema[word], str) and schema[word].strip()):
            yield Problem((*path, word), "must be a text that is not empty")
    if "pattern" in schema and not _compiles({"type": "string", "pattern": schema["pattern"]}):
        yield Problem((*path, "pattern"), "is no regular expression that can be used")
    if "format" in schema and schema["format"] not in FORMATS:
        hint = did_you_mean(str(schema["format"]), FORMATS)
        yield Problem((*path, "format"), f"must be {any_of(FORMATS)}{hint}")


def _compiles(schema: dict[str, Any]) -> bool:
    try:
        jsonschema_rs.Draft202012Validator(schema, offline=True)
    except (ValueError, jsonschema_rs.ValidationError):
        return False
    return True


def _object_problems(schema: Mapping[str, Any], path: Path, depth: int) -> Iterator[Problem]:
    if "additionalProperties" in schema and schema["additionalProperties"] is not False:
        yield Problem((*path, "additionalProperties"), "may only be false")
    properties = schema.get("properties")
    if properties is not None and not isinstance(properties, dict):
        yield Problem((*path, "properties"), "must be an object of name and schema")
    names = properties if isinstance(properties, dict) else {}
    for name, rule in names.items():
        if not _NAME.fullmatch(name):
            yield Problem((*path, "properties", name), "must be 1 to 64 letters, digits, '_', '-' or '.'")
        if isinstance(rule, dict) and "description" not in rule:
            yield Problem((*path, "properties", name), "has no description for the model to read", warning=True)
        yield from _schema_problems(rule, (*path, "properties", name), depth + 1)
    yield from _required_problems(schema, names, path)


def _required_problems(schema: Mapping[str, Any], names: Mapping[str, Any], path: Path) -> Iterator[Problem]:
    required = schema.get("required", [])
    if not isinstance(required, list):
        yield Problem((*path, "required"), "must be a list of names")
        return
    for place, name in enumerate(required):
        if not isinstance(name, str) or name not in names:
            yield Problem(
                (*path, "required", place), f"is not in `properties`, so no call fits{did_you_mean(str(name), names)}"
            )
        elif name in required[:place]:
            yield Problem((*path, "required", place), "is named twice")


def _array_problems(schema: Mapping[str, Any], path: Path, depth: int) -> Iterator[Problem]:
    if "items" in schema:
        yield from _schema_problems(schema["items"], (*path, "items"), depth + 1)
    elif schema.get("type") == "array":
        yield Problem((*path, "items"), "is missing; the kernel refuses an array without it")


def _value_problems(schema: Mapping[str, Any], path: Path) -> Iterator[Problem]:
    """Values in the schema that the schema itself would refuse."""
    for word in ("default", "const"):
        if word in schema and not fits(schema, schema[word]):
            yield Problem((*path, word), "does not fit its own schema")
    choices = schema.get("enum")
    for place, value in enumerate(choices if isinstance(choices, list) else []):
        if not fits({"type": schema["type"]} if "type" in schema else {}, value):
            yield Problem((*path, "enum", place), f"is not of type {schema['type']!r}")


def fits(schema: Mapping[str, Any], value: Any) -> bool:
    """Whether a value is valid; a schema that is itself no schema has its own problems."""
    try:
        return not schema_problems({"type": "object", "properties": {"value": schema}}, {"value": value})
    except ToolMisconfigured:
        return True
