"""The upstream's parameters, in one table per operation: names, values, and who may set them (jina-api 1.3, 2.2, 6.3).

`endpoints.py` assigns the tables to operations; `conversions.py` converts values. Names are looked up *folded*, without
case and separators, so `target_selector`, `targetSelector` and `X-Target-Selector` are the same parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from openapi_tool.jina.address_repair import MAX_URL_CHARS
from openapi_tool.jina.conversions import (
    Convert,
    after_date,
    after_period,
    choice,
    chunking,
    content_or_none,
    country,
    each_text,
    excluded_sites,
    flag,
    flag_or,
    integer,
    language,
    no_country,
    no_language,
    no_whole_site,
    phrase,
    proxy,
    robots,
    sites,
    text,
    text_or_list,
    viewport,
)
from openapi_tool.tools.argument_names import fold
from openapi_tool.tools.catalogue import CATALOGUE


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the upstream.

    How it is sent:

    - `name`: its name in a JSON body; `markdown.hr` is the member `hr` of the member `markdown`.
    - `header`: its header in a GET request. Without a header, a GET request has it in the query.
    - `header_only`: a POST request has it as a header, too.
    - `separator`: if not empty, the upstream has no such parameter; the value is appended to the query or page address,
      behind the separator.

    What values it takes:

    - `convert`: converts a value, or refuses it.
    - `merge`: the model may set it by two arguments, whose values this combines.
    - `lenient`: an invalid value of the operator is left out, as earlier versions sent it; else the call is refused.
    - `doubt`: returns why the upstream would not understand a text of a definition, else an empty text. Only the linter
      asks; a call gets the upstream's own error.

    Who may set it, and how:

    - `aliases`: further names.
    - `model`: a model may set it. Else only an operator may.
    - `declared`: a model may set it only if the definition's `parameters` declare it, as it costs more.
    """

    name: str
    convert: Convert
    header: str | None = None
    aliases: tuple[str, ...] = ()
    model: bool = False
    declared: bool = False
    header_only: bool = False
    separator: str = ""
    merge: Callable[[Any, Any], Any] | None = None
    lenient: bool = False
    doubt: Callable[[str], str] | None = None


# The upstream's limits of `timeout`, of `maxTokens` (and `tokenBudget`), and of `cacheTolerance`.
MAX_TIMEOUT_S = 180
MIN_MAX_TOKENS = 500
_MAX_TOKENS = 2_000_000
_WEEK_S = 7 * 24 * 3600

_MAX_PDF_PAGE = 100_000
_ENGINES = ("auto", "browser", "curl", "direct", "cf-browser-rendering", "vlm", "readerlm-v2")


def _with_header(
    name: str, convert: Convert, *aliases: str, model: bool = False, header_only: bool = False, lenient: bool = False
) -> Parameter:
    """Return a parameter with its header: `X-Target-Selector` for `targetSelector`, `X-Md-Hr` for `markdown.hr`."""
    # A dash before each upper-case letter: `target-Selector`
    words = "".join(f"-{char}" if char.isupper() else char for char in name.replace("markdown.", "md-"))
    return Parameter(name, convert, f"X-{words.title()}", aliases, model, header_only=header_only, lenient=lenient)


# How pages are read. A search has these parameters, too, as it can return the pages of its results.
_PAGE: tuple[Parameter, ...] = (
    _with_header("targetSelector", text_or_list, model=True),
    _with_header("waitForSelector", text_or_list, model=True),
    _with_header("removeSelector", text_or_list, model=True),
    _with_header("retainImages", choice("none", "all", "alt", "all_p", "alt_p"), model=True),
    _with_header("retainLinks", choice("none", "all", "text", "gpt-oss"), model=True),
    _with_header("withLinksSummary", flag_or("all"), "with_links", model=True),
    _with_header("withImagesSummary", flag, "with_images", model=True),
    _with_header("markdown.linkStyle", choice("inlined", "referenced", "discarded"), "link_style", model=True),
    _with_header("noCache", flag, model=True),
    _with_header("maxTokens", integer(MIN_MAX_TOKENS, _MAX_TOKENS), model=True),
    _with_header("timeout", integer(1, MAX_TIMEOUT_S)),
    _with_header("engine", choice(*_ENGINES), lenient=True),
    _with_header(
        "respondTiming",
        choice("html", "visible-content", "mutation-idle", "resource-idle", "media-idle", "network-idle"),
    ),
    _with_header("base", choice("initial", "final")),
    _with_header("locale", text(40)),
    _with_header("robotsTxt", robots, lenient=True),
    _with_header("cacheTolerance", integer(0, _WEEK_S)),
    Parameter("doNotTrack", flag, "DNT"),
    _with_header("tokenBudget", integer(1, _MAX_TOKENS)),
    _with_header("markdownChunking", chunking, lenient=True),
    _with_header("withIframe", flag_or("quoted")),
    _with_header("withShadowDom", flag),
    _with_header("withGeneratedAlt", flag),
    _with_header("removeOverlay", flag),
    _with_header("keepImgDataUrl", flag),
    _with_header("noGfm", flag_or("table")),
    _with_header("proxy", proxy, lenient=True),
    _with_header("markdown.headingStyle", choice("setext", "atx")),
    _with_header("markdown.hr", text(128)),
    _with_header("markdown.bulletListMarker", choice("-", "+", "*")),
    _with_header("markdown.emDelimiter", choice("_", "*")),
    _with_header("markdown.strongDelimiter", choice("__", "**")),
    _with_header("markdown.linkReferenceStyle", choice("full", "collapsed", "shortcut", "discarded")),
    Parameter("viewport", viewport, lenient=True),
)

READER_PARAMETERS: tuple[Parameter, ...] = (
    Parameter("url", text(MAX_URL_CHARS), aliases=("target_url",), model=True),
    _with_header("respondWith", text(80), "format", "return_format", "X-Return-Format", model=True),
    Parameter("pdf_page", integer(1, _MAX_PDF_PAGE), model=True, separator="#"),
    *_PAGE,
)

SEARCH_PARAMETERS: tuple[Parameter, ...] = (
    Parameter("q", text(), aliases=("query",), model=True),
    Parameter("num", integer(1, 20), aliases=("count",), model=True),
    Parameter("page", integer(1, 1000), model=True),
    Parameter("gl", country, aliases=("country",), model=True, doubt=no_country),
    Parameter("hl", language, aliases=("language",), model=True, doubt=no_language),
    Parameter("location", text(200), model=True),
    Parameter("site", sites, aliases=("X-Site",), model=True, doubt=no_whole_site),
    Parameter("ext", text_or_list, aliases=("X-Ext",), model=True),
    Parameter("filetype", each_text(lambda name: name.lstrip(".") or name), aliases=("X-Filetype",), model=True),
    Parameter("intitle", each_text(phrase), aliases=("X-Intitle", "title_words"), model=True),
    Parameter("exclude_sites", excluded_sites, model=True, separator=" ", doubt=no_whole_site),
    Parameter("after", after_date, model=True, separator=" ", merge=max),
    Parameter("loc", text_or_list, aliases=("X-Loc",), model=True),
    Parameter("type", choice("web", "images", "news"), model=True, declared=True),
    Parameter("provider", choice("google", "bing", "reader")),
    Parameter("nfpr", flag),
    Parameter("fallback", flag),
    _with_header("respondWith", text(80), "format", "return_format", "X-Return-Format", model=True),
    _with_header("withFavicons", flag, "collect-favicon", header_only=True),
    *_PAGE,
)

ALL = (*SEARCH_PARAMETERS, *READER_PARAMETERS)
"""Parameters of every table."""


WITH_CONTENT = Parameter("respondWith", content_or_none, model=True)
"""The argument `with_content`. It sets the same parameter as `format`.

A table has each parameter once, so this one, like RECENCY, is not in a table but in `Endpoint.own`.
"""

RECENCY = Parameter("after", after_period, model=True, separator=" ", merge=max)
"""The argument `recency`. It sets the same parameter as `after`; if the model gives both, the later date counts."""

MODEL_FORMATS = ("content", "markdown", "text", "html")
"""Values of `respondWith` that a model may use."""

_NAMES_BY_REASON: Mapping[str, str] = {
    "it sends pages and keys through a foreign proxy; use proxy, a country of the upstream's own": (
        "proxyUrl X-Proxy-Url"
    ),
    "it could log in at a page; only public pages are read": "setCookies X-Set-Cookie cookie customHeader",
    "it pretends to be another client; to reach pages that refuse, set engine to `browser` or proxy to a country": (
        "referer X-Referer userAgent X-User-Agent X-Forwarded-For"
    ),
    "it runs code in the page; use target_selector, remove_selector or wait_for_selector": (
        "injectPageScript injectFrameScript"
    ),
    "it uploads content; give the page's address as url": "html pdf file",
    "it lets the upstream run a model, at its price; let the model that calls the tool read the text": (
        "instruction jsonSchema"
    ),
    "no key stands in a definition; name its variable in options.jina.auth_env or options.envs.api_key": (
        "authorization token _token api_key"
    ),
}

REFUSED: Mapping[str, str] = {
    fold(name): reason for reason, names in _NAMES_BY_REASON.items() for name in names.split()
}
"""Parameters that are never sent, by their folded names: why, and what to do instead (jina-api 6.3)."""


def by_name(parameters: tuple[Parameter, ...]) -> Mapping[str, Parameter]:
    """Return parameters by each of their names, folded and without dots.

    `markdown.hr` is found as `markdownhr`, and without its parent as `hr`.
    """
    found: dict[str, Parameter] = {}
    for parameter in parameters:
        without_parent = parameter.name.split(".")[-1]
        for name in (parameter.name, without_parent, parameter.header, *parameter.aliases):
            if name:
                found[fold(name).replace(".", "")] = parameter
    return found


OUTGOING_HEADERS = frozenset(parameter.header.lower() for parameter in ALL if parameter.header is not None)
"""Headers of parameters, which may leave (`egress.py`)."""

_BATCH_LISTS = {tool.list_argument for tool in CATALOGUE.values() if tool.list_argument}
_DOCUMENTED = REFUSED.keys() | _BATCH_LISTS | by_name(ALL).keys()
"""Folded names of all parameters, and of the lists of a batch."""

OWN_FIELD = "tenant"
"""Prefix, folded, of members of the body that are the operator's own, such as `tenant_token`.

No parameter of the upstream has it.
"""


def is_documented(name: str) -> bool:
    """Return whether a name, in any spelling, is that of a parameter or of a batch's list."""
    folded = fold(name)
    first = folded.partition(".")[0].strip()  # `viewport` of `viewport.width`
    return first in _DOCUMENTED or folded.replace(".", "") in _DOCUMENTED  # `markdown.hr`


def secret_problem(name: str) -> str | None:
    """Return why an argument of `envs` other than `api_key` may not take a secret; None if it may.

    Only members of the body that are the operator's own may: the upstream ignores them unless it has agreed on them
    with the operator (jina-api 1.1). Parameters of the upstream may not: it would pass a secret on to a page, a search
    engine or a proxy (jina-api 1.3, 2.2). Nor may any other name, since it could be that of a new parameter.
    """
    folded = fold(name)
    rest = folded.removeprefix(OWN_FIELD)
    if folded.startswith(OWN_FIELD) and rest.isascii() and rest.isalnum():
        return None
    if is_documented(name):
        return (
            f"may never take a secret: a page, a search engine or a third party would see it; map {OWN_FIELD}_… instead"
        )
    return f"may not take a secret: only api_key may, and body members of your own, whose names begin with {OWN_FIELD}_"
