"""The one declaration of a tool definition: fields, types, bounds and descriptions (protocol sections 4 and 5).

The parser of stored rows, the linter of files, `config/tool.schema.json` and the tables of docs come from these models.
Each declares what a file may hold. A stored row may hold more, because other programs write rows, too: it is validated
with `in_rows` conversions and without unknown keys. A message stands at the type that it is about.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, core_schema

from openapi_tool.options.budgets import BUDGETS, BudgetLimits
from openapi_tool.protocol.jsontext import JsonObject, JsonValue, as_object
from openapi_tool.tools.bounds import REFUSED_KEYWORDS
from openapi_tool.tools.catalogue import CATALOGUE, OPERATIONS
from openapi_tool.tools.declaration_errors import (
    PYDANTIC_MESSAGES,
    WARNING,
    WRONG,
    details_of,
    error_at,
    own_error,
    raise_any,
    validation_error,
    wrong_value,
)
from openapi_tool.tools.problems import MAX_PROBLEMS, Path, Problem
from openapi_tool.tools.wording import any_of, did_you_mean, short

MAX_SUSPEND_S = 3_600
MIN_RESULT_TOKENS = 500
"""Lowest limit of the tokens that a model is shown at once."""

MAX_SCHEMA_LEVELS = 12
"""Levels of schemas below the root; each (`properties` and the schema) takes two of the 32 levels of `bounds`."""

TIMEOUTS = ("timeout_s", "timeout")
"""Names of the time limit in seconds; the first one given is used."""

_ROW = {"row": True}
"""Validation context of a stored row."""


def _is_row(info: ValidationInfo) -> bool:
    return info.context is _ROW


@dataclass(frozen=True, slots=True)
class Says:
    """Message for a value that does not fit the type, published as `errorMessage`; errors below it keep their own."""

    message: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:  # noqa: ANN401
        """Replace the errors of the type itself."""
        return core_schema.no_info_wrap_validator_function(self._validate, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Add `errorMessage`, which editors show."""
        return {**handler(core), "errorMessage": self.message}

    def _validate(self, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError as error:
            if all(loc for _, loc, _, _ in details_of(error)):
                raise
        raise wrong_value(self.message)


@dataclass(frozen=True, slots=True)
class OneOf:
    """Message for a value that is none of a Literal's, with the closest one."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:  # noqa: ANN401
        """Replace the error."""
        choices = [
            choice for part in (source, *get_args(source)) for choice in get_args(part) if isinstance(choice, str)
        ]

        def validate(value: object, inner: ValidatorFunctionWrapHandler) -> object:
            try:
                return inner(value)
            except ValidationError:
                message = f"must be {any_of(choices)}{did_you_mean(short(str(value)), choices)}"
            raise wrong_value(message)

        return core_schema.no_info_wrap_validator_function(validate, handler(source))


def in_rows(read: Callable[[Any], Any]) -> BeforeValidator:
    """Return a conversion of a stored row's value, before its validation."""

    def convert(value: object, info: ValidationInfo) -> object:
        return read(value) if _is_row(info) else value

    return BeforeValidator(convert)


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        return None
    return float(value)


def _lenient_seconds(value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
    """Read a value of a row that is no positive number as none; the linter refuses it."""
    return _seconds(value) if _is_row(info) else handler(value)


def _is_unset(value: object) -> bool:
    return value in (None, False, 0, "", [], {})


_IF_SET = in_rows(lambda value: None if _is_unset(value) else value)
"""In old rows `false`, `0`, and an empty text, list or object stand for the default."""
_OR_NULL = in_rows(lambda value: {} if value is None else value)
_IGNORED = in_rows(lambda _: None)
_AS_TEXT = in_rows(lambda value: value if value is None else str(value))
"""A number is no error yet: the parser of the tool names what would fit, or reads another key instead."""

_IS_TEXT = Says("must be a text that is not empty")
_IS_OBJECT = Says("must be an object")
_omitted = partial(Field, None)
"""Field that a file may omit but not set to null."""

Text = Annotated[str, Field(min_length=1), _IS_TEXT]
TextOrNull = Annotated[str | None, Field(min_length=1), _IS_TEXT]
Seconds = Annotated[
    float | None,
    Field(gt=0, le=MAX_SUSPEND_S),
    Says(f"must be a number of seconds above 0, at most {MAX_SUSPEND_S}"),
    WrapValidator(_lenient_seconds),
]


def _only_texts(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    """Refuse members that are no text; pydantic takes ten times as long for an error, and there may be 100."""
    if isinstance(value, dict):
        raise_any(error_at(_IS_TEXT.message, name) for name, one in value.items() if not (isinstance(one, str) and one))
    return handler(value)


Names = Annotated[dict[str, Annotated[str, Field(min_length=1)]], _IS_OBJECT, WrapValidator(_only_texts), _OR_NULL]


def _no_nulls(value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
    if not _is_row(info) and isinstance(value, dict):
        raise_any(
            error_at("is empty; give it a value or take it out", name) for name, one in value.items() if one is None
        )
    return handler(value)


Values = Annotated[dict[str, Any], _IS_OBJECT, _OR_NULL, WrapValidator(_no_nulls)]


class Section(BaseModel):
    """Object of a definition; an unknown key gets a suggestion, or the reason why it is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    hints: ClassVar[Mapping[str, str]] = {}
    """Remedy if a key is missing."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Reason why a key is refused."""
    ignored_beside: ClassVar[Mapping[str, str]] = {}
    """Keys that another one overrides, by the latter."""
    place: ClassVar[str] = ""
    """Path of the section in messages about two keys."""

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, value: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:  # noqa: ANN401
        """Replace pydantic's messages, and add what depends on several keys of a file."""
        if _is_row(info):
            return handler(value)
        conflicts = list(cls.conflicts(value)) if isinstance(value, dict) else []
        try:
            read = handler(value)
        except ValidationError as error:
            found = list(details_of(error))
            if not conflicts and all(kind in (WRONG, WARNING) for kind, *_ in found):
                raise
            raise validation_error([*conflicts, *(cls._explained(*one) for one in found)]) from None
        raise_any(conflicts)
        return read

    @classmethod
    def _explained(cls, kind: str, loc: Path, message: str, _: Mapping[str, Any]) -> InitErrorDetails:
        if kind in (WRONG, WARNING):
            return error_at(message, *loc, kind=WARNING if kind == WARNING else WRONG)
        if kind == "missing":
            return error_at(f"is missing{cls.hints.get(str(loc[-1]), '')}", *loc)
        if kind == "extra_forbidden":
            return error_at(unknown_key(str(loc[-1]), cls), *loc)
        return error_at(PYDANTIC_MESSAGES.get(kind, f"is not valid: {message}"), *loc)

    @classmethod
    def conflicts(cls, value: Mapping[str, Any]) -> Iterator[InitErrorDetails]:
        """Yield the errors of a file that depend on several keys."""
        for winner, name in cls.ignored_beside.items():
            if winner in value and name in value:
                yield error_at(f"is ignored beside {cls.place}{winner}; take it out", name, kind=WARNING)


def unknown_key(name: str, section: type[Section | BudgetLimits]) -> str:
    """Return the problem of a key that a section does not have."""
    if issubclass(section, Section) and name in section.refused:
        return section.refused[name]
    if "partial" in name.lower() and not issubclass(section, Schema):
        return (
            "is not an option: a model would see only the error of a partial result. Here a call succeeds if at least "
            "one item does; take it out"
        )
    if not issubclass(section, Schema):
        for home, place in _HOMES.items():
            if home is not section and not issubclass(section, home) and name in names_of(home):
                return f"is not known here; {name!r} belongs in {place}"
    known = names_of(section)
    return f"is not known here{did_you_mean(short(name), known) or '; known are ' + any_of(sorted(known))}"


def names_of(section: type[Section | BudgetLimits]) -> list[str]:
    """Return the keys of a section, as they stand in a file."""
    if issubclass(section, Section):
        return list(section.model_fields)
    return list(BUDGETS)


_TYPE_NAMES = ("object", "string", "number", "integer", "boolean", "array", "null")
SchemaType = Literal["object", "string", "number", "integer", "boolean", "array", "null"]
Format = Literal["date", "date-time", "email", "hostname", "ipv4", "ipv6", "regex", "time", "uri", "uuid"]


def _one_type(value: object) -> object:
    if isinstance(value, list):
        raise wrong_value("must be one type; an optional field is left out of `required`, never null")
    return value


def _whole(value: object) -> object:
    """Return `5.0` as 5, which JSON Schema does not tell apart."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _each_once(values: object) -> object:
    if isinstance(values, list) and len({json.dumps(_whole(one), sort_keys=True) for one in values}) < len(values):
        raise ValueError("a value is given twice")
    return values


def _only_false(value: object) -> object:
    """Refuse 0, which a Literal takes for False."""
    if value is not False:
        raise ValueError("is not false")
    return value


def _arguments(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    """Check the names of arguments, and that each has a description."""
    errors = []
    read = None
    try:
        read = handler(value)
    except ValidationError as error:
        errors = [
            error_at(message, *loc, kind=WARNING if kind == WARNING else WRONG)
            for kind, loc, message, _ in details_of(error)
        ]
    for name, rule in as_object(value).items():
        if not is_argument_name(name):
            errors.append(error_at("must be 1 to 64 letters, digits, '_', '-' or '.'", name))
        if isinstance(rule, dict) and "description" not in rule:
            errors.append(error_at("has no description for the model to read; add one", name, kind=WARNING))
    raise_any(errors)
    return read


def is_argument_name(name: str) -> bool:
    """Return whether model providers accept the name of an argument."""
    return 1 <= len(name) <= _MAX_NAME_CHARS and name.isascii() and all(one.isalnum() or one in "_.-" for one in name)


_MAX_NAME_CHARS = 64

Type = Annotated[SchemaType, OneOf(), BeforeValidator(_one_type)]
Prose = Annotated[str, Field(pattern=r"\S"), _IS_TEXT]
Number = Annotated[float, Says("must be a number")]
Size = Annotated[int, Field(ge=0), BeforeValidator(_whole), Says("must be a whole number from 0")]
Choices = Annotated[
    list[Any],
    Field(min_length=1, json_schema_extra={"uniqueItems": True}),
    BeforeValidator(_each_once),
    Says("must be a list of at least one value, each once"),
]

_NO_REFERENCES = "references are not read; write the schema out"
_NO_CONDITIONALS = "conditionals are not allowed; say them in the descriptions"


class Schema(Section):
    """Schema of an argument: a subset of JSON Schema that all model providers accept (tool-design section 2)."""

    refused: ClassVar[Mapping[str, str]] = {
        **REFUSED_KEYWORDS,
        **dict.fromkeys(("$defs", "definitions"), _NO_REFERENCES),
        "anyOf": "alternatives are not allowed; an optional field is left out of `required`",
        "oneOf": "alternatives are not allowed; say in the descriptions which fields exclude each other",
        "allOf": "combinations are not allowed; write one schema",
        "not": "negations are not allowed; say in the description what does not fit",
        **dict.fromkeys(("if", "then", "else", "dependentRequired", "dependentSchemas"), _NO_CONDITIONALS),
        "patternProperties": "name every property in `properties`",
    }

    type: Type = _omitted(description="Type of the value; required, except beside `enum` or `const`.")
    title: Prose = _omitted(description="Short name for people.")
    description: Prose = _omitted(description="What the argument means, for the model.")
    default: Any = _omitted(description="Value that the model may assume.")
    const: Any = _omitted(description="The only value.")
    examples: Any = _omitted(description="Examples of values.")
    deprecated: Any = _omitted(description="Whether models should not use it any more.")
    enum: Choices = _omitted(description="All values.")
    minimum: Number = _omitted(description="Lowest number.")
    maximum: Number = _omitted(description="Highest number.")
    exclusiveMinimum: Number = _omitted(description="The number must be above it.")  # noqa: N815 - JSON Schema's
    exclusiveMaximum: Number = _omitted(description="The number must be below it.")  # noqa: N815
    properties: Annotated[dict[str, Argument], Says("must be an object"), WrapValidator(_arguments)] = _omitted(
        description="Schema of each member by its name."
    )
    required: Annotated[list[Any], Says("must be a list")] = _omitted(
        description="Names of members that must be given."
    )
    additionalProperties: Annotated[Literal[False], BeforeValidator(_only_false), Says("may only be false")] = _omitted(  # noqa: N815
        description="false: no other members."
    )
    minLength: Size = _omitted(description="Least characters of a text.")  # noqa: N815
    maxLength: Size = _omitted(description="Most characters of a text.")  # noqa: N815
    pattern: Annotated[str, Says("must be a text")] = _omitted(
        description="Regular expression, without look-around and back-references."
    )
    format: Annotated[Format, OneOf()] = _omitted(description="Form of a text.")
    items: Annotated[Schema, Says("must be a schema, which is an object with a `type`")] = _omitted(
        description="Schema of each item of a list; required for type array."
    )
    minItems: Size = _omitted(description="Least items of a list.")  # noqa: N815
    maxItems: Size = _omitted(description="Most items of a list.")  # noqa: N815

    @classmethod
    def conflicts(cls, value: Mapping[str, Any]) -> Iterator[InitErrorDetails]:
        """Yield a missing `type` or `items`, keywords of other types, and choices of another type."""
        # With `enum` or `const` it needs no `type`; a refused keyword already has its own problem.
        if not {"type", "enum", "const", *cls.refused}.intersection(value):
            yield error_at(f"is missing; it is one of {any_of(_TYPE_NAMES)}", "type")
        kind = value.get("type")
        if not isinstance(kind, str) or kind not in _KEYWORDS:
            return
        if kind == "array" and "items" not in value:
            yield error_at("is missing; the kernel refuses an array without it", "items")
        for name in value:
            if name in _KEYWORDS_OF_A_TYPE and name not in _KEYWORDS[kind]:
                yield error_at(f"says nothing about type {kind!r}; take it out", name)
        choices = value.get("enum")
        for place, choice in enumerate(choices if isinstance(choices, list) else ()):
            if not has_type(choice, kind):
                yield error_at(f"is not of type {kind!r}", "enum", place)


Argument = Annotated[Schema, Says("must be a schema, which is an object with a `type`")]

_OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_KEYWORDS: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": _OF_NUMBERS,
    "integer": _OF_NUMBERS,
    "boolean": frozenset(),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "null": frozenset(),
}
"""Keywords that say something about a type only."""
_KEYWORDS_OF_A_TYPE = frozenset().union(*_KEYWORDS.values())


_PYTHON_TYPES: Mapping[str, type] = {"string": str, "array": list, "object": dict, "null": type(None)}


def has_type(value: JsonValue, kind: str) -> bool:
    """Return whether a value has a type of JSON Schema, for which 5.0 is an integer."""
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and (isinstance(value, int) or value.is_integer()))
    return kind in _PYTHON_TYPES and isinstance(value, _PYTHON_TYPES[kind])


class Parameters(Schema):
    """Schema of all arguments, for the model and for validation."""

    type: Annotated[Literal["object"], Says("must be 'object': arguments are named")] = _omitted(
        description="`object`: arguments are named."
    )

    @classmethod
    def check(cls, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        """Validate the schema of a file: its depth and its type come first."""
        if value is not None and not (isinstance(value, dict) and value):
            raise wrong_value(
                "must be an object with the schema of each argument; leave it out to take the built-in tool's own"
            )
        schema = as_object(value)
        if schema.get("type", "object") != "object":
            raise_any([error_at("must be 'object': arguments are named", "type")])
        if deepest := _beyond_depth(schema, ()):
            raise_any([error_at(f"is nested more than {MAX_SCHEMA_LEVELS} levels deep; flatten it", *deepest)])
        return handler(value)


def _beyond_depth(schema: JsonValue, path: Path) -> Path | None:
    """Return the path of a schema below the deepest level."""
    level: list[tuple[Path, JsonObject]] = [(path, as_object(schema))]
    for _ in range(MAX_SCHEMA_LEVELS + 1):
        level = [
            ((*where, *step), as_object(below))
            for where, rule in level
            for step, below in (
                *((("properties", name), one) for name, one in as_object(rule.get("properties")).items()),
                (("items",), rule.get("items")),
            )
            if isinstance(below, dict)
        ]
    return level[0][0] if level else None


MODES = {name: operation for operation in OPERATIONS for name in (operation.name, *operation.aliases)}
"""Operation by each accepted `mode`."""

BASE_URLS = {url: operation for operation in reversed(OPERATIONS) for path in ("", "/") for url in operation.urls(path)}
"""Operation by each accepted `base_url`; the first one of a host, if `mode` names none."""

OPERATION_NAMES = [operation.name for operation in OPERATIONS]


def _mode(value: object) -> str | None:
    if value is None:
        return None
    operation = MODES.get(str(value).strip().lower())
    if operation is None:
        raise wrong_value(f"must be {any_of(OPERATION_NAMES)}{did_you_mean(short(str(value)), OPERATION_NAMES)}")
    return operation.name


def _base_url(value: object) -> str | None:
    if value is not None and not (isinstance(value, str) and value in BASE_URLS):
        raise wrong_value(f"may only be {' or '.join(f'https://{operation.host}' for operation in OPERATIONS)}")
    return value


def _accept(value: object, info: ValidationInfo) -> None:
    if _is_row(info):
        return
    if value is not None and not isinstance(value, str):
        raise wrong_value("must be a text")
    raise own_error(WARNING, "is ignored: JSON is always asked for; take it out")


Variable = Annotated[str | None, Field(min_length=1), Says("must be the name of an environment variable"), _IF_SET]


class Args(Section):
    """Values of arguments that the definition sets. Their texts may hold placeholders such as {agent_turn_id}."""

    defaults: Values = Field(
        default_factory=dict,
        description="Values used if the model omits the argument, but not if it gives an explicit `null`.",
    )
    fixed: Values = Field(default_factory=dict, description="Values that are always used, and hidden from the model.")


class Upstream(Section):
    """The built-in tool, and options of its upstream requests."""

    ignored_beside: ClassVar[Mapping[str, str]] = {"timeout_s": "timeout", "endpoint_template": "path"}

    mode: Annotated[str | None, BeforeValidator(_mode), WithJsonSchema({"enum": [*MODES, None]})] = Field(
        None, description="`search` or `reader`; without it the host of `base_url` decides, else `tool`."
    )
    tool: Annotated[TextOrNull, Field(json_schema_extra={"examples": [*CATALOGUE]}), _AS_TEXT] = Field(
        None, description=f"Built-in tool: {', '.join(f'`{name}`' for name in CATALOGUE)}. For lists it must be named."
    )
    base_url: Annotated[str | None, BeforeValidator(_base_url), WithJsonSchema({"enum": [*BASE_URLS, None]})] = Field(
        None, description="Only `https://s.jina.ai` (search) or `https://r.jina.ai` (reader)."
    )
    method: Annotated[
        str | None, Field(pattern="^([Gg][Ee][Tt]|[Pp][Oo][Ss][Tt])$"), Says("must be GET or POST"), _IF_SET
    ] = Field(
        None,
        description="`POST` (default) or `GET`. A call with a secret in its body is always a POST.",
    )
    path: Annotated[str | None, Says("must be a text"), _AS_TEXT, _IF_SET] = Field(
        None, description="Path of the request: `/`, for a search also `/search`, for a reader also `/{url}`."
    )
    endpoint_template: TextOrNull = Field(
        None, description="Instead of `path`: the reader's address that contains the address of the page."
    )
    auth_env: Variable = Field(
        None, description="Variable of the API key, used if `envs` has no `api_key`, or its variable is not set."
    )
    accept: Annotated[str | None, BeforeValidator(_accept)] = Field(
        None, description="Ignored: JSON is always asked for."
    )
    params: Values = Field(
        default_factory=dict, description="Parameters of the upstream that the model cannot set (docs/tools.md)."
    )
    defaults: Values = Field(default_factory=dict, description="Legacy name of `params`; what `params` sets, wins.")
    headers: Names = Field(default_factory=dict, description="Such parameters as headers.")
    timeout_s: Seconds = Field(
        None, description="Time limit of the whole call in seconds; must be less than the worker waits."
    )
    timeout: Seconds = Field(None, description="Legacy name of `timeout_s`; that one wins.")


class Auth(Section):
    """Legacy form of `auth_env`."""

    env: Annotated[str, Field(min_length=1), Says("must be the name of an environment variable")] = Field(
        description="Variable of the API key."
    )


class LegacyUpstream(Upstream):
    """Legacy form of `jina`; beside it, it is ignored."""

    ignored_beside: ClassVar[Mapping[str, str]] = {**Upstream.ignored_beside, "auth": "auth_env"}

    auth: Annotated[
        Auth | None, in_rows(lambda value: value if isinstance(value, dict) and value.get("env") else None)
    ] = Field(None, description="`env`: variable of the API key.")


def _budget(value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
    if not isinstance(value, dict):
        if value is None and _is_row(info):
            return None
        raise wrong_value("must be an object")
    most = 1 if _is_row(info) else MAX_PROBLEMS  # there may be 2,000 names, and a call waits for the search of each
    unknown = list(islice((name for name in value if name not in BUDGETS), most))
    raise_any(error_at(unknown_key(name, BudgetLimits), name) for name in unknown)
    raise_any(
        error_at("must be an integer of at least 0", name)
        for name, one in value.items()
        if isinstance(one, bool) or not isinstance(one, int) or one < 0
    )
    try:
        return handler(value) if value else None
    except ValidationError as error:  # an upper bound, which differs for requests and tokens
        raise_any(error_at(f"must be at most {context['le']:,}", *loc) for _, loc, _, context in details_of(error))
        raise


class Options(Section):
    """What the executor does in a call."""

    place: ClassVar[str] = "options."
    ignored_beside: ClassVar[Mapping[str, str]] = {"jina": "openapi"}

    args: Annotated[Args, _OR_NULL] = Field(
        default_factory=Args, description="Values of arguments: `defaults`, `fixed`."
    )
    envs: Names = Field(
        default_factory=dict,
        description="Maps arguments to names of environment variables of the executor, never to values. `api_key` is "
        "the key of the request; any other argument is sent as a member of the request body. Its name must begin with "
        "`tenant_` and be listed in `secrets.env_parameters` or be a key of `tools.jina.envs`, which maps arguments of "
        "all tools. The variable must be `JINA_API_KEY`, or be in `secrets.allowed_env`, `tools.jina.envs` or "
        "`limits.pools`.",
    )
    jina: Upstream | None = Field(None, description="The built-in tool, and options of its upstream requests.")
    openapi: LegacyUpstream | None = Field(None, description="Legacy form of `jina`, used without it.")
    suspend_timeout_seconds: Seconds = Field(
        None,
        description="Seconds that a worker waits for the result; 60 (search) and 90 (read) in the shipped definitions, "
        "because the upstream may take over a minute for a page.",
    )
    timeout_s: Seconds = Field(None, description="Legacy place of `jina.timeout_s`; that one wins.")
    timeout: Seconds = Field(None, description="Legacy place of `jina.timeout`; that one wins.")
    result_format: Annotated[Literal["text", "object"] | None, OneOf(), _IF_SET] = Field(
        None,
        description="Form of the card's `result`: `text` (default), or `object` with the text and further fields.",
    )
    max_result_tokens: Annotated[
        int | None, Field(ge=MIN_RESULT_TOKENS), Says(f"must be an integer of at least {MIN_RESULT_TOKENS}")
    ] = Field(
        None,
        description="Maximum tokens of a result that a model is shown at once; replaces `tools.max_result_tokens`.",
    )
    budget: Annotated[BudgetLimits | None, WrapValidator(_budget)] = Field(
        None,
        description="[Budgets](tools.md#budgets) for the calls of this tool, with the names of section `budgets`; the "
        "budgets of the settings apply, too.",
    )
    ui_allowed: Annotated[bool | None, Says("must be true or false"), _IGNORED] = Field(
        None, description="For the kernel; the executor ignores it."
    )

    @property
    def upstream(self) -> Upstream:
        """Return `jina`, or its legacy form if that is missing or empty."""
        given = (section for section in (self.jina, self.openapi) if section is not None and section.model_fields_set)
        return next(given, Upstream())

    @property
    def key_variable(self) -> str | None:
        """Return the variable of the API key."""
        upstream = self.upstream
        legacy = upstream.auth if isinstance(upstream, LegacyUpstream) else None
        return legacy.env if legacy else upstream.auth_env

    @property
    def call_seconds(self) -> float | None:
        """Return the time limit of `jina`, else of the options themselves, as the kernel's own executor reads it."""
        values = (getattr(section, name) for section in (self.upstream, self) for name in TIMEOUTS)
        return next((seconds for seconds in values if seconds is not None), None)


class Definition(Section):
    """Tool of a project, as its file declares it."""

    hints: ClassVar[Mapping[str, str]] = {
        "tool_name": "; give the name by which a model calls it",
        "target_subject": "; give cg.v1r4.{project_id}.{channel_id}.cmd.tool.jina.search, or .read",
        "after_execution": "; give suspend or terminate",
        "options": "; give options.jina with mode: search or mode: reader",
    }
    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["tool_name"]}, {"required": ["name"]}]})

    tool_name: Text = _omitted(
        description="Name for the model: letters, digits, `_`, `-`, `.`; at most 64 characters; no `__`, which "
        "replaces dots for providers that allow none."
    )
    name: Text = _omitted(description="The same, as the kernel's management API also accepts it.")
    target_subject: Text = Field(description="`cg.v1r4.{project_id}.{channel_id}.cmd.tool.TARGET.SUFFIX`")
    after_execution: Annotated[Literal["suspend", "terminate"], OneOf()] = Field(
        description="`suspend` (the turn waits for the result) or `terminate` (the result ends it)."
    )
    description: TextOrNull = Field(None, description="Description for the model; default: that of the built-in tool.")
    parameters: Annotated[Parameters | None, WrapValidator(Parameters.check)] = Field(
        None,
        description="Schema of the arguments; default: that of the built-in tool, without arguments that `fixed` and "
        "`envs` set.",
    )
    options: Options = Field(description="What the executor does in a call.")

    @classmethod
    def conflicts(cls, value: Mapping[str, Any]) -> Iterator[InitErrorDetails]:
        """Yield a missing or doubled name."""
        if "name" not in value and "tool_name" not in value:
            yield error_at(f"is missing{cls.hints['tool_name']}", "tool_name")
        if "name" in value and "tool_name" in value:
            yield error_at("says the same as tool_name; give only one", "name")


class StoredRow(Section):
    """JSON columns of a stored definition."""

    parameters: Annotated[dict[str, Any], _IS_OBJECT, _OR_NULL] = Field(default_factory=dict)
    options: Annotated[Options, _OR_NULL] = Field(default_factory=Options)


_HOMES: Mapping[type[Section | BudgetLimits], str] = {
    Args: "options.args",
    Upstream: "options.jina",
    BudgetLimits: "options.budget",
    Options: "options",
}
"""Where a misplaced key may belong."""


def file_problems(document: Mapping[str, JsonValue]) -> list[Problem]:
    """Return the problems of a definition's file."""
    try:
        Definition.model_validate(document)
    except ValidationError as error:
        return list(dict.fromkeys(_problems(error)))
    except RecursionError:
        return [Problem((), "is nested too deeply; flatten it")]
    return []


def read_row(parameters: JsonValue, options: JsonValue) -> tuple[StoredRow, list[Problem]]:
    """Return the columns of a row, read as if wrong values were missing, and the problems of these."""
    if isinstance(options, dict) and options.get("jina") and isinstance(options.get("openapi"), dict):
        options = {name: value for name, value in options.items() if name != "openapi"}  # never read beside jina
    columns: JsonObject = {"parameters": parameters, "options": options}
    try:
        return _row(columns), []
    except ValidationError as error:
        problems = list(_problems(error))
    # Of budgets only the first unknown name is found, so all of them are left out.
    wrong_paths = [problem.path[:2] if problem.path[1:2] == ("budget",) else problem.path for problem in problems]
    return _row(without(columns, wrong_paths)), problems


def _row(columns: JsonObject) -> StoredRow:
    return StoredRow.model_validate(columns, context=_ROW, extra="ignore")


def _problems(error: ValidationError) -> Iterator[Problem]:
    for kind, loc, message, _ in details_of(error):
        yield Problem(loc, PYDANTIC_MESSAGES.get(kind, message), warning=kind == WARNING)


def without(value: Mapping[str, JsonValue], paths: Iterable[Path]) -> JsonObject:
    """Return an object without the members at some paths, each of at least one name, and through objects only."""
    below: dict[str, list[Path]] = {}
    for name, *rest in paths:
        below.setdefault(str(name), []).append(tuple(rest))
    return {
        name: without(as_object(member), below[name]) if name in below else member
        for name, member in value.items()
        if () not in below.get(name, ())
    }


def suspend_timeout(options: object) -> float | None:
    """Return the seconds that the worker waits for the tool of a row."""
    return _seconds(options.get("suspend_timeout_seconds")) if isinstance(options, dict) else None


class _Published(GenerateJsonSchema):
    """JSON Schema without what editors would only repeat: titles, and `null` as the default."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ANN401, ARG002
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        published = super().default_schema(schema)
        return {name: value for name, value in published.items() if name != "default" or value is not None}


def json_schema() -> JsonObject:
    """Return the JSON Schema of a definition's file, for editors."""
    schema: JsonObject = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Definition.model_json_schema(schema_generator=_Published),
    }
    return schema
