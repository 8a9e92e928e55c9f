"""Fuzz targets by name; each takes bytes and raises an exception for a failure.

Inputs of `answer`: four bytes choose status, endpoint, limit and result format; the rest is the body. If the first byte
is `G`, the rest chooses status, headers and an envelope of known names instead.

Inputs of `command`: a message as text, with the subject on the first line, a header on each further line, an empty
line, and the body.

Inputs of `socket`: a server on loopback sends them to a connected client. If the first byte is even, the rest is sent
unchanged, as by a broken server. If it is odd, the rest is subject, reply, headers and body of one message, separated
by `|`, and framed as a real server would. Any client may publish such a message, so it must arrive, and be settled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import unicodedata
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from ipaddress import IPv4Address, IPv6Address, IPv6Network
from socket import inet_aton
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import idna
from nats.aio.msg import Msg
from pydantic import SecretStr
from yarl import URL

from openapi_tool.jina.byte_semaphore import ByteSemaphore
from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.request import UpstreamRequest
from openapi_tool.jina.response import Expected, NothingToShow, UpstreamResult
from openapi_tool.jina.url_policy import INTERNAL_SUFFIXES, UrlPolicy, checked_url
from openapi_tool.kernel.jetstream.dead_letter_records import dead_letter, decode, encode
from openapi_tool.kernel.jetstream.deliveries import ForeignMessage, delivery_of
from openapi_tool.nats_client.client import BusClient
from openapi_tool.protocol.cards import ToolCall, read_tool_call
from openapi_tool.protocol.command import HEARTBEAT_NAMES, Command, Delivery
from openapi_tool.protocol.errors import BadRequest, TargetRefused, ToolError, Unanswerable
from openapi_tool.protocol.headers import MAX_EPOCH
from openapi_tool.protocol.identity import CallIdentity, ClaimedIdentity
from openapi_tool.protocol.ids import MAX_ID_BYTES
from openapi_tool.protocol.jsontext import JsonObject
from openapi_tool.protocol.records import CardRecord, DefinitionRecord
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.tools.arguments import Arguments, ArgumentSources, OperatorEnvs, is_identity
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.definition_parser import parse_definition
from openapi_tool.tools.frames import framed
from openapi_tool.tools.output import ToolOutput
from openapi_tool.tools.placeholders import PLACEHOLDERS, placeholder_values, render
from openapi_tool.tools.result import RenderedResult, failure, success
from openapi_tool.tools.result_limit import ResultLimit
from openapi_tool.tools.schema import fits
from openapi_tool.tools.session_identities import SessionIdentities
from openapi_tool.tools.truncation import truncate, uncut_parts
from tests.answering import for_request
from tests.fuzz import corpora
from tests.fuzz.corpora import Source, assert_storable, mutate
from tests.support import V1R4, framed_items

SOCKET_MAX_BYTES = 8_192
WAIT_S = 10.0
_HALF_A_FRAME_S = 0.02
_MAX_PAYLOAD = 1 << 20
_INFO = b'INFO {"server_id":"x","version":"2.11.0","max_payload":%d,"headers":true}\r\n' % _MAX_PAYLOAD
_NOT_IN_A_SUBJECT = re.compile(rb"[ \t\r\n]")
_ACK = b"$JS.ACK.stream.durable.1.7.7.1767225600000000000.0"


class Server:
    """Server for one client; `sid` is the id of its subscription."""

    def __init__(self) -> None:
        self.writer: asyncio.StreamWriter | None = None
        self.sid = b""
        self.ready = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send INFO, and read what a client sends until it disconnects."""
        writer.write(_INFO)
        with suppress(OSError):
            while line := await reader.readline():
                self._take(line, writer)
        if self.writer is writer:
            self.writer = None
            self.ready.clear()
        writer.close()

    def _take(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        match line.split():
            case [b"SUB", *_, sid]:
                self.sid = sid
                self.writer = writer
                self.ready.set()
            case [b"PING"]:
                writer.write(b"PONG\r\n")

    async def subscribed(self) -> bytes:
        """Wait for the client's subscription and return its id. Raises TimeoutError."""
        async with asyncio.timeout(WAIT_S):
            await self.ready.wait()
        return self.sid

    async def send(self, data: bytes) -> None:
        """Send to the current or next connection. Raises TimeoutError."""
        await self.subscribed()
        if self.writer is not None:
            self.writer.write(data)

    def hang_up(self) -> None:
        """Drop the connection."""
        if self.writer is not None:
            self.writer.close()
            self.ready.clear()


class LoopbackClient(BusClient):
    """Client that ignores other servers named in INFO."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:  # noqa: FBT001, FBT002
        info.pop("connect_urls", None)
        await super()._process_info(info, initial_connection)


@dataclass
class World:
    """Server, client and received messages; `mark` differs for each input, so that no input can contain it."""

    server: Server
    client: BusClient
    arrived: list[Msg] = field(default_factory=list)
    marked: asyncio.Event = field(default_factory=asyncio.Event)
    defects: list[str] = field(default_factory=list)
    mark: bytes = b""

    async def hear(self, message: Msg) -> None:
        """Record a message, or the mark, which follows each input."""
        if message.data == self.mark:
            self.marked.set()
        else:
            self.arrived.append(message)

    async def check(self, data: bytes) -> None:
        """Send an input, then the mark."""
        self.arrived.clear()
        self.marked.clear()
        self.mark = secrets.token_bytes(8)
        framed = bool(data[:1] and data[0] & 1)
        sent = _frame(await self.server.subscribed(), data[1:]) if framed else data[1:]
        await self.server.send(sent + self._mark())
        if not await self._heard_in(WAIT_S if framed else _HALF_A_FRAME_S):
            assert not framed, "no message arrived after a well-framed one"
            self.server.hang_up()  # the client waits for the rest of a frame, or reconnects
            await self._assert_hears()
        assert not self.defects, self.defects
        assert not self.client.is_closed
        if framed:
            assert len(self.arrived) == 1
            _assert_settled(self.arrived[0])

    async def _assert_hears(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while not self.marked.is_set():
                await self.server.send(self._mark())
                await self._heard_in(_HALF_A_FRAME_S)

    def _mark(self) -> bytes:
        return b"MSG mark %b %d\r\n%b\r\n" % (self.server.sid, len(self.mark), self.mark)

    async def _heard_in(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.marked.wait()
        return self.marked.is_set()


def _frame(sid: bytes, data: bytes) -> bytes:
    subject, reply, headers, body = (data.split(b"|", 3) + [b""] * 4)[:4]
    subject = _NOT_IN_A_SUBJECT.sub(b"_", subject) or b"_"
    reply = _NOT_IN_A_SUBJECT.sub(b"_", reply) or _ACK
    if not headers:
        return b"MSG %b %b %b %d\r\n%b\r\n" % (subject, sid, reply, len(body), body)
    sizes = (len(headers), len(headers) + len(body))
    return b"HMSG %b %b %b %d %d\r\n%b%b\r\n" % (subject, sid, reply, *sizes, headers, body)


def _assert_settled(message: Msg) -> None:
    """Assert that a message is a command, a dead letter that can be stored and read again, or no delivery."""
    try:
        delivery = delivery_of(message)
    except ForeignMessage:
        return
    try:
        V1R4.decode(delivery)
    except Unanswerable as refusal:
        letter = dead_letter(delivery, refusal.reason, str(refusal), _REDACTOR)
        again = decode(encode(letter, _MAX_PAYLOAD), 1)
        assert (again.size, again.sha256, again.data) == (letter.size, letter.sha256, letter.data)


@asynccontextmanager
async def _world() -> AsyncIterator[World]:
    server, client = Server(), LoopbackClient()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    world = World(server, client)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: world.defects.append(str(context)))
    address = f"nats://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    await client.connect(
        address, error_cb=_ignore_error, max_reconnect_attempts=-1, reconnect_time_wait=0, ping_interval=3_600
    )
    await client.subscribe("mark", cb=world.hear)
    try:
        yield world
    finally:
        await client.close()
        server.hang_up()
        listening.close()
        await asyncio.sleep(_HALF_A_FRAME_S)  # until the transports are closed


async def _ignore_error(_: Exception) -> None:
    """Ignore errors, which are expected."""


class Player:
    """World that is used for all inputs."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._open = AsyncExitStack()
        self._world = self._loop.run_until_complete(self._open.enter_async_context(_world()))

    def check(self, data: bytes) -> None:
        """Check one input. Raises AssertionError and TimeoutError."""
        self._loop.run_until_complete(self._world.check(data))

    def close(self) -> None:
        """Close the world."""
        self._loop.run_until_complete(self._open.aclose())
        self._loop.close()


_REDACTOR = Redactor([])
_players: list[Player] = []


def check_socket(data: bytes) -> None:
    """Send one input to a shared client. Raises AssertionError, or TimeoutError if it no longer receives."""
    if not _players:
        _players.append(Player())
    _players[0].check(data)


def close_client() -> None:
    """Close the client of `check_socket`; the next input gets a new one."""
    while _players:
        _players.pop().close()


_RULES = UrlPolicy()
_METADATA = (IPv4Address("168.63.129.16"), IPv4Address("192.0.0.192"), IPv4Address("100.100.100.200"))
_NAT64 = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48"))
_SITE_LOCAL_OR_TEREDO = (IPv6Network("fec0::/10"), IPv6Network("2001::/32"))
_ISATAP = (b"\x00\x00\x5e\xfe", b"\x02\x00\x5e\xfe")
_INTERNAL_NAMES = (
    "metadata.google.internal",
    "metadata.goog",
    "metadata.tencentyun.com",
    "localhost",
    "r.jina.ai",
    "s.jina.ai",
)


def check_address(data: bytes) -> None:
    """Check one text; raise AssertionError for a wrong result, or the exception of a defect."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        url = checked_url(text, _RULES)
    except (BadRequest, TargetRefused) as refusal:
        assert refusal.message.startswith("url: ")
        assert refusal.message.isprintable()
        assert len(refusal.message) < 400
        return
    assert checked_url(url, _RULES) == url
    _assert_form(url)
    for host in {spelling for read in _hosts(url) for spelling in _host_forms(read)}:
        assert_public(host)


def _assert_form(url: str) -> None:
    parts = urlsplit(url)
    assert parts.scheme in ("http", "https")
    assert url.lower().startswith(f"{parts.scheme}://")
    assert (parts.username, parts.password) == (None, None)
    assert not any(char.isspace() or unicodedata.category(char) in ("Cc", "Cs") for char in url)
    assert "\\" not in url


def _hosts(url: str) -> Iterator[str]:
    """Yield the host as two libraries read it, and as a careless parser does: up to the first `/`, `?` or `#`."""
    yield urlsplit(url).hostname or ""
    with contextlib.suppress(ValueError):
        read = URL(url)
        assert read.user is None
        assert read.password is None
        yield read.host or ""
        yield read.raw_host or ""
    authority = url.split("://", 1)[1]
    for mark in "/?#":
        authority = authority.split(mark, 1)[0]
    yield authority.rsplit(":", 1)[0] if not authority.endswith("]") else authority


def _host_forms(host: str) -> Iterator[str]:
    """Return the forms of a host: decoded, folded, with and without invisible characters, in both IDNA standards."""
    plain = host.strip("[]")
    for text in {plain, unquote(plain), unquote(unquote(plain))}:
        folded = unicodedata.normalize("NFKC", text).casefold()
        visible = "".join(char for char in folded if unicodedata.category(char)[0] != "C" and char != "\u034f")
        for form in {text, folded, visible, unicodedata.normalize("NFKC", visible)}:
            yield form
            with contextlib.suppress(UnicodeError):
                yield form.encode("idna").decode()
            with contextlib.suppress(UnicodeError):
                yield idna.encode(form, uts46=True).decode()
            with contextlib.suppress(UnicodeError):
                yield idna.decode(form)


def assert_public(host: str) -> None:
    """Assert that a host is no internal name and no address that the standard library lists as not public."""
    name = host.lower().replace("\u3002", ".").removesuffix(".")
    address = _address(name)
    if address is not None:
        _assert_public_address(address)
        return
    assert "." in name, f"{host!r} has no dot"
    assert name not in _INTERNAL_NAMES, f"{host!r} is internal"
    assert not name.endswith(INTERNAL_SUFFIXES), f"{host!r} is internal"


def _address(name: str) -> IPv4Address | IPv6Address | None:
    """Return the address that the C library or the standard library reads, None if neither does."""
    with contextlib.suppress(ValueError):
        return IPv6Address(name)
    with contextlib.suppress(OSError, ValueError, UnicodeError):
        return IPv4Address(inet_aton(name))
    return None


def _assert_public_address(address: IPv4Address | IPv6Address) -> None:
    # Newer versions of Python treat all of 2002::/16 as not global; the embedded address is checked below.
    is_6to4 = isinstance(address, IPv6Address) and address.sixtofour is not None
    assert address.is_global or is_6to4, f"{address} is not public"
    assert not address.is_multicast, f"{address} is not public"
    assert address.version != 4 or not address.is_reserved, f"{address} is not public"
    assert address not in _METADATA, f"{address} is a metadata service"
    if isinstance(address, IPv6Address):
        assert address.packed[8:12] not in _ISATAP, f"{address} holds an address of a site"
        assert not any(address in network for network in _SITE_LOCAL_OR_TEREDO), f"{address} is not public"
        for inner in _inside(address):
            _assert_public_address(inner)


def _inside(address: IPv6Address) -> Iterator[IPv4Address]:
    """Yield the IPv4 addresses that a gateway or operating system would extract from an IPv6 one."""
    yield from filter(None, (address.ipv4_mapped, address.sixtofour))
    if any(address in network for network in _NAT64) or address.packed.startswith(bytes(12)):
        yield IPv4Address(address.packed[12:])


SECRET = "a-key-of-the-fuzzer"
_PARAMETERS = {"q": "a query", "respondWith": "no-content"}
_OFFERED = frozenset({"wait_for_selector", "target_selector", "max_tokens", "count", "no_cache"})
_STATUSES = (200, 200, 200, 422, 429, 400, 402, 403, 409, 451, 500, 503, 524, 302)
_LIMITS = (100_000, 2_000, 600, 501)
_RETRY_AFTER = (None, None, "1", "Wed, 21 Oct 2026 07:28:00 GMT", "-1", "1e400", "9" * 5_000, "²", "soon")
_LENGTHS = (None, None, None, "0", "²", "9" * 5_000, "-1", "ten")
_MAX_BYTES = 200_000
_ANSWER_TEXTS = (
    *("data", "title", "url", "content", "description", "warning", "links", "images", "chunks", "html", "text"),
    *("usage", "tokens", "meta", "siteLinks", "link", "snippet", "publishedTime", "numPages", "date", "source"),
    *("imageUrl", "screenshotUrl", "pageshotUrl", "code", "status", "message", "readableMessage", "name", "retryAfter"),
    *(
        "retryAfterDate",
        "0",
        "1",
        "No search results available for query x",
        "a.png,data:x",
        "https://a.b/",
        "Error: x",
    ),
    *(
        "[Untrusted web content between marks 123456789:",
        "[123456789 end]",
        "\x00",
        "\ud800",
        "a\n\nb. c",
        "x" * 700,
        SECRET,
    ),
)


def check_answer(data: bytes) -> None:
    """Process one response; raise AssertionError for a wrong result, or the exception of a defect."""
    source = Source(data)
    drawn = data[:1] == b"G"
    status, operation = source.below(len(_STATUSES)), "search" if source.below(2) else "reader"
    limit, form = source.pick(_LIMITS), source.pick(("text", "object"))
    headers: dict[str, str | None] = {}
    if drawn:
        status = source.below(len(_STATUSES))
        headers = {"retry-after": source.pick(_RETRY_AFTER), "content-length": source.pick(_LENGTHS)}
        body = json.dumps(_envelope(source)).encode()
    else:
        body = source.rest()
    try:
        expected = Expected(operation, _PARAMETERS, offered=_OFFERED)
        output = _fetched(expected, _STATUSES[status], {name: text for name, text in headers.items() if text}, body)
        if isinstance(output, NothingToShow):
            raise output.error
    except ToolError as error:
        assert SECRET not in error.message
        assert_storable(failure(error, 1).result)
        assert error.message.isprintable()
        assert error.retry_after is None or 0 <= error.retry_after <= 1e9
        return
    _assert_shown(output, limit, "object" if form == "object" else "text")


def _envelope(source: Source) -> Any:
    envelope: Any = source.object(_ANSWER_TEXTS)
    kind = source.below(4)
    if kind:
        envelope["data"] = (
            [source.object(_ANSWER_TEXTS) for _ in range(source.below(6))]
            if kind == 1
            else source.object(_ANSWER_TEXTS)
        )
    return envelope


def _fetched(expected: Expected, status: int, headers: Mapping[str, str], body: bytes) -> UpstreamResult:
    request = UpstreamRequest("POST", "r.jina.ai", "/", {"Accept": "application/json"}, b"{}", expected)
    answer = httpx.Response(status, headers=httpx.Headers(dict(headers), encoding="utf-8"), stream=_Body(body))
    client = JinaClient(httpx.MockTransport(lambda _: answer), _MAX_BYTES)
    fetching = client.fetch(
        request, SecretStr(SECRET), Deadline.after(5), for_request(ByteSemaphore(10 * _MAX_BYTES).for_call())
    )
    return _loop().run_until_complete(fetching)


class _Body(httpx.AsyncByteStream):
    """Body of a response that ignores the declared length."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __aiter__(self) -> Any:
        yield self._body


_loops: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    """Return one loop for all inputs: a new one would take longer than an input."""
    if not _loops:
        _loops.append(asyncio.new_event_loop())
    return _loops[0]


def _assert_shown(output: ToolOutput, limit: int, form: Any) -> None:
    assert SECRET not in output.content
    parts = uncut_parts(output.items, ResultLimit(limit, limit))
    shown = framed(truncate(output.items, ResultLimit(limit, limit)).parts if parts is None else parts)
    assert len(shown) <= limit
    assert len(framed_items(shown)) <= len(output.items)
    fields = success(output, RenderedResult(shown, truncated=parts is None), form, 1)
    assert_storable([fields.result, fields.tool_output])


_SOURCES = ArgumentSources(
    OperatorEnvs(parameters=frozenset({"note"})), lambda _: SecretStr("the-key"), SessionIdentities(b"k" * 32)
)
_ARGUMENT_NAMES = (
    "query",
    "url",
    "count",
    "site",
    "session_id",
    "projectId",
    "api_key",
    "locale",
    "provider",
    "note",
    "urls",
)
_TEMPLATES = (
    *("{agent_id}", "{turn_epoch}", "a{project_id}b", "{step_id}{step_id}", "{{agent_id}}", "{trace_id}", "{}"),
    *("{context_box_id}", "{parent_step_id}", "{nobody}", "{agent_id", "agent_id}", "{agent_{step_id}id}", "plain"),
    *("{project_id.__class__}", "{0}", "%(agent_id)s", "${agent_id}", "{agent_id!r}", "{agent_id:>99}", "https://a.b/"),
)
_ARGUMENT_TEXTS = (*_ARGUMENT_NAMES, *_TEMPLATES)
_SCHEMA_WORDS = ("type", "string", "properties", "required", "enum", "$ref", "pattern", "items", "minimum", "const")
# An id's value may itself look like a template: it must not be rendered a second time.
_IDS = ("agent", "{project_id}", "{nobody}", "é", "x" * 200)


def check_arguments(data: bytes) -> None:
    """Prepare one call's arguments; raise AssertionError for wrong ones, or the exception of a defect."""
    source = Source(data, stored=True)
    identity = _identity(source)
    _check_render(source, identity)
    try:
        definition = parse_definition(_record(source))
        call = read_tool_call(_card(source), "call")
        arguments = _SOURCES.resolve(definition, call, identity)
    except ToolError as error:
        assert_storable(failure(error, 1).result)
        return
    _assert_prepared(arguments, definition, call)


def _identity(source: Source) -> CallIdentity:
    agent, step = source.pick(_IDS), source.pick((None, *_IDS))
    trace = source.pick((None, "0" * 31 + "1"))
    return CallIdentity("proj", agent, "public", "turn", source.below(3), "call", step, None, trace, None, None)


def _check_render(source: Source, identity: CallIdentity) -> None:
    """Compare the rendering of each text with an independent implementation."""
    values = placeholder_values(identity)
    assert tuple(values) == PLACEHOLDERS
    template = "".join(source.pick(_TEMPLATES) if source.byte() < 1 << 7 else source.text() for _ in range(3))
    names = re.findall(r"\{([^{}]*)\}", template)
    try:
        rendered = render(template, values, "here")
    except ToolError as error:
        assert any(not values.get(name) for name in names)
        assert "here" in error.message
        return
    assert all(values.get(name) for name in names)
    texts = re.split(r"\{[^{}]*\}", template)
    assert (
        rendered
        == "".join(text + (values[name] or "") for text, name in zip(texts, [*names, ""], strict=True) if name)
        + texts[-1]
    )


def _record(source: Source) -> DefinitionRecord:
    tool = CATALOGUE[source.pick(sorted(CATALOGUE))]
    parameters: Any = source.pick((None, tool.schema(), {}))
    if parameters is None:
        parameters = source.object((*_SCHEMA_WORDS, *_ARGUMENT_NAMES))
    options: JsonObject = {
        "jina": {"tool": tool.name, "mode": tool.operation.name},
        "args": {"defaults": _named(source), "fixed": _named(source)},
        "envs": {**source.pick(({}, {"api_key": "JINA_API_KEY"}, {"note": "JINA_API_KEY"}))},
    }
    return DefinitionRecord("a_tool", "suspend", parameters, options)


def _named(source: Source) -> dict[str, Any]:
    return {source.pick(_ARGUMENT_NAMES): source.value(_ARGUMENT_TEXTS) for _ in range(source.below(4))}


def _card(source: Source) -> CardRecord:
    applied: JsonObject = {
        "tool_args_defaults_applied": [source.pick(_ARGUMENT_NAMES) for _ in range(source.below(3))],
        "tool_args_fixed_applied": [source.pick(_ARGUMENT_NAMES) for _ in range(source.below(2))],
    }
    arguments = _named(source) | source.object(_ARGUMENT_TEXTS) if source.below(8) else source.value(_ARGUMENT_TEXTS)
    content = {"__type__": "ToolCallContent", "tool_name": "a_tool", "arguments": arguments}
    return CardRecord("card", "call", content, {"type": "tool.call", **applied})


def _assert_prepared(arguments: Arguments, definition: ToolDefinition, call: ToolCall) -> None:
    own = {*definition.fixed, *definition.envs, *call.fixed_applied, *call.defaults_applied}
    rules: Any = definition.schema.get("properties")
    for name in arguments.by_model:
        value, given = arguments.values[name], call.arguments[name]
        # Only a value that its schema refuses is read differently, such as "5" as 5, a text as a list of one.
        assert value is given or not fits({"properties": {name: rules[name]}}, {name: given}), name
        assert name not in own
    assert not any(is_identity(name) for name in arguments.values)
    for name in arguments.values.keys() - arguments.by_model:
        assert name in own or name in definition.defaults
    assert not arguments.values.keys() & definition.envs.keys() - definition.fixed.keys()
    assert re.fullmatch("[0-9a-f]{64}", arguments.session_identity)


_PUBLISHED = datetime(2026, 1, 1, tzinfo=UTC)


def check_command(data: bytes) -> None:
    """Decode one message; raise AssertionError for a wrong result, or the exception of a defect."""
    head, _, body = data.partition(b"\n\n")
    subject, *lines = head.decode("utf-8", "replace").split("\n")
    headers = {name: value for name, _, value in (line.partition(": ") for line in lines)}
    tokens = subject.split(".")
    is_text = not any(char == " " or (unicodedata.category(char) == "Cc" and char < "\x80") for char in subject)
    is_short = all(len(token.encode()) <= MAX_ID_BYTES for token in tokens[2:4])
    is_command = is_text and is_short and len(tokens) >= 8 and tokens[0] == "cg" and tokens[4:6] == ["cmd", "tool"]
    try:
        command = V1R4.decode(Delivery(subject, headers, body, _PUBLISHED, number=1, stream_sequence=1))
    except Unanswerable as refusal:
        assert not is_command
        assert refusal.reason == "bad_subject"
        return
    assert is_command
    _assert_identity(command.identity, tokens, headers)
    _assert_command(command)


def _assert_identity(identity: ClaimedIdentity, tokens: list[str], headers: Mapping[str, str]) -> None:
    assert (identity.project_id, identity.channel_id) == (tokens[2], tokens[3])
    sent = {value.strip() for value in headers.values()}
    ids = (identity.agent_id, identity.agent_turn_id, identity.step_id, identity.tool_call_id, identity.parent_step_id)
    for text in (*ids, identity.tracestate):
        assert text is None or (text in sent and "\x00" not in text)
    for number in (identity.turn_epoch, identity.recursion_depth):
        assert number is None or 0 <= number <= MAX_EPOCH
    if identity.trace is not None:
        assert identity.trace.traceparent()[2:] in {text[2:55] for text in sent}


def _assert_command(command: Command) -> None:
    if command.violation is None:
        identity = command.identity
        assert identity.agent_id
        assert identity.tool_call_id
        assert command.card_id
        assert command.tool_name
        assert command.after_execution in ("suspend", "terminate")
    else:
        assert_storable(failure(command.violation, 1).result)
    assert command.function_name not in HEARTBEAT_NAMES
    assert_storable([command.card_id, command.tool_name])


Mutate = Callable[[bytes, int, int, Callable[[bytes, int], bytes]], bytes]

TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "command": check_command,
    "arguments": check_arguments,
    "address": check_address,
    "answer": check_answer,
    "whole": corpora.check_whole,
    "socket": check_socket,
}
MAX_BYTES: Mapping[str, int] = dict.fromkeys(TARGETS, 4_096) | {
    "whole": corpora.WHOLE_MAX_BYTES,
    "socket": SOCKET_MAX_BYTES,
}
"""Maximum size of an input."""

MUTATORS: Mapping[str, Mutate] = {"whole": mutate}
"""Functions that mutate the inputs of a target by their structure, instead of bytewise."""

REPLAYED: Mapping[str, tuple[Callable[[], None], Callable[[], float]]] = {"whole": (corpora.forget, corpora.spent_s)}
"""Targets whose slow and large inputs are measured again without instrumentation. The two functions clear caches, and
return the CPU time of the last input."""
