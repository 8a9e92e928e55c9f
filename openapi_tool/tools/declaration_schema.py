"""The `parameters` of a definition: which JSON Schema a file may use (tool-design section 2).

It is a subset of JSON Schema that all model providers accept. A stored row may use more of JSON Schema, so only files
are validated by these models; `bounds.py` and `compiled_schema.py` check rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import InitErrorDetails

from openapi_tool.protocol.jsontext import JsonObject, JsonValue, as_object
from openapi_tool.tools.bounds import REFUSED_KEYWORDS
from openapi_tool.tools.declaration_errors import WARNING, details_of, error_at, raise_any, wrong_value
from openapi_tool.tools.declaration_section import Section
from openapi_tool.tools.declaration_types import TEXT_MESSAGE, ErrorMessage, NamesChoices, omittable
from openapi_tool.tools.problems import Path
from openapi_tool.tools.wording import any_of

MAX_SCHEMA_LEVELS = 12
"""Levels of schemas below the root; each (`properties` and the schema) takes two of the 32 levels of `bounds`."""

_MAX_ARGUMENT_NAME_CHARS = 64

SchemaType = Literal["object", "string", "number", "integer", "boolean", "array", "null"]
Format = Literal["date", "date-time", "email", "hostname", "ipv4", "ipv6", "regex", "time", "uri", "uuid"]

_OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_KEYWORDS_OF_TYPE: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": _OF_NUMBERS,
    "integer": _OF_NUMBERS,
    "boolean": frozenset(),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "null": frozenset(),
}
"""Keywords that only say something about values of one type."""
_KEYWORDS_OF_ANY_TYPE = frozenset().union(*_KEYWORDS_OF_TYPE.values())

_NO_REFERENCES = "references are not read; write the schema out"
_NO_CONDITIONALS = "conditionals are not allowed; say them in the descriptions"
_REFUSED: Mapping[str, str] = {
    **REFUSED_KEYWORDS,
    **dict.fromkeys(("$defs", "definitions"), _NO_REFERENCES),
    "anyOf": "alternatives are not allowed; an optional field is left out of `required`",
    "oneOf": "alternatives are not allowed; say in the descriptions which fields exclude each other",
    "allOf": "combinations are not allowed; write one schema",
    "not": "negations are not allowed; say in the description what does not fit",
    **dict.fromkeys(("if", "then", "else", "dependentRequired", "dependentSchemas"), _NO_CONDITIONALS),
    "patternProperties": "name every property in `properties`",
}
"""Why a keyword of JSON Schema is refused."""


def _one_type(value: object) -> object:
    if isinstance(value, list):
        raise wrong_value("must be one type; an optional field is left out of `required`, never null")
    return value


def _whole(value: object) -> object:
    """Return `5.0` as 5, which JSON Schema does not tell apart."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _each_once(values: object) -> object:
    if isinstance(values, list):
        different = {json.dumps(_whole(value), sort_keys=True) for value in values}
        if len(different) < len(values):
            raise ValueError("a value is given twice")
    return values


def _only_false(value: object) -> object:
    """Refuse 0, which a Literal takes for False."""
    if value is not False:
        raise ValueError("is not false")
    return value


def _check_arguments(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    """Check `properties`: also the names, and that each argument has a description."""
    errors = []
    arguments = None
    try:
        arguments = handler(value)
    except ValidationError as error:
        errors = [details.with_message(details.message) for details in details_of(error)]
    for name, schema in as_object(value).items():
        if not _is_argument_name(name):
            errors.append(error_at("must be 1 to 64 letters, digits, '_', '-' or '.'", name))
        if isinstance(schema, dict) and "description" not in schema:
            errors.append(error_at("has no description for the model to read; add one", name, kind=WARNING))
    raise_any(errors)
    return arguments


def _is_argument_name(name: str) -> bool:
    """Return whether model providers accept the name of an argument."""
    if not 1 <= len(name) <= _MAX_ARGUMENT_NAME_CHARS or not name.isascii():
        return False
    return all(char.isalnum() or char in "_.-" for char in name)


Type = Annotated[SchemaType, NamesChoices(), BeforeValidator(_one_type)]
Prose = Annotated[str, Field(pattern=r"\S"), TEXT_MESSAGE]
Number = Annotated[float, ErrorMessage("must be a number")]
Size = Annotated[int, Field(ge=0), BeforeValidator(_whole), ErrorMessage("must be a whole number from 0")]
Choices = Annotated[
    list[Any],
    Field(min_length=1, json_schema_extra={"uniqueItems": True}),
    BeforeValidator(_each_once),
    ErrorMessage("must be a list of at least one value, each once"),
]
_SCHEMA_MESSAGE = ErrorMessage("must be a schema, which is an object with a `type`")


class Schema(Section):
    """Schema of an argument: a subset of JSON Schema that all model providers accept (tool-design section 2)."""

    type: Type = omittable(description="Type of the value; required, except beside `enum` or `const`.")
    title: Prose = omittable(description="Short name for people.")
    description: Prose = omittable(description="What the argument means, for the model.")
    default: Any = omittable(description="Value that the model may assume.")
    const: Any = omittable(description="The only value.")
    examples: Any = omittable(description="Examples of values.")
    deprecated: Any = omittable(description="Whether models should not use it any more.")
    enum: Choices = omittable(description="All values.")
    minimum: Number = omittable(description="Lowest number.")
    maximum: Number = omittable(description="Highest number.")
    exclusiveMinimum: Number = omittable(description="The number must be above it.")  # noqa: N815 - JSON Schema's
    exclusiveMaximum: Number = omittable(description="The number must be below it.")  # noqa: N815
    properties: Annotated[
        dict[str, Annotated[Schema, _SCHEMA_MESSAGE]],
        ErrorMessage("must be an object"),
        WrapValidator(_check_arguments),
    ] = omittable(description="Schema of each member by its name.")
    required: Annotated[list[Any], ErrorMessage("must be a list")] = omittable(
        description="Names of members that must be given."
    )
    additionalProperties: Annotated[  # noqa: N815
        Literal[False], BeforeValidator(_only_false), ErrorMessage("may only be false")
    ] = omittable(description="false: no other members.")
    minLength: Size = omittable(description="Least characters of a text.")  # noqa: N815
    maxLength: Size = omittable(description="Most characters of a text.")  # noqa: N815
    pattern: Annotated[str, ErrorMessage("must be a text")] = omittable(
        description="Regular expression, without look-around and back-references."
    )
    format: Annotated[Format, NamesChoices()] = omittable(description="Form of a text.")
    items: Annotated[Schema, _SCHEMA_MESSAGE] = omittable(
        description="Schema of each item of a list; required for type array."
    )
    minItems: Size = omittable(description="Least items of a list.")  # noqa: N815
    maxItems: Size = omittable(description="Most items of a list.")  # noqa: N815

    @classmethod
    def conflicts(cls, value: Mapping[str, Any]) -> Iterator[InitErrorDetails]:
        """Yield a missing `type` or `items`, keywords of other types, and choices of another type."""
        # With `enum` or `const` it needs no `type`; a refused keyword already has its own problem.
        if value.keys().isdisjoint({"type", "enum", "const", *_REFUSED}):
            yield error_at(f"is missing; it is one of {any_of(get_args(SchemaType))}", "type")
        schema_type = value.get("type")
        if not isinstance(schema_type, str) or schema_type not in _KEYWORDS_OF_TYPE:
            return  # the validation of `type` reports it
        if schema_type == "array" and "items" not in value:
            yield error_at("is missing; the kernel refuses an array without it", "items")
        for keyword in value:
            if keyword in _KEYWORDS_OF_ANY_TYPE and keyword not in _KEYWORDS_OF_TYPE[schema_type]:
                yield error_at(f"says nothing about type {schema_type!r}; take it out", keyword)
        choices = value.get("enum")
        if isinstance(choices, list):
            for index, choice in enumerate(choices):
                if not _has_type(choice, schema_type):
                    yield error_at(f"is not of type {schema_type!r}", "enum", index)

    @classmethod
    def unknown_key(cls, name: str) -> str:
        """Return why a keyword is refused, else the most similar one."""
        return _REFUSED.get(name) or super().unknown_key(name)


_PYTHON_TYPES: Mapping[str, type] = {"string": str, "array": list, "object": dict, "null": type(None)}


def _has_type(value: JsonValue, schema_type: str) -> bool:
    """Return whether a value has a type of JSON Schema, for which 5.0 is an integer."""
    if isinstance(value, bool):  # a Python bool is an int, too
        return schema_type == "boolean"
    if schema_type == "number":
        return isinstance(value, int | float)
    if schema_type == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    python_type = _PYTHON_TYPES.get(schema_type)
    return python_type is not None and isinstance(value, python_type)


_OBJECT_MESSAGE = "must be 'object': arguments are named"


class Parameters(Schema):
    """Schema of all arguments, for the model and for validation."""

    type: Annotated[Literal["object"], ErrorMessage(_OBJECT_MESSAGE)] = omittable(
        description="`object`: arguments are named."
    )

    @classmethod
    def check(cls, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        """Validate the schema of a file: its depth and its type come first, as other problems follow from them."""
        if value is not None and (not isinstance(value, dict) or not value):
            raise wrong_value(
                "must be an object with the schema of each argument; leave it out to take the built-in tool's own"
            )
        schema = as_object(value)
        if schema.get("type", "object") != "object":
            raise_any([error_at(_OBJECT_MESSAGE, "type")])
        too_deep = _path_beyond_depth(schema)
        if too_deep is not None:
            raise_any([error_at(f"is nested more than {MAX_SCHEMA_LEVELS} levels deep; flatten it", *too_deep)])
        return handler(value)


def _path_beyond_depth(schema: JsonObject) -> Path | None:
    """Return the path of a schema below the deepest allowed level, if there is one."""
    level: list[tuple[Path, JsonObject]] = [((), schema)]
    for _ in range(MAX_SCHEMA_LEVELS + 1):
        level = [
            ((*path, *step), below)
            for path, schema_above in level
            for step, below in _schemas_directly_below(schema_above)
        ]
    if not level:
        return None
    path, _ = level[0]
    return path


def _schemas_directly_below(schema: JsonObject) -> Iterator[tuple[Path, JsonObject]]:
    """Yield the schemas in `properties` and `items`, each with its path within the schema."""
    for name, argument in as_object(schema.get("properties")).items():
        if isinstance(argument, dict):
            yield ("properties", name), argument
    items = schema.get("items")
    if isinstance(items, dict):
        yield ("items",), items
