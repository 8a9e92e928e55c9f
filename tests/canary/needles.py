"""The secrets of a canary run, and the servers that look for them.

A successful response contains the secrets of its request only: others would be text of the page, which is not masked.
An error contains every secret.
"""

from __future__ import annotations

import base64
import html
import json
import re
import secrets
import ssl
import threading
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, quote_plus

from aiohttp import web

_SPECIALS = "+/=%&<>~_ "
"""Characters between head and tail that encodings write differently."""

_DIGITS = 12
_KEPT_DIGITS = slice(2, 11)  # of a float's text: after the point, before rounded digits
_MARKDOWN = re.compile(r"([^\w\s]|_)")
"""Characters that the reader escapes in a page: punctuation may be Markdown there."""


@dataclass(frozen=True, slots=True)
class Canary:
    """A secret of two distinctive halves; one half in an output is a leak as well."""

    head: str
    specials: str
    tail: str

    @property
    def value(self) -> str:
        """Value that is set."""
        return f"{self.head}{self.specials}{self.tail}"

    @property
    def parts(self) -> tuple[str, str, str]:
        """Texts to search for: the whole value, and each half."""
        return self.value, self.head, self.tail


def new_canary(specials: str = _SPECIALS) -> Canary:
    """Return a secret that occurs nowhere else."""
    return Canary(f"Canary{secrets.token_hex(10)}", specials, f"{secrets.token_hex(10)}yranaC")


def new_number() -> Canary:
    """Return a secret of digits only, which JSON may contain as a number that parsers round."""
    head, tail = (str(secrets.choice(range(10 ** (_DIGITS - 1), 10**_DIGITS))) for _ in range(2))
    return Canary(head, "", tail)


def _aligned(before: int, encode: Callable[[bytes], bytes]) -> Callable[[str], str]:
    """Return base64 of a text after `before` bytes, without the characters that depend on adjacent bytes."""

    def encoded(text: str) -> str:
        whole = encode(b"\0" * before + text.encode())
        return whole[4 if before else 0 :].decode().rstrip("=")[:-1]

    return encoded


def _rounded(text: str) -> str:
    """Return digits as rounded by a parser without integers of this size; other text unchanged."""
    return repr(float(text))[_KEPT_DIGITS] if text.isdigit() and len(text) > _DIGITS else text


def _each(form: str) -> Callable[[str], str]:
    """Return an encoder that uses the same escape for every character."""
    return lambda text: "".join(form.format(ord(char)) for char in text)


_WHOLE: Mapping[str, Callable[[str], str]] = {
    "exact": str,
    "lower": str.lower,
    "upper": str.upper,
    "percent": lambda text: quote(text, safe=""),
    "percent_path": quote,
    "percent_lower": lambda text: re.sub("%..", lambda escape: escape[0].lower(), quote(text, safe="")),
    "percent_all": _each("%{:02X}"),
    "form": quote_plus,
    "json": lambda text: json.dumps(text)[1:-1],
    "json_twice": lambda text: json.dumps(json.dumps(text))[3:-3],
    "json_slash": lambda text: json.dumps(text)[1:-1].replace("/", r"\/"),
    "json_units": _each("\\u{:04x}"),
    "repr": lambda text: repr(text)[1:-1],
    "bytes": _each("\\x{:02x}"),
    "markdown": lambda text: _MARKDOWN.sub(r"\\\1", text),
    "html": html.escape,
    "entity_decimal": _each("&#{};"),
    "entity_hex": _each("&#x{:x};"),
    "entity_hex_upper": _each("&#x{:X};"),
    "hex": lambda text: text.encode().hex(),
    "hex_upper": lambda text: text.encode().hex().upper(),
}
ENCODINGS: Mapping[str, Callable[[str], str]] = {
    **_WHOLE,
    "rounded": _rounded,
    **{f"base64_{before}": _aligned(before, base64.b64encode) for before in range(3)},
    **{f"base64url_{before}": _aligned(before, base64.urlsafe_b64encode) for before in range(3)},
}
"""Encodings to search for."""


def encoded_forms(canary: Canary) -> list[str]:
    """Return a canary in encodings that others may use, alone and inside longer texts."""
    texts = [f"{before}{canary.value}{behind}" for before in ("", "u:", "me:") for behind in ("", "!")]
    in_base64 = [_in_base64(kind) for kind in (base64.b64encode, base64.urlsafe_b64encode)]
    return [
        *(encode(text) for text in (texts[0], texts[-1]) for encode in _WHOLE.values()),
        *(encode(text) for text in texts for encode in in_base64),
    ]


def _in_base64(encode: Callable[[bytes], bytes]) -> Callable[[str], str]:
    return lambda text: encode(text.encode()).decode()


@dataclass(frozen=True, slots=True)
class Hit:
    """A canary, by name, that was found in a sink in some encoding."""

    canary: str
    sink: str
    encoding: str


def search(canaries: Mapping[str, Canary], sinks: Mapping[str, bytes]) -> list[Hit]:
    """Search every sink for every canary in every encoding."""
    hits = []
    for name, canary in canaries.items():
        for encoding, encode in ENCODINGS.items():
            needles = {encode(part).encode() for part in canary.parts}
            hits += [
                Hit(name, sink, encoding)
                for sink, content in sinks.items()
                if any(needle in content for needle in needles)
            ]
    return hits


def planted(canaries: Mapping[str, Canary]) -> bool:
    """Check that the search finds each canary and each half of it in each encoding if it is planted."""
    for name, canary in canaries.items():
        for encoding, encode in ENCODINGS.items():
            leaks = {part: b"x" * 100 + encode(part).encode() + b"y" * 100 for part in canary.parts}
            matches = search({name: canary}, leaks)
            if not {Hit(name, part, encoding) for part in canary.parts} <= set(matches):
                return False
    return True


FAILS = "https://fails.example/"
"""Requests for this page fail, so that a batch fails in part."""

_FIELDS = ("title", "url", "description", "content", "text", "html", "publishedTime", "date", "warning", "source")
_OK, _FAILED = 200, 422
_WORDS = ("readableMessage", "message", "name")
_HOSTS = ("s.jina.ai", "r.jina.ai")


@dataclass(frozen=True, slots=True)
class Received:
    """Received request; `silent` if the model's own arguments contained secrets."""

    host: str
    target: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    silent: bool

    def __str__(self) -> str:
        return f"{self.target} {dict(self.headers)} {self.body.decode()}"

    def elsewhere(self, keys: Iterable[str], fields: Mapping[str, str]) -> bytes:
        """Return the request without its expected secrets: a key as bearer of a known host, each field once."""
        bearers = {f"Bearer {key}".encode() for key in keys} if self.host in _HOSTS else set()
        headers = [
            name + b": " + value
            for name, value in self.headers
            if name.lower() != b"authorization" or value not in bearers
        ]
        body = self.body
        for name, value in fields.items():
            body = body.replace(f"{json.dumps(name)}:{json.dumps(value)}".encode(), b"", 1)
        return b"\n".join([self.host.encode(), self.target.encode(), *headers, body])


class Upstream:
    """HTTPS on loopback for both hosts.

    It responds with `status`, as HTML if `html`. `silent` is for requests whose arguments contain secrets: their echo
    is no leak. `numbers` are secrets that it also sends as JSON numbers.
    """

    def __init__(self, certificate: Path, canaries: Mapping[str, Canary], numbers: Iterable[Canary] = ()) -> None:
        self.status = 200
        self.html = False
        self.silent = False
        self.received: list[Received] = []
        self._certificate = certificate
        self._canaries = canaries.values()
        self._numbers = list(numbers)

    async def __aenter__(self) -> Self:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(self._certificate)
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls).start()
        self.port: int = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        received = Received(request.host, request.raw_path, request.raw_headers, await request.read(), self.silent)
        self.received.append(received)
        fails = "fails.example" in f"{received.target}{received.body!r}"
        status = _FAILED if fails else self.status
        headers = {"X-Echo": request.headers.get("Authorization", ""), "Retry-After": "0", "Set-Cookie": "k=v"}
        text = self._text(received, status)
        return web.Response(status=status, text=text, content_type="application/json", headers=headers)

    def _text(self, received: Received, status: int) -> str:
        request = str(received)
        known = [canary for canary in self._canaries if status != _OK or canary.value in request]
        encoded = " ; ".join(self._rotated([text for canary in known for text in encoded_forms(canary)]))
        echo = (
            "" if self.silent else f"{encoded} {request} {json.dumps(request)} {b64encode(request.encode()).decode()}"
        )
        if self.html:
            return f"<html>{echo}</html>"
        page: dict[str, Any] = dict.fromkeys(_FIELDS, echo) | {"links": {echo: echo}, "images": [[echo, echo]]}
        for canary in self._numbers if echo else ():
            page |= dict.fromkeys(("publishedTime", "date", "numPages"), int(canary.value)) if canary in known else {}
        messages = dict.fromkeys(_WORDS, f"SomeError: {echo}")
        is_search = received.host.startswith("s.")
        return json.dumps({"code": status, "data": [page] if is_search else page, "meta": {}, **messages})

    def _rotated(self, texts: list[str]) -> list[str]:
        """Return the texts, rotated per request: only the first 300 characters of an error are shown."""
        start = 7 * len(self.received) % max(1, len(texts))
        return texts[start:] + texts[:start]


class Collector:
    """Server in its own thread, because exporters block while a loop ends; `bodies` are the raw requests."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nothing is logged."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
