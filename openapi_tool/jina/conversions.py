"""Converters: each turns a value of definition or model into what the upstream expects of a parameter.

A converter returns None if nothing is to be sent. It raises ValueError with the allowed values, such as "must be true
or false"; the message is put behind the name of the argument. Functions that return a `Convert` make a converter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any

from openapi_tool.jina.hosts import EXCLUDED
from openapi_tool.protocol.jsontext import whole_number

Convert = Callable[[Any], Any]
"""Converts a value; None sends nothing. Raises ValueError with the allowed values."""

MAX_TEXT_CHARS = 2_000
MAX_LIST_ITEMS = 20

# Texts, choices, numbers and flags.


def text(limit: int = MAX_TEXT_CHARS) -> Convert:
    """Take a text of at most `limit` characters."""

    def convert(value: Any) -> str:
        if not isinstance(value, str) or not value.strip() or len(value) > limit:
            raise ValueError(f"must be a text of 1 to {limit:,} characters, not blank")
        return value.strip()

    return convert


def text_or_list(value: Any) -> str | list[str]:
    """Take a text or a list of texts."""
    items = value if isinstance(value, list) else [value]
    if not 1 <= len(items) <= MAX_LIST_ITEMS or not all(isinstance(item, str) and item.strip() for item in items):
        raise ValueError(f"must be a text, or a list of 1 to {MAX_LIST_ITEMS} texts")
    if any(len(item) > MAX_TEXT_CHARS for item in items):
        raise ValueError(f"must hold at most {MAX_TEXT_CHARS:,} characters in each text")
    return [item.strip() for item in items] if isinstance(value, list) else value.strip()


def each_text(write: Callable[[str], str]) -> Convert:
    """Take a text or a list of texts, each as `write` returns it."""

    def convert(value: Any) -> str | list[str]:
        given = text_or_list(value)
        return write(given) if isinstance(given, str) else list(map(write, given))

    return convert


def choice(*choices: str) -> Convert:
    """Take one of the texts, in any case."""

    def convert(value: Any) -> str:
        if not isinstance(value, str) or value.lower() not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return value.lower()

    return convert


def integer(low: int, high: int) -> Convert:
    """Take a whole number, also as a text."""

    def convert(value: Any) -> int:
        number = whole_number(value)
        if number is None or not low <= number <= high:
            raise ValueError(f"must be an integer from {low:,} to {high:,}")
        return number

    return convert


def flag(value: Any) -> bool | None:
    """Return True, or None for false: the upstream takes any value as true, so false must not be sent."""
    word = value.lower() if isinstance(value, str) else None
    if value is True or word in ("true", "1", "yes"):
        return True
    if value is False or word in ("false", "0", "no", "none", ""):
        return None
    raise ValueError("must be true or false")


def flag_or(*words: str) -> Convert:
    """Take a flag, or one of the words."""

    def convert(value: Any) -> bool | str | None:
        if isinstance(value, str) and value.lower() in words:
            return value.lower()
        return flag(value)

    return convert


# Sites, words and dates of a search.

_SITE = re.compile(
    r"""-?\s*(?:site:\s*)?(?:https?:|[a-z][a-z0-9+.-]*:(?=//))?[/\\]*(?:[^/?#\\\s]*@)?[*.]*
    (?P<host>[^/?#\\\s]*?)\.?(?::[0-9]*)?(?P<rest>[/?#\\\s].*)?""",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
"""A site as it may be written. Of `-site:https://example.com:443/a` the host is `example.com`, and the rest `/a`."""
_NOT_IN_SITE = re.compile(r"[\s,;|\[\]()\"']")  # characters that no name of a site contains
# Days of a period of the argument `recency`.
_RECENCY_DAYS = {"day": 1, "week": 7, "month": 30, "year": 365}


def sites(value: Any) -> str | list[str]:
    """Take names of sites, in a list or one alone.

    Refuses a text with several names, which would be searched as one site, and a text without any.
    """
    given: str | list[str] = each_text(site_of)(value)
    names = [given] if isinstance(given, str) else given
    if not all(name and not _NOT_IN_SITE.search(name) for name in names):
        raise ValueError('must be names of sites, such as ["example.com"]')
    return given


def excluded_sites(value: Any) -> str:
    """Return operators of the query, such as `-site:a.com -site:b.com`."""
    given = sites(value)
    names = [given] if isinstance(given, str) else given
    operators = [f"{EXCLUDED}{name}" for name in names]
    return " ".join(operators)


def site_of(address: str) -> str:
    """Return the site of `a.com`, `https://a.com:443/`, `*.a.com` or `-site:a.com`; empty if there is none."""
    parts = _SITE.fullmatch(address)
    if not parts or not parts["host"]:
        return ""
    rest = (parts["rest"] or "").rstrip("/")
    return " ".join(f"{parts['host']}{rest}".split())


def phrase(words: str) -> str:
    """Quote several words: without quotes `intitle:annual report` would apply to the first word only."""
    if " " not in words or '"' in words:
        return words
    return f'"{" ".join(words.split())}"'


def after_date(value: Any) -> str:
    """Take a date; return an operator of the query, such as `after:2025-12-31`."""
    try:
        return f"after:{date.fromisoformat(value).isoformat()}"
    except (TypeError, ValueError):
        raise ValueError("must be a date such as 2025-12-31") from None


def after_period(value: Any) -> str:
    """Take a period such as `week`; return the operator `after:`, as the upstream has no parameter for it (`tbs`)."""
    period = choice(*_RECENCY_DAYS)(value)
    first_day = datetime.now(UTC).date() - timedelta(days=_RECENCY_DAYS[period])
    return after_date(first_day.isoformat())


def content_or_none(value: Any) -> str:
    """Take whether a search gets page texts; return the value of `respondWith`."""
    if value is True or value is False:
        return "content" if value else "no-content"
    raise ValueError("must be true or false")


# Countries and languages. The upstream refuses unknown codes itself (jina-api 9), so any short text is taken.

_REGIONAL = frozenset({"zh-cn", "zh-tw", "zh-hk", "pt-br", "pt-pt", "es-419", "fr-ca"})
"""Languages of which the upstream distinguishes regions."""
_SCRIPTS = {"zh-hans": "zh-cn", "zh-hant": "zh-tw"}
"""The region that stands for a script."""
_COUNTRY = re.compile(r"[A-Za-z]{2}")
_LANGUAGE = re.compile(r"[A-Za-z]{2,3}(?:[-_][A-Za-z0-9]{2,8})*")


def country(value: Any) -> str:
    """Take the code of a country."""
    code: str = text(10)(value).lower()
    return "gb" if code == "uk" else code  # the code of ISO 3166


def language(value: Any) -> str:
    """Take the code of a language; keep a region only if the upstream distinguishes it: `de` for `de-AT`."""
    code: str = text(20)(value).lower().replace("_", "-")
    code = _SCRIPTS.get(code, code)
    if code in _REGIONAL:
        return code
    without_region = code.partition("-")[0]
    return without_region or code


# Doubts of the linter about texts that a converter takes (`Parameter.doubt`).


def no_country(code: str) -> str:
    """Return why a text is no code of a country; empty if it looks like one."""
    return "" if _COUNTRY.fullmatch(code.strip()) else "must be the code of a country, of two letters, such as de"


def no_language(code: str) -> str:
    """Return why a text is no code of a language; empty if it looks like one."""
    return "" if _LANGUAGE.fullmatch(code.strip()) else "must be the code of a language, such as en or zh-cn"


def no_whole_site(site: str) -> str:
    """Return why a text is not the name of a whole site; empty if it is."""
    return "must be a site without a path, such as example.com" if "/" in site_of(site) else ""


# Parameters of a page that only an operator sets.

# For example `de` or `auto+`.
_PROXY = re.compile(r"(auto|any|none|[a-z]{2})\+?", re.IGNORECASE)
_CHUNKINGS = ("true", "h1", "h2", "h3", "h4", "h5", "structured", "s1", "s2", "s3", "s4", "s5")
_MAX_PIXELS = 16_384  # width or height of a viewport, by the upstream
_MAX_SCALE = 10  # of a viewport's pixels


def robots(value: Any) -> str | bool:
    """Take True, for the upstream's own user agent, or the name of one."""
    return True if value is True else text(200)(value)


def proxy(value: Any) -> str:
    """Take the upstream's own proxy: a country, or a word for the choice of one."""
    given = value.strip() if isinstance(value, str) else ""
    if not _PROXY.fullmatch(given):
        raise ValueError("must be auto, any, none or a country code such as de; with + also for what a page loads")
    return given


def chunking(value: Any) -> str:
    """Take where the upstream splits a page, such as `h2`."""
    return "true" if value is True else choice(*_CHUNKINGS)(value)


def viewport(value: Any) -> Mapping[str, Any]:
    """Take an object with the size of a browser's window."""
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


def _scale(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _MAX_SCALE:
        return value
    raise ValueError(f"must be a number above 0, at most {_MAX_SCALE}")


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")  # noqa: TRY004 - as every converter
    return value


_pixels = integer(1, _MAX_PIXELS)
_VIEWPORT: Mapping[str, Convert] = {
    "width": _pixels,
    "height": _pixels,
    "deviceScaleFactor": _scale,
    "isMobile": _boolean,
    "isLandscape": _boolean,
    "hasTouch": _boolean,
}
