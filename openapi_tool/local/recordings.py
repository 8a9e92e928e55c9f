"""Recorded requests to Jina's open-source server with its exact responses.

The server is jina-ai/reader of May 2026; pages are fixtures, and its error 429 is synthetic.

Each line of `recordings.jsonl.xz` contains one exchange as text, without the headers Host, User-Agent, Connection and
Content-Length; the last line all error classes. A recording answers each request with the same content, whether that is
a GET or a POST.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from operator import itemgetter
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from openapi_tool.local.request_content import (
    READER_HOST,
    SEARCH_HOST,
    RequestContent,
    UnknownRequest,
    parse_request,
)

RECORDED_HOSTS = ".fixture.test"
"""Suffix of every page in the recordings; executors read such pages only with it in `url_policy.allow`."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded response; `request` is None if no client may send the recorded request."""

    name: str
    status: int
    headers: Mapping[str, str]
    body: bytes
    request: RequestContent | None


def recording_of(request: RequestContent) -> Recording | None:
    """Return the recording of a request, or of one without its time limits, and options that no recording has."""
    responses = _recorded_responses()
    timeless = request.without_time_limits()
    return responses.get(request) or responses.get(timeless) or responses.get(timeless.without_unrecorded())


@cache
def _recorded_responses() -> Mapping[RequestContent, Recording]:
    responses: dict[RequestContent, Recording] = {}
    for recording in load_recordings().values():
        if recording.request is not None:  # if a request was recorded several times, the first by name counts
            responses.setdefault(recording.request, recording)
    return responses


@cache
def load_recordings() -> Mapping[str, Recording]:
    """Return the recordings by name."""
    return {exchange["name"]: _recording(exchange["name"], exchange["http"]) for exchange in exchanges()}


def exchanges() -> list[dict[str, str]]:
    """Return all exchanges by name: `name`, and the texts of request and response as `http`."""
    return sorted(_stored_lines()[:-1], key=itemgetter("name"))  # stored in the order that compresses best


@cache
def _stored_lines() -> list[Any]:
    stored = (files(__package__) / "data" / "jina" / "recordings.jsonl.xz").read_bytes()
    return [json.loads(line) for line in lzma.decompress(stored).splitlines()]


def _recording(name: str, exchange: str) -> Recording:
    """Parse an exchange: two HTTP messages, each below a heading line."""
    request_text, _, response_text = exchange.partition("\n### response")
    request = _message(request_text)
    response = _message(response_text)
    method, target, _ = request.first_line.split(" ")
    host = SEARCH_HOST if name.startswith("s-") else READER_HOST
    try:
        content = parse_request(host, method, target, request.headers, request.body)
    except UnknownRequest:
        content = None
    status = response.first_line.split(" ")[1]  # HTTP/1.1 200 OK
    return Recording(name, int(status), response.headers, response.body, content)


class _Message(NamedTuple):
    """An HTTP message."""

    first_line: str
    headers: Mapping[str, str]
    body: bytes


def _message(text: str) -> _Message:
    _heading, _, message = text.partition("\n")
    head, _, body = message.partition("\n\n")
    first_line, *header_lines = head.split("\n")
    headers = dict(line.split(": ", 1) for line in header_lines if ": " in line)
    return _Message(first_line, headers, body.strip().encode())


def on_site(body: str, site: str) -> str:
    """Return the body of a search with its results on another site: few searches of a site are recorded."""
    response = json.loads(body)
    results = response.get("data")
    if not isinstance(results, list):
        return json.dumps(response)
    for result in results:
        if isinstance(result, dict) and isinstance(result.get("url"), str):
            result["url"] = urlsplit(result["url"])._replace(netloc=site).geturl()
    return json.dumps(response)


def error_classes() -> Mapping[str, Mapping[str, Any]]:
    """Return the server's error classes by name: `http` (the status), `body`, perhaps `headers`."""
    return cast("Mapping[str, Mapping[str, Any]]", _stored_lines()[-1])


@cache
def error_bodies() -> Mapping[int, Mapping[str, Any]]:
    """Return an error body for each HTTP status, from the first error class by name."""
    bodies: dict[int, Mapping[str, Any]] = {}
    for _, entry in sorted(error_classes().items()):
        bodies.setdefault(entry["http"], entry["body"])
    return bodies
