"""Recorded requests to Jina's open-source server with its exact responses.

The server is jina-ai/reader of May 2026; pages are fixtures, and its error 429 is synthetic.

Each line of `recordings.jsonl.xz` contains one exchange as text, without the headers Host, User-Agent, Connection and
Content-Length; the last line all error classes. GET and POST forms of the same content have the same response. This
parser shares no code with the executor, so that it detects mistakes there.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from operator import itemgetter
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

SEARCH_HOST, READER_HOST = "s.jina.ai", "r.jina.ai"
RECORDED_HOSTS = ".fixture.test"
"""Suffix of every page in the recordings; executors read such pages only with it in `url_policy.allow`."""

# Options in a POST body that a header can set, too: `noCache` is the header X-No-Cache.
OPTIONS = (
    *("base", "cacheTolerance", "engine", "markdownChunking", "maxTokens", "noCache", "proxy", "removeSelector"),
    *("respondTiming", "respondWith", "retainImages", "retainLinks", "robotsTxt", "site", "targetSelector", "timeout"),
    *("tokenBudget", "waitForSelector", "withFavicons", "withImagesSummary", "withLinksSummary"),
)
# Further documented options: no recording shows their effect, so the response is that of the request without them.
UNRECORDED_OPTIONS = (
    *("keepImgDataUrl", "locale", "noGfm", "removeOverlay", "withGeneratedAlt", "withIframe", "withShadowDom"),
    *("markdown.headingStyle", "markdown.hr", "markdown.bulletListMarker", "markdown.emDelimiter"),
    *("markdown.strongDelimiter", "markdown.linkReferenceStyle"),
)
UNRECORDED_FIELDS = {
    *UNRECORDED_OPTIONS,
    *("viewport.width", "viewport.height", "viewport.deviceScaleFactor"),
    *("viewport.isMobile", "viewport.isLandscape", "viewport.hasTouch"),
}


def _header(option: str) -> str:
    words = option.replace("markdown.", "md-")
    return "x-" + "".join(f"-{char.lower()}" if char.isupper() else char for char in words)


HEADERS = {
    "dnt": "doNotTrack",
    **{_header(option): option for option in (*OPTIONS, *UNRECORDED_OPTIONS, "markdown.linkStyle")},
}
# Headers that set no option.
PLAIN_HEADERS = {
    *("accept", "accept-encoding", "authorization", "connection"),
    *("content-length", "content-type", "host", "user-agent"),
}
# Body fields of a search besides the options above.
SEARCH_FIELDS = {
    *("q", "num", "type", "provider", "gl", "hl", "location", "page", "nfpr", "fallback"),
    *("ext", "filetype", "intitle", "loc"),
}
_MIN_UNREACHED_DIGITS = 5  # no recorded page reaches a token limit of five digits; the longest has 1,800 tokens
_ALIASES = {"count": "num"}
_SEARCH_PATHS = ("/", "/search")


class UnknownRequest(Exception):
    """The message names the part that no client should send."""


@dataclass(frozen=True, slots=True)
class RequestContent:
    """Host, subject (query or url) and options of a request, under their names in a POST body."""

    host: str
    subject: str
    options: frozenset[tuple[str, str]]

    def without_time_limits(self) -> RequestContent:
        """Omit time limits, and a token limit that no recorded page reaches."""
        options = {
            (name, value)
            for name, value in self.options
            if name not in ("timeout", "respondTiming")
            and not (name == "maxTokens" and len(value) >= _MIN_UNREACHED_DIGITS)
        }
        return replace(self, options=frozenset(options))

    def without_unrecorded(self) -> RequestContent:
        """Omit options whose effect no recording shows."""
        return replace(self, options=frozenset(one for one in self.options if one[0] not in UNRECORDED_FIELDS))

    def text(self) -> str:
        """Return a text for messages."""
        return f"{self.host} {self.subject!r} {dict(sorted(self.options))}"


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded response; `request` is None if no client may send the recorded request."""

    name: str
    status: int
    headers: Mapping[str, str]
    body: bytes
    request: RequestContent | None


def parse_request(host: str, method: str, target: str, headers: Mapping[str, str], body: bytes) -> RequestContent:
    """Parse a request. Raises UnknownRequest."""
    options = {HEADERS[name.lower()]: _text(value) for name, value in headers.items() if name.lower() in HEADERS}
    unknown = [name for name in headers if name.lower() not in HEADERS.keys() | PLAIN_HEADERS]
    if unknown:
        raise UnknownRequest(f"headers {sorted(unknown)}")
    fields = _body_fields(method, headers, body)
    path, _, query = target.partition("?")
    if host == READER_HOST and path != "/":
        fields["url"] = unquote(target[1:])
    elif query:
        for alias, value in parse_qsl(query, keep_blank_values=True, strict_parsing=True):
            name = _ALIASES.get(alias, alias)
            fields[name] = f"{fields[name]},{value}" if name in fields else value
    if host == SEARCH_HOST and path not in _SEARCH_PATHS:
        fields["q"] = unquote(path[1:])
    subject = fields.pop("q" if host == SEARCH_HOST else "url", "")
    known_fields = {*HEADERS.values(), *UNRECORDED_FIELDS, *(SEARCH_FIELDS if host == SEARCH_HOST else ())}
    unknown_fields = sorted(fields.keys() - known_fields)
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
    # A list in a header may have blanks.
    return ",".join(map(str, value)) if isinstance(value, list) else str(value).replace(", ", ",")


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


@cache
def load_recordings() -> Mapping[str, Recording]:
    """Return the recordings by name."""
    return {exchange["name"]: _parse(exchange["name"], exchange["http"]) for exchange in exchanges()}


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


def exchanges() -> list[dict[str, str]]:
    """Return all exchanges by name: `name`, and the texts of request and response as `http`."""
    return sorted(_stored_lines()[:-1], key=itemgetter("name"))  # stored in the order that compresses best


@cache
def _stored_lines() -> list[Any]:
    stored = (files(__package__) / "data" / "jina" / "recordings.jsonl.xz").read_bytes()
    return [json.loads(line) for line in lzma.decompress(stored).splitlines()]


def _parse(name: str, text: str) -> Recording:
    """Parse an exchange: two HTTP messages, each below a heading line."""
    request, _, response = text.partition("\n### response")
    request_line, headers, body = _message(request.partition("\n")[2])
    status_line, response_headers, answer = _message(response.partition("\n")[2])
    method, target, _ = request_line.split(" ")
    host = SEARCH_HOST if name.startswith("s-") else READER_HOST
    try:
        content = parse_request(host, method, target, headers, body.strip().encode())
    except UnknownRequest:
        content = None
    _, status, *_ = status_line.split(" ")
    return Recording(name, int(status), response_headers, answer.strip().encode(), content)


def _message(text: str) -> tuple[str, dict[str, str], str]:
    head, _, body = text.partition("\n\n")
    first, *lines = head.split("\n")
    return first, dict(line.split(": ", 1) for line in lines if ": " in line), body


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
