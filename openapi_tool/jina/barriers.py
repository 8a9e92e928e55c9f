"""Recognizes pages with a barrier in place of content, by their title and text.

A barrier is a bot check (`captcha`), a login, a request for `consent`, a request for JavaScript, or a `loading` text. A
page that shows only its title counts as `empty`. Two rules apply to all:

- A barrier is short. A longer text with the same words has content of its own, so each kind has a maximum length.
- Title and text are compared in lower case, with plain apostrophes. `barrier_words.py` has the words.

`page_warnings.py` passes a page here; the type that it gets becomes a warning for the model.
"""

from __future__ import annotations

import re

from openapi_tool.jina.barrier_words import (
    BARRIERS,
    CAPTCHA_TITLES,
    CONSENT_REQUEST,
    HOME_TITLES,
    LOADING_WORDS,
    LOGIN_TITLES,
    MAX_CHARS,
    MAX_NOTICE_CHARS,
    SERVICE_LOGIN_STEMS,
    SERVICE_LOGINS,
    STEMS,
    ServiceLogin,
)
from openapi_tool.jina.cookie_banners import COOKIE_WORDS, is_cookie_banner

_MAX_CHARS_WITH_LINKS = 8_000  # of the text of a barrier that has links, whose addresses may be long
_MAX_LOADING_CHARS = 60
_MAX_CONSENT_LINES = 6  # first lines of a text, among which a request for consent is
_HEADING = re.compile(r"#|[^\n]*\n(?:=+|-+)\s*$", re.MULTILINE)
"""Start of a Markdown heading: marked with #, or underlined."""
_APOSTROPHE = "\N{RIGHT SINGLE QUOTATION MARK}"
_TITLE_SEPARATORS = (" | ", " - ", " \N{EN DASH} ", " \N{EM DASH} ", " · ")
# A Markdown link, `[text](address)`. It takes linear time, since neither text nor address may contain its own opening
# bracket.
_LINK = re.compile(r"\[([^\[\]\n]*+)\]\([^()\n]*+\)")
_IMAGE = re.compile("!" + _LINK.pattern)


def barrier_type(title: str, text: str) -> str | None:
    """Return the warning type of a page that shows a barrier, a loading text or only its title instead of content."""
    if len(text) > _MAX_CHARS_WITH_LINKS:
        return None
    title, text = _folded(title), _folded(text)
    by_title = _type_of_title(title)
    kind = _type_with_links(by_title, title, text)
    if kind is not None or len(text) > MAX_CHARS:
        return kind
    return _short_type(by_title, title, text)


def title_type(title: str) -> str | None:
    """Return the warning type of a page by its title alone."""
    return _type_of_title(_folded(title))


def _type_of_title(title: str) -> str | None:
    """Return the type of a page by its folded title alone."""
    title = title.strip(" .…")
    if title in CAPTCHA_TITLES:
        return "captcha"
    if title in LOGIN_TITLES:
        return "login"
    return "consent" if CONSENT_REQUEST.fullmatch(title) else None


def _type_with_links(by_title: str | None, title: str, text: str) -> str | None:
    """Return the type of a login, request for consent or cookie banner, which may have long lists of links.

    `by_title` is the type that the title alone has.
    """
    if by_title in ("login", "consent"):
        return by_title
    if "cookies" in text and any(map(CONSENT_REQUEST.fullmatch, _lines(text)[:_MAX_CONSENT_LINES])):
        return "consent"
    # Nearly no page has one of these words; the rest costs more.
    has_cookies = _has_one(text, COOKIE_WORDS)
    if title not in HOME_TITLES and not has_cookies and not _has_one(text, SERVICE_LOGIN_STEMS):
        return None
    shown = _LINK.sub(r"\1", _IMAGE.sub("", text))
    if has_cookies and is_cookie_banner(title, _lines(shown)):
        return "consent"
    is_login = any(_is_login_of(service, title, shown) for service in SERVICE_LOGINS)
    return "login" if is_login else None


def _is_login_of(service: ServiceLogin, title: str, shown: str) -> bool:
    if len(shown) > service.max_chars:
        return False
    if service.titles and title not in service.titles:
        return False
    return not service.phrases or _has_one(shown, service.phrases)


def _short_type(by_title: str | None, title: str, text: str) -> str | None:
    """Return the type of a text of at most MAX_CHARS; `by_title` is the type that the title alone has."""
    kind = _type_by_phrases(text) if _has_one(text, STEMS) else None
    has_title_of_bot_check = by_title == "captcha" and len(text) <= MAX_NOTICE_CHARS
    if has_title_of_bot_check and kind in (None, "javascript"):  # a bot check mostly asks for JavaScript, too
        return "captcha"
    if kind is not None:
        return kind
    if _is_loading(title, text):
        return "loading"
    return "empty" if _is_only_title(title, text) else None


def _type_by_phrases(text: str) -> str | None:
    for rule in BARRIERS:
        if len(text) <= rule.max_chars and _has_one(text, rule.phrases):
            return rule.kind
    return None


def _folded(text: str) -> str:
    """Return the part of a text that is compared, in lower case and with plain apostrophes."""
    return text[:_MAX_CHARS_WITH_LINKS].strip().lower().replace(_APOSTROPHE, "'")


def _lines(text: str) -> list[str]:
    """Return the lines with words, without the marks of a heading."""
    lines = [line.strip("#*= \t") for line in text.splitlines()]
    return [line for line in lines if line.strip("-")]


def _has_one(text: str, phrases: tuple[str, ...]) -> bool:
    return any(map(text.__contains__, phrases))


def _is_only_title(title: str, text: str) -> bool:
    """Return whether a text is only the title of its page, with or without the name of the site.

    It must begin with a heading, since a line without marks may be the content of a file.
    """
    if not title or not _HEADING.match(text):
        return False
    return _own_titles(title).issuperset(_lines(text))


def _own_titles(title: str) -> set[str]:
    """Return a title as it is, and without the name of its site behind it: `News` for `News | Example`."""
    return {title, *(title.partition(separator)[0] for separator in _TITLE_SEPARATORS)}


def _is_loading(title: str, text: str) -> bool:
    """Return whether a text, without images and the title that may be above it, is only a loading text."""
    if not _has_one(text, LOADING_WORDS):
        return False
    lines = _lines(_IMAGE.sub("", text))
    titles = _own_titles(title)
    if lines and title.startswith(lines[0]):  # the first line is a part of the title
        titles.add(lines[0])
    without_title = [line for line in lines if line not in titles]
    return _is_loading_text(lines) or _is_loading_text(without_title)


def _is_loading_text(lines: list[str]) -> bool:
    """Return whether a page's lines are short, and begin with a word such as `loading`."""
    text = "\n".join(lines)
    return len(text) <= _MAX_LOADING_CHARS and text.lstrip("![ ").startswith(LOADING_WORDS)
