"""Parser of a tool definition as stored in `resource.tools` (protocol sections 4 and 5).

It accepts old forms, but refuses every mistake that could send a key to a wrong place. The linter is stricter.

- Executor: `find_definition` returns the definition from the cache, or an `UnparsedDefinition`. For the latter the
  caller runs `check_definition`, here or in a worker process (`isolation/service.py`), and then `parse`.
- Other callers: `parse_definition` does all of it in this process.
- Linter: `parse_for_linter` returns all problems, and the definition as far as it can be parsed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import orjson
from cachetools import LRUCache

from openapi_tool.environment import DEFAULT_AUTH_ENV
from openapi_tool.options.budgets import BudgetLimits
from openapi_tool.protocol.command import AFTER_EXECUTION, AfterExecution
from openapi_tool.protocol.errors import ToolMisconfigured
from openapi_tool.protocol.jsontext import JsonValue, object_at
from openapi_tool.protocol.records import DefinitionRecord
from openapi_tool.tools.argument_names import fold
from openapi_tool.tools.bounds import MAX_ROW_BYTES, memory_bytes, row_problems
from openapi_tool.tools.catalogue import CATALOGUE, BuiltInTool
from openapi_tool.tools.declaration import BASE_URLS, MODES, OPERATION_NAMES, read_row
from openapi_tool.tools.definition_check import CheckedDefinition, check_definition
from openapi_tool.tools.inline_bounds import SchemaSize, schema_size
from openapi_tool.tools.operations import OPERATIONS, Operation
from openapi_tool.tools.problems import Problem, listed
from openapi_tool.tools.wording import any_of, close_to, did_you_mean, short

Method = Literal["GET", "POST"]
ResultFormat = Literal["text", "object"]

MAX_CACHE_BYTES = 16_000_000
"""Cache size in bytes for parsed definitions, usable or not."""

_MIN_MEMORY_BYTES = 8_000  # of the definition object, its cache entry and its problems

_UNKNOWN_OPERATION = OPERATIONS[0]
"""Operation of a definition that names none: the definition is refused, and its other problems are found, too."""

_TEMPLATES = tuple(operation.template for operation in OPERATIONS if operation.template)


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """Tool of a project. Durations are in seconds.

    `schema` is the JSON schema of the model's arguments. `defaults` and `fixed` set arguments; their texts may be
    templates. `upstream_params` and `headers` set parameters of the upstream. `envs` maps arguments to names of
    variables with secrets. `budget` applies beside the budgets of the settings. `schema_size` is None if the schema is
    too costly to validate in the event loop; `digest` identifies the content of the row.
    """

    tool_name: str
    built_in: BuiltInTool
    method: Method
    path: str
    auth_env: str = DEFAULT_AUTH_ENV
    after_execution: AfterExecution | None = None
    schema: Mapping[str, JsonValue] = field(default_factory=dict)
    defaults: Mapping[str, JsonValue] = field(default_factory=dict)
    fixed: Mapping[str, JsonValue] = field(default_factory=dict)
    envs: Mapping[str, str] = field(default_factory=dict)
    upstream_params: Mapping[str, JsonValue] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    suspend_timeout_s: float | None = None
    result_format: ResultFormat = "text"
    max_result_tokens: int | None = None
    budget: BudgetLimits | None = None
    schema_size: SchemaSize | None = None
    digest: bytes = b""

    @property
    def hidden(self) -> frozenset[str]:
        """Return the arguments that are never shown to the model."""
        return frozenset(self.fixed) | frozenset(self.envs)

    @property
    def takes_other_arguments(self) -> bool:
        """Return whether `parameters` allow arguments that they do not declare."""
        return self.schema.get("additionalProperties") is not False

    @property
    def model_arguments(self) -> frozenset[str]:
        """Return the arguments that a model may give."""
        names = set(object_at(self.schema, "properties"))
        if self.takes_other_arguments:
            names |= self.built_in.arguments.model_fields.keys()
        hidden = set(map(fold, self.hidden))
        return frozenset(name for name in names if fold(name) not in hidden) if hidden else frozenset(names)

    @property
    def operation(self) -> Operation:
        """Return the only operation that this tool may call."""
        return self.built_in.operation


def stored_after_execution(record: DefinitionRecord | None) -> AfterExecution | None:
    """Return the definition's `after_execution` if valid; it overrides the command's."""
    value = record.after_execution if record else None
    return cast("AfterExecution", value) if value in AFTER_EXECUTION else None


def stored_record(row: Mapping[str, JsonValue]) -> DefinitionRecord:
    """Return a row, or the document of a file, as the record that the executor would load."""
    name = row.get("tool_name", row.get("name"))  # a file may call it `name`, as the kernel's management API allows
    return DefinitionRecord(str(name), row.get("after_execution"), row.get("parameters"), row.get("options"))


def upstream_section(options: Mapping[str, JsonValue]) -> tuple[str, str]:
    """Return the path of the options for the upstream, which old definitions name `openapi`."""
    is_old = not options.get("jina") and options.get("openapi")
    return ("options", "openapi" if is_old else "jina")


@dataclass(frozen=True, slots=True)
class _ParseResult:
    """Cached result of parsing: the definition, None if it has problems; `memory` is an estimate in bytes."""

    definition: ToolDefinition | None
    problems: list[str]
    memory: int


_parse_cache: LRUCache[bytes, _ParseResult] = LRUCache(MAX_CACHE_BYTES, getsizeof=lambda result: result.memory)


@dataclass(frozen=True, slots=True)
class UnparsedDefinition:
    """Definition that is not in the cache: run `check_definition`, in this process or in another one, then `parse`.

    `content` is the JSON list of its members; its size bounds the cost of the check.
    """

    record: DefinitionRecord
    content: bytes
    digest: bytes

    def parse(self, checked: CheckedDefinition) -> ToolDefinition:
        """Parse and cache. Raises ToolMisconfigured with every problem."""
        result = _parse_cache[self.digest] = _parse(self.record, checked, self.digest)
        return _definition_of(result, self.record.tool_name)


def find_definition(record: DefinitionRecord) -> ToolDefinition | UnparsedDefinition:
    """Look a stored definition up in the cache, by its content. Raises ToolMisconfigured with every problem."""
    if record.oversized:
        raise unusable(record.tool_name, [f"it is larger than {MAX_ROW_BYTES:,} bytes"])
    if record.unreadable:  # set by kernel/postgres/load.py: valid JSON for PostgreSQL, but not for the parser here
        raise unusable(record.tool_name, ["it is nested too deeply, or contains a number that is too long to parse"])
    try:
        content = orjson.dumps([record.tool_name, record.after_execution, record.parameters, record.options])
    except TypeError:  # orjson refuses over 254 levels and integers beyond 64 bits; row_problems says where they are
        beyond = _as_texts(row_problems(record.parameters, record.options))
        raise unusable(record.tool_name, beyond or ["it is not JSON"]) from None
    digest = hashlib.sha256(content).digest()
    cached = _parse_cache.get(digest)
    if cached is None:
        return UnparsedDefinition(record, content, digest)
    return _definition_of(cached, record.tool_name)


def parse_definition(record: DefinitionRecord) -> ToolDefinition:
    """Parse a stored definition in this process, cached by content. Raises ToolMisconfigured with every problem."""
    found = find_definition(record)
    if isinstance(found, ToolDefinition):
        return found
    return found.parse(check_definition(record.parameters, record.options))


def _definition_of(result: _ParseResult, tool_name: str) -> ToolDefinition:
    if result.definition is None:
        raise unusable(tool_name, result.problems)
    return result.definition


def unusable(tool_name: str, problems: list[str]) -> ToolMisconfigured:
    """Return a new error. Never cache it: an exception keeps the frames of every call that raised it."""
    message = (
        f"The definition of {short(tool_name)!r} is not usable; an operator must correct it: {'; '.join(problems)}."
    )
    return ToolMisconfigured(message, detail={"problems": problems})


def _parse(record: DefinitionRecord, checked: CheckedDefinition, digest: bytes) -> _ParseResult:
    problems = list(checked.beyond)
    if not problems:
        definition, problems = _DefinitionParser(record).parse()
        if checked.defect:
            problems.append(checked.defect)
        if not problems:
            size = schema_size(definition.schema)
            memory = _MIN_MEMORY_BYTES + memory_bytes(record.parameters) + memory_bytes(record.options)
            return _ParseResult(replace(definition, schema_size=size, digest=digest), [], memory)
    return _ParseResult(None, _as_texts(problems), _MIN_MEMORY_BYTES)


def _as_texts(problems: list[Problem]) -> list[str]:
    return listed([str(problem) for problem in problems])


def parse_for_linter(record: DefinitionRecord) -> tuple[ToolDefinition | None, list[Problem]]:
    """Return a definition without its wrong options, and all its problems.

    The definition is None if no option names an operation; a misspelt mode counts as the most similar one. A schema
    beyond the limits of `tools.bounds` is not compiled.
    """
    checked = check_definition(record.parameters, record.options)
    parser = _DefinitionParser(record)
    definition, problems = parser.parse()
    problems = [*checked.beyond, *problems]
    if checked.defect:
        problems.append(checked.defect)
    return (definition if parser.names_upstream else None), problems


class _DefinitionParser:
    """Parser that collects all problems: those of the declaration, and those of options that must fit together."""

    def __init__(self, record: DefinitionRecord) -> None:
        self.record = record
        row, self.problems = read_row(record.parameters, record.options)
        self.parameters = row.parameters
        self.options = row.options
        self.jina = row.options.upstream
        self.section = upstream_section(object_at(record.options))
        self.given = object_at(record.options, *self.section[1:])
        self.names_upstream = False

    def parse(self) -> tuple[ToolDefinition, list[Problem]]:
        """Return the definition and its problems, without those of `check_definition`."""
        return self._definition(), self.problems

    def _definition(self) -> ToolDefinition:
        if not self.given and not any(problem.path == self.section for problem in self.problems):
            modes = " or ".join(f"mode: {name}" for name in OPERATION_NAMES)
            self._problem(f"is missing; give it {modes}", "options", "jina")
        operation = self._operation()
        options, jina = self.options, self.jina
        return ToolDefinition(
            tool_name=self.record.tool_name,
            built_in=self._built_in(operation),
            method=self._method(),
            path=self._path(operation),
            auth_env=options.key_variable or DEFAULT_AUTH_ENV,
            after_execution=stored_after_execution(self.record),
            schema=self.parameters,
            defaults=options.args.defaults,
            fixed=options.args.fixed,
            envs=options.envs,
            # `defaults` is the legacy name of `params`; a parameter that both set has the value of `params`
            upstream_params={**jina.defaults, **jina.params},
            headers=jina.headers,
            timeout_s=options.call_seconds,
            suspend_timeout_s=options.suspend_timeout_seconds,
            result_format=options.result_format or "text",
            max_result_tokens=options.max_result_tokens,
            budget=options.budget,
        )

    def _operation(self) -> Operation:
        """Return the operation that `mode`, `base_url` or `tool` names; with a misspelt mode the most similar one."""
        of_host = BASE_URLS.get(self.jina.base_url or "")
        mode = self.jina.mode
        if mode is not None:
            operation: Operation | None = MODES[mode]
            if of_host is not None and of_host.host != MODES[mode].host:
                message = f"{mode!r} does not go with the host of base_url; leave one of them out"
                self._problem(message, *self.section, "mode")
        elif (misspelt := self.given.get("mode")) is not None:
            close = close_to(short(str(misspelt)), OPERATION_NAMES)
            operation = of_host or next((MODES[name] for name in close), None)
        else:
            tool = CATALOGUE.get(self.jina.tool or "")
            operation = of_host or (tool.operation if tool else None)
            # `_definition` reports a missing section, the declaration a wrong URL.
            if operation is None and self.given and self.given.get("base_url") is None:
                self._problem("names neither mode nor base_url nor a built-in tool", *self.section)
        self.names_upstream = operation is not None
        return operation or _UNKNOWN_OPERATION

    def _built_in(self, operation: Operation) -> BuiltInTool:
        fitting = {tool.name: tool for tool in CATALOGUE.values() if tool.operation is operation}
        named = self.jina.tool
        tool = fitting.get(named or "")
        if tool is None and named is not None:
            other = CATALOGUE.get(named)
            hint = f"; {named!r} needs mode: {other.operation.name}" if other else did_you_mean(short(named), fitting)
            self._problem(f"must be {any_of(fitting)} for a {operation.name} tool{hint}", *self.section, "tool")
        # The default is the first in the catalogue, which is the single form, not the batch form.
        return tool or next(iter(fitting.values()))

    def _method(self) -> Method:
        url_in_path = self.jina.endpoint_template is not None or self.jina.path in _TEMPLATES
        method = self.jina.method or ("GET" if url_in_path else "POST")
        return "GET" if method.upper() == "GET" else "POST"

    def _path(self, operation: Operation) -> str:
        template, expected = self.jina.endpoint_template, operation.template
        if template is not None:
            if expected is None or template not in (expected, *operation.urls(expected)):
                allowed = " or ".join(f"https://{known.host}{known.template}" for known in OPERATIONS if known.template)
                self._problem(f"may only be {allowed}", *self.section, "endpoint_template")
            return expected or "/"
        path = self.jina.path or "/"
        path = path if path.startswith("/") else f"/{path}"
        if path not in operation.paths:
            fitting = any_of(dict.fromkeys(operation.paths.values()))
            self._problem(f"must be {fitting} for a {operation.name} tool", *self.section, "path")
            return "/"
        return operation.paths[path]

    def _problem(self, message: str, *path: str) -> None:
        self.problems.append(Problem(path, message))
