"""An upstream that says everything it knows: the request's headers and body, and secrets in every encoding.

In an answer these are the ones that it was sent: others would be a page's own words, and what is masked in those would
tell them. In an error it says every secret.
"""

from __future__ import annotations

import json
import ssl
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from tests.canary.needles import Canary, spoken

_FIELDS = ("title", "url", "description", "content", "text", "html", "publishedTime", "date", "warning", "source")
_OK = 200
_WORDS = ("readableMessage", "message", "name")


class Upstream:
    """HTTPS on loopback for both hosts.

    `status` is what it answers with, `html` takes the JSON away. `silent` is for requests in which a model says what it
    knows: an echo of that is no leak.
    """

    def __init__(self, certificate: Path, canaries: Mapping[str, Canary]) -> None:
        self.status = 200
        self.html = False
        self.silent = False
        self.targets: list[str] = []
        self.received: list[str] = []
        self._certificate = certificate
        self._canaries = canaries.values()

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
        self.targets.append(request.raw_path)
        seen = f"{dict(request.headers)} {await request.text()}"
        self.received.append(seen)
        headers = {"X-Echo": request.headers.get("Authorization", ""), "Retry-After": "0", "Set-Cookie": "k=v"}
        text = self._text(seen, is_search=request.host.startswith("s."))
        return web.Response(status=self.status, text=text, content_type="application/json", headers=headers)

    def _text(self, seen: str, *, is_search: bool) -> str:
        known = [canary for canary in self._canaries if self.status != _OK or canary.value in seen]
        spelled = " ; ".join(text for canary in known for text in spoken(canary))
        said = "" if self.silent else f"{seen} {json.dumps(seen)} {b64encode(seen.encode()).decode()} {spelled}"
        if self.html:
            return f"<html>{said}</html>"
        page: dict[str, Any] = dict.fromkeys(_FIELDS, said) | {"links": {said: said}, "images": [[said, said]]}
        told = dict.fromkeys(_WORDS, f"SomeError: {seen[-150:]} {said}")
        return json.dumps({"code": self.status, "data": [page] if is_search else page, "meta": {}, **told})
