"""Recorded requests to Jina's open-source server with its exact responses, looked up by request content.

The server is jina-ai/reader of May 2026; pages are fixtures, and its error 429 is synthetic.

Each line of `data/jina/recordings.jsonl.xz` contains one exchange as text; the last line contains all error classes.
The content of a request is its host, its subject (query or url) and its options under their names in a POST body. GET
and POST forms of the same content have the same response. This parser shares no code with the executor, so that it
detects mistakes there.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, unquote

SEARCH, READER = "s.jina.ai", "r.jina.ai"
RECORDED_HOSTS = ".fixture.test"
"""Suffix of every page in the recordings; executors read such pages only with it in `url_policy.allow`."""

# Name in a POST body of each option that a header can set.
HEADERS = {
    "dnt": "doNotTrack",
    "x-base": "base",
    "x-cache-tolerance": "cacheTolerance",
    "x-engine": "engine",
    "x-markdown-chunking": "markdownChunking",
    "x-max-tokens": "maxTokens",
    "x-md-link-style": "markdown.linkStyle",
    "x-no-cache": "noCache",
    "x-proxy": "proxy",
    "x-remove-selector": "removeSelector",
    "x-respond-timing": "respondTiming",
    "x-respond-with": "respondWith",
    "x-retain-images": "retainImages",
    "x-retain-links": "retainLinks",
    "x-robots-txt": "robotsTxt",
    "x-site": "site",
    "x-target-selector": "targetSelector",
    "x-timeout": "timeout",
    "x-token-budget": "tokenBudget",
    "x-wait-for-selector": "waitForSelector",
    "x-with-favicons": "withFavicons",
    "x-with-images-summary": "withImagesSummary",
    "x-with-links-summary": "withLinksSummary",
}
# Headers that set no option.
PLAIN_HEADERS = frozenset(
    {
        "accept",
        "accept-encoding",
        "authorization",
        "connection",
        "content-length",
        "content-type",
        "host",
        "user-agent",
    }
)
# Body fields of a search besides the options above.
SEARCH_FIELDS = frozenset(
    {
        *("q", "num", "type", "provider", "gl", "hl", "location", "page", "nfpr", "fallback"),
        *("site", "ext", "filetype", "intitle", "loc"),
    }
)
_MIN_UNREACHED_DIGITS = 5  # no recorded page reaches a token limit of five digits; the longest has 1,800 tokens
_ALIASES = {"count": "num"}
_SEARCH_PATHS = ("/", "/search")


class UnknownRequest(Exception):
    """Request that no client should send; the message names the unknown part."""


@dataclass(frozen=True, slots=True)
class RequestContent:
    """Content of a request, independent of its form (GET or POST)."""

    host: str
    subject: str
    options: frozenset[tuple[str, str]]

    def without_time_limits(self) -> RequestContent:
        """Return the same content without time limits, and without a token limit that no recorded page reaches."""
        return replace(self, options=frozenset(option for option in self.options if not _is_ignored(*option)))

    def text(self) -> str:
        """Return the content as text for messages."""
        return f"{self.host} {self.subject!r} {dict(sorted(self.options))}"


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded response."""

    name: str
    status: int
    headers: Mapping[str, str]
    body: bytes


def _is_ignored(name: str, value: str) -> bool:
    return name in ("timeout", "respondTiming") or (name == "maxTokens" and len(value) >= _MIN_UNREACHED_DIGITS)


def parse_request(host: str, method: str, target: str, headers: Mapping[str, str], body: bytes) -> RequestContent:
    """Parse a request. Raises UnknownRequest for forms, headers or fields that no client should send."""
    options = {HEADERS[name.lower()]: _text(value) for name, value in headers.items() if name.lower() in HEADERS}
    unknown = [name for name in headers if name.lower() not in HEADERS | dict.fromkeys(PLAIN_HEADERS)]
    if unknown:
        raise UnknownRequest(f"headers {sorted(unknown)}")
    fields = _body_fields(method, headers, body)
    path, _, query = target.partition("?")
    if host == READER and path != "/":
        fields["url"] = unquote(target[1:])
    elif query:
        for alias, value in parse_qsl(query, keep_blank_values=True, strict_parsing=True):
            name = _ALIASES.get(alias, alias)
            fields[name] = f"{fields[name]},{value}" if name in fields else value
    if host == SEARCH and path not in _SEARCH_PATHS:
        fields["q"] = unquote(path[1:])
    subject = fields.pop("q" if host == SEARCH else "url", "")
    known = SEARCH_FIELDS | set(HEADERS.values()) if host == SEARCH else set(HEADERS.values())
    unknown_fields = sorted(fields.keys() - known)
    if unknown_fields or not subject:
        raise UnknownRequest(f"fields {unknown_fields}" if unknown_fields else "no query or url")
    return RequestContent(host, subject, frozenset((options | fields).items()))


def _body_fields(method: str, headers: Mapping[str, str], body: bytes) -> dict[str, str]:
    if method == "GET" and not body:
        return {}
    content_type = next((value for name, value in headers.items() if name.lower() == "content-type"), "")
    if method != "POST" or content_type != "application/json":
        raise UnknownRequest(f"{method} with content type {content_type!r}")
    try:
        fields = json.loads(body)
    except ValueError:
        raise UnknownRequest("a body that is not JSON") from None
    return _flat(fields)


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + _ALIASES.get(name, name)] = _text(value)
    return flat


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value).replace(", ", ",")


@cache
def load_recordings() -> Mapping[str, Recording]:
    """Return the recordings by name."""
    return {recording.name: recording for recording, _ in _parsed()}


@cache
def recorded_responses() -> Mapping[RequestContent, Recording]:
    """Return the responses by recorded request. If a request was recorded several times, the first by name counts."""
    responses: dict[RequestContent, Recording] = {}
    for recording, request in _parsed():
        if request is not None:
            responses.setdefault(request, recording)
    return responses


@cache
def _parsed() -> tuple[tuple[Recording, RequestContent | None], ...]:
    return tuple(_parse(exchange["name"], exchange["http"]) for exchange in exchanges())


def exchanges() -> list[dict[str, str]]:
    """Return all exchanges as stored: `name`, and the texts of request and response as `http`."""
    return _stored_lines()[:-1]


@cache
def _stored_lines() -> list[Any]:
    stored = (files(__package__) / "data" / "jina" / "recordings.jsonl.xz").read_bytes()
    return [json.loads(line) for line in lzma.decompress(stored).splitlines()]


def _parse(name: str, text: str) -> tuple[Recording, RequestContent | None]:
    """Parse an exchange: two HTTP messages, each below a heading line. The request is None if no client may send it."""
    request, _, response = text.partition("\n### response")
    request_line, headers, body = _message(request.partition("\n")[2])
    status_line, response_headers, answer = _message(response.partition("\n")[2])
    method, target, _ = request_line.split(" ")
    recording = Recording(name, int(status_line.split(" ")[1]), response_headers, answer.strip().encode())
    host = SEARCH if name.startswith("s-") else READER
    headers = {key: value for key, value in headers.items() if key.lower() != "host"}
    try:
        return recording, parse_request(host, method, target, headers, body.strip().encode())
    except UnknownRequest:
        return recording, None


def _message(text: str) -> tuple[str, dict[str, str], str]:
    """Return the first line, the headers and the body of an HTTP message."""
    head, _, body = text.partition("\n\n")
    first, *lines = head.split("\n")
    return first, dict(line.split(": ", 1) for line in lines if ": " in line), body


def error_classes() -> Mapping[str, Mapping[str, Any]]:
    """Return the server's error classes by name: `http`, `body`, and `headers` if it sets any."""
    classes: Mapping[str, Mapping[str, Any]] = _stored_lines()[-1]
    return classes


@cache
def error_bodies() -> Mapping[int, Mapping[str, Any]]:
    """Return an error body for each HTTP status of the server's error classes, from the first class by name."""
    bodies: dict[int, Mapping[str, Any]] = {}
    for _, entry in sorted(error_classes().items()):
        bodies.setdefault(entry["http"], entry["body"])
    return bodies
