"""From the card's arguments to what a tool runs with, in the order of protocol section 5."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import SecretStr

from openapi_tool.protocol.cards import ToolCall
from openapi_tool.protocol.errors import BadRequest, ToolMisconfigured
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.problems import listed, short
from openapi_tool.tools.schema import schema_problems, visible_schema
from openapi_tool.tools.secrets import MissingVariable
from openapi_tool.tools.session import SessionScope
from openapi_tool.tools.template import placeholder_values, render_default, render_fixed

API_KEY = "api_key"
_SESSION = "sessionid"

IDENTITY_ARGUMENTS = frozenset(
    name.replace("_", "")
    for name in (
        "project_id",
        "channel_id",
        "channel",
        "agent_id",
        "agent_turn_id",
        "turn_id",
        "turn_epoch",
        "step_id",
        "tool_call_id",
        "session_id",
        "trace_id",
        "traceparent",
        "tracestate",
        "parent_agent_id",
        "parent_agent_turn_id",
        "parent_step_id",
        "recursion_depth",
        "context_box_id",
    )
)
"""Names, folded, of arguments that identify the caller; they never go upstream."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a tool runs with.

    `values` are ordered by weight: defaults, then the model's, then fixed. `by_model` names the
    arguments that the model itself gave; `secrets` are the values of `envs` arguments (without
    `api_key`), `api_key` is the bearer key; `session` is the execution identity behind `session_id`.
    """

    values: Mapping[str, Any]
    by_model: frozenset[str]
    secrets: Mapping[str, SecretStr]
    api_key: SecretStr
    session: str


SecretSource = Callable[[str], SecretStr]
"""Variable name -> value. Raises ToolMisconfigured when it is missing or not allowed."""


def fold(name: str) -> str:
    """An argument's name without case and separators: `target_url`, `targetUrl` and `Target-URL` agree."""
    return name.replace("_", "").replace("-", "").lower()


@dataclass(frozen=True, slots=True)
class OperatorEnvs:
    """The operator's own `envs`, and where else definitions may put a secret (protocol section 5).

    `variables` maps arguments to variables and wins over definitions; `parameters` are folded names that a
    definition may map beside `api_key`. Any other argument may reach a page, a URL or a third party.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()

    def over(self, definition: ToolDefinition) -> dict[str, str]:
        """Argument to variable of a call. Raises ToolMisconfigured naming every argument that may take no secret."""
        wrong = [name for name in definition.envs if name != API_KEY and fold(name) not in self.parameters]
        if wrong:
            problems = listed([f"options.envs.{short(name)} may not take a secret" for name in sorted(wrong)])
            raise ToolMisconfigured(
                f"The definition of {short(definition.tool_name)!r} is not usable: {'; '.join(problems)}. Only api_key "
                "may, and what the operator lists in secrets.env_parameters. An operator must correct one of them.",
                detail={"problems": problems},
            )
        return {**definition.envs, **self.variables}


def prepare_arguments(
    definition: ToolDefinition,
    call: ToolCall,
    identity: CallIdentity,
    operator: OperatorEnvs,
    secret: SecretSource,
    scope: SessionScope,
) -> Arguments:
    """Apply the definition to the model's arguments.

    Raises BadRequest (naming every offending path) for the model's mistakes and ToolMisconfigured
    for the operator's.
    """
    envs = operator.over(definition)
    hidden = frozenset(definition.fixed) | frozenset(envs) | call.fixed_applied
    own = hidden | call.defaults_applied
    given = {name: value for name, value in call.arguments.items() if name not in own}
    ids = placeholder_values(identity)
    defaults = {
        name: render_default(name, definition.defaults.get(name), call, ids)
        for name in sorted({*definition.defaults, *(call.defaults_applied & call.arguments.keys())})
        if name not in given and name not in hidden
    }
    _validate(definition, defaults | given, frozenset(given), hidden)
    fixed = {name: render_fixed(name, template, call, ids) for name, template in definition.fixed.items()}
    prepared: dict[str, Any] = defaults | given | fixed
    values = {name: value for name, value in prepared.items() if not is_identity(name)}
    return Arguments(
        values=values,
        by_model=frozenset(given) & values.keys(),
        secrets={name: secret(variable) for name, variable in envs.items() if name != API_KEY},
        api_key=_api_key(envs, definition, secret),
        session=scope.identity(identity.project_id, identity.agent_id, _alias(prepared)),
    )


def _alias(prepared: dict[str, Any]) -> Any:
    """The session's alias: the weightiest `session_id`, in whatever spelling."""
    return next((prepared[name] for name in reversed(prepared) if fold(name) == _SESSION), None)


def is_identity(name: str) -> bool:
    """Whether an argument identifies the caller rather than asking for something."""
    return fold(name) in IDENTITY_ARGUMENTS


def _validate(
    definition: ToolDefinition, arguments: Mapping[str, Any], by_model: frozenset[str], hidden: frozenset[str]
) -> None:
    """Hold the model to the schema; a default that the schema does not declare is the operator's own."""
    schema = visible_schema(definition.parameters, hidden)
    declared = schema.get("properties")
    known = by_model.union(declared) if isinstance(declared, dict) else by_model
    seen = {name: value for name, value in arguments.items() if name in known}
    problems = schema_problems(schema, seen)
    if problems:
        raise BadRequest(
            "The arguments do not fit the tool's parameters. Correct these and call again: " + "; ".join(problems),
            detail={"problems": problems},
        )


def _api_key(envs: Mapping[str, str], definition: ToolDefinition, secret: SecretSource) -> SecretStr:
    """The key of an `envs` argument named `api_key`; where its variable is missing, `auth_env`'s."""
    named = envs.get(API_KEY, definition.auth_env)
    try:
        return secret(named)
    except MissingVariable:
        if named == definition.auth_env:
            raise
        return secret(definition.auth_env)
