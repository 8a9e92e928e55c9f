"""A whole call in memory, as the runner handles it, from values drawn from bytes: the same bytes give the same values.

An input is three parts between record separators: the definition's row as a JSON object, the arguments as JSON, and the
answer, a byte for its status and its body. A part that is no JSON stands for an empty object.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, nullcontext
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, Self, TypeVar
from unittest import mock

import httpx
import orjson
from nats.js.errors import BucketNotFoundError

from openapi_tool import assembly
from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.protocol.cards import ArtifactCard, Card
from openapi_tool.protocol.command import Acknowledge, Command, Delivery, Report, Settlement
from openapi_tool.protocol.records import Artifact, CallRecords, CardRecord, DefinitionRecord, RequestEdgeRecord
from openapi_tool.settings import Settings
from openapi_tool.tools import definition, schema
from tests.support import BODY, HEADERS, SUBJECT, waiting_turn

Item = TypeVar("Item")

_MAX_DEPTH = 4
_LIST, _OBJECT = 6, 7
_CHAINS = (30, 100, 300)
_NUMBERS = (0, 1, -1, 7, 20_000, 2**63, -(2**64), 10**400, 0.5, -0.0, 1e308, float("inf"))


class Source:
    """Reader of values from `data`, followed by zeros. With `stored` only values that jsonb accepts."""

    def __init__(self, data: bytes, *, stored: bool = False) -> None:
        self._data = data
        self._stored = stored
        self._at = 0

    def byte(self) -> int:
        """Return a number from 0 to 255."""
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def below(self, count: int) -> int:
        """Return a number below `count`; uses two bytes if that is over 256."""
        number = self.byte() if count <= 1 << 8 else self.byte() << 8 | self.byte()
        return number % count

    def pick(self, items: Sequence[Item]) -> Item:
        """Return one of several items."""
        return items[self.below(len(items))]

    def take(self, count: int) -> bytes:
        """Return at most this many bytes."""
        self._at += count
        return self._data[self._at - count : self._at]

    def text(self, most: int = 40) -> str:
        """Return any text; unless `stored`, with lone surrogates for bytes that are no UTF-8."""
        data = self.take(self.below(most))
        return data.replace(b"\0", b"0").decode("utf-8", "replace" if self._stored else "surrogateescape")

    def rest(self) -> bytes:
        """Return the remaining bytes."""
        return self.take(len(self._data))

    def value(self, texts: Sequence[str], depth: int = 0) -> Any:
        """Return a JSON value with odd numbers, and with texts and keys from `texts` or any others."""
        kind = self.below(8 if depth < _MAX_DEPTH else 6)
        if kind == _LIST:
            return [self.value(texts, depth + 1) for _ in range(self.below(5))]
        if kind == _OBJECT:
            return self.object(texts, depth + 1)
        return self._scalar(kind, texts)

    def _scalar(self, kind: int, texts: Sequence[str]) -> Any:
        """Return a scalar, or one nested in many lists."""
        match kind:
            case 2:
                return self.text()
            case 3:
                return self.pick((None, True, False, [], {}, ""))
            case 4:
                return self.pick(_NUMBERS[: -1 if self._stored else None])
            case 5:
                return self._chain() if self.byte() > 1 << 7 else self.below(1 << 16)
            case _:
                return self.pick(texts)

    def object(self, texts: Sequence[str], depth: int = 0) -> dict[str, Any]:
        """Return a JSON object of up to seven members."""
        return {
            self.pick(texts) if self.byte() < 1 << 7 else self.text(12): self.value(texts, depth + 1)
            for _ in range(self.below(8))
        }

    def _chain(self) -> Any:
        """Return deeply nested lists or objects."""
        inner: Any = self.pick(("x", 1, None))
        wrap = self.below(2)
        for _ in range(self.pick(_CHAINS)):
            inner = {"a": inner} if wrap else [inner]
        return inner


# Values that jsonb accepts, checked independently of the code that converts them.


def assert_storable(value: Any) -> None:
    """Assert JSON of finite numbers, in UTF-8, without NUL, with integers of 64 bits."""
    orjson.dumps(value)  # as the driver does, which limits the depth
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    text.encode()
    assert "\\u0000" not in text.replace("\\\\", "")
    assert all(abs(number) <= 1 << 63 for number in _integers(value))


def _integers(value: Any) -> list[int]:
    if isinstance(value, dict):
        return [number for item in value.values() for number in _integers(item)]
    if isinstance(value, list | tuple):
        return [number for item in value for number in _integers(item)]
    return [value] if isinstance(value, int) else []


Handler = Callable[[Delivery], Awaitable[Settlement]]
SEPARATOR = b"\x1e"
MAX_BYTES = 256 * 1024
SECRET, OTHER = "a-key-of-the-fuzzer", "another-secret-of-the-fuzzer"
STATUSES = (200, 200, 200, 422, 429, 400, 402, 403, 409, 451, 500, 503, 524, 302)
_SHOWN_CHARS = 2_000
_HELD = timedelta(seconds=1)
_ENVIRONMENT = {"JINA_API_KEY": SECRET, "SEARCH_API_KEY": OTHER}
_SETTINGS = Settings(
    postgres={"dsn": "postgresql://nobody@127.0.0.1/nothing"},
    session={"key": "k" * 32},
    secrets={"allowed_env": ("SEARCH_API_KEY",)},
    tools={"max_result_chars": _SHOWN_CHARS},
    retry={"max_retries": 0},
    cache={"ttl_s": 0},
)


def joined(row: Any, arguments: Any, status: int, body: bytes) -> bytes:
    """Return an input from its parts."""
    place = STATUSES.index(status)
    return SEPARATOR.join([orjson.dumps(row), orjson.dumps(arguments), bytes([place]) + body])


def parts(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Split an input into row, arguments and response."""
    first, _, rest = data.partition(SEPARATOR)
    second, _, third = rest.partition(SEPARATOR)
    return first, second, third


def stored(text: bytes) -> dict[str, Any]:
    """Return a JSON object as stored by jsonb; empty if jsonb rejects it."""
    try:
        value = json.loads(text)
        assert_storable(value)
    except (ValueError, RecursionError, AssertionError, TypeError):
        return {}
    return value if isinstance(value, dict) else {}


def check(data: bytes) -> None:
    """Handle one call; raise AssertionError for a wrong result, or the exception of a defect."""
    row, arguments, answer = parts(data[:MAX_BYTES])
    row_object, arguments_object = stored(row), stored(arguments)
    with _Defects() as defects:
        began = time.process_time()
        settlement = _loop().run_until_complete(_KERNEL.handle(row_object, arguments_object, answer))
        _spent_s[:] = [time.process_time() - began]
    if defects.found:
        raise defects.found.pop()
    assert settlement == Acknowledge(), settlement
    for written, metadata in _KERNEL.written:
        assert_storable([written, metadata])
        assert SECRET not in json.dumps([written, metadata])
    content, _ = _KERNEL.written[0]
    if content["status"] == "success":
        assert len(str(content["result"])) <= 2 * _SHOWN_CHARS
    else:
        assert len(content["error"]["message"]) < 3 * _SHOWN_CHARS


_spent_s = [0.0]


def spent_s() -> float:
    """Return the CPU time of the last input in seconds, without that of the checks, which may take more."""
    return _spent_s[0]


def forget() -> None:
    """Clear the caches."""
    definition._parse_cache.clear()  # noqa: SLF001 - only tests clear it
    schema._compiled.clear()  # noqa: SLF001


class _Defects(logging.Handler):
    """Collect the exceptions that the pipeline logs as defects within the `with` block.

    A handler that stayed would take defects that other tests cause deliberately for those of the next input, and hide
    log lines from those tests.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[BaseException] = []
        self._logger = logging.getLogger("openapi_tool")

    def __enter__(self) -> Self:
        self._logger.addHandler(self)
        self._propagated, self._logger.propagate = self._logger.propagate, False
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.propagate = self._propagated
        self._logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Collect the exception."""
        if record.exc_info and record.exc_info[1] is not None:
            self.found.append(record.exc_info[1])


_loops: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    """Return one loop for all inputs."""
    if not _loops:
        _loops.append(asyncio.new_event_loop())
    return _loops[0]


def _consumer(handlers: list[Handler], handle: Handler) -> mock.Mock:
    handlers.append(handle)
    return mock.Mock()


def _client() -> mock.AsyncMock:
    """Return a connection to NATS without buckets."""
    buckets = mock.AsyncMock(key_value=mock.AsyncMock(side_effect=BucketNotFoundError))
    return mock.AsyncMock(jetstream=mock.Mock(return_value=buckets))


class _Kernel:
    """Kernel, doorbell and upstream of one call, in place of all servers that `serve` connects to."""

    def __init__(self) -> None:
        self.written: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._records = CallRecords(None, None, None, None, None, None)
        self._answer = b""
        self._handle = _loop().run_until_complete(self._assembled())

    async def _assembled(self) -> Handler:
        """Return the pipeline, built as `serve` builds it."""
        handlers: list[Handler] = []
        with ExitStack() as patches:
            for name, value in {
                "KernelStore": SimpleNamespace(open=self._open),
                "connected": lambda _: nullcontext(_client()),
                "upstream_transport": lambda *_: httpx.MockTransport(lambda _: self._response()),
                "WakeupPublisher": lambda *_: self,
                "_replica_count": mock.AsyncMock(return_value=1),
                "answering_stats": lambda *_: nullcontext(),
                "SwitchMonitor": lambda *_: mock.AsyncMock(),
                "CommandConsumer": lambda *given: _consumer(handlers, given[3]),
            }.items():
                patches.enter_context(mock.patch.object(assembly, name, value))
            stack, bootstrap = AsyncExitStack(), build_bootstrap(_SETTINGS, _ENVIRONMENT)
            await assembly.assemble(stack, bootstrap, assembly.open_shared(stack, bootstrap, None))
        return handlers[0]

    async def _open(self, _: object) -> _Kernel:
        return self

    async def handle(self, row: Mapping[str, Any], arguments: Mapping[str, Any], answer: bytes) -> Any:
        """Handle a call and return the settlement of its command."""
        self.written.clear()
        content = {"__type__": "ToolCallContent", "tool_name": "a_tool", "arguments": arguments}
        own = {"type": "tool.call", "author_id": "agent", "agent_turn_id": "turn"}
        more = row.get("metadata")
        self._answer = answer
        self._records = CallRecords(
            CardRecord("card", "call", content, (more if isinstance(more, dict) else {}) | own),
            DefinitionRecord("a_tool", row.get("after_execution"), row.get("parameters"), row.get("options")),
            "worker_generic",
            waiting_turn(),
            RequestEdgeRecord("edge", 0),
            None,
        )
        published_at = datetime.now(UTC) - _HELD  # otherwise each result would be delayed
        return await self._handle(Delivery(SUBJECT, HEADERS, orjson.dumps(BODY), published_at, 1, 1))

    def _response(self) -> httpx.Response:
        status = STATUSES[self._answer[0] % len(STATUSES)] if self._answer else 200
        return httpx.Response(status, stream=_Body(self._answer[1:]))

    async def load(self, _: Command) -> CallRecords:
        """Return the records of the call."""
        return self._records

    async def commit(self, card: Card, report: Report, artifact: ArtifactCard | None, *, retry: bool = False) -> bool:
        """Record content and metadata of the cards."""
        del report, retry
        self.written.append((card.content, card.metadata))
        if artifact:
            self.written.append((json.loads(artifact.content), artifact.metadata))
        return True

    async def artifact(self, *_: object) -> Artifact | None:
        """Return no artifact of earlier calls."""
        return None

    async def publish(self, *_: object) -> bool:
        """Do nothing."""
        return True

    async def aclose(self) -> None:
        """Do nothing."""


class _Body(httpx.AsyncByteStream):
    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __aiter__(self) -> Any:
        yield self._body


_KERNEL = _Kernel()
