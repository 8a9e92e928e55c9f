"""What a request to Jina asks for, in whatever form a client sends it: the double compares requests by this.

A client may name the query or the page, and the options, in the path, in the query string, in headers or in a JSON
body. This parser shares no code with the executor, so that it detects mistakes there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, unquote

SEARCH_HOST, READER_HOST = "s.jina.ai", "r.jina.ai"

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
    """Return the header of an option: `x-no-cache` of `noCache`, `x-md-hr` of `markdown.hr`."""
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
_OPTION_FIELDS = {*HEADERS.values(), *UNRECORDED_FIELDS}
_ALIASES = {"count": "num"}
_SEARCH_PATHS = ("/", "/search")
_MIN_UNREACHED_DIGITS = 5  # no recorded page reaches a token limit of five digits; the longest has 1,800 tokens


class UnknownRequest(Exception):
    """The message names the part that no client should send."""


@dataclass(frozen=True, slots=True)
class RequestContent:
    """Host, subject (the query of a search, or the URL of a page) and options, which have their names in a POST body.

    Each value is a text: `true` of a boolean, `a,b` of a list.
    """

    host: str
    subject: str
    options: frozenset[tuple[str, str]]

    def without_time_limits(self) -> RequestContent:
        """Omit time limits, and a token limit that no recorded page reaches."""
        return replace(self, options=frozenset(option for option in self.options if not _never_reached(*option)))

    def without_unrecorded(self) -> RequestContent:
        """Omit options whose effect no recording shows."""
        recorded = frozenset((name, value) for name, value in self.options if name not in UNRECORDED_FIELDS)
        return replace(self, options=recorded)

    def text(self) -> str:
        """Return a text for messages."""
        return f"{self.host} {self.subject!r} {dict(sorted(self.options))}"


def _never_reached(name: str, value: str) -> bool:
    """Return whether an option is a limit that a recorded response cannot reach."""
    if name == "maxTokens":
        return len(value) >= _MIN_UNREACHED_DIGITS
    return name in ("timeout", "respondTiming")


def parse_request(host: str, method: str, target: str, headers: Mapping[str, str], body: bytes) -> RequestContent:
    """Parse a request. Raises UnknownRequest."""
    options = _header_options(headers)
    fields = _body_fields(method, headers, body)
    _add_target_fields(fields, host, target)
    is_search = host == SEARCH_HOST
    subject = fields.pop("q" if is_search else "url", "")
    known_fields = _OPTION_FIELDS | SEARCH_FIELDS if is_search else _OPTION_FIELDS
    unknown_fields = sorted(fields.keys() - known_fields)
    if unknown_fields:
        raise UnknownRequest(f"fields {unknown_fields}")
    if not subject:
        raise UnknownRequest("no query or url")
    return RequestContent(host, subject, frozenset((options | fields).items()))


def _header_options(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the options that headers set."""
    options = {}
    unknown = []
    for name, value in headers.items():
        lower_name = name.lower()
        if lower_name in HEADERS:
            options[HEADERS[lower_name]] = _text(value)
        elif lower_name not in PLAIN_HEADERS:
            unknown.append(name)
    if unknown:
        raise UnknownRequest(f"headers {sorted(unknown)}")
    return options


def _body_fields(method: str, headers: Mapping[str, str], body: bytes) -> dict[str, str]:
    if method == "GET" and not body:
        return {}
    content_type = ""
    for name, value in headers.items():
        if name.lower() == "content-type":
            content_type = value
            break
    if method != "POST" or content_type != "application/json":
        raise UnknownRequest(f"{method} with content type {content_type!r}")
    try:
        fields = json.loads(body)
    except ValueError:
        raise UnknownRequest("a body that is not JSON") from None
    return _flat(fields)


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return `{"viewport.width": "800"}` of `{"viewport": {"width": 800}}`."""
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
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).replace(", ", ",")  # a list in a header may have blanks


def _add_target_fields(fields: dict[str, str], host: str, target: str) -> None:
    """Add what the target says, such as `/https://example.com/?page=2` or `/search?q=hello&site=a.org&site=b.org`."""
    path, _, query = target.partition("?")
    if host == READER_HOST and path != "/":
        fields["url"] = unquote(target[1:])  # the page's own query is part of its URL
        return
    if query:
        for alias, value in parse_qsl(query, keep_blank_values=True, strict_parsing=True):
            name = _ALIASES.get(alias, alias)
            fields[name] = f"{fields[name]},{value}" if name in fields else value
    if host == SEARCH_HOST and path not in _SEARCH_PATHS:
        fields["q"] = unquote(path[1:])
