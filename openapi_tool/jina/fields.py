"""Reads the fields of a page or a search result in an upstream response, each within its limit (tool-design section 3).

The output of a call is made from them. A field may have any type and any length. It is cut before it is searched or
changed, so its length does not matter; only the body of a page stays whole. Links to hosts that the operator denies are
left out and counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from openapi_tool.jina import remarks
from openapi_tool.jina.inline_data import is_inline, without_inline_data
from openapi_tool.jina.shown_hosts import DeniedHosts
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.tools.wording import counted, one_line

BODY_FIELDS = ("content", "text", "html")
MAX_CHARS = 2_000
"""Limit of one field or line: a title, a warning, the text of a link."""
MAX_URL_CHARS = 16_000
MAX_DESCRIPTION_CHARS = 10_000  # of a search result's description

_MAX_PAGE_DESCRIPTION_CHARS = 200
"""Limit of a page's own description, which is shown only if it has a word that the page does not show."""
_MAX_COMPARED_CHARS = 20_000  # of title and body, in which these words are searched
_MAX_FAVICON_CHARS = 4_000  # the upstream's icons of 32 pixels have up to 3,000
_MAX_WARNINGS = 20  # lines of a warning that are shown
_MAX_WARNING_CHARS = 20_000  # of a warning that are read
_MAX_SITE_LINKS = 20  # of a search result
_MAX_LINKS = 10_000  # of a list of links or images

_SCREENSHOT_LABELS = {"screenshotUrl": "Screenshot", "pageshotUrl": "Page shot"}
_JOINED_PAIR = re.compile(r"(.*?),([a-z][a-z0-9+.-]*:.*)", re.DOTALL)  # `text,https://a.example`
_MAX_PAIR_CHARS = MAX_CHARS + MAX_URL_CHARS  # limits the time of _JOINED_PAIR
_URLS = frozenset({"url", "imageUrl"})
_NUMBERS = (int, float)
_TEXT_OR_NUMBER = (str, *_NUMBERS)  # `isinstance` with `str | int | float` would create that union for each field


class FieldReader:
    """Reads the fields of one response. A secret of `redactor` that a limit would cut is masked whole.

    `denied` counts the links to denied hosts that were left out so far.
    """

    def __init__(self, redactor: Redactor, denied: Sequence[str]) -> None:
        self._redactor = redactor
        self.denied = DeniedHosts(denied)

    def line(self, value: Any, chars: int = MAX_CHARS) -> str:
        """Return a text or number in one line, and an empty text for any other value."""
        if not isinstance(value, _TEXT_OR_NUMBER):
            return ""
        return one_line(self.denied.without(self._short(str(value), chars)))

    def _short(self, text: str, chars: int) -> str:
        """Return a text of at most `chars` characters, and how many more there are."""
        text = without_inline_data(text)
        if len(text) <= chars:
            return text
        return f"{self._redactor.head(text, chars)} … ({counted(len(text) - chars, 'character')} more)"

    def facts(self, item: Mapping[str, Any], fields: tuple[str, ...], *, are_shown: bool) -> dict[str, Any]:
        """Return those of the fields that are texts or numbers; deeply nested values cannot be stored.

        With `are_shown` the links that are left out in them are counted. Without it the model is shown these fields by
        another method, which counts them.
        """
        facts: dict[str, Any] = {}
        without_denied = self.denied.without if are_shown else self.denied.uncounted
        for field in fields:
            value = item.get(field)
            if value is None:
                continue
            if isinstance(value, _NUMBERS):
                facts[field] = value
            elif not isinstance(value, str) or not value:
                continue
            elif field in _URLS:
                facts[field] = one_line(self._short(value, MAX_URL_CHARS))
            elif field == "warning":  # which may have several lines
                facts[field] = without_denied(self._short(value, MAX_CHARS))
            else:
                facts[field] = one_line(without_denied(self._short(value, MAX_CHARS)))
        return facts

    def warnings(self, item: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the lines of a warning that have no type of their own (`page_warnings.py`), such as a page's error."""
        text = text_of(item.get("warning"))
        if not text:
            return ()
        lines = [
            line
            for line in self._short(text, _MAX_WARNING_CHARS).splitlines()
            if line not in remarks.UPSTREAM_WARNINGS and not remarks.is_plain_target_error(line)
        ]
        shown = [self.line(line) for line in lines[:_MAX_WARNINGS]]
        shown = [line for line in shown if line]
        left = len(lines) - _MAX_WARNINGS
        if left > 0:
            shown.append(f"({counted(left, 'more line')})")
        return tuple(shown)

    def description(self, page: Mapping[str, Any], bodies: list[str]) -> str:
        """Return a page's description if it has a word that is neither in the title nor in the first body."""
        description = self.line(page.get("description"), _MAX_PAGE_DESCRIPTION_CHARS)
        if not description:
            return ""
        texts = [text_of(page.get("title")), *bodies[:1]]
        shown = "\n".join(text[:_MAX_COMPARED_CHARS] for text in texts).lower()
        words = description.lower().replace(".", " ").replace(",", " ").split()
        says_nothing_new = all(map(shown.__contains__, words))
        return "" if says_nothing_new else description

    def bodies(self, page: Mapping[str, Any]) -> Iterator[str]:
        """Yield all forms of the body; chunks only without content, as they repeat that."""
        texts = [text_of(given).strip() for given in map(page.get, BODY_FIELDS) if given]
        chunks = page.get("chunks")
        if isinstance(chunks, list) and not text_of(page.get("content")).strip():
            texts += [chunk for chunk in chunks if isinstance(chunk, str) and chunk.strip()]
        yield from map(self.denied.without, filter(None, texts))
        for field, label in _SCREENSHOT_LABELS.items():
            screenshot = page.get(field)
            url = self.line(screenshot, MAX_URL_CHARS) if screenshot else ""
            if url:
                yield f"{label}: {url}"

    def lists(self, page: Mapping[str, Any]) -> list[str]:
        """Return the lists of links and images, each as one text."""
        found = []
        for title, field in (("Links", "links"), ("Images", "images")):
            if not page.get(field):
                continue
            lines = [f"{title}:"]
            for text, url in islice(_pairs(page.get(field)), _MAX_LINKS):
                if not self.denied.has_link(url):
                    lines.append(self._link(text, url))
            if len(lines) > _MAX_LINKS:  # the title, and as many links as are shown
                left = len(page[field]) - _MAX_LINKS
                if left:
                    lines.append(f"({left:,} more {'is' if left == 1 else 'are'} left out.)")
            if len(lines) > 1:
                found.append("\n".join(lines))
        return found

    def site_links(self, item: Mapping[str, Any]) -> Iterator[str]:
        """Yield the links within the site of a search result; each is `{title, link, snippet?}`."""
        site_links = item.get("siteLinks")
        if not isinstance(site_links, list):
            return
        links = [link for link in site_links if isinstance(link, dict)]
        for link in links[:_MAX_SITE_LINKS]:
            url = self.line(link.get("link"), MAX_URL_CHARS)
            if url and not self.denied.has_link(url):
                yield self._link(text_of(link.get("title")), url, link.get("snippet") or "")

    def _link(self, text: str, url: str, snippet: str = "") -> str:
        """Return `- title: address (snippet)`, without what is missing; an inline image has no address to show."""
        title = self.line(text)
        note = self.line(snippet)
        if is_inline(url):
            return f"- {title}"
        address = self.line(url, MAX_URL_CHARS)
        link = f"- {title}: {address}" if title else f"- {address}"
        return f"{link} ({note})" if note else link


def favicon(item: Mapping[str, Any]) -> str:
    """Return the address of a result's icon, which only a UI can show; empty if it has none."""
    address = text_of(item.get("favicon"))
    is_shown = len(address) <= _MAX_FAVICON_CHARS and address.startswith(("data:image/", "https://"))
    return address if is_shown else ""


def text_of(value: Any) -> str:
    """Return a text as it is, and an empty one for any other value."""
    return value if isinstance(value, str) else ""


def _pairs(value: Any) -> Iterator[tuple[str, str]]:
    """Yield text and address of each link or image, from each of the upstream's shapes (jina-api 3.1).

    They are `{text: address}`, `{"0": "text,address"}` with a number for each, or `[[text, address]]`.
    """
    if isinstance(value, dict):
        is_numbered = all(key == str(number) for number, key in enumerate(value))
        for key, member in value.items():
            split = _split_pair(member) if is_numbered else None
            yield split or (key, text_of(member))
    elif isinstance(value, list):
        for pair in value:
            match pair:
                case [str(text), str(url)]:
                    yield text, url


def _split_pair(joined: Any) -> tuple[str, str] | None:
    """Return text and address of `text,address`; None if it is something else, or too long."""
    if not isinstance(joined, str) or not 0 < len(joined) < _MAX_PAIR_CHARS:
        return None
    parts = _JOINED_PAIR.fullmatch(joined)
    return (parts[1], parts[2]) if parts else None
