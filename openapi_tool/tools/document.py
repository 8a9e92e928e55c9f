"""What a definition's file may say: one strict model (protocol sections 4 and 5).

It is stricter than the reading of stored definitions (`definition`), which may be old.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from openapi_tool.protocol.records import ToolRecord
from openapi_tool.tools.problems import Path, Problem, any_of, did_you_mean

MAX_SUSPEND_S = 3_600

Text = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SUSPEND_S)]
Values = dict[str, Any]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class Args(_Strict):
    """Arguments that the operator sets."""

    defaults: Values = Field(default_factory=dict)
    fixed: Values = Field(default_factory=dict)


class Jina(_Strict):
    """Which upstream, which tool, how it is asked. Durations are seconds."""

    mode: Literal["search", "reader", "read", "crawl"] | None = None
    tool: Text | None = None
    base_url: Text | None = None
    path: str | None = None
    method: Literal["GET", "POST", "get", "post"] | None = None
    endpoint_template: Text | None = None
    auth_env: Text | None = None
    params: Values = Field(default_factory=dict)
    defaults: Values = Field(default_factory=dict)
    headers: dict[str, Text] = Field(default_factory=dict)
    timeout_s: Seconds | None = None
    timeout: Seconds | None = None
    accept: str | None = None


class Auth(_Strict):
    """The key's variable in the old spelling."""

    env: Text


class OpenApi(Jina):
    """`options.openapi`, the old spelling of `options.jina`."""

    auth: Auth | None = None


class Options(_Strict):
    """Everything beside what the kernel itself reads."""

    args: Args = Args()
    envs: dict[str, Text] = Field(default_factory=dict)
    jina: Jina | None = None
    openapi: OpenApi | None = None
    suspend_timeout_seconds: Seconds | None = None
    result_format: Literal["text", "object"] | None = None
    ui_allowed: bool | None = None


class Document(_Strict):
    """A definition. `description` and `parameters` that are left out are those of the built-in tool."""

    tool_name: Text = Field(validation_alias=AliasChoices("tool_name", "name"))
    target_subject: Text
    after_execution: Literal["suspend", "terminate"]
    description: Text | None = None
    parameters: Values | None = None
    options: Options


_SECONDS = f"must be a number of seconds above 0, at most {MAX_SUSPEND_S}"
_MESSAGES = {
    "missing": "is missing",
    "string_type": "must be a text",
    "string_too_short": "must not be empty",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "bool_type": "must be true or false",
    **dict.fromkeys(("float_type", "finite_number", "greater_than", "less_than_equal"), _SECONDS),
}
_HIDES_RESULTS = "partial"


def stored_record(document: Mapping[str, Any]) -> ToolRecord:
    """A definition as the executor would load it, for its own reading of the options."""
    name = document.get("tool_name", document.get("name"))
    parameters = document.get("parameters") or {}
    return ToolRecord(str(name), document.get("after_execution"), parameters, document.get("options"))


def shape_problems(document: Mapping[str, Any]) -> Iterator[Problem]:
    """Unknown keys, missing keys, wrong types and choices, each with its path; no value is echoed."""
    try:
        Document.model_validate(document)
    except ValidationError as error:
        for item in error.errors(include_url=False, include_input=False, include_context=True):
            yield _problem(item["loc"], item)


def _problem(path: Path, item: Mapping[str, Any]) -> Problem:
    kind, context = item["type"], item.get("ctx") or {}
    if kind == "extra_forbidden":
        return Problem(path, _unknown(path))
    if kind == "literal_error":
        return Problem(path, f"must be {context['expected']}" + _hint(path))
    return Problem(path, _MESSAGES.get(kind, item["msg"]))


def _unknown(path: Path) -> str:
    name, known = str(path[-1]), list(_model(path[:-1]).model_fields)
    if path == ("name",):
        return "says the same as tool_name; give only one of them"
    if _HIDES_RESULTS in name.lower():
        return "is no option: of a partial result a model would see only the error; what succeeded is a success here"
    home = next((place for place, model in _HOMES.items() if name in model.model_fields), None)
    elsewhere = f"; {name!r} belongs in {home}" if home else ""
    return f"is not known here{elsewhere or did_you_mean(name, known) or '; known are ' + any_of(sorted(known))}"


def _hint(path: Path) -> str:
    if path[-1] == "result_format":
        return "; a partial result would hide from the model what succeeded"
    return ""


_HOMES: Mapping[str, type[BaseModel]] = {"options.args": Args, "options.jina": Jina, "options": Options}


def _model(path: Path) -> type[BaseModel]:
    models: Mapping[Path, type[BaseModel]] = {
        ("options",): Options,
        ("options", "args"): Args,
        ("options", "jina"): Jina,
        ("options", "openapi"): OpenApi,
        ("options", "openapi", "auth"): Auth,
    }
    return models.get(path, Document)
