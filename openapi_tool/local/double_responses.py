"""Texts and responses of the double: a recorded text, changed as a rule says."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping

from aiohttp import web

from openapi_tool.local.recordings import Recording, on_site
from openapi_tool.local.request_content import RequestContent


def text_on_site(recording: Recording, content: RequestContent) -> str:
    """Return the recorded body; if another search was recorded, with its results on the site that this one asks for."""
    text = recording.body.decode()
    sites = [value for name, value in content.options if name == "site"]
    if not sites or recording.request == content:
        return text
    # Several sites may be named: `a.org,b.org` or `["a.org", "b.org"]`; a path may follow each.
    first_site, *_ = re.split(r"[\s,/\[\]\"]+", sites[0].strip('[" '))
    return on_site(text, first_site)


def padded(text: str, size: int) -> str:
    """Repeat or cut the content of the first item to `size` characters; 0 changes nothing."""
    if not size:
        return text
    envelope = json.loads(text)
    data = envelope.get("data")
    item = data
    if isinstance(data, list) and data:
        item = data[0]
    if not isinstance(item, dict):
        return text
    content = item.get("content") or "Lorem ipsum dolor sit amet. "
    item["content"] = (content * (size // len(content) + 1))[:size]
    return json.dumps(envelope)


def with_echo(text: str, request: web.Request) -> str:
    """Return the text with the request's headers, including the key, as some gateways do in errors."""
    # Escaped twice, as a gateway that quotes JSON does; without the outer quotes.
    headers = json.dumps(json.dumps(dict(request.headers)))[1:-1]
    envelope = json.loads(text)
    data = envelope.get("data")
    if isinstance(data, dict):
        data["content"] = f"{data.get('content', '')}\n{dict(request.headers)}"
    return json.dumps({**envelope, "readableMessage": f"Error: headers were {headers}"})


async def partial_response(request: web.Request, body: bytes, *, stall: bool) -> web.StreamResponse:
    """Send the first half of a body; then abort the connection, or with `stall` send nothing more."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(body))})
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    if stall:
        await asyncio.Event().wait()
    if request.transport is not None:
        request.transport.abort()
    return response


def json_response(status: int, text: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a response with a text, which need not be JSON: a rule may set another one."""
    kind = "application/json" if text.lstrip().startswith(("{", "[")) else "text/html"
    return web.Response(status=status, text=text, content_type=kind, charset="utf-8", headers=headers)
