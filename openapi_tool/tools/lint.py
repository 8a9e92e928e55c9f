"""What keeps a definition from being registered: everything that can be told without knowing Jina's parameters.

`jina.definition_lint` adds what only the parameter table knows; use that one. Nothing here echoes a value
that could be a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from openapi_tool.protocol.errors import ToolMisconfigured
from openapi_tool.tools.arguments import is_identity
from openapi_tool.tools.bounds import row_problems
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.definition import ToolDefinition, parse_definition
from openapi_tool.tools.document import shape_problems, stored_record
from openapi_tool.tools.naming import name_problem
from openapi_tool.tools.problems import Path, Problem, any_of, did_you_mean
from openapi_tool.tools.schema_lint import fits, parameters_problems
from openapi_tool.tools.secrets import is_executors_own
from openapi_tool.tools.template import PLACEHOLDERS

RESERVED_NAMES = frozenset({"delegate_async", "launch_principal", "ask_expert", "fork_join", "provision_agent"})
"""Names of the kernel's own tools (protocol section 4)."""

_SUBJECT_TOKENS = 8
_SUBJECT_PLACEHOLDERS = ("{project_id}", "{channel_id}", "{agent_id}")
_TOKEN = re.compile(r"[A-Za-z0-9_-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEY_PREFIX = re.compile(r"(?:\b(?:jina|sk|pk|ghp|gho|xox[abp]|glpat|hf)[_-][A-Za-z0-9_-]{16,}|(?i:bearer)\s+\S{12,})")
_KEY_CHUNK = re.compile(r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{16,}")
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_SESSION = "session_id"
_REPORTED = re.compile(r"^((?:options|parameters)(?:\.[^\s.:]+)*):?\s+(.*)$", re.DOTALL)
_NO_VALUE_IN_V1R4 = "context_box_id"


@dataclass(frozen=True, slots=True)
class LintLimits:
    """What the executor that will serve the definitions is set to: seconds, items, targets, folded parameters."""

    worker_default_s: float = 30
    margin_s: float = 3
    maximum_s: float = 120
    max_batch_items: int = 10
    targets: frozenset[str] = frozenset({"jina"})
    env_parameters: frozenset[str] = frozenset()


def general_problems(document: Any, limits: LintLimits) -> Iterator[Problem]:
    """Every defect that shows without the parameter table, in no order."""
    if not isinstance(document, dict):
        yield Problem((), "must be an object with tool_name, target_subject, after_execution and options")
        return
    found = list(_own_problems(document, limits))
    yield from found
    told = {problem.path for problem in found if not problem.warning}
    beyond = row_problems(document.get("parameters") or {}, document.get("options"))
    yield from (problem for problem in beyond if problem.path not in told)
    if not beyond:
        read = list(_reading_problems(document))
        above = {problem.path[:-1] for problem in read}
        about_schema = any(path[0] == "parameters" for path in told if path)
        yield from (
            problem
            for problem in read
            if problem.path not in told | above and not (about_schema and problem.path[0] == "parameters")
        )


def _own_problems(document: Mapping[str, Any], limits: LintLimits) -> Iterator[Problem]:
    yield from shape_problems(document)
    yield from _name_problems(document)
    yield from _subject_problems(document.get("target_subject"), limits)
    yield from parameters_problems(document.get("parameters"))
    yield from _upstream_problems(document)
    yield from _argument_problems(document)
    yield from _template_problems(document)
    yield from _variable_problems(document)
    yield from _pasted_keys(document, ())
    yield from _time_problems(document, limits)


def readable(document: Mapping[str, Any]) -> ToolDefinition | None:
    """The definition as the executor reads it; None where that fails."""
    try:
        return parse_definition(stored_record(document))
    except ToolMisconfigured:
        return None


def part(document: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """The object at a path, empty where there is none."""
    value: Any = document
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def upstream_section(document: Mapping[str, Any]) -> tuple[Path, Mapping[str, Any]]:
    """`options.jina`, or `options.openapi` where only that is there."""
    options = part(document, "options")
    name = "openapi" if options.get("jina") is None and options.get("openapi") is not None else "jina"
    return ("options", name), part(document, "options", name)


def has_placeholder(value: Any) -> bool:
    """Whether any string of a value, at any depth, is a template."""
    return any(_PLACEHOLDER.search(text) for _, text in _texts(value, ()))


def _name_problems(document: Mapping[str, Any]) -> Iterator[Problem]:
    key = "tool_name" if "tool_name" in document else "name"
    name = document.get(key)
    if not isinstance(name, str) or not name:
        return
    problem = name_problem(name)
    if name in RESERVED_NAMES:
        yield Problem((key,), f"{name!r} is reserved by the kernel; choose another name")
    elif problem:
        yield Problem((key,), problem)


def _subject_problems(subject: Any, limits: LintLimits) -> Iterator[Problem]:
    path: Path = ("target_subject",)
    if not isinstance(subject, str) or not subject:
        return
    for placeholder in re.findall(r"\{[^{}]*\}?", subject):
        if placeholder not in _SUBJECT_PLACEHOLDERS:
            hint = did_you_mean(placeholder, _SUBJECT_PLACEHOLDERS)
            yield Problem(path, f"{placeholder[:40]} is not filled in; known are {any_of(_SUBJECT_PLACEHOLDERS)}{hint}")
            return
    tokens = subject.split(".")
    if ".cmd.sys." in subject:
        yield Problem(path, "may not hold '.cmd.sys.', which is the kernel's own")
    elif ".cmd.tool." not in subject:
        yield Problem(path, "must hold '.cmd.tool.'")
    elif len(tokens) < _SUBJECT_TOKENS or tokens[0] != "cg" or tokens[4:6] != ["cmd", "tool"]:
        yield Problem(path, "must be cg.v1r4.{project_id}.{channel_id}.cmd.tool.TARGET.SUFFIX")
    else:
        yield from _token_problems(tokens, limits)


def _token_problems(tokens: list[str], limits: LintLimits) -> Iterator[Problem]:
    path: Path = ("target_subject",)
    wrong = [token for token in tokens if token not in _SUBJECT_PLACEHOLDERS and not _TOKEN.fullmatch(token)]
    if wrong:
        yield Problem(path, f"{wrong[0][:40]!r} cannot be a token: letters, digits, '_' and '-'")
    if tokens[1] not in ("v1r4", "v1r3"):
        yield Problem(path, f"the second token must be v1r4{did_you_mean(tokens[1], ('v1r4',))}")
    for place, placeholder in ((2, "{project_id}"), (3, "{channel_id}")):
        if tokens[place] != placeholder:
            yield Problem(
                path, f"token {place + 1} must be {placeholder}, or calls of others are answered as violations"
            )
    if tokens[6] not in limits.targets:
        yield Problem(
            path,
            f"nobody may listen for the target {tokens[6][:40]!r}; the executor's is {any_of(sorted(limits.targets))}"
            + did_you_mean(tokens[6], limits.targets),
            warning=True,
        )


def _upstream_problems(document: Mapping[str, Any]) -> Iterator[Problem]:
    """What the executor would pass over in silence."""
    section, jina = upstream_section(document)
    if "jina" in part(document, "options") and "openapi" in part(document, "options"):
        yield Problem(("options", "openapi"), "is passed over beside options.jina; take it out", warning=True)
    if "accept" in jina:
        yield Problem((*section, "accept"), "is passed over: JSON is always asked for", warning=True)
    if "timeout" in jina and "timeout_s" in jina:
        yield Problem((*section, "timeout"), "is passed over beside timeout_s; take it out", warning=True)
    if "endpoint_template" in jina and "path" in jina:
        yield Problem((*section, "path"), "is passed over beside endpoint_template; take it out", warning=True)
    if "auth" in jina and "auth_env" in jina:
        yield Problem((*section, "auth_env"), "is passed over beside auth.env; take it out", warning=True)
    tool = jina.get("tool")
    if isinstance(tool, str) and tool not in CATALOGUE:
        yield Problem((*section, "tool"), f"must be {any_of(CATALOGUE)}{did_you_mean(tool, CATALOGUE)}")


def _reading_problems(document: Mapping[str, Any]) -> Iterator[Problem]:
    """What the executor itself would say of a definition within the bounds."""
    if not isinstance(document.get("options"), dict):
        return
    try:
        parse_definition(stored_record(document))
    except ToolMisconfigured as error:
        detail = error.detail
        for line in detail["problems"] if isinstance(detail, dict) else []:
            match = _REPORTED.match(line)
            path: Path = tuple(match[1].split(".")) if match else ("options",)
            yield Problem(path, match[2] if match else line)


def _argument_problems(document: Mapping[str, Any]) -> Iterator[Problem]:
    """Names that are set twice, or set and shown to the model."""
    properties = part(document, "parameters", "properties")
    defaults, fixed = part(document, "options", "args", "defaults"), part(document, "options", "args", "fixed")
    envs = part(document, "options", "envs")
    for name in fixed.keys() & properties.keys():
        yield Problem(("parameters", "properties", name), "is fixed in options.args.fixed; a model may not be shown it")
    for name in envs.keys() & properties.keys():
        yield Problem(("parameters", "properties", name), "is a secret of options.envs; a model may not be shown it")
    for name in defaults.keys() & (fixed.keys() | envs.keys()):
        yield Problem(("options", "args", "defaults", name), "is never used: fixed or envs set the same argument")
    for name in fixed.keys() & envs.keys():
        yield Problem(("options", "args", "fixed", name), "is set by options.envs, too; give only one of them")
    for name in properties:
        if is_identity(name) and name != _SESSION and name not in fixed:
            yield Problem(("parameters", "properties", name), "identifies the caller; a model is not asked for it")
    for name, value in defaults.items():
        yield from _default_problems(properties.get(name), value, ("options", "args", "defaults", name))


def _default_problems(schema: Any, value: Any, path: Path) -> Iterator[Problem]:
    """A default is held to the schema as the executor does it; of a template only the type is known."""
    if not isinstance(schema, dict):
        return
    rule = {"type": schema["type"]} if has_placeholder(value) and "type" in schema else schema
    if not fits(rule, value):
        yield Problem(path, f"does not fit parameters.properties.{path[-1]}, so every call that leaves it out fails")


def _template_problems(document: Mapping[str, Any]) -> Iterator[Problem]:
    for group in ("defaults", "fixed"):
        for path, text in _texts(part(document, "options", "args", group), ("options", "args", group)):
            yield from _placeholder_problems(path, text)
    section, jina = upstream_section(document)
    for name in ("params", "defaults", "headers"):
        for path, text in _texts(jina.get(name), (*section, name)):
            if any(known in PLACEHOLDERS for known in _PLACEHOLDER.findall(text)):
                yield Problem(path, "placeholders are filled in only in options.args; move it there")


def _placeholder_problems(path: Path, text: str) -> Iterator[Problem]:
    for name in _PLACEHOLDER.findall(text):
        if name not in PLACEHOLDERS:
            hint = did_you_mean(name.strip(), PLACEHOLDERS) or f"; known are {', '.join(PLACEHOLDERS)}"
            yield Problem(path, f"the placeholder {{{name[:40]}}} is not known{hint}")
        elif name == _NO_VALUE_IN_V1R4:
            yield Problem(path, f"{{{name}}} has a value only where the worker fills it in", warning=True)


def _texts(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(item, (*path, name))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _texts(item, (*path, place))


def _variables(document: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    section, jina = upstream_section(document)
    named: list[tuple[Path, Any]] = [
        (("options", "envs", name), value) for name, value in part(document, "options", "envs").items()
    ]
    named.append(((*section, "auth_env"), jina.get("auth_env")))
    named.append(((*section, "auth", "env"), part(jina, "auth").get("env")))
    yield from ((path, value) for path, value in named if isinstance(value, str) and value)


def _variable_problems(document: Mapping[str, Any]) -> Iterator[Problem]:
    for path, name in _variables(document):
        if looks_like_a_key(name):
            yield Problem(path, "looks like a key itself; put it into the executor's environment and name its variable")
        elif not _VARIABLE.fullmatch(name):
            yield Problem(path, "must be the name of an environment variable: letters, digits and '_'")
        elif is_executors_own(name):
            yield Problem(path, "names one of the executor's own settings, which tools are never given")


def looks_like_a_key(text: str) -> bool:
    """Whether a text is rather a pasted credential than the name of a variable."""
    return bool(
        _KEY_PREFIX.search(text) or any(_KEY_CHUNK.fullmatch(chunk) for chunk in re.split(r"[^A-Za-z0-9]", text))
    )


def _pasted_keys(value: Any, path: Path) -> Iterator[Problem]:
    """Keys where no variable is named."""
    for where, text in _texts(value, path):
        if where[:2] != ("options", "envs") and where[-1] not in ("auth_env", "env") and _KEY_PREFIX.search(text):
            yield Problem(where, "looks like a key; definitions are readable for many: name a variable in options.envs")


def _time_problems(document: Mapping[str, Any], limits: LintLimits) -> Iterator[Problem]:
    section, jina = upstream_section(document)
    suspend = _number(part(document, "options").get("suspend_timeout_seconds"))
    patience = max(limits.worker_default_s, suspend or 0) - limits.margin_s
    if suspend is not None and 0 < suspend < limits.worker_default_s:
        yield Problem(
            ("options", "suspend_timeout_seconds"),
            f"changes nothing: workers wait {limits.worker_default_s:g} s anyway",
            warning=True,
        )
    own = [((*section, name), jina.get(name)) for name in ("timeout_s", "timeout")]
    own += [
        (("options", "args", group, "timeout"), part(document, "options", "args", group).get("timeout"))
        for group in ("defaults", "fixed")
    ]
    for path, value in own:
        seconds = _number(value)
        if seconds is not None and seconds > patience:
            yield Problem(
                path,
                f"cannot fit: the worker gives up after {patience + limits.margin_s:g} s, and {limits.margin_s:g} s of "
                "it are kept back; raise options.suspend_timeout_seconds",
            )
        elif seconds is not None and seconds > limits.maximum_s:
            yield Problem(path, f"cannot fit: tools.max_timeout_ms ends every call after {limits.maximum_s:g} s")


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
