"""Linter rules for a definition's file; `jina.definition_checks` adds those that need the upstream parameters.

No message repeats a value that could be a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from openapi_tool.options.budgets import BudgetLimits
from openapi_tool.options.executor import ExecutorOptions
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

_VERSIONS = [version.value for version in ProtocolVersion]
_PROJECT = "{project_id}"
_CHANNEL = "{channel_id}"
_SUBJECT_PLACEHOLDERS = (_PROJECT, _CHANNEL, "{agent_id}")
_SUBJECT = re.compile(r"(?:[A-Za-z0-9_-]+|\{[^{}]*\})(?:\.(?:[A-Za-z0-9_-]+|\{[^{}]*\}))*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ARGS = ("options", "args")
PROPERTIES = ("parameters", "properties")
_SUSPEND = ("options", "suspend_timeout_seconds")
_OFTEN_EMPTY = "context_box_id"  # not in commands of v1r4; a worker may have put the value into the call's card
_MAX_SUBJECT_CHARS = 255
_BOUNDS = (("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems"))
_MAX_DESCRIPTION_CHARS = 10_000
_LONG_DESCRIPTION_CHARS = 1_024  # that some model providers take


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
        """Return the seconds that a call may take."""
        return max(self.executor.worker_timeout_s, _number(document, _SUSPEND) or 0) - self.executor.commit_margin_s


def lint_general(document: Mapping[str, JsonValue], limits: LintLimits) -> tuple[ToolDefinition | None, list[Problem]]:
    """Return the definition, None if it cannot be parsed, and its problems."""
    found = [
        *file_problems(document),
        *_schema_conflicts(document.get("parameters"), ("parameters",)),
        *_name_problems(document),
        *_length_problems(document),
        *_subject_problems(document.get("target_subject"), limits),
        *_argument_problems(document),
        *_template_problems(document),
        *_secret_problems(document, limits),
        *_time_problems(document, limits),
        *_budget_problems(document, limits),
    ]
    if not isinstance(document.get("options"), dict):
        return None, found
    definition, by_parser = parse_for_linter(stored_record(document))
    # The parser may find the same mistake again: drop its problems at a place with an error, and one level above.
    wrong = {path for problem in found if not problem.warning for path in (problem.path, problem.path[:-1])}
    return definition, [*found, *(problem for problem in by_parser if problem.path not in wrong)]


def _name_problems(document: Mapping[str, JsonValue]) -> Iterator[Problem]:
    key = "tool_name" if "tool_name" in document else "name"
    name = document.get(key)
    if isinstance(name, str) and name and (problem := name_problem(name)):
        yield Problem((key,), problem)


def _length_problems(document: Mapping[str, JsonValue]) -> Iterator[Problem]:
    description = document.get("description")
    chars = len(description) if isinstance(description, str) else 0
    if chars > _MAX_DESCRIPTION_CHARS:
        most = f"at most {_MAX_DESCRIPTION_CHARS:,} are stored"
        yield Problem(("description",), f"has {chars:,} characters, {most}: a model reads all of it in every step")
    elif chars > _LONG_DESCRIPTION_CHARS:
        message = f"has {chars:,} characters; some model providers refuse more than {_LONG_DESCRIPTION_CHARS:,}"
        yield Problem(("description",), message, warning=True)


def _subject_problems(subject: object, limits: LintLimits) -> Iterator[Problem]:
    path: Path = ("target_subject",)
    if not isinstance(subject, str) or not subject:
        return
    if len(subject) > _MAX_SUBJECT_CHARS:
        yield Problem(path, f"has {len(subject):,} characters, at most {_MAX_SUBJECT_CHARS} may be given; shorten it")
        return
    unknown = [name for name in re.findall(r"\{[^{}]*\}?", subject) if name not in _SUBJECT_PLACEHOLDERS]
    if unknown:
        hint = did_you_mean(unknown[0], _SUBJECT_PLACEHOLDERS)
        yield Problem(path, f"{unknown[0][:40]} is not filled in; known are {any_of(_SUBJECT_PLACEHOLDERS)}{hint}")
        return
    try:
        parsed = parse_command_subject(subject)
    except Unanswerable:
        subject = f"cg.VERSION.{_PROJECT}.{_CHANNEL}.cmd.tool.TARGET.SUFFIX"
        yield Problem(path, f"must be {subject}, with version {any_of(_VERSIONS)}")
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


def _argument_problems(document: Mapping[str, JsonValue]) -> Iterator[Problem]:
    shown = object_at(document, *PROPERTIES)
    envs = object_at(document, "options", "envs")
    defaults = object_at(document, *ARGS, "defaults")
    fixed = object_at(document, *ARGS, "fixed")
    hide = "take it out here, a model may not be shown it"
    unused = "is never used: fixed or envs set the same argument; take it out"
    rules = (  # a name in the first mapping must not be in the second; path of the first, message
        (shown, fixed, PROPERTIES, f"is fixed in options.args.fixed; {hide}"),
        (shown, envs, PROPERTIES, f"is a secret of options.envs; {hide}"),
        (defaults, {**fixed, **envs}, (*ARGS, "defaults"), unused),
        (fixed, envs, (*ARGS, "fixed"), "is set by options.envs, too; give only one of them"),
    )
    for names, others, path, message in rules:
        yield from (Problem((*path, name), message) for name in names if name in others)
    for name in shown:  # a model may choose a session within its project and agent, so `session_id` is allowed
        if is_identity(name) and fold(name) != "sessionid" and name not in fixed:
            yield Problem((*PROPERTIES, name), "identifies the caller; a model is not asked for it; take it out")
    for name, value in defaults.items():
        rule = shown.get(name)
        if isinstance(rule, dict) and is_template(value) and "type" in rule:
            rule = {"type": rule["type"]}  # its text is not known yet
        if isinstance(rule, dict) and not value_fits(rule, value):
            message = f"does not fit parameters.properties.{name}, so every call without the argument fails; change one"
            yield Problem((*ARGS, "defaults", name), message)


def _template_problems(document: Mapping[str, JsonValue]) -> Iterator[Problem]:
    for path, text in texts_in(object_at(document, *ARGS), ARGS):
        for name in PLACEHOLDER.findall(text):
            if name not in PLACEHOLDERS:
                hint = did_you_mean(name.strip(), PLACEHOLDERS) or f"; known are {', '.join(PLACEHOLDERS)}"
                yield Problem(path, f"the placeholder {{{name[:40]}}} is not known{hint}")
            elif name == _OFTEN_EMPTY:
                message = f"{{{name}}} has a value only where the worker fills it in; use another id"
                yield Problem(path, message, warning=True)
        if {"{", "}"} & set(PLACEHOLDER.sub("", text)):
            meant = next((name for name in PLACEHOLDERS if f"{{{name}" in text or f"{name}}}" in text), None)
            if meant is None:
                yield Problem(path, "has a brace without its partner, which is sent as it is", warning=True)
            else:
                message = f"has a brace too many or too few; write {{{meant}}}, with one brace on each side"
                yield Problem(path, message)
    section = upstream_path(object_at(document, "options"))
    jina = object_at(document, *section)
    for path, text in texts_in({name: jina.get(name) for name in ("params", "defaults", "headers")}, section):
        if not set(PLACEHOLDERS).isdisjoint(PLACEHOLDER.findall(text)):
            yield Problem(path, "placeholders are filled in only in options.args; move it there")


def _secret_problems(document: Mapping[str, JsonValue], limits: LintLimits) -> Iterator[Problem]:
    for path, text in texts_in(document, ()):
        if not names_a_variable(path):
            if PREFIXED_KEY.search(text):
                message = "looks like a key; definitions are readable for many: name a variable in options.envs"
                yield Problem(path, message)
        elif path[0] != "options" or not text:
            continue
        elif looks_like_a_key(text):
            yield Problem(path, "looks like a key itself; put it into the executor's environment and name its variable")
        elif not _VARIABLE.fullmatch(text):
            yield Problem(path, "must be the name of an environment variable: letters, digits and '_'")
        elif is_executors_own(text):
            message = "names one of the executor's own settings, never given to tools; name a variable of the tool's"
            yield Problem(path, message)
        elif limits.allowed_env is not None and text not in limits.allowed_env:
            hint = did_you_mean(text, limits.allowed_env) or "; list it in secrets.allowed_env"
            message = f"{short(text)} is no variable that these settings pass to tools{hint}"
            yield Problem(path, message, warning=not limits.known_to_be_serving)


def _time_problems(document: Mapping[str, JsonValue], limits: LintLimits) -> Iterator[Problem]:
    section = upstream_path(object_at(document, "options"))
    suspend = _number(document, _SUSPEND)
    wait_s = limits.executor.worker_timeout_s
    if suspend is not None and 0 < suspend < wait_s:
        message = f"changes nothing: workers wait {wait_s:g} s anyway; take it out or raise it"
        yield Problem(_SUSPEND, message, warning=True)
    max_call_s = limits.max_call_s(document)
    commit_s = limits.executor.commit_margin_s
    max_timeout_s = limits.tools.max_timeout_s
    by_worker = (
        f"the worker gives up after {max_call_s + commit_s:g} s, and {commit_s:g} s of it are for the commit; "
        "raise options.suspend_timeout_seconds"
    )
    by_settings = f"tools.max_timeout_s ends every call after {max_timeout_s:g} s; shorten it"
    paths = [
        *((*place, name) for place in (section, ("options",)) for name in TIMEOUTS),
        *((*ARGS, group, "timeout") for group in ("defaults", "fixed")),
    ]
    all_fit = True
    for path in paths:
        seconds = _number(document, path) or 0
        if seconds > min(max_call_s, max_timeout_s):
            all_fit = False
            why = by_worker if seconds > max_call_s else by_settings
            yield Problem(path, f"cannot fit: {why}")
    # Up to one usual wait of a worker above `max_timeout_s` is useful, for commit and redeliveries.
    if suspend is not None and all_fit and max_timeout_s + wait_s < suspend <= MAX_SUSPEND_S:
        message = f"is longer than any call: tools.max_timeout_s ends them after {max_timeout_s:g} s; shorten it"
        yield Problem(_SUSPEND, message, warning=True)


def _budget_problems(document: Mapping[str, JsonValue], limits: LintLimits) -> Iterator[Problem]:
    for name in object_at(document, "options", "budget"):
        most = getattr(limits.budgets, name, None)
        own = _number(document, ("options", "budget", name))
        if most is not None and own is not None and own >= most:
            message = f"changes nothing: budgets.{name} is {most:,}, and a definition can only lower it"
            yield Problem(("options", "budget", name), message, warning=True)


def _number(document: Mapping[str, JsonValue], path: tuple[str, ...]) -> float | None:
    value = object_at(document, *path[:-1]).get(path[-1])
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _schema_conflicts(schema: JsonValue, path: Path, depth: int = 0) -> Iterator[Problem]:
    if not isinstance(schema, dict) or depth > MAX_SCHEMA_LEVELS:  # which the declaration reports
        return
    named = object_at(schema, "properties")
    for low, high in _BOUNDS:
        minimum, maximum = schema.get(low), schema.get(high)
        if isinstance(minimum, int | float) and isinstance(maximum, int | float) and minimum > maximum:
            yield Problem((*path, low), f"is more than {high}, so no value fits; change one of them")
    yield from _required_conflicts(schema.get("required"), named, (*path, "required"))
    for keyword in ("default", "const"):
        if keyword in schema and not value_fits(schema, schema[keyword]):
            yield Problem((*path, keyword), "does not fit its own schema; change one of them")
    for name, rule in named.items():
        yield from _schema_conflicts(rule, (*path, "properties", name), depth + 1)
    yield from _schema_conflicts(schema.get("items"), (*path, "items"), depth + 1)


def _required_conflicts(required: JsonValue, named: Mapping[str, JsonValue], path: Path) -> Iterator[Problem]:
    required = required if isinstance(required, list) else []
    for place, name in enumerate(required):
        if not isinstance(name, str) or name not in named:
            hint = did_you_mean(str(name), named) or "; declare it there, or take it out"
            yield Problem((*path, place), f"is not in `properties`, so no call fits{hint}")
        elif name in required[:place]:
            yield Problem((*path, place), "is named twice; take one out")


def value_fits(schema: JsonObject, value: JsonValue, *, if_broken: bool = True) -> bool:
    """Return whether a value fits; `if_broken` for a schema that cannot be compiled, which is reported elsewhere."""
    try:
        return not schema_problems({"properties": {"value": schema}}, {"value": value})
    except ToolMisconfigured:
        return if_broken
