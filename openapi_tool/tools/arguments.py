"""The arguments of a call, from all their sources (protocol section 5).

They are the definition's defaults, what the model gives, the definition's fixed values, and secrets of the environment.
Names are compared *folded*: without case and separators (`argument_names.fold`). The *main parameter* of a call is its
query or page address.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import SecretStr

from openapi_tool.protocol.cards import ToolCall
from openapi_tool.protocol.errors import BadRequest, ToolMisconfigured
from openapi_tool.protocol.identity import CONTROL_FIELDS, CallIdentity
from openapi_tool.protocol.jsontext import JsonValue, object_at, storable_text
from openapi_tool.tools.argument_check import ArgumentCheck, CheckedArguments, check_arguments
from openapi_tool.tools.argument_names import fold
from openapi_tool.tools.definition import ToolDefinition, unusable
from openapi_tool.tools.placeholders import placeholder_values, render, render_fixed
from openapi_tool.tools.problems import listed
from openapi_tool.tools.schema import visible_schema
from openapi_tool.tools.secret_variables import MissingVariable, VariableNotAllowed
from openapi_tool.tools.session_identities import SessionIdentities
from openapi_tool.tools.wording import short

API_KEY = "api_key"
"""Argument of `envs` whose secret is the key of the request; it is sent in a header, unlike other secrets."""

CURSOR, MAX_RESULT_TOKENS = "cursor", "max_result_tokens"
FIND, QUESTION = "find", "question"
"""Arguments that say what of a result is shown (`result_request.py`). They are not sent to the upstream."""

_MAX_SESSION_ID_CHARS = 128

_OTHER_IDS = {"turn_id", "session_id", "context_box_id"}
IDENTITY_ARGUMENTS = frozenset(map(fold, CONTROL_FIELDS | _OTHER_IDS))
"""Folded names of arguments that identify the caller; they never go upstream."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """Resolved arguments of a call.

    - `values`: defaults, the model's arguments (names in `by_model`), fixed values; a later one overrides an earlier
      one.
    - `secrets`: values of the `envs` arguments except `api_key`.
    - `session_identity`: derived from the call's `session_id` (`tools/session_identities.py`).
    - `session_id`: the first 128 characters of the argument, for the result card.
    - `key_variable`: the variable that `api_key` was read from.
    - `key_fallback_reason`: why that is the definition's `auth_env` although `envs` names another one.
    - `repaired`: names of arguments that the model gave in another form.
    """

    values: Mapping[str, JsonValue]
    by_model: frozenset[str]
    secrets: Mapping[str, SecretStr]
    api_key: SecretStr
    session_identity: str
    session_id: str | None = None
    key_variable: str = ""
    key_fallback_reason: str | None = None
    repaired: tuple[str, ...] = ()


SecretSource = Callable[[str], SecretStr]
"""Read a variable by name. Raises ToolMisconfigured if it is missing or not allowed."""


@dataclass(frozen=True, slots=True)
class OperatorEnvs:
    """Arguments that take a secret from the environment by the operator's settings (protocol section 5).

    `variables` maps arguments to variables and overrides definitions. `parameters` are the folded names that a
    definition may map beside `api_key`: the upstream may pass on others to a page, a URL or a third party.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()

    def merged_envs(self, definition: ToolDefinition) -> dict[str, str]:
        """Return the definition's `envs`, overridden by `variables`. Raises ToolMisconfigured."""
        wrong = [name for name in definition.envs if name != API_KEY and fold(name) not in self.parameters]
        if wrong:
            problems = listed([f"options.envs.{short(name)}: may not take a secret" for name in sorted(wrong)])
            raise ToolMisconfigured(
                f"The definition of {short(definition.tool_name)!r} is not usable: {'; '.join(problems)}. Only api_key "
                "may, and what the operator lists in secrets.env_parameters. An operator must correct one of them.",
                detail={"problems": problems},
            )
        return {**definition.envs, **self.variables}


@dataclass(frozen=True, slots=True)
class ArgumentSources:
    """Where arguments come from beside definition and model: secrets by the operator's settings, session identities."""

    operator: OperatorEnvs
    read_secret: SecretSource
    sessions: SessionIdentities

    def prepare(self, definition: ToolDefinition, call: ToolCall, identity: CallIdentity) -> Preparation:
        """Separate the model's arguments and render the defaults, for the check of both. Raises ToolMisconfigured.

        `Preparation.finish` merges them.
        """
        envs = self.operator.merged_envs(definition)
        hidden = frozenset(definition.fixed) | frozenset(envs) | call.fixed_applied
        # The kernel's worker may already have merged defaults and fixed values into the card. They are not the model's,
        # so leave them out here and compute them again below.
        not_from_model = hidden | call.defaults_applied
        given = {name: value for name, value in call.arguments.items() if name not in not_from_model}
        undeclared = _use_declared_main_name(definition, given)
        ids = placeholder_values(identity)
        templates = _default_templates(definition, call, given.keys() | hidden)
        defaults = {
            name: render(template, ids, f"options.args.defaults.{short(name)}") for name, template in templates.items()
        }
        schema = _schema_for(definition, given, hidden)
        check = ArgumentCheck(schema, given, defaults, _rules_of(definition, defaults))
        return Preparation(self, definition, call, identity, ids, envs, undeclared, check)

    def resolve(self, definition: ToolDefinition, call: ToolCall, identity: CallIdentity) -> Arguments:
        """Merge defaults, the model's arguments, fixed values and secrets; validate the first two, in this process.

        Raises BadRequest with every offending path for a mistake of the model, ToolMisconfigured for one of the
        operator.
        """
        prepared = self.prepare(definition, call, identity)
        return prepared.finish(check_arguments(prepared.check))


@dataclass(frozen=True, slots=True)
class Preparation:
    """Arguments of a call before their validation: validate `check`, then `finish` with its result.

    Two steps, as the validation may run in another process (`isolation/`). `ids` are the values of placeholders;
    `undeclared` is the undeclared name by which the model gave the query or page, if it did.
    """

    sources: ArgumentSources
    definition: ToolDefinition
    call: ToolCall
    identity: CallIdentity
    ids: Mapping[str, str | None]
    envs: Mapping[str, str]
    undeclared: str | None
    check: ArgumentCheck

    def finish(self, checked: CheckedArguments) -> Arguments:
        """Return the resolved arguments. Raises BadRequest with every offending path, or ToolMisconfigured."""
        definition = self.definition
        if checked.default_problems:
            raise unusable(definition.tool_name, list(checked.default_problems))
        if checked.problems:
            raise correction_error(list(checked.problems), "The arguments do not fit the tool's parameters. ")
        # A repair to None omits the argument (`jina/resolved_parameters.py`).
        given = {**self.check.given, **checked.repairs}
        read_secret = self.sources.read_secret
        key = api_key(self.envs, definition, read_secret)
        fixed = {name: render_fixed(name, text, self.call, self.ids) for name, text in definition.fixed.items()}
        merged: dict[str, JsonValue] = {**self.check.defaults, **given, **fixed}
        values = {name: value for name, value in merged.items() if not is_identity(name)}
        session_id = _session_id(merged)
        project_id, agent_id = self.identity.project_id, self.identity.agent_id
        repaired = set(checked.repairs)
        if self.undeclared is not None:
            repaired.add(self.undeclared)
        return Arguments(
            values=values,
            by_model=frozenset(given) & values.keys(),
            secrets={name: read_secret(variable) for name, variable in self.envs.items() if name != API_KEY},
            api_key=key.value,
            session_identity=self.sources.sessions.identity(project_id, agent_id, session_id),
            session_id=storable_text(session_id[:_MAX_SESSION_ID_CHARS]) if isinstance(session_id, str) else None,
            key_variable=key.variable,
            key_fallback_reason=key.fallback_reason,
            repaired=tuple(sorted(repaired)),
        )


def _use_declared_main_name(definition: ToolDefinition, given: dict[str, JsonValue]) -> str | None:
    """Give the main parameter the name that `parameters` declare; return the name by which the model gave it.

    The kernel's own executor takes `q` and `target_url`, also if `parameters` require `query` or `url`, and the other
    way round. Returns None if there is nothing to rename.
    """
    if not definition.takes_other_arguments:
        return None
    declared = [name for name in object_at(definition.schema, "properties") if names_main_parameter(definition, name)]
    if len(declared) != 1 or declared[0] in given:
        return None
    for name in given:
        if names_main_parameter(definition, name):
            given[declared[0]] = given.pop(name)
            return name
    return None


def _default_templates(definition: ToolDefinition, call: ToolCall, other_names: Container[str]) -> dict[str, JsonValue]:
    """Return the defaults of arguments that nothing else sets, before their placeholders are replaced.

    A default that the worker merged into the card is used even if the definition no longer contains it.
    """
    names = definition.defaults.keys() | (call.defaults_applied & call.arguments.keys())
    return {
        name: call.arguments.get(name, definition.defaults.get(name))
        for name in sorted(names)
        if name not in other_names
    }


def _schema_for(
    definition: ToolDefinition, given: Mapping[str, JsonValue], hidden: frozenset[str]
) -> Mapping[str, JsonValue]:
    """Return the schema for what the model gives."""
    is_continued = isinstance(given.get(CURSOR), str) and takes_cursor(definition)
    return cursor_schema(definition, hidden) if is_continued else visible_schema(definition.schema, hidden)


def _session_id(arguments: Mapping[str, JsonValue]) -> JsonValue:
    """Return `session_id`, in whatever spelling. The last of several overrides the others, as it does elsewhere."""
    for name in reversed(list(arguments)):
        if fold(name) == "sessionid":
            return arguments[name]
    return None


def _rules_of(definition: ToolDefinition, defaults: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the definition's own rules for the arguments that have a default."""
    declared = object_at(definition.schema, "properties")
    return {name: declared[name] for name in defaults if name in declared}


def is_identity(name: str) -> bool:
    """Return whether an argument identifies the caller."""
    return fold(name) in IDENTITY_ARGUMENTS


def takes_cursor(definition: ToolDefinition) -> bool:
    """Return whether the built-in tool takes a cursor, even if the definition's schema omits it."""
    return CURSOR in definition.built_in.arguments.model_fields


def cursor_schema(definition: ToolDefinition, hidden: frozenset[str]) -> Mapping[str, JsonValue]:
    """Return the schema for a call with a cursor, which does not require page or query.

    Definitions for the kernel's own executor require `url` and do not declare `cursor`; without this their models
    could not paginate.
    """
    schema = visible_schema(definition.schema, hidden)
    required = schema.get("required")
    if not isinstance(required, list):
        return schema
    return {**schema, "required": [name for name in required if not names_main_parameter(definition, name)]}


def names_main_parameter(definition: ToolDefinition, name: JsonValue) -> bool:
    """Return whether an argument is the page or query of a call."""
    return isinstance(name, str) and fold(name) in definition.operation.main_parameter_names


class UsedKey(NamedTuple):
    """API key of a call: its value, the variable with it, and why that is the fallback `auth_env`, if it is."""

    value: SecretStr
    variable: str
    fallback_reason: str | None = None


def api_key(envs: Mapping[str, str], definition: ToolDefinition, read_secret: SecretSource) -> UsedKey:
    """Return the API key of a call.

    As in the kernel's own executor, the fallback applies if the variable in `envs` is missing or not allowed, but not
    if its name looks like a key or configures the executor itself.
    """
    named = envs.get(API_KEY, definition.auth_env)
    try:
        return UsedKey(read_secret(named), named)
    except (MissingVariable, VariableNotAllowed) as refusal:
        if named == definition.auth_env:
            raise
        return UsedKey(read_secret(definition.auth_env), definition.auth_env, refusal.message)


def correction_error(problems: list[str], why: str = "") -> BadRequest:
    """Return the error of a call whose arguments the model must correct."""
    return BadRequest(f"{why}Correct these and call again: {'; '.join(problems)}", detail={"problems": problems})
