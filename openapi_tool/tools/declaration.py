"""The declaration of a tool definition: its keys, their types and their descriptions (protocol sections 4 and 5).

A definition is a *file* or a *stored row*. The linter validates files with `file_problems`. The parser of rows
(`definition_parser.py`) starts with `read_row`, which accepts more, because other programs write rows, too. The JSON
Schema for editors (`config/tool.schema.json`) and tables in the documents also come from these classes.

Beside this module are the parts that it is made of: `declaration_types.py` (types of single values),
`declaration_section.py` (the base class), `declaration_schema.py` (`parameters`) and `declaration_errors.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import InitErrorDetails, core_schema

from openapi_tool.options.budgets import BUDGETS, BudgetLimits
from openapi_tool.protocol.jsontext import JsonObject, JsonValue, as_object
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.declaration_errors import (
    PYDANTIC_MESSAGES,
    WARNING,
    details_of,
    error_at,
    own_error,
    raise_any,
    wrong_value,
)
from openapi_tool.tools.declaration_schema import Parameters
from openapi_tool.tools.declaration_section import Section, similar_key
from openapi_tool.tools.declaration_types import (
    EMPTY_IS_UNSET_IN_ROWS,
    IGNORED_IN_ROWS,
    NULL_IS_EMPTY_IN_ROWS,
    OBJECT_MESSAGE,
    ROW_CONTEXT,
    TEXT_IN_ROWS,
    ErrorMessage,
    NamesChoices,
    Seconds,
    Text,
    TextOrNull,
    Texts,
    Values,
    VariableName,
    in_rows,
    is_row,
    omittable,
    positive_seconds,
)
from openapi_tool.tools.operations import OPERATIONS, Operation
from openapi_tool.tools.problems import MAX_PROBLEMS, Path, Problem
from openapi_tool.tools.wording import any_of, did_you_mean, short

MIN_RESULT_TOKENS = 500
"""Lowest limit of the tokens that a model is shown at once."""

TIMEOUTS = ("timeout_s", "timeout")
"""Names of the time limit in seconds; the first one given is used."""

OPERATION_NAMES = [operation.name for operation in OPERATIONS]

MODES = {name: operation for operation in OPERATIONS for name in (operation.name, *operation.aliases)}
"""Operation by each `mode` that a definition may have, such as `read`."""


def _operations_by_base_url() -> dict[str, Operation]:
    found: dict[str, Operation] = {}
    for operation in reversed(OPERATIONS):  # so that the first of several operations with the same host remains
        for url in (*operation.urls(""), *operation.urls("/")):
            found[url] = operation
    return found


BASE_URLS = _operations_by_base_url()
"""Operation by each `base_url` that a definition may have, such as `https://s.jina.ai/`."""


class OwnSection(Section):
    """Section with keys of definitions, unlike `parameters`, whose keys are those of JSON Schema."""

    @classmethod
    def unknown_key(cls, name: str) -> str:
        """Return the message for an unknown key: where it belongs, else the most similar one."""
        return _unknown_option(name, cls)


def _known_mode(value: object) -> str | None:
    if value is None:
        return None
    operation = MODES.get(str(value).strip().lower())
    if operation is None:
        raise wrong_value(f"must be {any_of(OPERATION_NAMES)}{did_you_mean(short(str(value)), OPERATION_NAMES)}")
    return operation.name


def _known_base_url(value: object) -> str | None:
    if value is not None and not (isinstance(value, str) and value in BASE_URLS):
        raise wrong_value(f"may only be {' or '.join(f'https://{operation.host}' for operation in OPERATIONS)}")
    return value


def _warn_of_accept(value: object, info: ValidationInfo) -> None:
    if is_row(info):
        return
    if value is not None and not isinstance(value, str):
        raise wrong_value("must be a text")
    raise own_error(WARNING, "is ignored: JSON is always asked for; take it out")


class Args(OwnSection):
    """Values of arguments that the definition sets. Their texts may hold placeholders such as {agent_turn_id}."""

    defaults: Values = Field(
        default_factory=dict,
        description="Values used if the model omits the argument, but not if it gives an explicit `null`.",
    )
    fixed: Values = Field(default_factory=dict, description="Values that are always used, and hidden from the model.")


class Upstream(OwnSection):
    """The built-in tool, and options of its upstream requests."""

    overrides: ClassVar[Mapping[str, str]] = {"timeout_s": "timeout", "endpoint_template": "path"}

    mode: Annotated[str | None, BeforeValidator(_known_mode), WithJsonSchema({"enum": [*MODES, None]})] = Field(
        None, description="`search` or `reader`; without it the host of `base_url` decides, else `tool`."
    )
    tool: Annotated[TextOrNull, Field(json_schema_extra={"examples": [*CATALOGUE]}), TEXT_IN_ROWS] = Field(
        None, description=f"Built-in tool: {', '.join(f'`{name}`' for name in CATALOGUE)}. For lists it must be named."
    )
    base_url: Annotated[str | None, BeforeValidator(_known_base_url), WithJsonSchema({"enum": [*BASE_URLS, None]})] = (
        Field(None, description="Only `https://s.jina.ai` (search) or `https://r.jina.ai` (reader).")
    )
    method: Annotated[
        str | None,
        Field(pattern="^([Gg][Ee][Tt]|[Pp][Oo][Ss][Tt])$"),
        ErrorMessage("must be GET or POST"),
        EMPTY_IS_UNSET_IN_ROWS,
    ] = Field(
        None,
        description="`POST` (default) or `GET`. A call with a secret in its body is always a POST.",
    )
    path: Annotated[str | None, ErrorMessage("must be a text"), TEXT_IN_ROWS, EMPTY_IS_UNSET_IN_ROWS] = Field(
        None, description="Path of the request: `/`, for a search also `/search`, for a reader also `/{url}`."
    )
    endpoint_template: TextOrNull = Field(
        None, description="Instead of `path`: the reader's address that contains the address of the page."
    )
    auth_env: VariableName = Field(
        None, description="Variable of the API key, used if `envs` has no `api_key`, or its variable is not set."
    )
    accept: Annotated[str | None, BeforeValidator(_warn_of_accept)] = Field(
        None, description="Ignored: JSON is always asked for."
    )
    params: Values = Field(
        default_factory=dict, description="Parameters of the upstream that the model cannot set (docs/tools.md)."
    )
    defaults: Values = Field(default_factory=dict, description="Legacy name of `params`; what `params` sets, wins.")
    headers: Texts = Field(default_factory=dict, description="Such parameters as headers.")
    timeout_s: Seconds = Field(
        None, description="Time limit of the whole call in seconds; must be less than the worker waits."
    )
    timeout: Seconds = Field(None, description="Legacy name of `timeout_s`; that one wins.")


class Auth(OwnSection):
    """Legacy form of `auth_env`."""

    env: Annotated[str, Field(min_length=1), ErrorMessage("must be the name of an environment variable")] = Field(
        description="Variable of the API key."
    )


class LegacyUpstream(Upstream):
    """Legacy form of `jina`; beside it, it is ignored."""

    overrides: ClassVar[Mapping[str, str]] = {**Upstream.overrides, "auth": "auth_env"}

    auth: Annotated[
        Auth | None, in_rows(lambda value: value if isinstance(value, dict) and value.get("env") else None)
    ] = Field(None, description="`env`: variable of the API key.")


def _check_budget(value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
    """Validate `budget`. BudgetLimits has messages for settings, so its errors get others here."""
    if not isinstance(value, dict):
        if value is None and is_row(info):
            return None
        raise wrong_value("must be an object")
    # The search of a similar name is slow. There may be 2,000 unknown names, and for a row, a call waits.
    most_unknown = 1 if is_row(info) else MAX_PROBLEMS
    unknown = islice((name for name in value if name not in BUDGETS), most_unknown)
    raise_any(error_at(_unknown_option(name, BudgetLimits), name) for name in unknown)
    raise_any(
        error_at("must be an integer of at least 0", name)
        for name, limit in value.items()
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0
    )
    if not value:
        return None
    try:
        return handler(value)
    except ValidationError as error:  # only an upper bound is left, which differs for requests and tokens
        raise_any(error_at(f"must be at most {found.context['le']:,}", *found.path) for found in details_of(error))
        raise


class Options(OwnSection):
    """What the executor does in a call."""

    path_prefix: ClassVar[str] = "options."
    overrides: ClassVar[Mapping[str, str]] = {"jina": "openapi"}

    args: Annotated[Args, NULL_IS_EMPTY_IN_ROWS] = Field(
        default_factory=Args, description="Values of arguments: `defaults`, `fixed`."
    )
    envs: Texts = Field(
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
    result_format: Annotated[Literal["text", "object"] | None, NamesChoices(), EMPTY_IS_UNSET_IN_ROWS] = Field(
        None,
        description="Form of the card's `result`: `text` (default), or `object` with the text and further fields.",
    )
    max_result_tokens: Annotated[
        int | None, Field(ge=MIN_RESULT_TOKENS), ErrorMessage(f"must be an integer of at least {MIN_RESULT_TOKENS}")
    ] = Field(
        None,
        description="Maximum tokens of a result that a model is shown at once; replaces `tools.max_result_tokens`.",
    )
    budget: Annotated[BudgetLimits | None, WrapValidator(_check_budget)] = Field(
        None,
        description="[Budgets](tools.md#budgets) for the calls of this tool, with the names of section `budgets`; the "
        "budgets of the settings apply, too.",
    )
    ui_allowed: Annotated[bool | None, ErrorMessage("must be true or false"), IGNORED_IN_ROWS] = Field(
        None, description="For the kernel; the executor ignores it."
    )

    @property
    def upstream(self) -> Upstream:
        """Return `jina`, or its legacy form if that is missing or empty."""
        for section in (self.jina, self.openapi):
            if section is not None and section.model_fields_set:
                return section
        return Upstream()

    @property
    def key_variable(self) -> str | None:
        """Return the variable of the API key."""
        upstream = self.upstream
        if isinstance(upstream, LegacyUpstream) and upstream.auth is not None:
            return upstream.auth.env
        return upstream.auth_env

    @property
    def call_seconds(self) -> float | None:
        """Return the time limit of `jina`, else of the options themselves, as the kernel's own executor reads it."""
        for section in (self.upstream, self):
            for name in TIMEOUTS:
                seconds: float | None = getattr(section, name)
                if seconds is not None:
                    return seconds
        return None


class Definition(OwnSection):
    """Tool of a project, as its file declares it."""

    missing_hints: ClassVar[Mapping[str, str]] = {
        "tool_name": "; give the name by which a model calls it",
        "target_subject": "; give cg.v1r4.{project_id}.{channel_id}.cmd.tool.jina.search, or .read",
        "after_execution": "; give suspend or terminate",
        "options": "; give options.jina with mode: search or mode: reader",
    }
    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["tool_name"]}, {"required": ["name"]}]})

    tool_name: Text = omittable(
        description="Name for the model: letters, digits, `_`, `-`, `.`; at most 64 characters; no `__`, which "
        "replaces dots for providers that allow none."
    )
    name: Text = omittable(description="The same, as the kernel's management API also accepts it.")
    target_subject: Text = Field(description="`cg.v1r4.{project_id}.{channel_id}.cmd.tool.TARGET.SUFFIX`")
    after_execution: Annotated[Literal["suspend", "terminate"], NamesChoices()] = Field(
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
            yield error_at(f"is missing{cls.missing_hints['tool_name']}", "tool_name")
        if "name" in value and "tool_name" in value:
            yield error_at("says the same as tool_name; give only one", "name")


class StoredRow(Section):
    """JSON columns of a stored definition."""

    parameters: Annotated[dict[str, Any], OBJECT_MESSAGE, NULL_IS_EMPTY_IN_ROWS] = Field(default_factory=dict)
    options: Annotated[Options, NULL_IS_EMPTY_IN_ROWS] = Field(default_factory=Options)


_OPTION_SECTIONS: Mapping[str, type[Section | BudgetLimits]] = {
    "options.args": Args,
    "options.jina": Upstream,
    "options.budget": BudgetLimits,
    "options": Options,
}
"""Sections by their path, in which a misplaced key may belong."""


def _unknown_option(name: str, section: type[Section | BudgetLimits]) -> str:
    """Return the message for a key that a section does not have."""
    if "partial" in name.lower():
        return (
            "is not an option: a model would see only the error of a partial result. Here a call succeeds if at least "
            "one item does; take it out"
        )
    for path, other in _OPTION_SECTIONS.items():
        if not issubclass(section, other) and name in _keys_of(other):
            return f"is not known here; {name!r} belongs in {path}"
    return similar_key(name, _keys_of(section))


def _keys_of(section: type[Section | BudgetLimits]) -> list[str]:
    return list(section.model_fields) if issubclass(section, Section) else list(BUDGETS)


def file_problems(document: Mapping[str, JsonValue]) -> list[Problem]:
    """Return the problems of a definition's file, each once."""
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
        return _validated_row(columns), []
    except ValidationError as error:
        problems = list(_problems(error))
    wrong_paths = []
    for problem in problems:
        # Of budgets only the first unknown name is found, so all of them are left out.
        in_budget = problem.path[:2] == ("options", "budget")
        wrong_paths.append(problem.path[:2] if in_budget else problem.path)
    return _validated_row(_without(columns, wrong_paths)), problems


def _validated_row(columns: JsonObject) -> StoredRow:
    return StoredRow.model_validate(columns, context=ROW_CONTEXT, extra="ignore")


def _problems(error: ValidationError) -> Iterator[Problem]:
    for found in details_of(error):
        message = PYDANTIC_MESSAGES.get(found.error_type, found.message)
        yield Problem(found.path, message, warning=found.is_warning)


def _without(value: Mapping[str, JsonValue], paths: Iterable[Path]) -> JsonObject:
    """Return an object without the members at some paths, each of at least one name, and through objects only."""
    paths_below: dict[str, list[Path]] = {}
    for name, *rest in paths:
        paths_below.setdefault(str(name), []).append(tuple(rest))
    kept: JsonObject = {}
    for name, member in value.items():
        if name not in paths_below:
            kept[name] = member
        elif () not in paths_below[name]:  # an empty rest is the path of the member itself
            kept[name] = _without(as_object(member), paths_below[name])
    return kept


def suspend_timeout(options: object) -> float | None:
    """Return the seconds that the worker waits for the result of a tool, from the options of its row."""
    return positive_seconds(as_object(options).get("suspend_timeout_seconds"))


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
