"""Checks of definitions: lint of a file, and why the executor would refuse a stored one.

Both run the steps of a call that do not depend on the model's arguments, with the executor's functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pydantic import SecretStr

from openapi_tool.jina.batches import batch_items, item_arguments, item_problems
from openapi_tool.jina.endpoints import ENDPOINTS, endpoint_of
from openapi_tool.jina.parameters import REFUSED, secret_problem
from openapi_tool.jina.resolved_parameters import (
    IGNORED_HEADERS,
    examine_parameters,
    resolve_parameters,
    under_url_policy,
)
from openapi_tool.jina.url_policy import UrlPolicy
from openapi_tool.protocol.cards import ToolCall
from openapi_tool.protocol.command import AFTER_EXECUTION
from openapi_tool.protocol.errors import BadRequest, TargetRefused, ToolError, ToolMisconfigured
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.jsontext import JsonObject, JsonValue, as_object, object_at
from openapi_tool.protocol.records import DefinitionRecord
from openapi_tool.tools.argument_names import fold
from openapi_tool.tools.arguments import (
    API_KEY,
    CURSOR,
    FIND,
    MAX_RESULT_TOKENS,
    QUESTION,
    Arguments,
    ArgumentSources,
    OperatorEnvs,
    SecretSource,
    api_key,
    default_problems,
    is_identity,
    requested_cursor,
    requested_tokens,
    takes_cursor,
    tokens_problems,
)
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.declaration import suspend_timeout
from openapi_tool.tools.definition import ToolDefinition, parse_definition, upstream_section
from openapi_tool.tools.lint import ARGS, PROPERTIES, LintLimits, lint_general, value_fits
from openapi_tool.tools.placeholders import is_template, placeholder_values, render, texts_in
from openapi_tool.tools.problems import Path, Problem
from openapi_tool.tools.result_request import request_problems
from openapi_tool.tools.schema import visible_schema
from openapi_tool.tools.secret_variables import MissingVariable
from openapi_tool.tools.session_identities import MIN_KEY_BYTES, SessionIdentities
from openapi_tool.tools.wording import any_of, did_you_mean, short
from openapi_tool.tools.yaml_source import Source

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
"""Caller with every id."""
_IDS = placeholder_values(_IDENTITY)
_SECRET = SecretStr("")
_SOURCES = ArgumentSources(OperatorEnvs(), lambda _: _SECRET, SessionIdentities(bytes(MIN_KEY_BYTES)))


@dataclass(frozen=True, slots=True)
class StoredCheck:
    """Check of one stored definition against the executor's settings.

    A variable that `secret` finds unset is not a problem, since the executor may run elsewhere. `target` is the token
    TARGET of its subjects.
    """

    operator: OperatorEnvs
    secret: SecretSource
    url_policy: UrlPolicy
    max_batch_items: int
    target: str = "jina"

    def check(self, record: DefinitionRecord) -> tuple[ToolDefinition | None, list[str]]:
        """Return the definition, None if no call of it can work, and its mistakes and ignored values."""
        try:
            definition = parse_definition(record)
        except ToolMisconfigured as error:
            return None, [*_problems(error), *_ignored_values(record)]
        envs = {**definition.envs, **self.operator.variables}
        used = self._key_variable(definition, envs)
        named = envs.pop(API_KEY, used)
        found = list(dict.fromkeys(self._problems(definition, {used, *envs.values()})))
        left_out = [f"{problem}; it is not sent" for problem in _left_out(definition)]
        fallback = [f"options.envs.api_key: {short(named)} is replaced by {short(used)}"] if named != used else []
        return None if found else definition, [*found, *left_out, *_ignored_values(record), *fallback]

    def _key_variable(self, definition: ToolDefinition, envs: Mapping[str, str]) -> str:
        """Return the variable of the key; `auth_env` need not be set."""

        def secret(variable: str) -> SecretStr:
            return _SECRET if variable == definition.auth_env else self.secret(variable)

        try:
            _, variable, _ = api_key(envs, definition, secret)
        except ToolMisconfigured:
            return envs[API_KEY]  # set, but unusable: `_problems` reports it
        return variable

    def _problems(self, definition: ToolDefinition, variables: set[str]) -> Iterator[str]:
        yield from _problems_of_step(lambda: self.operator.merged_envs(definition))
        for variable in sorted(variables):
            yield from _problems_of_step(partial(self.secret, variable))
        usable, problems = _usable(definition)
        yield from problems
        values = usable.defaults.items()
        used = {name: value for name, value in values if name not in usable.fixed and not is_template(value)}
        yield from default_problems(definition, used)
        call = _sample_call(usable, {})
        yield from _set_tokens_problems(usable, call)
        yield from _problems_of_step(lambda: self._resolve(definition, call))

    def _resolve(self, definition: ToolDefinition, call: Arguments) -> None:
        calls = [call]
        if definition.built_in.list_argument in call.values:
            items = batch_items(definition, call, self.max_batch_items) or ()
            calls = [item_arguments(definition, call, item) for item in dict.fromkeys(items)]
        for each in calls:
            under_url_policy(resolve_parameters(definition, each), definition, self.url_policy)


def _left_out(definition: ToolDefinition) -> list[Problem]:
    """Return the values that a call leaves out."""
    return examine_parameters(definition, _sample_call(_usable(definition)[0], {})).invalid


def _usable(definition: ToolDefinition) -> tuple[ToolDefinition, list[str]]:
    """Return the definition without templates that cannot be rendered, and the problems of these."""
    problems: list[str] = []
    groups: dict[str, Any] = {"defaults": {}, "fixed": {}}
    for group, usable in groups.items():
        for name, template in getattr(definition, group).items():
            try:
                render(template, _IDS, f"options.args.{group}.{short(name)}")
                usable[name] = template
            except ToolMisconfigured as error:
                problems += _problems(error)
    return replace(definition, **groups), problems


def _sample_call(definition: ToolDefinition, given: Mapping[str, Any]) -> Arguments:
    """Prepare a call without secrets, and without `parameters`, since required arguments may be missing."""
    bare = replace(definition, schema={}, envs={})
    return _SOURCES.resolve(bare, ToolCall(given), _IDENTITY)


def _ignored_values(record: DefinitionRecord) -> Iterator[str]:
    if record.after_execution not in (None, *AFTER_EXECUTION):
        yield "after_execution: is ignored; it must be 'suspend' or 'terminate'"
    suspend = object_at(record.options).get("suspend_timeout_seconds")
    if suspend is not None and suspend_timeout(record.options) is None:
        yield "options.suspend_timeout_seconds: is ignored; it must be a number of seconds above 0"


def _problems_of_step(step: Callable[[], object]) -> list[str]:
    """Return the operator's mistakes that a step finds; ignore missing arguments of the model."""
    try:
        step()
    except (MissingVariable, BadRequest):
        pass
    except ToolMisconfigured as error:
        return _problems(error)
    return []


def _set_tokens_problems(definition: ToolDefinition, call: Arguments) -> list[str]:
    """Return the problem of `max_result_tokens` in `options.args`, except for a template."""
    if _is_template_of_tokens(definition):
        return []
    return _problems_of_step(lambda: requested_tokens(definition, call))


def _is_template_of_tokens(definition: ToolDefinition) -> bool:
    return is_template({**definition.defaults, **definition.fixed}.get(MAX_RESULT_TOKENS))


def _smallest(value: Any) -> Any:
    return value[:1] if isinstance(value, str | list) else value


def _problems(error: ToolError) -> list[str]:
    return error.detail["problems"] if isinstance(error.detail, dict) else [error.message]


def definition_problems(
    document: Any,
    limits: LintLimits = LintLimits(),  # noqa: B008 - frozen
    rules: UrlPolicy = UrlPolicy(),  # noqa: B008 - frozen
) -> list[Problem]:
    """Return every problem, errors first, one for each path and message."""
    if not isinstance(document, dict):
        return [Problem((), "must be an object with tool_name, target_subject, after_execution and options")]
    definition, found = lint_general(document, limits)
    found += _env_problems(document, limits)
    if definition is not None:
        found += _SampleCalls(document, definition, limits, rules).problems()
    unique = {(problem.path, problem.message): problem for problem in found}
    return sorted(unique.values(), key=lambda problem: problem.warning)


def source_problems(source: Source, limits: LintLimits, rules: UrlPolicy) -> list[Problem]:
    """Return every problem of the YAML, and of the parts of the definition that could be read."""
    broken = {problem.path for problem in source.problems if not problem.warning}
    if source.document is None and broken:
        return source.problems
    found = definition_problems(source.document, limits, rules)
    return [*source.problems, *(problem for problem in found if problem.path not in broken)]


def _env_problems(document: Mapping[str, Any], limits: LintLimits) -> Iterator[Problem]:
    for name in object_at(document, "options", "envs"):
        if name != API_KEY and fold(name) not in limits.env_parameters:
            problem = "may not take a secret: only api_key and what secrets.env_parameters lists may"
            yield Problem(("options", "envs", name), secret_problem(name) or problem)


class _SampleCalls:
    """Sample calls of a definition: with the `values` that it sets, and with each argument `shown` to the model."""

    def __init__(
        self, document: Mapping[str, Any], definition: ToolDefinition, limits: LintLimits, rules: UrlPolicy
    ) -> None:
        self.document = document
        self.definition = definition
        self.limits = limits
        self.rules = rules
        self.built_in = definition.built_in
        self.endpoint = endpoint_of(definition)
        self.section = upstream_section(object_at(document, "options"))
        self.jina = object_at(document, *self.section)
        self.shown = object_at(document, *PROPERTIES)
        self.call = _sample_call(_usable(definition)[0], {})
        self.paginates = takes_cursor(definition)

    def problems(self) -> Iterator[Problem]:
        yield from self._operator_problems()
        for group in ("defaults", "fixed"):
            for name, value in getattr(self.definition, group).items():
                yield from self._address_problems(name, (*ARGS, group, name), self.call.values.get(name))
                yield from self._doubts(name, (*ARGS, group, name), value)
        for name, value in self.definition.headers.items():
            yield from self._doubts(name, (*self.section, "headers", name), value)
        for name, value in self.definition.upstream_params.items():
            path = self._path_in_file(("options", "jina", "params", name))
            yield from self._address_problems(name, path, value)
            yield from self._doubts(name, path, value)
        for name, rule in self.shown.items():
            if not is_identity(name):
                yield from self._argument_problems(name, as_object(rule), (*PROPERTIES, name))
        yield from self._shown_and_fixed()
        if object_at(self.document, "parameters"):
            yield from self._open_schema()
            yield from self._main_argument()

    def _operator_problems(self) -> Iterator[Problem]:
        for name in object_at(self.jina, "headers"):
            if fold(name) in IGNORED_HEADERS:
                message = "is ignored: the executor writes this header itself; take it out"
                yield Problem((*self.section, "headers", name), message, warning=True)
        values = {name: value for name, value in self.call.values.items() if name != self.built_in.list_argument}
        found = examine_parameters(self.definition, replace(self.call, values=values))
        unknown = [
            Problem(path, f"is no parameter of a {self.definition.operation.name} tool") for path in found.unknown
        ]
        for problem in (*found.operator_problems, *found.invalid, *unknown):
            yield self._with_hint(replace(problem, path=self._path_in_file(problem.path)))
        yield from self._upstream_time(found.parameters)
        yield from self._set_values()

    def _set_values(self) -> Iterator[Problem]:
        """Check values of `args` that are no parameters of the upstream."""
        name = self.built_in.list_argument
        wrong = item_problems(self.definition, self.call, self.limits.tools.max_batch_items) if name else []
        if not _is_template_of_tokens(self.definition):
            wrong += tokens_problems(self.call)
        for problem in wrong:
            for group in ("fixed", "defaults"):
                if problem.path[0] in getattr(self.definition, group):
                    yield replace(problem, path=(*ARGS, group, *problem.path))
                    break

    def _address_problems(self, name: str, path: Path, value: Any) -> Iterator[Problem]:
        main = (self.definition.operation.argument, self.built_in.list_argument)
        if self.endpoint.check_url is None or not any(self._is_parameter(name, wanted) for wanted in main):
            return
        if isinstance(value, list):
            for place, item in enumerate(value):
                yield from self._address_problems(name, (*path, place), item)
        elif isinstance(value, str) and value.strip():
            try:
                self.endpoint.check_url(value, self.rules)
            except (BadRequest, TargetRefused) as refusal:
                yield Problem(path, refusal.message.removeprefix("url: "))

    def _doubts(self, name: str, path: Path, value: Any) -> Iterator[Problem]:
        """Check texts that the upstream would not understand; a text with a placeholder is not known yet."""
        parameter = self.endpoint.find(name)
        if parameter is None or parameter.doubt is None:
            return
        try:
            parameter.convert(value)
        except ValueError:  # which the executor reports
            return
        for where, text in texts_in(value, path):
            if not is_template(text) and (doubt := parameter.doubt(text)):
                yield Problem(where, doubt)

    def _path_in_file(self, path: Path) -> Path:
        """Return an option's path in the file, which may use the legacy names `openapi` and `defaults`."""
        if path[:2] != ("options", "jina"):
            return path
        _, _, group, name = path
        in_defaults = group == "params" and name not in object_at(self.jina, "params")
        return (*self.section, "defaults" if in_defaults else group, name)

    def _with_hint(self, problem: Problem) -> Problem:
        name = str(problem.path[-1])
        parameter = self.endpoint.find(name)
        if parameter and not parameter.model and problem.path[:2] == PROPERTIES:
            return replace(problem, message=f"{problem.message}; an operator may set it in options.jina.params")
        if reason := REFUSED.get(fold(name)):
            if reason in problem.message:
                return problem
            return replace(problem, message=f"{problem.message}: {reason}")
        if parameter:
            return problem
        entries = self.endpoint.parameters
        if "headers" in problem.path:
            if (bare := self.endpoint.find(name[2:])) and name.lower().startswith("x-"):
                return replace(problem, message=f"{problem.message}; set {bare.name!r} in options.jina.params")
            known = [entry.header for entry in entries if entry.header]
        else:
            known = [*self.built_in.arguments.model_fields, *(entry.name for entry in entries)]
        homes = [tool.name for tool in CATALOGUE.values() if name in tool.arguments.model_fields]
        others = (f"a {other} tool" for other, endpoint in ENDPOINTS.items() if endpoint.find(name))
        home = any_of(homes) if homes else next(others, None)
        hint = f"; it is one of {home}" if home else did_you_mean(name, known) or "; take it out"
        return replace(problem, message=problem.message + hint)

    def _upstream_time(self, parameters: Mapping[str, Any]) -> Iterator[Problem]:
        """Check the upstream's `timeout`, which applies to each of its stages."""
        call_s = min(self.limits.max_call_s(self.document), self.limits.tools.max_timeout_s)
        longest = self.endpoint.timeouts.longest_s(parameters)
        if longest is None or longest <= call_s:
            return
        for name in self.definition.upstream_params:
            if self._is_parameter(name, "timeout"):
                message = f"lets the upstream take {longest:g} s, and a call has {call_s:g} s; raise both or shorten it"
                path = self._path_in_file(("options", "jina", "params", name))
                yield Problem(path, message, warning=parameters["timeout"] < call_s)  # one stage fits

    def _argument_problems(self, name: str, rule: dict[str, Any], path: Path) -> Iterator[Problem]:
        """Yield problems of values that the schema allows and the executor refuses."""
        of_list = name == self.built_in.list_argument
        if unknown := self._refusals(name, ["a"] if of_list else None):
            yield from (self._with_hint(replace(problem, path=path)) for problem in unknown)
            return
        for where, values in _samples(rule, of_list=of_list):
            # Of a refused text or item a larger size proves nothing.
            by_size = where[0] in _SIZES
            tried = [one for one in values if not (by_size and self._refusals(name, _smallest(one), unfit=True))]
            found = [self._refusals(name, value) for value in tried]
            if found and all(found):
                yield from (replace(problem, path=(*path, *where)) for problem in found[0])
                if where[-1] == "type":
                    return
            if where[0] in ("default", "const", "enum"):
                yield from self._address_problems(name, (*path, *where), values[0])
                yield from self._doubts(name, (*path, *where), values[0])
        if rule.get("type") == "string" and self._takes_numbers_only(name):
            message = "lets a model give words, and only a number fits; write `integer`"
            yield Problem((*path, "type"), message, warning=True)

    def _takes_numbers_only(self, name: str) -> bool:
        """Return whether a parameter of the upstream takes a number, also as a text, and no other text."""
        rule = object_at(self.shown, name)
        if self.endpoint.find(name) is None or not {"enum", "const", "pattern"}.isdisjoint(rule):
            return False
        takes_a_number = any(not self._refusals(name, number, unfit=True) for number in ("1", "500"))
        return takes_a_number and all(self._refusals(name, word, unfit=True) for word in ("a", "true"))

    def _refusals(self, name: str, value: Any, *, unfit: bool = False) -> list[Problem]:
        """Return the executor's problems with an argument; with one that its schema refuses only if `unfit`."""
        items = self.built_in.list_argument
        given: dict[str, Any] = {items: ["a"]} if items else {}
        if self.paginates and name in (FIND, QUESTION):
            given[CURSOR] = "a"
        call = _sample_call(replace(self.definition, defaults={}, fixed={}), given | {name: value})
        if problems := request_problems(self.definition, call):
            if not unfit and not value_fits(dict(object_at(self.shown, name)), value):
                return []
            return [replace(problem, path=(name,)) for problem in problems]
        if requested_cursor(self.definition, call) is not None:
            return []
        if items:
            found = item_problems(self.definition, call, self.limits.tools.max_batch_items)
            if found or name == items:
                return found
            call = item_arguments(self.definition, call, "a")
        return examine_parameters(self.definition, call, suggest=False).model_problems

    def _shown_and_fixed(self) -> Iterator[Problem]:
        """Check fixed values whose parameter a model is shown under another name."""
        derived = object_at(visible_schema(self.built_in.schema(), self.definition.hidden), "properties")
        shown = self.shown if object_at(self.document, "parameters") else derived
        for name in self.definition.fixed.keys() - shown.keys():
            parameter = self.endpoint.find(name)
            for other in shown:
                if parameter and self.endpoint.find(other) is parameter:
                    yield Problem(
                        (*ARGS, "fixed", name), f"a model is shown the same parameter as {other!r}; take one out"
                    )

    def _open_schema(self) -> Iterator[Problem]:
        """Check that the schema is closed, and declares `cursor` for pagination then."""
        schema = object_at(self.document, "parameters")
        if schema.get("type") != "object":
            return
        if schema.get("additionalProperties") is False and self.paginates and CURSOR not in self.shown:
            message = f"lacks `{CURSOR}`, so a model sees only the beginning of a long page; declare it, as a text"
            yield Problem(PROPERTIES, message, warning=True)
        if "additionalProperties" in schema:
            return
        message = "lacks `additionalProperties: false`, so a model may give what is not declared; add it"
        if self.paginates and CURSOR not in self.shown:
            message += f", and declare `{CURSOR}`: a closed schema without it shows only the beginning of a long page"
        yield Problem(("parameters",), message, warning=True)

    def _main_argument(self) -> Iterator[Problem]:
        """Check that something provides the query or address."""
        wanted = self.built_in.list_argument or self.definition.operation.argument
        given = any(self._is_parameter(name, wanted) for name in (*self.call.values, *self.definition.upstream_params))
        required = object_at(self.document, "parameters").get("required") or []
        if given or not isinstance(required, list):
            return
        shown = [name for name in self.shown if self._is_parameter(name, wanted)]
        path = ("parameters", "required")
        if not shown:
            yield Problem(
                PROPERTIES, f"lacks {wanted!r}, without which no call can work; declare it, or set it in options.args"
            )
        elif self.paginates and CURSOR in self.shown and shown[0] in required:
            message = f"names {shown[0]!r}, which is ignored beside a cursor; take it out of `required`"
            yield Problem(path, message, warning=True)
        elif CURSOR not in self.shown and shown[0] not in required:
            yield Problem(path, f"should name {shown[0]!r}: no call works without it; add it", warning=True)

    def _is_parameter(self, name: str, wanted: str | None) -> bool:
        if wanted is None or wanted == self.built_in.list_argument:
            return name == wanted
        return self.endpoint.find(name) is self.endpoint.find(wanted)


# Samples of each JSON type; a parameter that refuses all of them refuses the type.
_SAMPLES: Mapping[str, list[JsonValue]] = {
    "string": [],  # others may be accepted
    "integer": [1, 500],
    "number": [1, 500],
    "boolean": [True],
    "array": [["a"]],
    "object": [{"a": 1}],
}
_SIZES = ("minLength", "minItems")
_ABOVE_LIMITS = 2_001  # characters of a text, items of a list: more than the executor accepts


def _set_samples(rule: JsonObject) -> Iterator[tuple[Path, list[JsonValue]]]:
    for keyword in ("default", "const"):
        if keyword in rule:
            yield (keyword,), [rule[keyword]]


def _choices(rule: JsonObject) -> Iterator[tuple[Path, list[JsonValue]]]:
    choices = rule.get("enum")
    if isinstance(choices, list):
        for place, value in enumerate(choices):
            yield ("enum", place), [value]


def _samples(rule: JsonObject, *, of_list: bool = False) -> Iterator[tuple[Path, list[JsonValue]]]:
    """Yield values that a schema allows, by keyword; `of_list` if it is of a batch's items."""
    kind = str(rule.get("type"))
    yield ("type",), (["a"] if of_list and kind == "string" else _SAMPLES.get(kind, []))
    yield from _set_samples(rule)
    for word, inwards in (("minimum", math.ceil), ("maximum", math.floor)):
        limit = rule.get(word)
        if kind == "integer" and isinstance(limit, float) and math.isfinite(limit):
            limit = inwards(limit)
        if word in rule and value_fits(rule, limit):  # an exclusive limit may exclude it
            yield (word,), [limit]
    if of_list and isinstance(most := rule.get("maxItems"), int):
        yield ("maxItems",), [["a"] * min(max(most, 0), _ABOVE_LIMITS)]
    yield from _choices(rule)
    lists: list[list[JsonValue]] = [["a"]]
    items = rule.get("items")
    if isinstance(items, dict) and (kind == "array" or (of_list and kind not in _SAMPLES)):
        for where, values in _samples(items):
            lists_of_one = [[value] for value in values]
            lists += lists_of_one
            yield ("items", *where), [*lists_of_one]
    for keyword in ("exclusiveMinimum", "exclusiveMaximum", *_SIZES):
        limit = rule.get(keyword)
        # 0 is the size that any text or list has without the keyword.
        if isinstance(limit, int) and kind in _SAMPLES and (limit or keyword not in _SIZES):
            size = min(max(limit, 0), _ABOVE_LIMITS)
            nearest: dict[str, list[JsonValue]] = {
                "exclusiveMinimum": [limit + 1],
                "exclusiveMaximum": [limit - 1],
                "minLength": ["a" * size],
                "minItems": [one * size for one in lists],
            }
            yield (keyword,), [value for value in nearest[keyword] if value_fits(rule, value, if_broken=False)]
