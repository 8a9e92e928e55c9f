"""Check of a stored definition: find the reasons for which the executor would refuse every call of it.

Runs the steps of a call that do not depend on the model's arguments: the same functions, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import SecretStr

from openapi_tool.jina.batch import batch_items, item_arguments
from openapi_tool.jina.parameter_mapping import resolve_parameters, with_checked_url
from openapi_tool.jina.url_policy import UrlPolicy
from openapi_tool.protocol.command import AFTER_EXECUTION
from openapi_tool.protocol.errors import BadRequest, ToolError, ToolMisconfigured
from openapi_tool.protocol.records import DefinitionRecord
from openapi_tool.tools.arguments import API_KEY, Arguments, OperatorEnvs, SecretSource, default_problems, is_identity
from openapi_tool.tools.definition import ToolDefinition, parse_definition, suspend_timeout
from openapi_tool.tools.problems import short
from openapi_tool.tools.secrets import MissingVariable, VariableNotAllowed
from openapi_tool.tools.template import PLACEHOLDERS, render

_IDS = dict.fromkeys(PLACEHOLDERS, "1")


@dataclass(frozen=True, slots=True)
class StoredCheck:
    """Check of one row against the executor's settings.

    `target` is the token of the subjects that this executor listens on.

    A variable that is not set here is not a problem: the executor may run elsewhere.
    """

    operator: OperatorEnvs
    secret: SecretSource
    url_policy: UrlPolicy
    max_batch_items: int
    target: str = "jina"

    def check(self, record: DefinitionRecord) -> tuple[ToolDefinition | None, list[str]]:
        """Return the definition, None if no call of it can work; and a line for each mistake and each ignored value."""
        try:
            definition = parse_definition(record)
        except ToolMisconfigured as error:
            return None, [*_problems(error), *_ignored_values(record)]
        found = list(dict.fromkeys(self._problems(definition)))
        return None if found else definition, [*found, *_ignored_values(record), *self._key_fallback(definition)]

    def _problems(self, definition: ToolDefinition) -> Iterator[str]:
        yield from _problems_of_step(lambda: self.operator.merged_envs(definition))
        envs = {**definition.envs, **self.operator.variables}
        for variable in sorted({self._key_variable(envs, definition), *_without_key(envs).values()}):
            yield from _problems_of_step(partial(self.secret, variable))
        values, problems = set_values(definition)
        yield from problems
        plain = {name: value for name, value in definition.defaults.items() if values.get(name) == value}
        yield from default_problems(definition, plain)
        yield from _problems_of_step(lambda: self._resolve(definition, sample_arguments(values)))

    def _key_fallback(self, definition: ToolDefinition) -> Iterator[str]:
        """Yield why calls take the key of `auth_env` although `envs` names another variable."""
        envs = {**definition.envs, **self.operator.variables}
        named = envs.get(API_KEY, definition.auth_env)
        if named != definition.auth_env and self._key_variable(envs, definition) == definition.auth_env:
            yield f"options.envs.api_key: {short(named)} is replaced by {short(definition.auth_env)}"

    def _key_variable(self, envs: Mapping[str, str], definition: ToolDefinition) -> str:
        named = envs.get(API_KEY, definition.auth_env)
        try:
            self.secret(named)
        except (MissingVariable, VariableNotAllowed):
            return definition.auth_env
        except ToolMisconfigured:
            pass
        return named

    def _resolve(self, definition: ToolDefinition, call: Arguments) -> None:
        calls = [call]
        if definition.built_in.items in call.values:
            items = batch_items(definition, call, self.max_batch_items) or ()
            calls = [item_arguments(definition, call, item) for item in dict.fromkeys(items)]
        for each in calls:
            with_checked_url(resolve_parameters(definition, each), definition, self.url_policy)


def set_values(definition: ToolDefinition) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments that the definition sets, with sample ids in templates; and the templates' problems."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for group, templates in (("defaults", definition.defaults), ("fixed", definition.fixed)):
        for name, template in templates.items():
            try:
                values[name] = render(template, _IDS, f"options.args.{group}.{short(name)}")
            except ToolMisconfigured as error:
                problems += _problems(error)
    return values, problems


def sample_arguments(values: Mapping[str, Any], by_model: frozenset[str] = frozenset()) -> Arguments:
    """Return the arguments of a sample call, which is resolved but never sent."""
    sent = {name: value for name, value in values.items() if not is_identity(name)}
    return Arguments(sent, by_model, {}, SecretStr(""), session="")


def _without_key(envs: Mapping[str, str]) -> dict[str, str]:
    return {name: variable for name, variable in envs.items() if name != API_KEY}


def _ignored_values(record: DefinitionRecord) -> Iterator[str]:
    if record.after_execution not in (None, *AFTER_EXECUTION):
        yield "after_execution: is ignored; it must be 'suspend' or 'terminate'"
    options = record.options if isinstance(record.options, dict) else {}
    if options.get("suspend_timeout_seconds") is not None and suspend_timeout(options) is None:
        yield "options.suspend_timeout_seconds: is ignored; it must be a number of seconds above 0"


def _problems_of_step(step: Callable[[], object]) -> list[str]:
    """Return the problems that a step of a call finds in the definition; ignore missing arguments of the model."""
    try:
        step()
    except (MissingVariable, BadRequest):
        return []
    except ToolMisconfigured as error:
        return _problems(error)
    return []


def _problems(error: ToolError) -> list[str]:
    return error.detail["problems"] if isinstance(error.detail, dict) else [error.message]
