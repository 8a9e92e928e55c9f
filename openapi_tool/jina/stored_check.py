"""Check of a stored definition: why the executor would refuse its calls, and what it would ignore.

It runs the steps of a call that do not depend on the model's arguments (`sample_calls.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from pydantic import SecretStr

from openapi_tool.jina.batches import batch_items, item_arguments
from openapi_tool.jina.resolved_parameters import (
    examine_parameters,
    resolve_parameters,
    under_url_policy,
)
from openapi_tool.jina.sample_calls import (
    NO_SECRET,
    is_template_of_tokens,
    problems_of,
    problems_of_step,
    sample_call,
    usable_part,
)
from openapi_tool.jina.url_policy import UrlPolicy
from openapi_tool.protocol.command import AFTER_EXECUTION
from openapi_tool.protocol.errors import ToolMisconfigured
from openapi_tool.protocol.jsontext import object_at
from openapi_tool.protocol.records import DefinitionRecord
from openapi_tool.tools.argument_check import default_problems
from openapi_tool.tools.arguments import (
    API_KEY,
    Arguments,
    OperatorEnvs,
    SecretSource,
    api_key,
)
from openapi_tool.tools.declaration import suspend_timeout
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.definition_parser import parse_definition
from openapi_tool.tools.placeholders import is_template
from openapi_tool.tools.problems import Problem
from openapi_tool.tools.result_request import requested_tokens
from openapi_tool.tools.wording import short


@dataclass(frozen=True, slots=True)
class StoredCheck:
    """Check of stored definitions against the executor's settings.

    - `operator`: the arguments that take a secret by the settings, and its variable.
    - `secret`: reads a variable. One that is not set is no problem, since the executor may run elsewhere.
    - `target`: the token TARGET of the executor's subjects.
    """

    operator: OperatorEnvs
    secret: SecretSource
    url_policy: UrlPolicy
    max_batch_items: int
    target: str = "jina"

    def check(self, record: DefinitionRecord) -> tuple[ToolDefinition | None, list[str]]:
        """Return the definition, or None if no call of it can work; and lines about its mistakes and ignored values."""
        try:
            definition = parse_definition(record)
        except ToolMisconfigured as error:
            return None, [*problems_of(error), *_ignored_values(record)]
        envs = {**definition.envs, **self.operator.variables}  # variables of secrets, by argument
        used_variable = self._key_variable(definition, envs)
        named_variable = envs.pop(API_KEY, used_variable)
        problems = list(dict.fromkeys(self._problems(definition, {used_variable, *envs.values()})))  # each once
        ignored = [f"{problem}; it is not sent" for problem in _left_out(definition)]
        ignored += _ignored_values(record)
        if named_variable != used_variable:
            ignored.append(f"options.envs.api_key: {short(named_variable)} is replaced by {short(used_variable)}")
        return None if problems else definition, [*problems, *ignored]

    def _key_variable(self, definition: ToolDefinition, envs: Mapping[str, str]) -> str:
        """Return the variable whose value is the key of a call; the one of `auth_env` need not be set here."""

        def secret(variable: str) -> SecretStr:
            return NO_SECRET if variable == definition.auth_env else self.secret(variable)

        try:
            variable = api_key(envs, definition, secret).variable
        except ToolMisconfigured:
            return envs[API_KEY]  # set, but unusable: `_problems` reports it
        return variable

    def _problems(self, definition: ToolDefinition, variables: set[str]) -> Iterator[str]:
        """Yield why calls cannot work; `variables` are those of secrets."""
        yield from problems_of_step(lambda: self.operator.merged_envs(definition))
        for variable in sorted(variables):
            yield from problems_of_step(partial(self.secret, variable))
        usable, problems = usable_part(definition)
        yield from problems
        defaults = usable.defaults.items()
        # A fixed value replaces a default one, and the value of a template is not known yet.
        used = {name: value for name, value in defaults if name not in usable.fixed and not is_template(value)}
        yield from default_problems(object_at(definition.schema, "properties"), used)
        call = sample_call(usable, {})
        yield from _set_tokens_problems(usable, call)
        yield from problems_of_step(lambda: self._resolve(definition, call))

    def _resolve(self, definition: ToolDefinition, call: Arguments) -> None:
        """Resolve the parameters of a call, of each item if the definition sets the items of a batch."""
        calls = [call]
        if definition.built_in.list_argument in call.values:
            items = batch_items(definition, call, self.max_batch_items) or ()
            calls = [item_arguments(definition, call, item) for item in dict.fromkeys(items)]
        for call_of_item in calls:
            under_url_policy(resolve_parameters(definition, call_of_item), definition, self.url_policy)


def _left_out(definition: ToolDefinition) -> list[Problem]:
    """Return the invalid values that a call leaves out (`ParameterResolver.invalid`)."""
    return examine_parameters(definition, sample_call(usable_part(definition)[0], {})).invalid


def _ignored_values(record: DefinitionRecord) -> Iterator[str]:
    """Yield the values of a record that its dialect ignores."""
    if record.after_execution not in (None, *AFTER_EXECUTION):
        yield "after_execution: is ignored; it must be 'suspend' or 'terminate'"
    suspend = object_at(record.options).get("suspend_timeout_seconds")
    if suspend is not None and suspend_timeout(record.options) is None:
        yield "options.suspend_timeout_seconds: is ignored; it must be a number of seconds above 0"


def _set_tokens_problems(definition: ToolDefinition, call: Arguments) -> list[str]:
    """Return the problem of `max_result_tokens` in `options.args`, except for a template."""
    if is_template_of_tokens(definition):
        return []
    return problems_of_step(lambda: requested_tokens(definition, call))
