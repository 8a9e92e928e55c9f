"""Upstream double that echoes the request's headers and body, and secrets in every encoding.

A successful response contains the secrets of its request only: others would be text of the page, which is not masked.
An error contains every secret.
"""

from __future__ import annotations

import json
import ssl
from base64 import b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from tests.canary.needles import Canary, encoded_forms

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
