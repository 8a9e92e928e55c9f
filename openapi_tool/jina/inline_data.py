"""Drops inline addresses from texts: `data:` and `blob:`, which hold a file instead of naming one.

A model cannot open them, and one of them may be longer than the page that it is on. All functions take linear time.
"""

from __future__ import annotations

import re

_MARKS = (("](blob:", ")"), ("](data:image/", ")"), ('src="data:image/', '"'), ("src='data:image/", "'"))
"""*Marks*, by which inline images are found, each with what ends the address: in Markdown, and in HTML."""

_MAX_DROPPED = 10_000  # addresses of one text, for each mark
# Parts of a `data:` address: a parameter of its type, such as `;charset=utf-8`, and the further lines of broken base64.
# Each repetition has a limit, which bounds the time of a match that fails.
_PARAMETER = r""";(?:[^\s,;"'()<>]{0,100}|[\w-]{1,40}="[^"\n]{0,60}")"""
_BASE64_LINES = r"(?:\s{1,4}[A-Za-z0-9+/=]{40,})*(?:\s{1,4}[A-Za-z0-9+/]{1,60}={1,2})?"
_LONG_DATA = re.compile(
    rf"data:(?:([a-z0-9.+-]{{1,60}}\\?/[a-z0-9.+-]{{1,80}})(?:{_PARAMETER}){{0,5}}|(?:{_PARAMETER}){{0,4}};base64),"
    rf"""[ ]?[^\s"'()<>]{{64,}}{_BASE64_LINES}""",
    re.IGNORECASE,
)
"""A `data:` address with at least 64 characters of data; shorter ones are mostly examples in a text."""


def is_inline(url: str) -> bool:
    """Return whether an address is an inline one."""
    return url.startswith(("blob:", "data:"))


def without_inline_images(texts: list[str]) -> list[str]:
    """Return the texts without inline addresses of images, and with short ones for other `data:` addresses.

    For example `![alt]` for `![alt](blob:…)`, and `src=""` for `src="data:image/…"`. An address must end on its line.
    At most 10,000 addresses of each kind are dropped from a text.
    """
    if not any("blob:" in text or "data:" in text or "DATA:" in text for text in texts):
        return texts
    return [_without_inline_images(text) for text in texts]


def _without_inline_images(text: str) -> str:
    for mark, closing in _MARKS:
        if mark in text:
            text = _drop_addresses(text, mark, closing)
    return without_inline_data(text)


def without_inline_data(text: str) -> str:
    """Return a text with `data:TYPE,…` for each long `data:` address, wherever it is: `srcset`, `url(…)`, a reference.

    Only texts with `data:` or `DATA:` are searched. Nobody mixes the cases, and to look for that would take longer.
    """
    if "data:" not in text and "DATA:" not in text:
        return text
    return _LONG_DATA.sub(_shortened, text)


def _shortened(address: re.Match[str]) -> str:
    return f"data:{address[1] or ''},…"


def _drop_addresses(text: str, mark: str, closing: str) -> str:
    """Return a text without the address that follows each `mark`, up to `closing`.

    `](blob:…)` becomes `]`, and `src="data:image/…"` becomes `src=""`.
    """
    in_markdown = mark.startswith("]")
    kept = len("]") if in_markdown else len('src="')  # characters of the mark that stay
    dropped_after = len(")") if in_markdown else 0  # characters of `closing` that go
    pieces: list[str] = []
    copied_until = 0  # the text before it is in `pieces`, or is dropped
    search_from = 0
    end = 0  # where `closing` was found last
    while len(pieces) < _MAX_DROPPED:
        start = text.find(mark, search_from)
        if start < 0:
            break
        behind_mark = start + len(mark)
        if end < behind_mark:  # else that one is still the next, as the search has passed over a mark
            end = text.find(closing, behind_mark)
        if end < 0:
            break
        line_end = text.find("\n", start, end)
        if line_end >= 0:
            search_from = line_end  # no address that begins later on this line ends on this line either
            continue
        pieces.append(text[copied_until : start + kept])
        copied_until = search_from = end + dropped_after
    return "".join([*pieces, text[copied_until:]]) if pieces else text
