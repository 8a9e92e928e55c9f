"""Test tool definitions without servers: the executor's own runner, with a respx router in place of Jina.

    executor = InProcessExecutor(router)
    result = await executor.run_tool("tools/product_docs.yaml", {"query": "install"})

The router is below the egress checks, so `result.requests` are the requests that would be sent. In pytest use the
fixtures of `openapi_tool.pytest_plugin`. docs/registering-tools.md describes both; install the extra [testing].
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import httpx
import orjson
import respx
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource
from respx.models import AllMockedAssertionError

from openapi_tool.bootstrap import Upstream, build_bootstrap, build_runner, lint_limits
from openapi_tool.environment import DEFAULT_AUTH_ENV
from openapi_tool.jina.definition_checks import source_problems
from openapi_tool.jina.egress import EgressTransport
from openapi_tool.jina.transport import ON_CONNECTED
from openapi_tool.local.recordings import (
    RECORDED_HOSTS,
    Recording,
    error_classes,
    load_recordings,
    on_site,
    recording_of,
)
from openapi_tool.local.request_content import UnknownRequest, parse_request
from openapi_tool.protocol.cards import StoredText, ToolCall, as_model_reads
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.records import Artifact
from openapi_tool.protocol.result_objects import ErrorObject, UsageObject
from openapi_tool.settings import Settings
from openapi_tool.tools.definition import ToolDefinition, stored_record
from openapi_tool.tools.definition_parser import parse_definition
from openapi_tool.tools.result import ResultFields
from openapi_tool.tools.stored_rows import complete
from openapi_tool.tools.time_limits import TimeLimits
from openapi_tool.tools.yaml_source import Source, read_source

PROJECT, AGENT = "proj_test", "agent_test"
KEY = "key-of-the-test"
"""Value of JINA_API_KEY unless `environment` has another."""

# Ids of a call, as the kernel would send them.
_IDS: Mapping[str, str | None] = {
    "channel_id": "public",
    "agent_turn_id": "turn_test",
    "step_id": "step_test",
    "tool_call_id": "tc_test",
    "parent_step_id": None,
    "trace_id": "0" * 31 + "1",
    "turn_epoch": "1",
    "context_box_id": None,
}
_DEFAULTS: dict[str, Any] = {
    "postgres": {"dsn": "postgresql://127.0.0.1/none"},
    "url_policy": {"allow": (RECORDED_HOSTS,)},  # pages of the recordings
}
_NOT_RETRIED = 400  # HTTP status that answers a request without a route: the executor does not retry it
_SESSION_KEY = b"session-key-of-the-test-of-tools"

Definition = str | Path | Mapping[str, Any] | ToolDefinition
"""Path or document of a YAML file, or a parsed definition, which is not linted."""


class InvalidDefinition(AssertionError):
    """The message lists the errors, as `tools lint` does."""


class UnansweredRequest(AssertionError):
    """No route and no recording answers a request; the message says what to add."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of a call.

    `text` is what the model reads, `fields` are the parts of the result card, `requests` what the executor would send.
    `waits_s` are the waits between attempts in seconds, which are skipped.
    """

    text: str
    fields: ResultFields
    requests: tuple[httpx.Request, ...]
    waits_s: tuple[float, ...]

    @property
    def status(self) -> str:
        """`success`, `failed` or `timeout`."""
        return self.fields.status

    @property
    def error(self) -> ErrorObject | None:
        """Error of a failed call."""
        return self.fields.error

    @property
    def error_code(self) -> str | None:
        """Code of the error."""
        return self.fields.error_code

    @property
    def usage(self) -> UsageObject:
        """Tokens charged and requests sent."""
        return cast("UsageObject", self._metadata["usage"])

    @property
    def cursor(self) -> str | None:
        """Argument `cursor` of the call for the next part, if there is one."""
        return cast("str | None", self._metadata.get("next_cursor"))

    @property
    def _metadata(self) -> Mapping[str, Any]:
        """Where `usage` and `next_cursor` are."""
        result = self.fields.result
        if isinstance(result, dict) and "usage" in result:  # a success with `result_format: object`
            return result
        return cast("Mapping[str, Any]", self.fields.tool_output)


@dataclass(slots=True)
class _Traffic:
    """What a call has sent and waited for."""

    requests: list[httpx.Request] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    unanswered: UnansweredRequest | None = None


_traffic: ContextVar[_Traffic] = ContextVar("traffic")  # tasks of a call inherit it


class InProcessExecutor:
    """Runs tool calls as `serve` does; `router` answers in place of Jina, for other requests the recordings.

    `settings` are those of `serve` by section; the shell's and those of files are ignored. `environment` has the
    variables that definitions may name; JINA_API_KEY has a default. Raises SettingsError.
    """

    def __init__(
        self,
        router: respx.Router,
        *,
        settings: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = _IsolatedSettings(**(_DEFAULTS | dict(settings or {})))
        bootstrap = build_bootstrap(self._settings, {DEFAULT_AUTH_ENV: KEY, **(environment or {})})
        self._artifacts = _MemoryArtifacts()
        transport = EgressTransport(_RouterTransport(router))
        upstream = Upstream(bootstrap, transport, permits=None, budgets=None, sleep=_record_wait)
        self._runner = build_runner(bootstrap, upstream, self._artifacts, _SESSION_KEY)

    async def run_tool(
        self,
        definition: Definition,
        arguments: Mapping[str, Any],
        *,
        project: str = PROJECT,
        agent: str = AGENT,
        ids: Mapping[str, str | None] | None = None,
    ) -> ToolResult:
        """Call a tool with a model's arguments; `ids` replaces values of placeholders.

        Raises InvalidDefinition, UnansweredRequest.
        """
        parsed = self._parsed(definition)
        identity = _identity({**_IDS, "project_id": project, "agent_id": agent, **(ids or {})})
        limits = TimeLimits(self._settings.executor, self._settings.tools)
        deadline = limits.deadline(0, parsed.suspend_timeout_s, parsed.timeout_s)
        traffic = _Traffic()
        token = _traffic.set(traffic)
        try:
            call = self._runner.new_call(identity)
            with call.memory:
                result = await self._runner.run(call, parsed, ToolCall(arguments), deadline)
        finally:
            _traffic.reset(token)
        if traffic.unanswered is not None:
            raise traffic.unanswered
        fields = result.fields
        if result.full_text is not None:
            self._artifacts.put(identity, result.full_text)
        text = as_model_reads({"status": fields.status, "result": fields.result, "error": fields.error})
        return ToolResult(text, fields, tuple(traffic.requests), tuple(traffic.waits_s))

    def _parsed(self, definition: Definition) -> ToolDefinition:
        if isinstance(definition, ToolDefinition):
            return definition
        source = _read(definition)
        problems = source_problems(source, lint_limits(self._settings), self._settings.url_policy)
        file = "definition" if isinstance(definition, Mapping) else definition
        lines = []
        for problem in problems:
            if not problem.warning:
                line, column = source.position(problem.path)
                lines.append(f"{file}:{line}:{column}: error: {problem.where}: {problem.message}")
        if lines:
            raise InvalidDefinition("\n".join(lines))
        document = cast("Mapping[str, Any]", source.document)
        built_in = parse_definition(stored_record(document)).built_in
        return parse_definition(stored_record(complete(document, built_in)))


def _identity(ids: Mapping[str, str | None]) -> CallIdentity:
    values: dict[str, Any] = {**ids, "turn_epoch": int(ids["turn_epoch"] or 0)}
    return CallIdentity(**values)


def recorded(name: str, site: str = "") -> httpx.Response:
    """Return a recorded response by a name of `recordings()`, or an error by a name of `error_names()`.

    With `site`, such as `docs.example.org`, the results of a search are moved there: a tool restricted to a site
    shows no others. Raises LookupError with the nearest name.
    """
    if name in error_classes():
        error = error_classes()[name]
        return httpx.Response(error["http"], headers=error.get("headers"), json=error["body"])
    if name not in load_recordings():
        near = difflib.get_close_matches(name, [*load_recordings(), *error_classes()], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; recordings() and error_names() list them"
        raise LookupError(f"no recorded answer is named {name!r}{hint}")
    recording = load_recordings()[name]
    if site:
        recording = replace(recording, body=on_site(recording.body.decode(), site).encode())
    return _response(recording)


def recordings() -> Sequence[str]:
    """Return the names of all recorded responses: `s-…` of searches, else of pages."""
    return sorted(load_recordings())


def error_names() -> Sequence[str]:
    """Return the names of Jina's error classes."""
    return sorted(error_classes())


def _response(recording: Recording) -> httpx.Response:
    headers = {name: value for name, value in recording.headers.items() if name.lower() == "content-type"}
    return httpx.Response(recording.status, headers=headers, content=recording.body)


def _read(definition: str | Path | Mapping[str, Any]) -> Source:
    if isinstance(definition, Mapping):
        return Source(dict(definition), [], {})
    file = Path(definition)
    if not file.exists():
        raise FileNotFoundError(f"there is no definition {file.resolve()}; a relative path starts at {Path.cwd()}")
    return read_source(file.read_text(encoding="utf-8"))


class _IsolatedSettings(Settings):
    """Settings that no variable and no file of this machine can change."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the constructor's values only."""
        del settings_cls
        return (init_settings,)


class _RouterTransport(httpx.AsyncBaseTransport):
    """Answers requests from the routes of the test, else from the recordings."""

    def __init__(self, router: respx.Router) -> None:
        self._router = router

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        tell_connected = request.extensions.get(ON_CONNECTED)  # what the executor wants to hear of a connection
        if tell_connected is not None:
            tell_connected()
        traffic = _traffic.get()
        traffic.requests.append(request)
        with suppress(AllMockedAssertionError):  # no route
            return await self._router.async_handler(request)
        recorded_answer = _recorded_answer(request)
        if recorded_answer is not None:
            return recorded_answer
        url, method = request.url, request.method
        traffic.unanswered = UnansweredRequest(
            f"nothing answers {method} {url} {request.content.decode()}; add a route, such as "
            f'jina.{method.lower()}("{url.copy_with(raw_path=b"/")}").mock(recorded("NAME"))'
        )
        return httpx.Response(_NOT_RETRIED)  # an exception here would be logged as a defect of the executor


def _recorded_answer(request: httpx.Request) -> httpx.Response | None:
    url, headers = request.url, dict(request.headers)
    try:
        content = parse_request(url.host, request.method, url.raw_path.decode("ascii"), headers, request.content)
    except UnknownRequest:
        return None
    recording = recording_of(content)
    return _response(recording) if recording else None


async def _record_wait(seconds: float) -> None:
    """Record a wait between attempts instead of waiting."""
    _traffic.get().waits_s.append(seconds)


class _MemoryArtifacts:
    """Whole texts of truncated results, by project, agent and card id."""

    def __init__(self) -> None:
        self._stored: dict[tuple[str, str, str], Artifact] = {}

    def put(self, owner: CallIdentity, stored: StoredText) -> None:
        """Store the whole text of a truncated result."""
        text = orjson.loads(stored.content)["text"]
        artifact = Artifact(stored.card_id, stored.chars, stored.sha256, text, stored.items)
        self._stored[owner.project_id, owner.agent_id, stored.card_id] = artifact

    async def artifact(self, project_id: str, agent_id: str, card_id: str, start: int, chars: int) -> Artifact | None:
        """Return a part of a text, as the database does."""
        whole = self._stored.get((project_id, agent_id, card_id))
        return whole and replace(whole, text=whole.text[start : start + chars])
