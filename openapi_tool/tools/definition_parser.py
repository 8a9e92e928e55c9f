"""Parser of a tool definition as stored in `resource.tools` (protocol sections 4 and 5).

It accepts old forms, but refuses every mistake that could send a key to a wrong place. The linter is stricter.

- Executor: `find_definition` looks into the cache. For a definition that is not there, the executor runs
  `check_definition`, in this process or in a worker process (`isolation/service.py`), and then
  `UnparsedDefinition.parse`.
- Other callers: `parse_definition` does all of it in this process.
- Linter: `parse_for_linter` returns all problems, and the definition as far as it can be parsed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import orjson
from cachetools import LRUCache

from openapi_tool.environment import DEFAULT_AUTH_ENV
from openapi_tool.protocol.jsontext import object_at
from openapi_tool.protocol.records import DefinitionRecord
from openapi_tool.tools.bounds import MAX_ROW_BYTES, memory_bytes, row_problems
from openapi_tool.tools.catalogue import CATALOGUE, BuiltInTool
from openapi_tool.tools.declaration import BASE_URLS, MODES, OPERATION_NAMES, read_row
from openapi_tool.tools.definition import Method, ToolDefinition, stored_after_execution, unusable, upstream_path
from openapi_tool.tools.definition_check import CheckedDefinition, check_definition
from openapi_tool.tools.inline_bounds import schema_size
from openapi_tool.tools.operations import OPERATIONS, Operation
from openapi_tool.tools.problems import Problem, listed
from openapi_tool.tools.wording import any_of, close_to, did_you_mean, short

MAX_CACHE_BYTES = 16_000_000
"""Cache size in bytes for parsed definitions, usable or not."""

_MIN_MEMORY_BYTES = 8_000  # of the definition object, its cache entry and its problems

_UNKNOWN_OPERATION = OPERATIONS[0]
"""Operation of a definition that names none: the definition is refused, and its other problems are found, too."""

_GET_PATHS = tuple(operation.template for operation in OPERATIONS if operation.template is not None)


def parse_definition(record: DefinitionRecord) -> ToolDefinition:
    """Parse a stored definition in this process, cached by content. Raises ToolMisconfigured with every problem."""
    found = find_definition(record)
    if isinstance(found, ToolDefinition):
        return found
    return found.parse(check_definition(record.parameters, record.options))


@dataclass(frozen=True, slots=True)
class _ParseResult:
    """Cached result of parsing: the definition, None if it has problems; `memory` is an estimate in bytes."""

    definition: ToolDefinition | None
    problems: list[str]
    memory: int

    def definition_or_error(self, tool_name: str) -> ToolDefinition:
        """Return the definition. Raises ToolMisconfigured if it has problems."""
        if self.definition is None:
            raise unusable(tool_name, self.problems)
        return self.definition


_parse_cache: LRUCache[bytes, _ParseResult] = LRUCache(MAX_CACHE_BYTES, getsizeof=lambda result: result.memory)


@dataclass(frozen=True, slots=True)
class UnparsedDefinition:
    """Definition that is not in the cache: run `check_definition`, in this process or in another one, then `parse`.

    `content` is the JSON list of its members; its size bounds the cost of the check. `digest` is the key in the cache.
    """

    record: DefinitionRecord
    content: bytes
    digest: bytes

    def parse(self, checked: CheckedDefinition) -> ToolDefinition:
        """Parse and cache. Raises ToolMisconfigured with every problem."""
        result = _parse(self.record, checked, self.digest)
        _parse_cache[self.digest] = result
        return result.definition_or_error(self.record.tool_name)


def find_definition(record: DefinitionRecord) -> ToolDefinition | UnparsedDefinition:
    """Look a stored definition up in the cache, by its content. Raises ToolMisconfigured with every problem."""
    if record.oversized:
        raise unusable(record.tool_name, [f"it is larger than {MAX_ROW_BYTES:,} bytes"])
    if record.unreadable:  # set by kernel/postgres/load.py: valid JSON for PostgreSQL, but not for the parser here
        raise unusable(record.tool_name, ["it is nested too deeply, or contains a number that is too long to parse"])
    try:
        content = orjson.dumps([record.tool_name, record.after_execution, record.parameters, record.options])
    except TypeError:  # orjson refuses over 254 levels and integers beyond 64 bits; row_problems says where they are
        problems = _as_texts(row_problems(record.parameters, record.options))
        raise unusable(record.tool_name, problems or ["it is not JSON"]) from None
    digest = hashlib.sha256(content).digest()
    cached = _parse_cache.get(digest)
    if cached is None:
        return UnparsedDefinition(record, content, digest)
    return cached.definition_or_error(record.tool_name)


def parse_for_linter(record: DefinitionRecord) -> tuple[ToolDefinition | None, list[Problem]]:
    """Return a definition without its wrong options, and all its problems.

    The definition is None if no option names an operation; a misspelt mode counts as the most similar one. A schema
    beyond the limits of `tools.bounds` is not compiled.
    """
    checked = check_definition(record.parameters, record.options)
    parser = _DefinitionParser(record)
    definition = parser.parse()
    problems = [*checked.exceeded_limits, *parser.problems]
    if checked.schema_defect is not None:
        problems.append(checked.schema_defect)
    return (definition if parser.names_operation else None), problems


def _parse(record: DefinitionRecord, checked: CheckedDefinition, digest: bytes) -> _ParseResult:
    if checked.exceeded_limits:
        return _ParseResult(None, _as_texts(checked.exceeded_limits), _MIN_MEMORY_BYTES)
    parser = _DefinitionParser(record)
    definition = parser.parse()
    problems = parser.problems
    if checked.schema_defect is not None:
        problems.append(checked.schema_defect)
    if problems:
        return _ParseResult(None, _as_texts(problems), _MIN_MEMORY_BYTES)
    definition = replace(definition, schema_size=schema_size(definition.schema), digest=digest)
    memory = _MIN_MEMORY_BYTES + memory_bytes(record.parameters) + memory_bytes(record.options)
    return _ParseResult(definition, [], memory)


def _as_texts(problems: Sequence[Problem]) -> list[str]:
    return listed([str(problem) for problem in problems])


class _DefinitionParser:
    """Parser that collects all problems: those of the declaration, and those of options that must fit together.

    - `options` and `upstream` are as declared: wrong values are missing. `upstream` is the section `options.jina`,
      which has another name in old rows.
    - `stored_upstream` is the same section as it is stored, wrong values included, and `upstream_path` its path.
    - `names_operation` says, after `parse`, whether an option names an operation.
    """

    def __init__(self, record: DefinitionRecord) -> None:
        self.record = record
        row, self.problems = read_row(record.parameters, record.options)
        self.parameters = row.parameters
        self.options = row.options
        self.upstream = row.options.upstream
        self.upstream_path = upstream_path(object_at(record.options))
        self.stored_upstream = object_at(record.options, self.upstream_path[-1])
        self.names_operation = False

    def parse(self) -> ToolDefinition:
        """Return the definition; it is usable only if there are no `problems`."""
        options, upstream = self.options, self.upstream
        self._check_that_section_exists()
        operation = self._operation()
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
            upstream_params={**upstream.defaults, **upstream.params},
            headers=upstream.headers,
            timeout_s=options.call_seconds,
            suspend_timeout_s=options.suspend_timeout_seconds,
            result_format=options.result_format or "text",
            max_result_tokens=options.max_result_tokens,
            budget=options.budget,
        )

    def _check_that_section_exists(self) -> None:
        is_reported = any(problem.path == self.upstream_path for problem in self.problems)
        if not self.stored_upstream and not is_reported:
            modes = " or ".join(f"mode: {name}" for name in OPERATION_NAMES)
            self._problem(f"is missing; give it {modes}", "options", "jina")

    def _operation(self) -> Operation:
        operation = self._named_operation()
        self.names_operation = operation is not None
        return operation or _UNKNOWN_OPERATION

    def _named_operation(self) -> Operation | None:
        """Return the operation that `mode`, `base_url` or `tool` names; for a misspelt mode the most similar one."""
        of_host = BASE_URLS.get(self.upstream.base_url or "")
        mode = self.upstream.mode
        if mode is not None:
            operation = MODES[mode]
            if of_host is not None and of_host.host != operation.host:
                message = f"{mode!r} does not go with the host of base_url; leave one of them out"
                self._problem(message, *self.upstream_path, "mode")
            return operation
        if of_host is not None:
            return of_host
        misspelt = self.stored_upstream.get("mode")  # the declaration has refused it
        if misspelt is not None:
            similar = close_to(short(str(misspelt)), OPERATION_NAMES)
            return MODES[similar[0]] if similar else None
        tool = CATALOGUE.get(self.upstream.tool or "")
        if tool is not None:
            return tool.operation
        # A missing section and a wrong `base_url` are reported elsewhere.
        if self.stored_upstream and self.stored_upstream.get("base_url") is None:
            self._problem("names neither mode nor base_url nor a built-in tool", *self.upstream_path)
        return None

    def _built_in(self, operation: Operation) -> BuiltInTool:
        fitting = {tool.name: tool for tool in CATALOGUE.values() if tool.operation is operation}
        named = self.upstream.tool
        if named in fitting:
            return fitting[named]
        if named is not None:
            other = CATALOGUE.get(named)
            hint = f"; {named!r} needs mode: {other.operation.name}" if other else did_you_mean(short(named), fitting)
            message = f"must be {any_of(fitting)} for a {operation.name} tool{hint}"
            self._problem(message, *self.upstream_path, "tool")
        # The default is the first in the catalogue, which is the single form, not the batch form.
        return next(iter(fitting.values()))

    def _method(self) -> Method:
        has_address_in_path = self.upstream.endpoint_template is not None or self.upstream.path in _GET_PATHS
        method = self.upstream.method or ("GET" if has_address_in_path else "POST")
        return "GET" if method.upper() == "GET" else "POST"

    def _path(self, operation: Operation) -> str:
        if self.upstream.endpoint_template is not None:
            return self._path_of_template(self.upstream.endpoint_template, operation)
        path = self.upstream.path or "/"
        if not path.startswith("/"):
            path = f"/{path}"
        if path not in operation.paths:
            fitting = any_of(dict.fromkeys(operation.paths.values()))
            self._problem(f"must be {fitting} for a {operation.name} tool", *self.upstream_path, "path")
            return "/"
        return operation.paths[path]

    def _path_of_template(self, template: str, operation: Operation) -> str:
        """Return the path of `endpoint_template`, which may be `/{url}` or `https://r.jina.ai/{url}`."""
        expected = operation.template
        if expected is None or template not in (expected, *operation.urls(expected)):
            allowed = " or ".join(f"https://{known.host}{known.template}" for known in OPERATIONS if known.template)
            self._problem(f"may only be {allowed}", *self.upstream_path, "endpoint_template")
        return expected or "/"

    def _problem(self, message: str, *path: str) -> None:
        self.problems.append(Problem(path, message))
