"""Which parameters exist upstream, under which names, and who may set them (jina-api 1.3, 2.2, 6.3).

One table per host. A name is looked up folded (no case, no separators), so `target_selector`,
`targetSelector` and `X-Target-Selector` are the same parameter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from openapi_tool.tools.arguments import fold
from openapi_tool.tools.catalogue import Mode

MAX_TEXT_CHARS = 2_000
MAX_URL_CHARS = 16_000
MAX_LIST_ITEMS = 20
_DIGITS = re.compile(r"[0-9]{1,12}")

Convert = Callable[[Any], Any]
"""A given value -> the upstream's value, None for "leave it out". Raises ValueError saying what fits."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One upstream parameter: `name` in a JSON body (dots nest), `header` where a GET carries it.

    Without a header a GET carries it in its query. `model` says whether a model may set it;
    `declared`, whether only if the definition's `parameters` declare it (they cost more).
    """

    name: str
    convert: Convert
    header: str | None = None
    aliases: tuple[str, ...] = ()
    model: bool = False
    declared: bool = False
    header_only: bool = False


def _text(limit: int = MAX_TEXT_CHARS) -> Convert:
    def convert(value: Any) -> str:
        if not isinstance(value, str) or not value.strip() or len(value) > limit:
            raise ValueError(f"must be a text of 1 to {limit} characters")
        return value.strip()

    return convert


def _texts(value: Any) -> str | list[str]:
    items = value if isinstance(value, list) else [value]
    if not items or len(items) > MAX_LIST_ITEMS or not all(isinstance(item, str) and item.strip() for item in items):
        raise ValueError(f"must be a text, or a list of 1 to {MAX_LIST_ITEMS} texts")
    if any(len(item) > MAX_TEXT_CHARS for item in items):
        raise ValueError(f"must hold at most {MAX_TEXT_CHARS} characters in each text")
    return [item.strip() for item in items] if isinstance(value, list) else value.strip()


def _integer(low: int, high: int) -> Convert:
    def convert(value: Any) -> int:
        number = _whole(value)
        if number is None or not low <= number <= high:
            raise ValueError(f"must be an integer from {low} to {high}")
        return number

    return convert


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return int(value) if isinstance(value, str) and _DIGITS.fullmatch(value) else None


def _flag(value: Any) -> bool | None:
    """True, or None: for these the upstream takes any value at all as true, so false is left out."""
    if value is True or (isinstance(value, str) and value.lower() in ("true", "1", "yes")):
        return True
    if value is False or (isinstance(value, str) and value.lower() in ("false", "0", "no", "none", "")):
        return None
    raise ValueError("must be true or false")


def _choice(*choices: str) -> Convert:
    def convert(value: Any) -> str:
        if not isinstance(value, str) or value.lower() not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return value.lower()

    return convert


def _flag_or(*words: str) -> Convert:
    def convert(value: Any) -> bool | str | None:
        return value.lower() if isinstance(value, str) and value.lower() in words else _flag(value)

    return convert


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not value:
        raise ValueError("must be an object")
    return value


_MAX_SECONDS = 180
_MAX_TOKENS = 2_000_000
_WEEK_S = 7 * 24 * 3600
_style = _text(128)

_PAGE = (
    Parameter("targetSelector", _texts, "X-Target-Selector", model=True),
    Parameter("waitForSelector", _texts, "X-Wait-For-Selector", model=True),
    Parameter("removeSelector", _texts, "X-Remove-Selector", model=True),
    Parameter("retainImages", _choice("none", "all", "alt", "all_p", "alt_p"), "X-Retain-Images", model=True),
    Parameter("retainLinks", _choice("none", "all", "text", "gpt-oss"), "X-Retain-Links", model=True),
    Parameter("withLinksSummary", _flag_or("all"), "X-With-Links-Summary", ("with_links",), model=True),
    Parameter("withImagesSummary", _flag, "X-With-Images-Summary", ("with_images",), model=True),
    Parameter(
        "markdown.linkStyle",
        _choice("inlined", "referenced", "discarded"),
        "X-Md-Link-Style",
        ("link_style",),
        model=True,
    ),
    Parameter("noCache", _flag, "X-No-Cache", model=True),
    Parameter("maxTokens", _integer(500, _MAX_TOKENS), "X-Max-Tokens", model=True),
    Parameter("timeout", _integer(1, _MAX_SECONDS), "X-Timeout"),
    Parameter("engine", _text(40), "X-Engine"),
    Parameter(
        "respondTiming",
        _choice("html", "visible-content", "mutation-idle", "resource-idle", "media-idle", "network-idle"),
        "X-Respond-Timing",
    ),
    Parameter("base", _choice("initial", "final"), "X-Base"),
    Parameter("locale", _text(40), "X-Locale"),
    Parameter("robotsTxt", _text(200), "X-Robots-Txt"),
    Parameter("cacheTolerance", _integer(0, _WEEK_S), "X-Cache-Tolerance"),
    Parameter("doNotTrack", _flag, "DNT"),
    Parameter("tokenBudget", _integer(1, _MAX_TOKENS), "X-Token-Budget"),
    Parameter("markdownChunking", _text(20), "X-Markdown-Chunking"),
    Parameter("withIframe", _flag_or("quoted"), "X-With-Iframe"),
    Parameter("withShadowDom", _flag, "X-With-Shadow-Dom"),
    Parameter("withGeneratedAlt", _flag, "X-With-Generated-Alt"),
    Parameter("removeOverlay", _flag, "X-Remove-Overlay"),
    Parameter("keepImgDataUrl", _flag, "X-Keep-Img-Data-Url"),
    Parameter("noGfm", _flag_or("table"), "X-No-Gfm"),
    Parameter("proxy", _text(40), "X-Proxy"),
    Parameter("markdown.headingStyle", _choice("setext", "atx"), "X-Md-Heading-Style"),
    Parameter("markdown.hr", _style, "X-Md-Hr"),
    Parameter("markdown.bulletListMarker", _choice("-", "+", "*"), "X-Md-Bullet-List-Marker"),
    Parameter("markdown.emDelimiter", _choice("_", "*"), "X-Md-Em-Delimiter"),
    Parameter("markdown.strongDelimiter", _choice("__", "**"), "X-Md-Strong-Delimiter"),
    Parameter(
        "markdown.linkReferenceStyle",
        _choice("full", "collapsed", "shortcut", "discarded"),
        "X-Md-Link-Reference-Style",
    ),
    Parameter("viewport", _object),
)

READER: tuple[Parameter, ...] = (
    Parameter("url", _text(MAX_URL_CHARS), aliases=("target_url",), model=True),
    Parameter("respondWith", _text(80), "X-Respond-With", ("format", "return_format", "X-Return-Format"), model=True),
    *_PAGE,
)

SEARCH: tuple[Parameter, ...] = (
    Parameter("q", _text(), aliases=("query",), model=True),
    Parameter("num", _integer(1, 20), aliases=("count",), model=True),
    Parameter("page", _integer(1, 1000), model=True),
    Parameter("gl", _text(10), aliases=("country",), model=True),
    Parameter("hl", _text(20), aliases=("language",), model=True),
    Parameter("location", _text(200), model=True),
    Parameter("site", _texts, aliases=("X-Site",), model=True),
    Parameter("ext", _texts, aliases=("X-Ext",), model=True),
    Parameter("filetype", _texts, aliases=("X-Filetype",), model=True),
    Parameter("intitle", _texts, aliases=("X-Intitle",), model=True),
    Parameter("loc", _texts, aliases=("X-Loc",), model=True),
    Parameter("type", _choice("web", "images", "news"), model=True, declared=True),
    Parameter("provider", _choice("google", "bing", "reader")),
    Parameter("nfpr", _flag),
    Parameter("fallback", _flag),
    Parameter("respondWith", _text(80), "X-Respond-With", ("format", "return_format", "X-Return-Format"), model=True),
    Parameter("withFavicons", _flag, "X-With-Favicons", header_only=True),
    *_PAGE,
)

MODEL_FORMATS = ("content", "markdown", "text", "html")
"""What a model may ask for as `respondWith`; a search also takes `no-content`."""

REFUSED = frozenset(
    fold(name)
    for name in (
        "proxyUrl",
        "X-Proxy-Url",
        "setCookies",
        "X-Set-Cookie",
        "cookie",
        "customHeader",
        "referer",
        "X-Referer",
        "userAgent",
        "X-User-Agent",
        "injectPageScript",
        "injectFrameScript",
        "html",
        "pdf",
        "file",
        "instruction",
        "jsonSchema",
        "X-Forwarded-For",
        "authorization",
        "token",
        "_token",
        "api_key",
    )
)
"""Folded names that nobody may send: credentials, impersonation, code, uploads (jina-api 6.3)."""


_SUBJECTS = frozenset(
    fold(name) for table in (READER[:1], SEARCH[:1]) for entry in table for name in (entry.name, *entry.aliases)
)
_NEVER_SECRET = REFUSED | _SUBJECTS | {"urls", "queries"}


def may_never_take_a_secret(name: str) -> bool:
    """Return whether an `envs` argument reaches a page, a URL or a third party, whoever set it.

    The part before a dot counts: `customHeader.X` is a member of `customHeader`.
    """
    return fold(name.partition(".")[0].strip()) in _NEVER_SECRET


def _index(parameters: tuple[Parameter, ...]) -> Mapping[str, Parameter]:
    return {
        fold(name).replace(".", ""): parameter
        for parameter in parameters
        for name in (parameter.name, parameter.name.split(".")[-1], parameter.header, *parameter.aliases)
        if name
    }


_BY_NAME: Mapping[Mode, Mapping[str, Parameter]] = {"search": _index(SEARCH), "reader": _index(READER)}

OUTGOING_HEADERS = frozenset(
    parameter.header.lower() for parameter in (*SEARCH, *READER) if parameter.header is not None
)
"""Every header, in lower case, that a parameter may travel in."""


def find_parameter(mode: Mode, name: str) -> Parameter | None:
    """The parameter that `name` means for a search or a reader tool, None if there is none."""
    return _BY_NAME[mode].get(fold(name).replace(".", ""))
