"""A project's tool definition, as stored in resource.tools (protocol sections 4 and 5).

Runtime reading is lenient where stored definitions may be old, and strict where a mistake could
send a key to a wrong place. Registration is stricter.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import orjson
from cachetools import LRUCache

from openapi_tool.protocol.command import AFTER_EXECUTION, AfterExecution
from openapi_tool.protocol.errors import ToolMisconfigured
from openapi_tool.protocol.records import ToolRecord
from openapi_tool.tools.bounds import MAX_ROW_BYTES, memory_bytes, row_problems
from openapi_tool.tools.catalogue import CATALOGUE, BuiltInTool, Mode
from openapi_tool.tools.problems import listed, short
from openapi_tool.tools.schema import schema_defect, visible_schema

Method = Literal["GET", "POST"]
ResultFormat = Literal["text", "object"]

HOSTS: Mapping[Mode, str] = {"search": "s.jina.ai", "reader": "r.jina.ai"}
_DEFAULT_TOOLS: Mapping[Mode, str] = {"search": "jina.search", "reader": "jina.read"}
DEFAULT_AUTH_ENV = "JINA_API_KEY"

MAX_CACHE_BYTES = 16_000_000
"""Memory of all definitions that the process has read, usable or not."""

_MEMORY_AT_LEAST = 8_000  # of the object, its cache entry and problems

_MODES: Mapping[str, Mode] = {"search": "search", "reader": "reader", "read": "reader", "crawl": "reader"}
_BASE_URL = re.compile(r"https://([sr]\.jina\.ai)(?::443)?/?")
_URL_TEMPLATE = re.compile(r"(?:https://r\.jina\.ai(?::443)?)?/\{url\}")
_PATHS: Mapping[Mode, Mapping[str, str]] = {
    "search": {"": "/", "/": "/", "/search": "/search", "/search/": "/search"},
    "reader": {"": "/", "/": "/", "/{url}": "/{url}"},
}


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """One tool of one project. Durations are seconds; `defaults` and `fixed` hold templates."""

    tool_name: str
    tool: BuiltInTool
    mode: Mode
    method: Method
    path: str
    auth_env: str = DEFAULT_AUTH_ENV
    after_execution: AfterExecution | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    envs: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    suspend_timeout_s: float | None = None
    result_format: ResultFormat = "text"

    @property
    def hidden(self) -> frozenset[str]:
        """Arguments of the definition that the model is never shown."""
        return frozenset(self.fixed) | frozenset(self.envs)

    @property
    def host(self) -> str:
        """The one upstream host that this tool may call."""
        return HOSTS[self.mode]


def stored_after_execution(record: ToolRecord | None) -> AfterExecution | None:
    """The definition's valid `after_execution`, which wins over the command's."""
    value = record.after_execution if record else None
    return cast("AfterExecution", value) if value in AFTER_EXECUTION else None


def suspend_timeout(options: Any) -> float | None:
    """Seconds that the worker waits for this tool, where the definition says so."""
    value = options.get("suspend_timeout_seconds") if isinstance(options, dict) else None
    return _seconds(value)


@dataclass(frozen=True, slots=True)
class _Reading:
    """Outcome of reading a row: a definition, or its problems. `memory` is an estimate in bytes."""

    definition: ToolDefinition | None
    problems: list[str]
    memory: int


_known: LRUCache[bytes, _Reading] = LRUCache(MAX_CACHE_BYTES, getsizeof=lambda reading: reading.memory)


def parse_definition(record: ToolRecord) -> ToolDefinition:
    """Read a stored definition; one of the same content is read once. Raises ToolMisconfigured with every problem."""
    if record.oversized:
        raise _unusable(record, [f"it is larger than {MAX_ROW_BYTES:,} bytes"])
    if record.unreadable:
        raise _unusable(record, ["it is nested too deeply, or holds a number that no parser takes"])
    try:
        content = orjson.dumps([record.tool_name, record.after_execution, record.parameters, record.options])
    except TypeError:  # beyond 254 levels or 64 bits: the bounds refuse it, at a small cost
        raise _unusable(record, _bound_problems(record) or ["it is not JSON"]) from None
    key = hashlib.sha256(content).digest()
    reading = _known.get(key)
    if reading is None:
        reading = _known[key] = _read(record)
    if reading.definition is None:
        raise _unusable(record, reading.problems)
    return reading.definition


def _unusable(record: ToolRecord, problems: list[str]) -> ToolMisconfigured:
    """A new error for every call: one that is raised twice would keep the frames of both."""
    return ToolMisconfigured(
        f"The definition of {short(record.tool_name)!r} is not usable; an operator must correct it: "
        + "; ".join(problems)
        + ".",
        detail={"problems": problems},
    )


def _read(record: ToolRecord) -> _Reading:
    problems = _bound_problems(record)
    if problems:
        return _Reading(None, problems, _MEMORY_AT_LEAST)
    reader = _Reader(record)
    definition = reader.definition()
    defect = schema_defect(visible_schema(definition.parameters, definition.hidden))
    problems = listed([*reader.problems, *([defect] if defect else [])])
    if problems:
        return _Reading(None, problems, _MEMORY_AT_LEAST)
    return _Reading(definition, [], _MEMORY_AT_LEAST + memory_bytes(record.parameters) + memory_bytes(record.options))


def _bound_problems(record: ToolRecord) -> list[str]:
    found = row_problems(record.parameters, record.options)
    return listed([f"{short(problem.where)}: {problem.message}" for problem in found])


class _Reader:
    """Reads one record's options and collects what is wrong with them."""

    def __init__(self, record: ToolRecord) -> None:
        self.record = record
        self.problems: list[str] = []
        self.options = self._object(record.options, "options")
        legacy = self._object(self.options.get("openapi"), "options.openapi")
        self.section = "options.jina" if self.options.get("jina") is not None or not legacy else "options.openapi"
        self.jina = self._object(self.options.get("jina"), "options.jina") or _from_legacy(legacy)

    def definition(self) -> ToolDefinition:
        if not self.jina:
            self.problems.append("options.jina is missing")
        mode = self._mode()
        args = self._object(self.options.get("args"), "options.args")
        return ToolDefinition(
            tool_name=self.record.tool_name,
            tool=self._tool(mode),
            mode=mode,
            method=self._method(),
            path=self._path(mode),
            auth_env=self._auth_env(),
            after_execution=stored_after_execution(self.record),
            parameters=self._object(self.record.parameters, "parameters"),
            defaults=self._object(args.get("defaults"), "options.args.defaults"),
            fixed=self._object(args.get("fixed"), "options.args.fixed"),
            envs=self._names(self.options.get("envs"), "options.envs"),
            params=self._object(self.jina.get("defaults"), f"{self.section}.defaults")
            | self._object(self.jina.get("params"), f"{self.section}.params"),
            headers=self._names(self.jina.get("headers"), f"{self.section}.headers"),
            timeout_s=_seconds(self.jina.get("timeout_s")) or _seconds(self.jina.get("timeout")),
            suspend_timeout_s=suspend_timeout(self.options),
            result_format=self._result_format(),
        )

    def _mode(self) -> Mode:
        host_mode = self._mode_of_base_url()
        named = self.jina.get("mode")
        if named is None:
            tool = CATALOGUE.get(str(self.jina.get("tool")))
            if host_mode is None and tool is None and self.jina:
                self.problems.append(f"{self.section} names neither mode nor base_url nor a built-in tool")
            return host_mode or (tool.mode if tool else "search")
        mode = _MODES.get(named) if isinstance(named, str) else None
        if mode is None:
            self.problems.append(f"{self.section}.mode must be 'search' or 'reader'")
        elif host_mode is not None and host_mode != mode:
            self.problems.append(f"{self.section}.mode {mode!r} does not go with the host of base_url")
        return mode or host_mode or "search"

    def _mode_of_base_url(self) -> Mode | None:
        base_url = self.jina.get("base_url")
        if base_url is None:
            return None
        match = _BASE_URL.fullmatch(base_url) if isinstance(base_url, str) else None
        if match is None:
            self.problems.append(f"{self.section}.base_url may only be https://s.jina.ai or https://r.jina.ai")
            return None
        return "search" if match[1] == HOSTS["search"] else "reader"

    def _tool(self, mode: Mode) -> BuiltInTool:
        default = CATALOGUE[_DEFAULT_TOOLS[mode]]
        named = self.jina.get("tool")
        if named is None:
            return default
        tool = CATALOGUE.get(named) if isinstance(named, str) else None
        if tool is None or tool.mode != mode:
            fitting = " or ".join(repr(tool.name) for tool in CATALOGUE.values() if tool.mode == mode)
            self.problems.append(f"{self.section}.tool for a {mode} tool must be {fitting}")
            return default
        return tool

    def _method(self) -> Method:
        method = self.jina.get("method") or ("GET" if self._url_in_path() else "POST")
        if not isinstance(method, str) or method.upper() not in ("GET", "POST"):
            self.problems.append(f"{self.section}.method must be GET or POST")
            return "POST"
        return cast("Method", method.upper())

    def _url_in_path(self) -> bool:
        return self.jina.get("endpoint_template") is not None or self.jina.get("path") == "/{url}"

    def _path(self, mode: Mode) -> str:
        template = self.jina.get("endpoint_template")
        if template is not None:
            if mode != "reader" or not isinstance(template, str) or not _URL_TEMPLATE.fullmatch(template):
                self.problems.append(f"{self.section}.endpoint_template may only be https://r.jina.ai/{{url}}")
            return "/{url}"
        path = self.jina.get("path") or "/"
        known = _PATHS[mode]
        if not isinstance(path, str) or path not in known:
            self.problems.append(f"{self.section}.path for a {mode} tool must be one of {sorted(set(known.values()))}")
            return "/"
        return known[path]

    def _auth_env(self) -> str:
        name = self.jina.get("auth_env") or DEFAULT_AUTH_ENV
        if not isinstance(name, str):
            self.problems.append(f"{self.section}.auth_env must be the name of an environment variable")
            return DEFAULT_AUTH_ENV
        return name

    def _result_format(self) -> ResultFormat:
        value = self.options.get("result_format") or "text"
        if value not in ("text", "object"):
            self.problems.append("options.result_format must be 'text' or 'object'")
            return "text"
        return cast("ResultFormat", value)

    def _object(self, value: Any, where: str) -> dict[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.problems.append(f"{where} must be an object")
            return {}
        return value

    def _names(self, value: Any, where: str) -> dict[str, str]:
        pairs = self._object(value, where)
        wrong = sorted(name for name, text in pairs.items() if not isinstance(text, str) or not text)
        self.problems.extend(f"{where}.{short(name)} must be a non-empty string" for name in wrong)
        return {name: text for name, text in pairs.items() if name not in wrong}


def _from_legacy(openapi: Mapping[str, Any]) -> dict[str, Any]:
    """`options.openapi`, the old spelling, as `options.jina`."""
    auth = openapi.get("auth")
    env = auth.get("env") if isinstance(auth, dict) else None
    return {key: value for key, value in openapi.items() if key != "auth"} | ({"auth_env": env} if env else {})


def _seconds(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        return None
    return float(value)
