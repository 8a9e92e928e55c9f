"""Corpora, mutations of their inputs, and the target whose inputs are mutated by structure: a whole call in memory.

Seeds are messages and addresses of the tests, and the recordings.

An input of `whole` has three parts, separated by record separators: the definition's row as a JSON object, the
arguments as JSON, and the response (a byte for its status, then its body). A part that is no JSON stands for an empty
object.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, nullcontext
from datetime import UTC, datetime, timedelta
from itertools import accumulate, chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, TypeVar
from unittest import mock

import httpx
import orjson
from nats.js.errors import BucketNotFoundError

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.jina.parameters import REFUSED
from openapi_tool.local.recordings import load_recordings
from openapi_tool.protocol.cards import ArtifactCard, ResultCard
from openapi_tool.protocol.command import Command, Delivery
from openapi_tool.protocol.records import Artifact, CallRecords, CardRecord, DefinitionRecord, RequestEdgeRecord
from openapi_tool.protocol.report import Report, TurnCondition
from openapi_tool.protocol.settlement import Acknowledge, Settlement
from openapi_tool.service import kernel_parts, process_parts
from openapi_tool.settings import Settings
from openapi_tool.tools import compiled_schema, definition_parser
from openapi_tool.tools.catalogue import CATALOGUE
from tests.support import BODY, HEADERS, SUBJECT, SentByMock, waiting_turn
from tests.unit import test_url_policy as addresses

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
        """Return a JSON value with unusual numbers; its texts and keys are from `texts` or arbitrary."""
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
WHOLE_MAX_BYTES = 256 * 1024
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


def check_whole(data: bytes) -> None:
    """Handle one call; raise AssertionError for a wrong result, or the exception of a defect."""
    row, arguments, answer = parts(data[:WHOLE_MAX_BYTES])
    row_object, arguments_object = stored(row), stored(arguments)
    given_by_caller = SECRET in json.dumps([row_object, arguments_object])  # what he sends is quoted unmasked
    with _Defects() as defects:
        began = time.process_time()
        settlement = _loop().run_until_complete(_KERNEL.handle(row_object, arguments_object, answer))
        _spent_s[:] = [time.process_time() - began]
    if defects.found:
        raise defects.found.pop()
    assert settlement == Acknowledge(), settlement
    for written, metadata in _KERNEL.written:
        assert_storable([written, metadata])
        assert SECRET not in json.dumps([written, metadata]) or given_by_caller
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
    definition_parser._parse_cache.clear()  # noqa: SLF001 - only tests clear it
    compiled_schema._cache.clear()  # noqa: SLF001


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
    """Return one loop for all inputs: a new one would take longer than an input."""
    if not _loops:
        _loops.append(asyncio.new_event_loop())
    return _loops[0]


def _consumer(handlers: list[Handler], handle: Handler) -> mock.Mock:
    handlers.append(handle)
    return mock.Mock()


def _client() -> mock.AsyncMock:
    """Return a connection to NATS without buckets."""
    missing = mock.AsyncMock(side_effect=BucketNotFoundError)
    buckets = mock.AsyncMock(key_value=missing)
    return mock.AsyncMock(jetstream=mock.Mock(return_value=buckets))


class _Kernel:
    """Kernel, doorbell and upstream of one call, in place of all servers that `serve` connects to."""

    def __init__(self) -> None:
        self.written: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
        self._records = CallRecords(None, None, None, None, None, None)
        self._answer = b""
        self._handle = _loop().run_until_complete(self._assembled())

    async def _assembled(self) -> Handler:
        """Return the pipeline, built as `serve` builds it."""
        handlers: list[Handler] = []
        with ExitStack() as patches:
            for name, value in {
                "KernelStore": SimpleNamespace(open=self._open),
                "connect_to_nats": mock.AsyncMock(return_value=_client()),
                "DoorbellPublisher": lambda *_: self,
                "replica_count": mock.AsyncMock(return_value=1),
                "answering_stats": lambda *_: nullcontext(),
                "SwitchMonitor": lambda *_: mock.AsyncMock(),
                "Slots": mock.Mock(),  # no consumer begins calls in them
                "CommandConsumer": lambda *given: _consumer(handlers, given[3]),
            }.items():
                patches.enter_context(mock.patch.object(kernel_parts, name, value))
            transport = SentByMock(lambda _: self._response())
            patches.enter_context(mock.patch.object(process_parts, "upstream_transport", return_value=transport))
            stack, bootstrap = AsyncExitStack(), build_bootstrap(_SETTINGS, _ENVIRONMENT)
            await kernel_parts.assemble(stack, bootstrap, process_parts.open_process_parts(stack, bootstrap, None))
        return handlers[0]

    async def _open(self, _: object) -> _Kernel:
        return self

    async def handle(self, row: Mapping[str, Any], arguments: Mapping[str, Any], answer: bytes) -> Any:
        """Handle a call and return the settlement of its command."""
        self.written.clear()
        content: dict[str, Any] = {"__type__": "ToolCallContent", "tool_name": "a_tool", "arguments": arguments}
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
        published_at = datetime.now(UTC) - _HELD  # a result is not delayed any more (ADR 8)
        return await self._handle(Delivery(SUBJECT, HEADERS, orjson.dumps(BODY), published_at, 1, 1))

    def _response(self) -> httpx.Response:
        status = STATUSES[self._answer[0] % len(STATUSES)] if self._answer else 200
        return httpx.Response(status, stream=_Body(self._answer[1:]))

    async def load(self, _: Command) -> CallRecords:
        """Return the records of the call."""
        return self._records

    async def commit(
        self,
        card: ResultCard,
        report: Report,
        artifact: ArtifactCard | None,
        condition: TurnCondition | None,
        *,
        retry: bool = False,
    ) -> bool:
        """Record content and metadata of the cards."""
        del report, condition, retry
        self.written.append((card.content, card.metadata))
        if artifact:
            self.written.append((json.loads(artifact.content), artifact.metadata))
        return True

    async def is_turn_busy(self, *_: object) -> bool:
        """No other result is unread."""
        return False

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


_MAX_BYTES = 3_000
CORPUS = Path(__file__).parent / "corpus"
BROKE = "found-"
"""Prefix of saved inputs that once caused a failure; a merge never removes them."""

MAX_INPUTS, MAX_TOTAL_BYTES = 300, 300_000


def saved(name: str) -> dict[str, bytes]:
    """Return a target's saved inputs by name."""
    if not _file(name).exists():
        return {}
    entries = map(json.loads, _file(name).read_text(encoding="utf-8").splitlines())
    return {entry["name"]: entry["data"].encode("latin-1") for entry in entries}


def save(name: str, inputs: Iterable[bytes]) -> None:
    """Save the smallest inputs up to the limit, and all that once caused a failure."""
    ordered = sorted(inputs, key=lambda data: (len(data), data))
    chosen = {known: data for known, data in saved(name).items() if known.startswith(BROKE)}
    sizes = accumulate(map(len, ordered), initial=sum(map(len, chosen.values())))
    next(sizes)  # that of the chosen ones
    for data, size in zip(ordered[: MAX_INPUTS - len(chosen)], sizes, strict=False):
        if size <= MAX_TOTAL_BYTES:
            chosen[hashlib.sha256(data).hexdigest()[:16]] = data
    entries = ({"name": known, "data": data.decode("latin-1")} for known, data in chosen.items())
    _file(name).write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")


def _file(name: str) -> Path:
    return CORPUS / f"{name}.jsonl"


def seeds(name: str) -> list[bytes]:
    """Return the seeds of a target."""
    return list(
        {
            "command": _messages,
            "address": _addresses,
            "answer": _answers,
            "whole": _calls,
            "socket": _frames,
        }.get(name, _nothing)()
    )


def _nothing() -> Iterator[bytes]:
    yield bytes(64)


def _messages() -> Iterator[bytes]:
    body = orjson.dumps(BODY)
    headers = "\n".join(f"{name}: {text}" for name, text in HEADERS.items())
    yield f"{SUBJECT}\n{headers}\n\n".encode() + body
    yield f"{SUBJECT.replace('public', 'private')}\n{headers.lower()}\ntracestate: a=b\n\n".encode() + body[:-1]
    yield f"{SUBJECT}\n\n".encode() + orjson.dumps(
        {**BODY, "args": {}, "project_id": "x", "tool_name": "skills.job_watch"}
    )


def _addresses() -> Iterator[bytes]:
    texts = [*addresses.UNCHANGED, *(text for text, _ in addresses.REPAIRED), *chain(*addresses.MALFORMED.values())]
    texts += [f"https://{host}/" for host in addresses.REFUSED_HOSTS]
    for text in texts:
        if len(text) < _MAX_BYTES:
            yield text.encode("utf-8", "surrogateescape" if text.isascii() else "surrogatepass")


def _answers() -> Iterator[bytes]:
    for recording in load_recordings().values():
        if len(recording.body) < _MAX_BYTES:
            mode = b"\x01" if recording.name.startswith("s-") else b"\x00"
            status = {200: b"\x00", 422: b"\x03", 429: b"\x04", 400: b"\x05", 451: b"\x09"}.get(
                recording.status, b"\x0a"
            )
            yield status + mode + b"\x01\x00" + recording.body
    for depth in (100, 300, 500, 900, 5_000):
        nested = b"[" * depth + b"]" * depth
        yield b'\x00\x00\x00\x00{"data":{"content":"x","title":' + nested + b"}}"
        yield b"\x00\x00\x00\x00" + nested
    yield b"G" + bytes(range(200))


def _calls() -> Iterator[bytes]:
    """Yield every built-in tool with a recorded response of each kind, and hostile ones."""
    bodies = {name: recording for name, recording in load_recordings().items() if len(recording.body) < _MAX_BYTES}
    arguments = {
        "query": "hello",
        "queries": ["a", "b"],
        "url": "https://example.com/",
        "urls": ["https://example.com/"],
    }
    for number, tool in enumerate(CATALOGUE.values()):
        given = {name: value for name, value in arguments.items() if name in tool.arguments.model_fields}
        row = {"parameters": tool.schema(), "options": {"jina": {"mode": tool.operation.name, "tool": tool.name}}}
        for recording in list(bodies.values())[number :: len(CATALOGUE)]:
            if recording.status in STATUSES:
                yield joined(row, given, recording.status, recording.body)
    for row, given in _ATTACKS:
        yield joined(row, given, 200, b'{"code":200,"data":{"content":"x","links":{"0":"a,https://a.b/"}}}')


def _frames() -> Iterator[bytes]:
    """Yield valid and invalid lines of a server, and messages that any client may publish."""
    yield from (
        b"\x00PING\r\n+OK\r\nPONG\r\n",
        b'\x00INFO {"server_id":"y","max_payload":1048576,"headers":true,"ldm":true}\r\n',
        b"\x00-ERR 'Permissions Violation for Publish to \"a\"'\r\n-ERR 'Stale Connection'\r\n",
        b"\x00MSG a 1 r 5\r\nhello\r\nHMSG a 1 12 14\r\nNATS/1.0\r\n\r\nhi\r\n",
        b"\x00HMSG a 1 28 28\r\nNATS/1.0 503 No Responders\r\n\r\n\r\n",
        b"\x00MSG a 1 99\r\nhello",
    )
    headers = "".join(f"{name}: {text}\r\n" for name, text in HEADERS.items())
    yield f"\x01{SUBJECT}||NATS/1.0\r\n{headers}\r\n|".encode() + orjson.dumps(BODY)
    yield f"\x01{SUBJECT}".encode() + b"\xff|||{}"
    yield b"\x01a\x0bb|$JS.ACK.a.b.1.2.3.x.0|NATS/1.0 408\r\n\r\n|"
    yield b"\x01_|$JS.ACK._._.1.9.9.99999999999999999999999.0|NATS/1.0\r\nA\r\n:\r\n\xff: \xff\r\n\r\n|[" + b"[" * 600


_JINA = {"mode": "reader"}
_ATTACKS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"options": {"jina": _JINA, "envs": {"locale": "JINA_API_KEY"}}}, {"url": "https://a.b/"}),
    (
        {"options": {"jina": _JINA, "args": {"defaults": {"locale": "{agent_id}" * 9}}}},
        {"url": "r.jina.ai/" * 9 + "a.b"},
    ),
    ({"options": {"jina": _JINA | {"params": {"unknown": 1}, "headers": {"X-A": "b"}}}}, {"url": "a.b"}),
    ({"options": {"jina": _JINA}, "parameters": {"anyOf": [{"required": ["url"]}, {"type": "null"}]}}, {"url": "a.b"}),
    ({"options": {"jina": _JINA}, "parameters": {"properties": {"url": {"pattern": "(a+)+$"}}}}, {"url": "a" * 30}),
    ({"options": {"jina": _JINA}, "metadata": {"tool_args_fixed_applied": ["url"]}}, {"url": "a.b"}),
    ({"options": {"openapi": {"base_url": "https://s.jina.ai", "auth": {"env": "JINA_API_KEY"}}}}, {"query": "x"}),
)


_MAX_TIMES = 2_000
_DEPTHS = (2, 10, 60, 200)
_NAMES = (
    *(
        "parameters",
        "options",
        "jina",
        "args",
        "envs",
        "defaults",
        "fixed",
        "params",
        "headers",
        "mode",
        "tool",
        "method",
    ),
    *("path", "base_url", "auth_env", "timeout_s", "endpoint_template", "result_format", "suspend_timeout_seconds"),
    *("type", "properties", "required", "items", "enum", "const", "pattern", "anyOf", "oneOf", "allOf", "not", "$ref"),
    *("$defs", "if", "then", "else", "patternProperties", "additionalProperties", "unevaluatedProperties", "minLength"),
    *("uniqueItems", "contains", "dependentSchemas", "propertyNames", "prefixItems", "multipleOf", "format", "$id"),
    *(
        "query",
        "queries",
        "url",
        "urls",
        "cursor",
        "find",
        "count",
        "site",
        "session_id",
        "api_key",
        "timeout",
        "with_content",
    ),
    *(
        "data",
        "title",
        "content",
        "description",
        "warning",
        "links",
        "images",
        "chunks",
        "siteLinks",
        "usage",
        "tokens",
    ),
    *("meta", "code", "status", "message", "readableMessage", "name", "publishedTime", "numPages", "metadata", "text"),
    *("tool_args_defaults_applied", "tool_args_fixed_applied", "step_id", "trace_id", "0", "1", "html", "doNotTrack"),
    *sorted(REFUSED),
    *(name for tool in CATALOGUE.values() for name in tool.arguments.model_fields),
)
_TEXTS = (
    *_NAMES,
    *("", "search", "reader", "string", "object", "array", "https://example.com/", "https://r.jina.ai", "JINA_API_KEY"),
    *("{agent_id}", "{step_id}{trace_id}", "{nobody}", "(a+)+$", "^[a-z]{1,500}$", "a,https://a.b/", "#/$defs/a", "#"),
    *("a-key-of-the-fuzzer", "[End of web content.]", "[web content", "\u0000", "\u202e", "x://y@", "Error(", "jina_"),
    *("\ud7ff", "\U0001f600", "a" * 300, "No search results available for query x", "&#97;-key", "\\_"),
)
_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    0.5,
    1e308,
    2**53,
    -(2**63),
    2**64 - 1,
    "",
    [],
    {},
    [[]],
    {"": {}},
)
_NUMBER = (0, 1, 20, 10_000)

Change = Callable[[Any, random.Random], Any]


def mutate(data: bytes, most: int, seed: int, flip: Callable[[bytes, int], bytes]) -> bytes:
    """Return a mutated input of at most `most` bytes; `flip` changes bytes as libFuzzer does."""
    chance = random.Random(seed)  # noqa: S311 - libFuzzer's own seed
    pieces = list(parts(data))
    for _ in range(chance.choice((1, 1, 2, 4))):
        place = chance.randrange(3)
        pieces[place] = _answer(pieces[place], chance, flip) if place == 2 else _json(pieces[place], chance)
    changed = SEPARATOR.join(pieces)
    return changed if len(changed) <= min(most, WHOLE_MAX_BYTES) else flip(data, min(most, WHOLE_MAX_BYTES))


def _answer(piece: bytes, chance: random.Random, flip: Callable[[bytes, int], bytes]) -> bytes:
    status, body = piece[:1] or b"\0", piece[1:]
    if chance.random() < 0.1:
        status = bytes([chance.randrange(14)])
    if chance.random() < 0.15:
        return status + flip(body, len(body) + 64)
    return status + _json(body, chance)


def _json(text: bytes, chance: random.Random) -> bytes:
    """Return a JSON text with one random change."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = {}
    try:
        return orjson.dumps(_changed(value, chance))
    except TypeError:  # nested too deeply
        return text


def _changed(value: Any, chance: random.Random) -> Any:
    """Descend randomly, then change the value there."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        name = chance.choice(list(value))
        return {**value, name: _changed(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        return [*value[:place], _changed(value[place], chance), *value[place + 1 :]]
    return chance.choice(_CHANGES)(value, chance)


def _replace(_: Any, chance: random.Random) -> Any:
    return chance.choice(_VALUES) if chance.random() < 0.5 else chance.choice(_TEXTS)


def _most_times(value: Any) -> int:
    """Return how often a value may be repeated in an input without exhausting the fuzzer's memory."""
    return max(1, WHOLE_MAX_BYTES // len(orjson.dumps(value)))


def _grow(value: Any, chance: random.Random) -> Any:
    times = chance.randrange(1, min(_MAX_TIMES, _most_times(value) + 1))
    if isinstance(value, str):
        return value[:100] * times
    if isinstance(value, list):
        return (value[:10] or [None]) * times
    if isinstance(value, dict):
        filler = chance.choice(_VALUES)
        return value | {f"{chance.choice(_NAMES)}{number}": filler for number in range(times)}
    return [value] * times


def _nest(value: Any, chance: random.Random) -> Any:
    name = chance.choice(_NAMES)
    for _ in range(chance.choice(_DEPTHS)):
        value = {name: value} if name != "items" else [value]
    return value


def _branch(value: Any, chance: random.Random) -> Any:
    keyword = chance.choice(("anyOf", "oneOf", "allOf"))
    for _ in range(chance.randrange(1, 9)):
        if _most_times(value) == 1:
            break
        value = {keyword: [value, value]}
    return value


def _add(value: Any, chance: random.Random) -> Any:
    new = chance.choice((*_VALUES, *_TEXTS))
    if isinstance(value, dict):
        return {**value, chance.choice(_NAMES): new}
    return [*value, new] if isinstance(value, list) else {chance.choice(_NAMES): value}


def _drop(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict) and value:
        gone = chance.choice(list(value))
        return {name: inner for name, inner in value.items() if name != gone}
    return value[: len(value) // 2] if isinstance(value, str | list) else None


def _rename(value: Any, chance: random.Random) -> Any:
    if not isinstance(value, dict) or not value:
        return _replace(value, chance)
    old, new = chance.choice(list(value)), chance.choice(_TEXTS)
    return {new if name == old else name: inner for name, inner in value.items()}


def _splice(value: Any, chance: random.Random) -> Any:
    if not isinstance(value, str):
        return _add(value, chance)
    place = chance.randrange(len(value) + 1)
    return value[:place] + chance.choice(_TEXTS) + value[place:]


_CHANGES: tuple[Change, ...] = (_replace, _replace, _add, _add, _drop, _rename, _splice, _grow, _nest, _branch)
