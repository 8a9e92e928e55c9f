"""Attacks on keys and on the health server."""

from __future__ import annotations

import asyncio
import base64
import html
import json
import re
import resource
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from urllib.parse import quote

from openapi_tool.local.caller import ResultRows
from tests.hostile.case import Cases
from tests.hostile.scene import Scene, assert_failed, assert_succeeded, content_of
from tests.hostile.upstream import response

CASES = Cases()
_OPERATORS = "tool_misconfigured"  # code of an error that an operator must correct
_READER, _SEARCH = {"mode": "reader"}, {"mode": "search"}
_AUTHORIZATION = re.compile(rb"^authorization:.*$", re.IGNORECASE | re.MULTILINE)

REACH_A_THIRD_PARTY = (
    *("locale", "url", "q", "query", "customHeader", "customHeader.X-Leak", "userAgent", "userAgent ", "user-agent"),
    *("User_Agent", "referer", "X-Referer", "proxyUrl", "setCookies", "X-Set-Cookie", "injectPageScript", "site"),
    *("url.x", "html", "cookies", "custom_header.authorization", "viewport.width", "engine", "Api_Key", "apiKey"),
    *("api_key ", "api_key.x", "headers.x", " locale", "locale\u200b", "\uff4cocale", "unknown", "unknown.deep.er"),
)
"""Names in `envs` that may not take a key."""

EXECUTORS_OWN = (
    *("PG_DSN", "pg_dsn", "PGPASSWORD", "PGPASSFILE", "NATS_SERVERS", "Nats_Token", "OPENAPI_TOOL__SESSION__KEY"),
    *("OPENAPI_TOOL__NATS__PASSWORD", "OPENAPI_TOOL_CONFIG", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "NO_PROXY"),
    *("OTEL_EXPORTER_OTLP_HEADERS", "SSL_CERT_FILE", "CG_CONFIG_TOML", "PG_DSN_FILE", "PGPASSWORD_FILE"),
)
"""Variables that no tool may name."""

UNLISTED = ("PATH", "JINA_API_KEY_FILE", "JINA_API_KEY ", "jina_api_key", "SEARCH_API_KEY\n")
"""Variables that are not allowed; the tool's `auth_env` is used instead, as in the kernel's executor."""


def _shown(answer: ResultRows) -> str:
    return json.dumps(answer.card, default=str)


def _elsewhere(scene: Scene) -> bytes:
    """Return the upstream requests without the header with the key."""
    return _AUTHORIZATION.sub(b"", scene.sent())


def _assert_no_secret(scene: Scene, text: str | bytes, names: Iterable[str] = ()) -> None:
    """Assert that a text contains none of the secrets, by default of all."""
    data = text if isinstance(text, bytes) else text.encode()
    for name in names or scene.stage.secrets:
        assert scene.stage.secrets[name].encode() not in data, f"{name} came out"


@CASES.case("6")
async def keys_in_arguments_that_reach_a_third_party(scene: Scene) -> None:
    calls = [
        (await scene.define({"jina": jina, "envs": {name: "TENANT_TOKEN"}}), given)
        for jina, given in ((_READER, {"url": "https://example.com/"}), (_SEARCH, {"query": "x"}))
        for name in REACH_A_THIRD_PARTY
    ]
    for answer in await asyncio.gather(*(scene.call(tool, given) for tool, given in calls)):
        assert_failed(answer, _OPERATORS)
    assert scene.sent() == b"", "something was asked for"


@CASES.case("6")
async def keys_only_in_the_authorization_header(scene: Scene) -> None:
    tool = await scene.define({"jina": _SEARCH, "envs": {"api_key": "SEARCH_API_KEY"}})
    assert_succeeded(await scene.call(tool, {"query": "a key of its own"}))
    assert f"Bearer {scene.stage.secrets['SEARCH_API_KEY']}".encode() in scene.sent()
    _assert_no_secret(scene, _elsewhere(scene))


@CASES.case("6")
async def keys_in_defaults_and_fixed_values(scene: Scene) -> None:
    """Templates that name a key or the argument for it; then a fixed value of that argument."""
    for args in ({"defaults": {"locale": "{JINA_API_KEY}"}}, {"fixed": {"site": "{api_key}"}}):
        tool = await scene.define({"jina": _SEARCH, "args": args})
        assert_failed(await scene.call(tool, {"query": "x"}), _OPERATORS)
    tool = await scene.define({"jina": _SEARCH, "args": {"fixed": {"api_key": "the attacker's own"}}})
    await scene.call(tool, {"query": "fixed key"})
    _assert_no_secret(scene, _elsewhere(scene))


@CASES.case("7")
async def settings_of_the_executor_as_keys(scene: Scene) -> None:
    own = [{"jina": _SEARCH, "envs": {"api_key": name}} for name in (*EXECUTORS_OWN, "")]
    named = [{"jina": _SEARCH | {"auth_env": name}} for name in (*EXECUTORS_OWN, *UNLISTED)]
    tools = [await scene.define(options) for options in (*own, *named)]
    for answer in await asyncio.gather(*(scene.call(tool, {"query": "x"}) for tool in tools)):
        assert_failed(answer, _OPERATORS)
    assert scene.sent() == b"", "something was asked for"


@CASES.case("7", log_bytes=100_000)
async def variables_not_allowed_as_keys(scene: Scene) -> None:
    for name in UNLISTED:
        tool = await scene.define({"jina": _SEARCH, "envs": {"api_key": name}})
        assert_succeeded(await scene.call(tool, {"query": "x"}))
    bearers = {line for line in scene.sent().splitlines() if line.lower().startswith(b"authorization:")}
    assert {line.partition(b" ")[2].strip() for line in bearers} == {
        f"Bearer {scene.stage.secrets['JINA_API_KEY']}".encode()
    }


@CASES.case("10")
async def page_that_lists_candidates(scene: Scene) -> None:
    """Secrets that were not sent with this call are not masked: a mask would reveal which candidate is one."""
    others = [name for name in scene.stage.secrets if name != "JINA_API_KEY"]
    candidates = " ; ".join(scene.stage.secrets[name] for name in others)
    body = {"code": 200, "data": {"title": candidates, "url": "https://a.example/", "content": f"Is it {candidates}?"}}
    _serve(scene, "candidates", body)
    shown = _shown(await scene.read("https://example.com/attack-candidates"))
    assert shown.count(candidates) >= 2, "a gap"
    _assert_no_secret(scene, scene.log())


def _serve(scene: Scene, name: str, body: object, status: int = 200) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    (scene.stage.answers / name).write_bytes(response(raw, status))


def encodings(secret: str) -> Mapping[str, str]:
    """Return a secret in encodings that others may use."""
    escaped = re.sub(r"([^\w\s])", r"\\\1", secret)
    return {
        "exact": secret,
        "markdown": secret.replace("_", "\\_"),
        "markdown of everything": escaped.replace("_", "\\_"),
        "slashes": secret.replace("/", "\\/"),
        "decimal entities": "".join(f"&#{ord(char)};" for char in secret),
        "hexadecimal entities": "".join(f"&#x{ord(char):x};" for char in secret),
        "entities in capitals": "".join(f"&#X{ord(char):X};" for char in secret),
        "entities": html.escape(secret),
        "hexadecimal": secret.encode().hex(),
        "hexadecimal capitals": secret.encode().hex().upper(),
        "capitals": secret.upper(),
        "small": secret.lower(),
        "percent": quote(secret, safe=""),
        "percent of everything": "".join(f"%{ord(char):02x}" for char in secret),
        "base64": base64.b64encode(f"user:{secret}".encode()).decode(),
        "json": json.dumps(secret)[1:-1],
        "unicode escapes": "".join(f"\\u{ord(char):04x}" for char in secret),
    }


MARKED = "Marked"
ESCAPED_EVERYWHERE = {"percent of everything", "unicode escapes"}
"""Encodings that do not occur by accident; excluded from the test."""


@CASES.case("10")
async def page_that_repeats_the_key(scene: Scene) -> None:
    key = scene.stage.secrets["JINA_API_KEY"]
    encoded = {name: form for name, form in encodings(key).items() if name not in ESCAPED_EVERYWHERE}
    lines = "\n".join(f"{MARKED} {name}: {form}!" for name, form in encoded.items())
    page = {"title": key, "url": f"https://a.example/{key}", "content": lines, "warning": key, "publishedTime": key}
    _serve(scene, "repeats", {"code": 200, "data": page})
    shown = _shown(await scene.read("https://example.com/attack-repeats"))
    for name, form in encoded.items():
        assert f"{MARKED} {name}" in shown
        assert json.dumps(form)[1:-1] not in shown, name
    _assert_no_secret(scene, shown, ["JINA_API_KEY"])


@CASES.case("10")
async def search_that_repeats_the_key(scene: Scene) -> None:
    key = scene.stage.secrets["JINA_API_KEY"]
    fields = ("title", "url", "description", "content", "date", "source", "warning", "imageUrl")
    result: dict[str, object] = {
        **dict.fromkeys(fields, key),
        "siteLinks": [{"title": key, "link": key, "snippet": key}],
    }
    result |= {"links": {key: key}, "images": [[key, key]], "usage": {"tokens": 3}}
    _serve(scene, "repeated", {"code": 200, "data": [result, {key: key, "title": "x"}]})
    for shape in ("text", "object"):
        tool = await scene.define({"jina": _SEARCH, "result_format": shape})
        _assert_no_secret(scene, _shown(await scene.call(tool, {"query": f"attack-repeated {shape}"})))


@CASES.case("10")
async def failures_that_repeat_every_secret(scene: Scene) -> None:
    """In a single call, and in an item of a batch that succeeds: the call's own are masked, as it sent no other.

    A page that lists candidates would learn from a mask which one is a secret.
    """
    others = [secret for name, secret in scene.stage.secrets.items() if name != "JINA_API_KEY"]
    everything = " ".join(scene.stage.secrets.values())
    words = dict.fromkeys(("readableMessage", "message", "name", "retryAfterDate"), f"Error: {everything}")
    for status in (400, 402, 409, 422, 451):
        _serve(scene, f"tells_{status}", {"code": status, "status": status * 100, "data": None, **words}, status)
        single = await scene.read(f"https://example.com/attack-tells_{status}")
        batch = await scene.read({"urls": ["https://example.com/good", f"https://example.com/attack-tells_{status}"]})
        assert content_of(single)["status"] != "success"
        assert_succeeded(batch)
        for answer in (single, batch):
            _assert_no_secret(scene, _shown(answer), ["JINA_API_KEY"])
            assert [secret for secret in others if secret not in _shown(answer)] == [], "a gap"
    _assert_no_secret(scene, scene.log())


@CASES.case("10")
async def command_with_every_secret(scene: Scene) -> None:
    """A dead letter contains none of them, whatever part of the command had it."""
    everything = " ".join(scene.stage.secrets.values())
    call = await scene.place("nothing", {}, publish=False)
    await scene.caller.publish(call, headers={"X-Note": everything}, data=json.dumps({"note": everything}).encode())
    [letter] = await scene.letters()
    _assert_no_secret(scene, json.dumps(letter))
    if data := letter.get("data_base64"):
        _assert_no_secret(scene, base64.b64decode(data))
    _assert_no_secret(scene, scene.log())


SOCKETS = 1_200
CALLS = 20
READY_S = 8.0
_SPARE = 300


@asynccontextmanager
async def _connections(scene: Scene, number: int, data: bytes) -> AsyncIterator[list[asyncio.StreamWriter]]:
    """Open `number` connections and send `data` on each; the server may close some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, number + _SPARE)), hard))
    writers: list[asyncio.StreamWriter] = []
    try:
        for _ in range(number):
            with suppress(OSError):  # one that the server closed
                _, writer = await asyncio.open_connection("127.0.0.1", scene.stage.health_port)
                writers.append(writer)
                writer.write(data)
        yield writers
    finally:
        for writer in writers:
            writer.close()


async def _ready(scene: Scene) -> None:
    """Wait for a complete response to a probe. Raises TimeoutError."""
    async with asyncio.timeout(READY_S):
        while True:
            with suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection("127.0.0.1", scene.stage.health_port)
                writer.write(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                data = await reader.read()
                writer.close()
                if b'"ready"' in data:
                    return
            await asyncio.sleep(0.05)


async def _calls_succeed(scene: Scene) -> None:
    tool = await scene.define()
    for answer in await scene.calls(CALLS, tool, {"query": "beside the health server {n}"}):
        assert_succeeded(answer)


@CASES.case("14")
async def incomplete_requests(scene: Scene) -> None:
    async with _connections(scene, SOCKETS, b"GET /readyz HTTP/1.1\r\nHost: "):
        await _calls_succeed(scene)
        await _ready(scene)


@CASES.case("14")
async def idle_connections(scene: Scene) -> None:
    async with _connections(scene, SOCKETS, b""):
        await _calls_succeed(scene)
        await _ready(scene)


@CASES.case("14")
async def slow_requests(scene: Scene) -> None:
    async with _connections(scene, 100, b"GET /readyz HTTP/1.1\r\n") as writers:
        for _ in range(20):
            for writer in writers:
                with suppress(OSError):
                    writer.write(b"X")
            await asyncio.sleep(0.02)
        await _calls_succeed(scene)
        await _ready(scene)


@CASES.case("14")
async def headers_and_bodies_of_ten_megabytes(scene: Scene) -> None:
    head = b"GET /readyz HTTP/1.1\r\nHost: x\r\nX-Long: "
    body = b"POST /readyz HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n"
    async with _connections(scene, 8, head + b"x" * 10_000_000), _connections(scene, 8, body + b"x" * 9_000_000):
        await _calls_succeed(scene)
        await _ready(scene)


@CASES.case("14")
async def pipelined_requests(scene: Scene) -> None:
    one = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    async with _connections(scene, 8, one * 2_000):
        await _calls_succeed(scene)
        await _ready(scene)


@CASES.case("14")
async def endless_requests_for_metrics(scene: Scene) -> None:
    for _ in range(20):
        async with _connections(scene, 30, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"):
            await _ready(scene)
    await _calls_succeed(scene)


@CASES.case("14")
async def malformed_requests(scene: Scene) -> None:
    odd = (
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /readyz HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01" + b"\x00" * 200,
        b"GET " + b"/a" * 40_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /readyz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
        b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    )
    for data in odd:
        async with _connections(scene, 2, data):
            await asyncio.sleep(0.01)
    await _ready(scene)
