"""Tables of the upstream's parameters: names, value ranges, who may set them (jina-api 1.3, 2.2, 6.3).

One table per operation; jina/endpoints.py assigns them. Names are looked up folded (no case, no separators), so
`target_selector`, `targetSelector` and `X-Target-Selector` are the same parameter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from openapi_tool.jina.hosts import EXCLUDED
from openapi_tool.jina.url_policy import MAX_URL_CHARS
from openapi_tool.protocol.jsontext import whole_number
from openapi_tool.tools.argument_names import fold
from openapi_tool.tools.catalogue import CATALOGUE

MAX_TEXT_CHARS = 2_000
MAX_LIST_ITEMS = 20
_NO_SITE = re.compile(r"[\s,;|\[\]()\"']")  # characters that no name of a site contains

Convert = Callable[[Any], Any]
"""Converts an argument to the upstream's value; None to send none. Raises ValueError with the allowed values."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One upstream parameter: `name` in a JSON body (dots nest), `header` in a GET request.

    - Without a header, a GET request has it in the query. With `header_only` a POST request has it as a header, too.
    - A model may set it if `model`; with `declared` only if the definition's `parameters` declare it, as it costs more.
    - With a `separator` the upstream has no such parameter: the value is appended to the query or page address.
    - With `merge` the model may set it by two arguments, whose values this combines.
    - `doubt` returns why the upstream would not understand a text of a definition, else an empty text. Only the linter
      asks: to a call the upstream itself says so.
    - With `lenient` an operator's invalid value is left out, as earlier versions sent it; else the call is refused.
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


def _text(limit: int = MAX_TEXT_CHARS) -> Convert:
    def convert(value: Any) -> str:
        if not isinstance(value, str) or not value.strip() or len(value) > limit:
            raise ValueError(f"must be a text of 1 to {limit:,} characters, not blank")
        return value.strip()

    return convert


def _texts(value: Any) -> str | list[str]:
    items = value if isinstance(value, list) else [value]
    if not items or len(items) > MAX_LIST_ITEMS or not all(isinstance(item, str) and item.strip() for item in items):
        raise ValueError(f"must be a text, or a list of 1 to {MAX_LIST_ITEMS} texts")
    if any(len(item) > MAX_TEXT_CHARS for item in items):
        raise ValueError(f"must hold at most {MAX_TEXT_CHARS:,} characters in each text")
    return [item.strip() for item in items] if isinstance(value, list) else value.strip()


def _each(write: Callable[[str], str]) -> Convert:
    def convert(value: Any) -> str | list[str]:
        texts = _texts(value)
        return write(texts) if isinstance(texts, str) else list(map(write, texts))

    return convert


def _phrase(text: str) -> str:
    """Quote several words: without quotes `intitle:annual report` would apply to the first word only."""
    return f'"{" ".join(text.split())}"' if " " in text and '"' not in text else text


def _sites(value: Any) -> str | list[str]:
    """Refuse several names in one text, which would be searched as one site, and a text that names none."""
    sites: str | list[str] = _each(_site)(value)
    listed = [sites] if isinstance(sites, str) else sites
    if not all(site and not _NO_SITE.search(site) for site in listed):
        raise ValueError('must be names of sites, such as ["example.com"]')
    return sites


def _excluded_sites(value: Any) -> str:
    sites = _sites(value)
    listed = [sites] if isinstance(sites, str) else sites
    return " ".join(f"{EXCLUDED}{site}" for site in listed)


_SITE = re.compile(
    r"""-?\s*(?:site:\s*)?(?:https?:|[a-z][a-z0-9+.-]*:(?=//))?[/\\]*(?:[^/?#\\\s]*@)?[*.]*
    (?P<host>[^/?#\\\s]*?)\.?(?::[0-9]*)?(?P<rest>[/?#\\\s].*)?""",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)


def _site(text: str) -> str:
    """Return the site of `a.com`, `https://a.com:443/`, `*.a.com` or `-site:a.com`; empty if there is none."""
    site = _SITE.fullmatch(text)
    if not site or not site["host"]:
        return ""
    rest = (site["rest"] or "").rstrip("/")
    return " ".join(f"{site['host']}{rest}".split())


def _after(value: Any) -> str:
    try:
        return f"after:{date.fromisoformat(value).isoformat()}"
    except (TypeError, ValueError):
        raise ValueError("must be a date such as 2025-12-31") from None


_RECENCY_DAYS = {"day": 1, "week": 7, "month": 30, "year": 365}


def _recency(value: Any) -> str:
    """Return the operator `after:` with a date, as the upstream has no parameter for recency (jina-api 2.2: `tbs`)."""
    period = _choice(*_RECENCY_DAYS)(value)
    return _after((datetime.now(UTC).date() - timedelta(days=_RECENCY_DAYS[period])).isoformat())


def _integer(low: int, high: int) -> Convert:
    def convert(value: Any) -> int:
        number = whole_number(value)
        if number is None or not low <= number <= high:
            raise ValueError(f"must be an integer from {low:,} to {high:,}")
        return number

    return convert


def _flag(value: Any) -> bool | None:
    """Return True, or None for false: the upstream takes any value as true, so false must not be sent."""
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
        if isinstance(value, str) and value.lower() in words:
            return value.lower()
        return _flag(value)

    return convert


_REGIONAL = frozenset({"zh-cn", "zh-tw", "zh-hk", "pt-br", "pt-pt", "es-419", "fr-ca"})
_SCRIPTS = {"zh-hans": "zh-cn", "zh-hant": "zh-tw"}


def _country(value: Any) -> str:
    """Take any code: the upstream refuses unknown ones itself (jina-api 9)."""
    code: str = _text(10)(value).lower()
    return "gb" if code == "uk" else code


def _language(value: Any) -> str:
    """Keep a region only if the upstream distinguishes it."""
    code: str = _text(20)(value).lower().replace("_", "-")
    code = _SCRIPTS.get(code, code)
    return code if code in _REGIONAL else code.partition("-")[0] or code


_COUNTRY = re.compile(r"[A-Za-z]{2}")
_LANGUAGE = re.compile(r"[A-Za-z]{2,3}(?:[-_][A-Za-z0-9]{2,8})*")


def _no_country(text: str) -> str:
    return "" if _COUNTRY.fullmatch(text.strip()) else "must be the code of a country, of two letters, such as de"


def _no_language(text: str) -> str:
    return "" if _LANGUAGE.fullmatch(text.strip()) else "must be the code of a language, such as en or zh-cn"


def _no_whole_site(text: str) -> str:
    return "must be a site without a path, such as example.com" if "/" in _site(text) else ""


def _robots(value: Any) -> str | bool:
    """Take True, for the upstream's own user agent, or the name of one."""
    return True if value is True else _text(200)(value)


_PROXY = re.compile(r"(auto|any|none|[a-z]{2})\+?", re.IGNORECASE)


def _proxy(value: Any) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if not _PROXY.fullmatch(text):
        raise ValueError("must be auto, any, none or a country code such as de; with + also for what a page loads")
    return text


_CHUNKINGS = ("true", "h1", "h2", "h3", "h4", "h5", "structured", "s1", "s2", "s3", "s4", "s5")


def _chunking(value: Any) -> str:
    return "true" if value is True else _choice(*_CHUNKINGS)(value)


_MAX_PIXELS = 16_384
_MAX_SCALE = 10


def _scale(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_SCALE:
        raise ValueError(f"must be a number above 0, at most {_MAX_SCALE}")
    return value


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")  # noqa: TRY004 - as every converter
    return value


def _viewport(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not value:
        raise ValueError(f"must be an object with members of {', '.join(_VIEWPORT)}")
    converted = {}
    for name, member in value.items():
        if name not in _VIEWPORT:
            raise ValueError(f"may have only the members {', '.join(_VIEWPORT)}")
        try:
            if member is not None:
                converted[name] = _VIEWPORT[name](member)
        except ValueError as problem:
            raise ValueError(f"{name} {problem}") from None
    return converted


MAX_TIMEOUT_S = 180  # of `timeout`, by the upstream
MIN_MAX_TOKENS = 500
_MAX_TOKENS = 2_000_000
_MAX_PDF_PAGE = 100_000
_WEEK_S = 7 * 24 * 3600
_style = _text(128)
_ENGINES = ("auto", "browser", "curl", "direct", "cf-browser-rendering", "vlm", "readerlm-v2")
_pixels = _integer(1, _MAX_PIXELS)
_VIEWPORT: Mapping[str, Convert] = {
    "width": _pixels,
    "height": _pixels,
    "deviceScaleFactor": _scale,
    "isMobile": _boolean,
    "isLandscape": _boolean,
    "hasTouch": _boolean,
}


def _with_header(
    name: str, convert: Convert, *aliases: str, model: bool = False, header_only: bool = False, lenient: bool = False
) -> Parameter:
    """Return a parameter with its header: `X-Target-Selector` for `targetSelector`, `X-Md-Hr` for `markdown.hr`."""
    words = "".join(f"-{char}" if char.isupper() else char for char in name.replace("markdown.", "md-"))
    return Parameter(name, convert, f"X-{words.title()}", aliases, model, header_only=header_only, lenient=lenient)


_PAGE = (
    _with_header("targetSelector", _texts, model=True),
    _with_header("waitForSelector", _texts, model=True),
    _with_header("removeSelector", _texts, model=True),
    _with_header("retainImages", _choice("none", "all", "alt", "all_p", "alt_p"), model=True),
    _with_header("retainLinks", _choice("none", "all", "text", "gpt-oss"), model=True),
    _with_header("withLinksSummary", _flag_or("all"), "with_links", model=True),
    _with_header("withImagesSummary", _flag, "with_images", model=True),
    _with_header("markdown.linkStyle", _choice("inlined", "referenced", "discarded"), "link_style", model=True),
    _with_header("noCache", _flag, model=True),
    _with_header("maxTokens", _integer(MIN_MAX_TOKENS, _MAX_TOKENS), model=True),
    _with_header("timeout", _integer(1, MAX_TIMEOUT_S)),
    _with_header("engine", _choice(*_ENGINES), lenient=True),
    _with_header(
        "respondTiming",
        _choice("html", "visible-content", "mutation-idle", "resource-idle", "media-idle", "network-idle"),
    ),
    _with_header("base", _choice("initial", "final")),
    _with_header("locale", _text(40)),
    _with_header("robotsTxt", _robots, lenient=True),
    _with_header("cacheTolerance", _integer(0, _WEEK_S)),
    Parameter("doNotTrack", _flag, "DNT"),
    _with_header("tokenBudget", _integer(1, _MAX_TOKENS)),
    _with_header("markdownChunking", _chunking, lenient=True),
    _with_header("withIframe", _flag_or("quoted")),
    _with_header("withShadowDom", _flag),
    _with_header("withGeneratedAlt", _flag),
    _with_header("removeOverlay", _flag),
    _with_header("keepImgDataUrl", _flag),
    _with_header("noGfm", _flag_or("table")),
    _with_header("proxy", _proxy, lenient=True),
    _with_header("markdown.headingStyle", _choice("setext", "atx")),
    _with_header("markdown.hr", _style),
    _with_header("markdown.bulletListMarker", _choice("-", "+", "*")),
    _with_header("markdown.emDelimiter", _choice("_", "*")),
    _with_header("markdown.strongDelimiter", _choice("__", "**")),
    _with_header("markdown.linkReferenceStyle", _choice("full", "collapsed", "shortcut", "discarded")),
    Parameter("viewport", _viewport, lenient=True),
)

READER_PARAMETERS: tuple[Parameter, ...] = (
    Parameter("url", _text(MAX_URL_CHARS), aliases=("target_url",), model=True),
    _with_header("respondWith", _text(80), "format", "return_format", "X-Return-Format", model=True),
    Parameter("pdf_page", _integer(1, _MAX_PDF_PAGE), model=True, separator="#"),
    *_PAGE,
)

SEARCH_PARAMETERS: tuple[Parameter, ...] = (
    Parameter("q", _text(), aliases=("query",), model=True),
    Parameter("num", _integer(1, 20), aliases=("count",), model=True),
    Parameter("page", _integer(1, 1000), model=True),
    Parameter("gl", _country, aliases=("country",), model=True, doubt=_no_country),
    Parameter("hl", _language, aliases=("language",), model=True, doubt=_no_language),
    Parameter("location", _text(200), model=True),
    Parameter("site", _sites, aliases=("X-Site",), model=True, doubt=_no_whole_site),
    Parameter("ext", _texts, aliases=("X-Ext",), model=True),
    Parameter("filetype", _each(lambda text: text.lstrip(".") or text), aliases=("X-Filetype",), model=True),
    Parameter("intitle", _each(_phrase), aliases=("X-Intitle", "title_words"), model=True),
    Parameter("exclude_sites", _excluded_sites, model=True, separator=" ", doubt=_no_whole_site),
    Parameter("after", _after, model=True, separator=" ", merge=max),
    Parameter("loc", _texts, aliases=("X-Loc",), model=True),
    Parameter("type", _choice("web", "images", "news"), model=True, declared=True),
    Parameter("provider", _choice("google", "bing", "reader")),
    Parameter("nfpr", _flag),
    Parameter("fallback", _flag),
    _with_header("respondWith", _text(80), "format", "return_format", "X-Return-Format", model=True),
    _with_header("withFavicons", _flag, "collect-favicon", header_only=True),
    *_PAGE,
)

ALL = (*SEARCH_PARAMETERS, *READER_PARAMETERS)
"""Parameters of every table: their headers may be sent, and their names are known to the linter."""


def _content_or_none(value: Any) -> str:
    if value is True or value is False:
        return "content" if value else "no-content"
    raise ValueError("must be true or false")


WITH_CONTENT = Parameter("respondWith", _content_or_none, model=True)
"""Argument `with_content`, in `Endpoint.own`: it sets the same parameter as `format`, and a table has each once."""

RECENCY = Parameter("after", _recency, model=True, separator=" ", merge=max)
"""Argument `recency`, in `Endpoint.own`: it sets the same parameter as `after`, and the later date counts."""

MODEL_FORMATS = ("content", "markdown", "text", "html")
"""Values of `respondWith` that a model may use."""

REFUSED: Mapping[str, str] = {
    fold(name): reason
    for names, reason in (
        (
            "proxyUrl X-Proxy-Url",
            "it sends pages and keys through a foreign proxy; use proxy, a country of the upstream's own",
        ),
        ("setCookies X-Set-Cookie cookie customHeader", "it could log in at a page; only public pages are read"),
        (
            "referer X-Referer userAgent X-User-Agent X-Forwarded-For",
            (
                "it pretends to be another client; to reach pages that refuse, set engine to `browser` or proxy to a "
                "country"
            ),
        ),
        (
            "injectPageScript injectFrameScript",
            "it runs code in the page; use target_selector, remove_selector or wait_for_selector",
        ),
        ("html pdf file", "it uploads content; give the page's address as url"),
        (
            "instruction jsonSchema",
            "it lets the upstream run a model, at its price; let the model that calls the tool read the text",
        ),
        (
            "authorization token _token api_key",
            "no key stands in a definition; name its variable in options.jina.auth_env or options.envs.api_key",
        ),
    )
    for name in names.split()
}
"""Reasons why a parameter is never sent, and the alternative, by its folded name (jina-api 6.3)."""


def by_name(parameters: tuple[Parameter, ...]) -> Mapping[str, Parameter]:
    """Return parameters by each of their names, folded and without dots; a nested one also without its parent."""
    return {
        fold(name).replace(".", ""): parameter
        for parameter in parameters
        for name in (parameter.name, parameter.name.split(".")[-1], parameter.header, *parameter.aliases)
        if name
    }


_DOCUMENTED = (
    REFUSED.keys() | {tool.list_argument for tool in CATALOGUE.values() if tool.list_argument} | by_name(ALL).keys()
)

OUTGOING_HEADERS = frozenset(parameter.header.lower() for parameter in ALL if parameter.header is not None)

OWN_FIELD = "tenant"
"""Folded prefix of the operator's own body members; no parameter of the upstream has it."""


def is_documented(name: str) -> bool:
    """Return whether a name, in any spelling, is one of the upstream's or of the built-in tools."""
    folded = fold(name)
    first = folded.partition(".")[0].strip()  # `viewport` of `viewport.width`
    return first in _DOCUMENTED or folded.replace(".", "") in _DOCUMENTED  # `markdown.hr`


def secret_problem(name: str) -> str | None:
    """Return why an `envs` argument other than `api_key` may not take a secret; None if it may.

    Every documented parameter controls the upstream, or is sent to a page, a search engine or a proxy (jina-api 1.3,
    2.2), and new ones are unknown here. So only the operator's own body members may, which the upstream ignores unless
    it has agreed on them (jina-api 1.1).
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
