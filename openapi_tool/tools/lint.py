"""Linter of the files with definitions: the checks that need no knowledge of the upstream's parameters.

`jina/definition_checks.py` calls `lint_general`, and adds the checks that need it. The declaration (`declaration.py`)
says which keys and types a file may have. The rules here are about values that must fit each other, or the settings of
the executor.
No message repeats a value that could be a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from openapi_tool.options.budgets import BudgetLimits
from openapi_tool.options.executor import ExecutorOptions
from openapi_tool.options.section import VARIABLE
from openapi_tool.options.tools import ToolOptions
from openapi_tool.protocol.dialect import ProtocolVersion
from openapi_tool.protocol.errors import ToolMisconfigured, Unanswerable
from openapi_tool.protocol.jsontext import JsonObject, JsonValue, object_at
from openapi_tool.protocol.subjects import parse_command_subject
from openapi_tool.tools.argument_names import fold
from openapi_tool.tools.arguments import is_identity
from openapi_tool.tools.declaration import TIMEOUTS, file_problems
from openapi_tool.tools.declaration_schema import MAX_SCHEMA_LEVELS
from openapi_tool.tools.declaration_types import MAX_SUSPEND_S
from openapi_tool.tools.definition import ToolDefinition, stored_record, upstream_path
from openapi_tool.tools.definition_parser import parse_for_linter
from openapi_tool.tools.key_shapes import PREFIXED_KEY, looks_like_a_key, names_a_variable
from openapi_tool.tools.placeholders import PLACEHOLDER, PLACEHOLDERS, is_template, texts_in
from openapi_tool.tools.problems import Path, Problem
from openapi_tool.tools.schema import schema_problems
from openapi_tool.tools.secret_variables import is_executors_own
from openapi_tool.tools.tool_names import name_problem
from openapi_tool.tools.wording import any_of, did_you_mean, short

ARGS_PATH = ("options", "args")
PROPERTIES_PATH = ("parameters", "properties")
_SUSPEND_PATH = ("options", "suspend_timeout_seconds")

_VERSIONS = [version.value for version in ProtocolVersion]
_PROJECT = "{project_id}"
_CHANNEL = "{channel_id}"
_SUBJECT_PLACEHOLDERS = (_PROJECT, _CHANNEL, "{agent_id}")
_MAX_SUBJECT_CHARS = 255

# Tokens with dots between them. A token is a word or a placeholder: `cg.v1r4.{project_id}.{channel_id}.cmd.tool.a.b`.
_SUBJECT = re.compile(r"(?:[A-Za-z0-9_-]+|\{[^{}]*\})(?:\.(?:[A-Za-z0-9_-]+|\{[^{}]*\}))*")
# A placeholder, also without its closing brace: `{project_id}`, `{project_id`.
_PERHAPS_PLACEHOLDER = re.compile(r"\{[^{}]*\}?")

_MAX_DESCRIPTION_CHARS = 10_000
_LONG_DESCRIPTION_CHARS = 1_024  # that some model providers take

_OFTEN_EMPTY = "context_box_id"
"""Placeholder for an id that commands of v1r4 do not have; a worker may have put its value into the call's card."""


@dataclass(frozen=True, slots=True)
class LintLimits:
    """Settings of the executor that will serve the definitions.

    - `targets`: the tokens TARGET of its subjects.
    - `env_parameters`: the folded names of arguments that may take a secret, beside `api_key`.
    - `allowed_env`: the variables that it passes to tools, None if unknown.
    - `known_to_be_serving`: these are known to be its settings; then another variable is an error, else a warning.
    - `budgets`: those of every project.
    """

    executor: ExecutorOptions = field(default_factory=ExecutorOptions)
    tools: ToolOptions = field(default_factory=ToolOptions)
    targets: frozenset[str] = frozenset({"jina"})
    env_parameters: frozenset[str] = frozenset()
    allowed_env: frozenset[str] | None = None
    known_to_be_serving: bool = False
    budgets: BudgetLimits = field(default_factory=BudgetLimits)

    def max_call_s(self, document: Mapping[str, JsonValue]) -> float:
        """Return the seconds that a call may take: the worker's wait without the time for the commit."""
        worker_wait_s = max(self.executor.worker_timeout_s, _number_at(document, _SUSPEND_PATH) or 0)
        return worker_wait_s - self.executor.commit_margin_s


def lint_general(document: Mapping[str, JsonValue], limits: LintLimits) -> tuple[ToolDefinition | None, list[Problem]]:
    """Return the definition, None if it cannot be parsed, and its problems."""
    found = [
        *file_problems(document),
        *_schema_conflicts(document.get("parameters"), ("parameters",)),
        *_name_problems(document),
        *_description_problems(document.get("description")),
        *_subject_problems(document.get("target_subject"), limits),
        *_argument_problems(document),
        *_placeholder_problems(document),
        *_secret_problems(document, limits),
        *_time_problems(document, limits),
        *_budget_problems(document, limits),
    ]
    if not isinstance(document.get("options"), dict):
        return None, found
    definition, by_parser = parse_for_linter(stored_record(document))
    # The parser may find the same mistake again: drop its problems at a place with an error, and one level above.
    reported: set[Path] = set()
    for problem in found:
        if not problem.warning:
            reported |= {problem.path, problem.path[:-1]}
    found += [problem for problem in by_parser if problem.path not in reported]
    return definition, found


def _schema_conflicts(schema: JsonValue, path: Path, depth: int = 0) -> Iterator[Problem]:
    """Yield the contradictions within a schema and the schemas below it."""
    if not isinstance(schema, dict) or depth > MAX_SCHEMA_LEVELS:  # which the declaration reports
        return
    for low, high in (("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems")):
        minimum, maximum = schema.get(low), schema.get(high)
        if isinstance(minimum, int | float) and isinstance(maximum, int | float) and minimum > maximum:
            yield Problem((*path, low), f"is more than {high}, so no value fits; change one of them")
    properties = object_at(schema, "properties")
    yield from _required_conflicts(schema.get("required"), properties, (*path, "required"))
    for keyword in ("default", "const"):
        if keyword in schema and not value_fits(schema, schema[keyword]):
            yield Problem((*path, keyword), "does not fit its own schema; change one of them")
    for name, schema_below in properties.items():
        yield from _schema_conflicts(schema_below, (*path, "properties", name), depth + 1)
    yield from _schema_conflicts(schema.get("items"), (*path, "items"), depth + 1)


def _required_conflicts(required: JsonValue, properties: Mapping[str, JsonValue], path: Path) -> Iterator[Problem]:
    names = required if isinstance(required, list) else []
    for index, name in enumerate(names):
        if not isinstance(name, str) or name not in properties:
            hint = did_you_mean(str(name), properties) or "; declare it there, or take it out"
            yield Problem((*path, index), f"is not in `properties`, so no call fits{hint}")
        elif name in names[:index]:
            yield Problem((*path, index), "is named twice; take one out")


def value_fits(schema: JsonObject, value: JsonValue, *, if_broken: bool = True) -> bool:
    """Return whether a value fits; `if_broken` for a schema that cannot be compiled, which is reported elsewhere."""
    try:
        return not schema_problems({"properties": {"value": schema}}, {"value": value})
    except ToolMisconfigured:
        return if_broken


def _name_problems(document: Mapping[str, JsonValue]) -> Iterator[Problem]:
    key = "tool_name" if "tool_name" in document else "name"
    name = document.get(key)
    if not isinstance(name, str) or not name:  # which the declaration reports
        return
    problem = name_problem(name)
    if problem is not None:
        yield Problem((key,), problem)


def _description_problems(description: JsonValue) -> Iterator[Problem]:
    chars = len(description) if isinstance(description, str) else 0
    if chars > _MAX_DESCRIPTION_CHARS:
        most = f"at most {_MAX_DESCRIPTION_CHARS:,} are stored"
        yield Problem(("description",), f"has {chars:,} characters, {most}: a model reads all of it in every step")
    elif chars > _LONG_DESCRIPTION_CHARS:
        message = f"has {chars:,} characters; some model providers refuse more than {_LONG_DESCRIPTION_CHARS:,}"
        yield Problem(("description",), message, warning=True)


def _subject_problems(subject: JsonValue, limits: LintLimits) -> Iterator[Problem]:
    path: Path = ("target_subject",)
    if not isinstance(subject, str) or not subject:
        return
    if len(subject) > _MAX_SUBJECT_CHARS:
        yield Problem(path, f"has {len(subject):,} characters, at most {_MAX_SUBJECT_CHARS} may be given; shorten it")
        return
    for name in _PERHAPS_PLACEHOLDER.findall(subject):
        if name not in _SUBJECT_PLACEHOLDERS:
            hint = did_you_mean(name, _SUBJECT_PLACEHOLDERS)
            yield Problem(path, f"{name[:40]} is not filled in; known are {any_of(_SUBJECT_PLACEHOLDERS)}{hint}")
            return
    try:
        parsed = parse_command_subject(subject)
    except Unanswerable:
        form = f"cg.VERSION.{_PROJECT}.{_CHANNEL}.cmd.tool.TARGET.SUFFIX"
        yield Problem(path, f"must be {form}, with version {any_of(_VERSIONS)}")
        return
    if not _SUBJECT.fullmatch(subject):
        yield Problem(path, "may hold only letters, digits, '_' and '-' between its dots")
    if parsed.version not in _VERSIONS:
        yield Problem(path, f"the second token must be {any_of(_VERSIONS)}{did_you_mean(parsed.version, _VERSIONS)}")
    if (parsed.project_id, parsed.channel_id) != (_PROJECT, _CHANNEL):
        message = f"tokens 3 and 4 must be {_PROJECT} and {_CHANNEL}, or the calls of other projects are refused"
        yield Problem(path, message)
    if parsed.target not in limits.targets:
        yield Problem(
            path,
            f"no executor may serve the target {parsed.target[:40]!r}; this executor's is "
            f"{any_of(sorted(limits.targets))}{did_you_mean(parsed.target, limits.targets)}",
            warning=True,
        )


class _Exclusion(NamedTuple):
    """Rule that a name in `names`, whose path is `path`, must not be in `others`, too."""

    names: Mapping[str, JsonValue]
    path: Path
    others: Mapping[str, JsonValue]
    message: str


def _argument_problems(document: Mapping[str, JsonValue]) -> Iterator[Problem]:
    """Yield arguments that are set in two places, that a model must not give, or whose default is wrong."""
    shown = object_at(document, *PROPERTIES_PATH)
    envs = object_at(document, "options", "envs")
    defaults = object_at(document, *ARGS_PATH, "defaults")
    fixed = object_at(document, *ARGS_PATH, "fixed")
    hide = "take it out here, a model may not be shown it"
    unused = "is never used: fixed or envs set the same argument; take it out"
    exclusions = (
        _Exclusion(shown, PROPERTIES_PATH, fixed, f"is fixed in options.args.fixed; {hide}"),
        _Exclusion(shown, PROPERTIES_PATH, envs, f"is a secret of options.envs; {hide}"),
        _Exclusion(defaults, (*ARGS_PATH, "defaults"), {**fixed, **envs}, unused),
        _Exclusion(fixed, (*ARGS_PATH, "fixed"), envs, "is set by options.envs, too; give only one of them"),
    )
    for names, path, others, message in exclusions:
        yield from (Problem((*path, name), message) for name in names if name in others)
    for name in shown:  # a model may choose a session within its project and agent, so `session_id` is allowed
        if is_identity(name) and fold(name) != "sessionid" and name not in fixed:
            yield Problem((*PROPERTIES_PATH, name), "identifies the caller; a model is not asked for it; take it out")
    for name, value in defaults.items():
        if not _default_fits(shown.get(name), value):
            message = f"does not fit parameters.properties.{name}, so every call without the argument fails; change one"
            yield Problem((*ARGS_PATH, "defaults", name), message)


def _default_fits(schema: JsonValue, default: JsonValue) -> bool:
    if not isinstance(schema, dict):
        return True
    if is_template(default) and "type" in schema:
        schema = {"type": schema["type"]}  # its text is not known yet
    return value_fits(schema, default)


def _placeholder_problems(document: Mapping[str, JsonValue]) -> Iterator[Problem]:
    for path, text in texts_in(object_at(document, *ARGS_PATH), ARGS_PATH):
        for name in PLACEHOLDER.findall(text):
            if name not in PLACEHOLDERS:
                hint = did_you_mean(name.strip(), PLACEHOLDERS) or f"; known are {', '.join(PLACEHOLDERS)}"
                yield Problem(path, f"the placeholder {{{name[:40]}}} is not known{hint}")
            elif name == _OFTEN_EMPTY:
                message = f"{{{name}}} has a value only where the worker fills it in; use another id"
                yield Problem(path, message, warning=True)
        yield from _single_brace(text, path)
    path_of_upstream = upstream_path(object_at(document, "options"))
    upstream = object_at(document, *path_of_upstream)
    never_filled_in = {name: upstream.get(name) for name in ("params", "defaults", "headers")}
    for path, text in texts_in(never_filled_in, path_of_upstream):
        if not set(PLACEHOLDERS).isdisjoint(PLACEHOLDER.findall(text)):
            yield Problem(path, "placeholders are filled in only in options.args; move it there")


def _single_brace(text: str, path: Path) -> Iterator[Problem]:
    """Yield a brace that belongs to no placeholder: an error beside the name of one, as in `{agent_id`."""
    rest = PLACEHOLDER.sub("", text)
    if "{" not in rest and "}" not in rest:
        return
    for name in PLACEHOLDERS:
        if f"{{{name}" in text or f"{name}}}" in text:
            yield Problem(path, f"has a brace too many or too few; write {{{name}}}, with one brace on each side")
            return
    yield Problem(path, "has a brace without its partner, which is sent as it is", warning=True)


def _secret_problems(document: Mapping[str, JsonValue], limits: LintLimits) -> Iterator[Problem]:
    for path, text in texts_in(document, ()):
        if names_a_variable(path):
            if path[0] == "options" and text:
                yield from _variable_problems(text, path, limits)
        elif PREFIXED_KEY.search(text):
            message = "looks like a key; definitions are readable for many: name a variable in options.envs"
            yield Problem(path, message)


def _variable_problems(variable: str, path: Path, limits: LintLimits) -> Iterator[Problem]:
    """Yield why tools may not get a variable of the environment."""
    if looks_like_a_key(variable):
        yield Problem(path, "looks like a key itself; put it into the executor's environment and name its variable")
    elif not VARIABLE.fullmatch(variable):
        yield Problem(path, "must be the name of an environment variable: letters, digits and '_'")
    elif is_executors_own(variable):
        message = "names one of the executor's own settings, never given to tools; name a variable of the tool's"
        yield Problem(path, message)
    elif limits.allowed_env is not None and variable not in limits.allowed_env:
        hint = did_you_mean(variable, limits.allowed_env) or "; list it in secrets.allowed_env"
        message = f"{short(variable)} is no variable that these settings pass to tools{hint}"
        yield Problem(path, message, warning=not limits.known_to_be_serving)


def _time_problems(document: Mapping[str, JsonValue], limits: LintLimits) -> Iterator[Problem]:
    suspend_s = _number_at(document, _SUSPEND_PATH)
    usual_wait_s = limits.executor.worker_timeout_s
    max_timeout_s = limits.tools.max_timeout_s
    if suspend_s is not None and 0 < suspend_s < usual_wait_s:
        message = f"changes nothing: workers wait {usual_wait_s:g} s anyway; take it out or raise it"
        yield Problem(_SUSPEND_PATH, message, warning=True)
    too_long = list(_too_long_timeouts(document, limits))
    yield from too_long
    # Up to one usual wait of a worker above `max_timeout_s` is useful, for commit and redeliveries.
    longest_useful_s = max_timeout_s + usual_wait_s
    if suspend_s is not None and not too_long and longest_useful_s < suspend_s <= MAX_SUSPEND_S:
        message = f"is longer than any call: tools.max_timeout_s ends them after {max_timeout_s:g} s; shorten it"
        yield Problem(_SUSPEND_PATH, message, warning=True)


def _too_long_timeouts(document: Mapping[str, JsonValue], limits: LintLimits) -> Iterator[Problem]:
    """Yield the time limits of a call, wherever the definition sets them, that it cannot have."""
    max_call_s = limits.max_call_s(document)
    commit_s = limits.executor.commit_margin_s
    max_timeout_s = limits.tools.max_timeout_s
    by_worker = (
        f"the worker gives up after {max_call_s + commit_s:g} s, and {commit_s:g} s of it are for the commit; "
        "raise options.suspend_timeout_seconds"
    )
    by_settings = f"tools.max_timeout_s ends every call after {max_timeout_s:g} s; shorten it"
    paths: list[tuple[str, ...]] = [
        *((*upstream_path(object_at(document, "options")), name) for name in TIMEOUTS),
        *(("options", name) for name in TIMEOUTS),
        (*ARGS_PATH, "defaults", "timeout"),
        (*ARGS_PATH, "fixed", "timeout"),
    ]
    for path in paths:
        seconds = _number_at(document, path) or 0
        if seconds > max_call_s:
            yield Problem(path, f"cannot fit: {by_worker}")
        elif seconds > max_timeout_s:
            yield Problem(path, f"cannot fit: {by_settings}")


def _budget_problems(document: Mapping[str, JsonValue], limits: LintLimits) -> Iterator[Problem]:
    for name in object_at(document, "options", "budget"):
        path = ("options", "budget", name)
        of_definition = _number_at(document, path)
        of_settings = getattr(limits.budgets, name, None)  # the name may be wrong, which the declaration reports
        if of_settings is not None and of_definition is not None and of_definition >= of_settings:
            message = f"changes nothing: budgets.{name} is {of_settings:,}, and a definition can only lower it"
            yield Problem(path, message, warning=True)


def _number_at(document: Mapping[str, JsonValue], path: tuple[str, ...]) -> float | None:
    *parents, name = path
    value = object_at(document, *parents).get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
