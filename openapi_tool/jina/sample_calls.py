"""Sample calls of a definition, which checks make without a caller, an environment and an upstream.

A sample call runs the executor's own steps as far as they do not depend on the model's arguments. Their errors are the
problems of the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import SecretStr

from openapi_tool.protocol.cards import ToolCall
from openapi_tool.protocol.errors import BadRequest, ToolError, ToolMisconfigured
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.tools.arguments import (
    MAX_RESULT_TOKENS,
    Arguments,
    ArgumentSources,
    OperatorEnvs,
)
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.placeholders import is_template, placeholder_values, render
from openapi_tool.tools.secret_variables import MissingVariable
from openapi_tool.tools.session_identities import MIN_KEY_BYTES, SessionIdentities
from openapi_tool.tools.wording import short

_IDENTITY = CallIdentity(
    project_id="1",
    agent_id="1",
    channel_id="1",
    agent_turn_id="1",
    turn_epoch=1,
    tool_call_id="1",
    step_id="1",
    parent_step_id="1",
    trace_id="1",
    context_box_id="1",
)
"""A caller with every id that a placeholder may name."""
_IDS = placeholder_values(_IDENTITY)

NO_SECRET = SecretStr("")
"""What stands for each secret."""
_SOURCES = ArgumentSources(OperatorEnvs(), lambda _: NO_SECRET, SessionIdentities(bytes(MIN_KEY_BYTES)))


def sample_call(definition: ToolDefinition, given: Mapping[str, Any]) -> Arguments:
    """Return the arguments of a call for which the model gives `given`.

    It has no secrets. The definition's `parameters` are not checked, since required arguments may be missing.
    """
    bare = replace(definition, schema={}, envs={})
    return _SOURCES.resolve(bare, ToolCall(given), _IDENTITY)


def usable_part(definition: ToolDefinition) -> tuple[ToolDefinition, list[str]]:
    """Return the definition without those templates that cannot be rendered, and the problems of these."""
    problems: list[str] = []
    groups: dict[str, Any] = {"defaults": {}, "fixed": {}}
    for group, usable in groups.items():
        for name, template in getattr(definition, group).items():
            try:
                render(template, _IDS, f"options.args.{group}.{short(name)}")
                usable[name] = template
            except ToolMisconfigured as error:
                problems += problems_of(error)
    return replace(definition, **groups), problems


def problems_of_step(step: Callable[[], object]) -> list[str]:
    """Return the operator's mistakes that a step finds; ignore missing arguments of the model."""
    try:
        step()
    except (MissingVariable, BadRequest):
        pass
    except ToolMisconfigured as error:
        return problems_of(error)
    return []


def problems_of(error: ToolError) -> list[str]:
    """Return the problems that an error lists, else its message."""
    return error.detail["problems"] if isinstance(error.detail, dict) else [error.message]


def is_template_of_tokens(definition: ToolDefinition) -> bool:
    """Return whether the definition sets `max_result_tokens` by a template, whose value is not known yet."""
    return is_template({**definition.defaults, **definition.fixed}.get(MAX_RESULT_TOKENS))
