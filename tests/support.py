"""Helpers of several test packages."""

from __future__ import annotations

import functools
import gc
import inspect
import json
import os
import re
import secrets
import subprocess
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import asyncpg
import helm_python
import httpx
import orjson
import yaml
from nats.js.errors import NotFoundError
from pydantic import SecretStr

from openapi_tool.engine.call import Call
from openapi_tool.jina import page_content, search_content
from openapi_tool.jina.byte_semaphore import ByteSemaphore
from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.egress import EgressTransport
from openapi_tool.jina.failure_rules import ONCE, SOME
from openapi_tool.jina.failures import NO_SECRETS
from openapi_tool.jina.rendering import RenderContext
from openapi_tool.jina.request import UpstreamRequest
from openapi_tool.jina.request_context import RequestContext
from openapi_tool.jina.response import Expected, UpstreamResult
from openapi_tool.jina.transport import ON_CONNECTED
from openapi_tool.kernel.jetstream.dead_letters import STREAM as DEAD_LETTERS
from openapi_tool.kernel.postgres.privileges import grant_statements, quoted_role
from openapi_tool.local.caller import Caller
from openapi_tool.local.postgres_server import USER, PostgresServer, _environment
from openapi_tool.local.recordings import error_classes
from openapi_tool.local.servers import NatsServer
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.options.postgres import PoolOptions, PostgresOptions
from openapi_tool.protocol.cards import ToolCall
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.errors import ToolError
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.records import (
    CallRecords,
    CardRecord,
    DefinitionRecord,
    EarlierResult,
    RequestEdgeRecord,
    WaitingTurnRecord,
)
from openapi_tool.protocol.tracing import SpanContext
from openapi_tool.protocol.v1r4 import V1r4
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.definition_parser import parse_definition
from openapi_tool.tools.output import ToolOutput
from openapi_tool.tools.secret_variables import Secret

_NOTE_CHARS = 1_000
ONE_WORKER = {"workers": 1}
"""Section `isolation` of most tests: each worker process takes 0.1 s of CPU time to start."""

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
V1R4 = V1r4("tool.openapi")
SUBJECT = "cg.v1r4.proj.public.cmd.tool.jina.search"

HEADERS = {
    "CG-Project-Id": "proj",
    "CG-Channel-Id": "public",
    "CG-Agent-Id": "agent",
    "CG-Turn-Id": "turn",
    "CG-Turn-Epoch": "1",
    "CG-Step-Id": "step",
    "CG-Tool-Call-Id": "call",
    "CG-Recursion-Depth": "0",
    "traceparent": TRACEPARENT,
}
BODY = {"tool_call_card_id": "card", "tool_name": "jina_search", "after_execution": "suspend"}


# Builders of valid objects of one call; each argument replaces the valid value.


def delivery(
    headers: Mapping[str, str] | None = None, body: object = None, *, subject: str = SUBJECT, data: bytes | None = None
) -> Delivery:
    return Delivery(
        subject=subject,
        headers=HEADERS if headers is None else headers,
        data=data if data is not None else orjson.dumps(BODY if body is None else body),
        published_at=datetime.now(UTC),
        number=1,
        stream_sequence=1,
    )


def identity(**changes: Any) -> CallIdentity:
    values: dict[str, Any] = {
        "project_id": "proj",
        "channel_id": "public",
        "agent_id": "agent",
        "agent_turn_id": "turn",
        "turn_epoch": 1,
        "tool_call_id": "call",
        "step_id": "step",
        "parent_step_id": None,
        "trace_id": TRACE_ID,
        "trace": SpanContext(TRACE_ID, "b7ad6b7169203331", "01"),
        "tracestate": None,
    }
    return CallIdentity(**(values | changes))


def call_card(arguments: Any = None, **changes: Any) -> CardRecord:
    values: dict[str, Any] = {
        "card_id": "card",
        "tool_call_id": "call",
        "content": {"__type__": "ToolCallContent", "tool_name": "jina_search", "arguments": arguments or {}},
        "metadata": {"type": "tool.call", "author_id": "agent", "agent_turn_id": "turn", "step_id": "step"},
    }
    return CardRecord(**(values | changes))


def waiting_turn(headers: Mapping[str, Any] | None = None, **changes: Any) -> WaitingTurnRecord:
    values: dict[str, Any] = {
        "inbox_id": "inbox_1",
        "message_type": "command_anchor",
        "channel_id": "public",
        "agent_turn_id": "turn",
        "turn_epoch": 1,
        "context_headers": HEADERS if headers is None else headers,
    }
    return WaitingTurnRecord(**(values | changes))


def records(
    *,
    card: CardRecord | None = None,
    tool: DefinitionRecord | None = None,
    worker_target: str | None = "worker_generic",
    waiting_turn: WaitingTurnRecord | None = None,
    request_edge: RequestEdgeRecord | None = None,
    earlier: EarlierResult | None = None,
) -> CallRecords:
    return CallRecords(card, tool, worker_target, waiting_turn, request_edge, earlier)


def definition(
    jina: dict[str, Any] | None = None, *, parameters: dict[str, Any] | None = None, **options: Any
) -> ToolDefinition:
    return parse_definition(
        DefinitionRecord(
            tool_name="jina_search",
            after_execution="suspend",
            parameters=parameters or {},
            options={"jina": jina or {"mode": "search"}, **options},
        )
    )


def tool_call(arguments: Mapping[str, Any], defaults: tuple[str, ...] = (), fixed: tuple[str, ...] = ()) -> ToolCall:
    return ToolCall(arguments, frozenset(defaults), frozenset(fixed))


async def dead_letters(caller: Caller) -> list[dict[str, Any]]:
    """Return the records of all dead letters, oldest first."""
    jetstream = caller.client.jetstream()
    try:
        state = (await jetstream.stream_info(DEAD_LETTERS)).state
    except NotFoundError:
        return []
    numbers = range(max(state.first_seq, 1), state.last_seq + 1)
    return [orjson.loads((await jetstream.get_msg(DEAD_LETTERS, number)).data or b"") for number in numbers]


def pool_of(dsn: str) -> PoolOptions:
    return PoolOptions("v1r4", PostgresOptions(Secret(dsn)))


async def delete_streams(caller: Caller) -> None:
    jetstream = caller.client.jetstream()
    for stream in await jetstream.streams_info():
        await jetstream.delete_stream(str(stream.config.name))


def memory_limit(kept_bytes: int, concurrency: int) -> int:
    """Return a process's memory limit in bytes, as the chart computes it; `kept_bytes` is the sum of its budgets."""
    return 128 * 2**20 + kept_bytes * 5 // 4 + concurrency * 2**20


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable[..., Any]], Any]:
    """Run one test for all cases of a corpus, in a loop: `parametrize` would pay the overhead of a test for each.

    `names` are parameters of the test, as in `parametrize`. All cases are run, also after a failure. The failures are
    raised as an ExceptionGroup, each with a note that names its case.
    """
    wanted = names if isinstance(names, tuple) else (names,)
    listed = [dict(zip(wanted, case if isinstance(names, tuple) else (case,), strict=True)) for case in cases]

    def decorate(test: Callable[..., Any]) -> Any:
        @functools.wraps(test)
        def looped(**fixtures: Any) -> None:
            with _failures() as failures:
                for case in listed:
                    with _noted(case, failures):
                        test(**case, **fixtures)

        @functools.wraps(test)
        async def looped_async(**fixtures: Any) -> None:
            with _failures() as failures:
                for case in listed:
                    with _noted(case, failures):
                        await test(**case, **fixtures)

        assert listed, "an empty corpus shows nothing"
        chosen: Any = looped_async if inspect.iscoroutinefunction(test) else looped
        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in wanted]
        chosen.__signature__ = signature.replace(parameters=left)
        return chosen

    return decorate


@contextmanager
def _failures() -> Iterator[list[Exception]]:
    """Yield a list for failures; at the end raise all that it contains."""
    failures: list[Exception] = []
    yield failures
    if failures:
        raise ExceptionGroup(f"{len(failures)} cases failed", failures)


@contextmanager
def _noted(case: Mapping[str, Any], failures: list[Exception]) -> Iterator[None]:
    """Add the failure of a case to `failures` instead of raising it, so that the next case is run."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - `_failures` raises it at the end
        error.add_note(f"case: {case!r}"[:_NOTE_CHARS])
        failures.append(error)


# Peak memory of a piece of work, read from /proc, so that it includes allocations of Rust and C.


_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # written to clear_refs, resets VmHWM (proc(5))


@contextmanager
def peak_growth() -> Iterator[Callable[[], int]]:
    """Yield a function that returns this process's peak growth since now in bytes; it may be called after the block."""
    _CLEAR.write_text(_RESET_PEAK)
    before = _bytes("VmRSS")
    yield lambda: _bytes("VmHWM") - before


async def left_for_the_garbage_collector(work: Callable[[], Awaitable[None]]) -> Counter[str]:
    """Return the types of the objects in reference cycles that `work` leaves, after a first run that is not counted."""
    await work()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await work()
        gc.collect()
        return Counter(f"{type(found).__module__}.{type(found).__qualname__}" for found in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return _bytes("VmRSS")


def _bytes(key: str) -> int:
    line = next(line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


# The database role of executors. It has only the privileges that `openapi-tool sql grants` prints.


ROLE = "openapi_tool"
_PASSWORD = secrets.token_urlsafe(18)


async def make_role(dsn: str, role: str = ROLE, *, registration: bool = False) -> None:
    """Create the role if it is missing, and grant it its privileges; `registration` adds those of `tools apply`."""
    connection = await asyncpg.connect(dsn)
    if not await connection.fetchval("select exists (select from pg_roles where rolname = $1)", role):
        await connection.execute(f"create role {quoted_role(role)} login password '{_PASSWORD}'")
    await connection.execute(";".join(grant_statements(role, registration=registration)))
    await connection.close()


def dsn_of(stack: EmbeddedStack, database: str, role: str = ROLE, *, at: str = "") -> str:
    """Return the executor's connection string; `at` replaces the stack's `host:port`, and may list several."""
    return f"postgresql://{role}:{_PASSWORD}@{at or f'127.0.0.1:{stack.postgres.port}'}/{database}"


INTRODUCED = re.compile(r"\[Untrusted web content between marks (\d{6,}): ")


def framed_items(content: str) -> list[str]:
    """Return the exact web content of each frame. Raises AssertionError for a broken frame."""
    marks = INTRODUCED.findall(content)
    if not marks:
        return []
    mark = marks[0]
    begun = re.findall(rf"^\[{mark}\] ", content, re.MULTILINE)
    found = re.findall(rf"^\[{mark}\] (.*?)\n(?=\[{mark}[ \]])", content, re.MULTILINE | re.DOTALL)
    assert len(begun) == len(found) > 0
    return found


def places(content: str) -> list[str]:
    """Return for each item of a later part the line that says where it continues; empty for one that just follows."""
    (mark,) = INTRODUCED.findall(content)[:1] or [""]
    found, place = list[str](), ""
    for line in content.split("\n"):
        if re.fullmatch(r"\[Continued: .*\]", line):
            place = line
        elif mark and line.startswith(f"[{mark}] "):
            found.append(place)
            place = ""
    return found


def repeated_lines(content: str) -> list[int]:
    """Return for each item of a later part the number of its first lines that an earlier part has shown already."""
    found = [re.search(r"its first (?:(\d+) lines are|line is) repeated", place) for place in places(content)]
    return [0 if lines is None else int(lines[1] or 1) for lines in found]


def another_nats(stack: EmbeddedStack, name: str, more: str, port: int = 0) -> NatsServer:
    """Return a further NATS server, not yet started, on a free port unless `port` is given."""
    folder = stack.folder / name
    folder.mkdir()
    return NatsServer(folder, stack.guard, more, name=name, port=port)


def copy_clusters(model: Path) -> None:
    """Replace `initdb`: copy new clusters from the folder `model`, which the first one creates; passwords differ."""
    initialize = PostgresServer._initialize  # noqa: SLF001 - replaced on purpose

    def fill(self: PostgresServer, data: Path, password: Path) -> None:
        if model.exists():
            _copy(model, data)
            _set_password(self, data, password.read_text(encoding="ascii"))
        else:
            initialize(self, data, password)
            part = model.with_name(f"{model.name}-{os.getpid()}-{id(self)}")
            part.mkdir()
            _copy(data, part)
            with suppress(OSError):  # another process has created it meanwhile
                part.rename(model)

    PostgresServer._initialize = fill  # type: ignore[method-assign]  # noqa: SLF001 - as above


def _copy(source: Path, target: Path) -> None:
    """Copy the contents of a folder with owners and modes."""
    subprocess.run(["cp", "-a", f"{source}/.", target], check=True)  # noqa: S603, S607 - a standard program


def _set_password(server: PostgresServer, data: Path, password: str) -> None:
    """Change the password of a stopped cluster."""
    subprocess.run(  # noqa: S603 - the server's own program
        [server._bin / "postgres", "--single", "-D", data, "-c", "fsync=off", "-j", "postgres"],  # noqa: SLF001 - its own
        input=f"alter role {USER} password '{password}';\n\n".encode(),
        stdout=subprocess.DEVNULL,
        check=True,
        env=_environment(),
        **server._identity,  # noqa: SLF001 - as above
    )


CHART = Path(__file__).parent.parent / "helm" / "openapi-tool"


def rendered(values: Mapping[str, Any] | None = None, *, name: str = "r") -> list[dict[str, Any]]:
    """Return all objects of the chart, in the order of the templates. Raises HelmError for values that it refuses."""
    return _rendered(json.dumps(values or {}, sort_keys=True), name)


def notes(values: Mapping[str, Any] | None = None) -> str:
    """Return the text that `helm install` prints."""
    texts = _chart().render(dict(values or {}), name="r", namespace="n")
    return next(text for path, text in texts.items() if path.endswith("NOTES.txt"))


@cache
def _rendered(values: str, name: str) -> list[dict[str, Any]]:
    texts = _chart().render(json.loads(values), name=name, namespace="n")
    return [document for path, text in texts.items() if not path.endswith("NOTES.txt") for document in _documents(text)]


@cache
def _documents(text: str) -> list[dict[str, Any]]:
    """Return the YAML documents of a rendered file. Cached, since most files do not depend on the values."""
    return [document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document]


@cache
def _chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def objects_of(values: Mapping[str, Any] | None = None) -> dict[str, list[dict[str, Any]]]:
    """Return every object by its kind."""
    found = defaultdict(list)
    for document in rendered(values):
        found[document["kind"]].append(document)
    return found


RETRIES = {"no": (False, 0), "once": (True, ONCE), "yes": (True, SOME), "later": (True, 0)}
"""`retryable` and `max_retries` by the words that tests of errors use; `later` is retryable, but not in this call."""

_REMEDY = re.compile(r"\b(try|use|call|ask|read|shorten|correct|wait|change|check|operator)\b")
_TAG = re.compile(r"<[a-z!/]", re.IGNORECASE)
_CLASS_NAME = re.compile(r"\b[A-Z]\w*Error\b|\bError:")


class SentByMock(httpx.MockTransport):
    """Mock transport that tells that a request has its connection, as `AiohttpTransport` does."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request."""
        if (tell_connected := request.extensions.get(ON_CONNECTED)) is not None:
            tell_connected()
        return await super().handle_async_request(request)


_OFFERED = frozenset({"wait_for_selector", "target_selector", "max_tokens", "count", "no_cache"})


async def fetched(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    operation: str = "reader",
    parameters: Mapping[str, Any] = MappingProxyType({}),
) -> UpstreamResult:
    """Return what the client makes of a response with these values. Raises ToolError."""
    expected = Expected(operation, parameters, offered=_OFFERED)
    request = UpstreamRequest("POST", "r.jina.ai", "/", {"Accept": "application/json"}, b"{}", expected)
    sent = httpx.Headers(dict(headers), encoding="latin-1")
    transport = httpx.MockTransport(lambda _: httpx.Response(status, headers=sent, content=body))
    client, memory = (
        JinaClient(EgressTransport(transport), max_response_bytes=1_000_000),
        ByteSemaphore(10_000_000).for_call(),
    )
    try:
        return await client.fetch(
            request,
            SecretStr("a-key-of-the-test"),
            Deadline.after(5),
            RequestContext(Call(CallIdentity("proj", "agent"), memory), memory),
        )
    finally:
        await client.aclose()


_CONTEXT = RenderContext(NO_SECRETS, lambda _: True)


def search_output(
    envelope: Mapping[str, Any], query: str, *, with_pages: bool = False, max_tokens: int | None = None
) -> ToolOutput:
    """Render the response of a search, with or without page content."""
    parameters = {"q": query, "maxTokens": max_tokens, "respondWith": "content" if with_pages else "no-content"}
    return search_content.search_output(envelope, parameters, _CONTEXT)


def page_output(envelope: Mapping[str, Any], max_tokens: int | None = None) -> ToolOutput:
    """Render the response of a reader."""
    return page_content.page_output(envelope, {"maxTokens": max_tokens}, _CONTEXT)


def assert_for_a_model(error: ToolError) -> None:
    """Assert that a message is a short sentence that says what to do, without tags, class names, or a line break."""
    assert re.match(r"[A-Z][^\"]{20,200}[.]( The service says: \"[^\"]+\")?$", error.message), error.message
    assert _REMEDY.search(error.message.partition(" The service says: ")[0]), error.message
    assert error.message.isprintable()
    assert len(error.message) < 550
    assert not _TAG.search(error.message)
    assert not _CLASS_NAME.search(error.message)
    assert not any(name in error.message for name in error_classes())


def retry(error: ToolError) -> str:
    """Return the word of RETRIES for an error."""
    return next(word for word, decision in RETRIES.items() if decision == (error.retryable, error.max_retries))
