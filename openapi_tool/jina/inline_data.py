"""Inline images and other `data:` addresses, which a model cannot open and which may be longer than a page."""

from __future__ import annotations

import re

_MARKS = (("](blob:", ")"), ("](data:image/", ")"), ('src="data:image/', '"'), ("src='data:image/", "'"))
"""Beginnings of inline images, each with what ends its address: in Markdown, and as the source of an image in HTML."""

_MAX_DROPPED = 10_000  # addresses, for each mark
_PARAMETER = r""";(?:[^\s,;"'()<>]{0,100}|[\w-]{1,40}="[^"\n]{0,60}")"""
_BASE64_LINES = r"(?:\s{1,4}[A-Za-z0-9+/=]{40,})*(?:\s{1,4}[A-Za-z0-9+/]{1,60}={1,2})?"
_LONG_DATA = re.compile(
    rf"data:(?:([a-z0-9.+-]{{1,60}}\\?/[a-z0-9.+-]{{1,80}})(?:{_PARAMETER}){{0,5}}|(?:{_PARAMETER}){{0,4}};base64),"
    rf"""[ ]?[^\s"'()<>]{{64,}}{_BASE64_LINES}""",
    re.IGNORECASE,
)
"""From 64 characters on: shorter ones are examples in a text."""


def is_inline(url: str) -> bool:
    """Return whether an address is that of an inline image."""
    return url.startswith(("blob:", "data:"))


def without_inline_images(texts: list[str]) -> list[str]:
    """Return the texts with `![alt]` for `![alt](blob:…)`, and `src=""` for `src="data:image/…"`.

    A model cannot open such an address, which may be longer than the page. An address must end on its line. Takes
    linear time; drops at most 10,000 addresses of each kind in each text.
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

    In mixed case nobody writes it, and a search for that would take longer. Takes linear time.
    """
    return _LONG_DATA.sub(_shortened, text) if "data:" in text or "DATA:" in text else text


def _shortened(address: re.Match[str]) -> str:
    return f"data:{address[1] or ''},…"


def _drop_addresses(text: str, mark: str, closing: str) -> str:
    """Return `text` without what stands between the mark's beginning and `closing`, for each mark in it.

    `](blob:…)` becomes `]`, and `src="data:image/…"` becomes `src=""`.
    """
    in_markdown = mark[0] == "]"
    kept = len("]") if in_markdown else len('src="')  # characters of the mark that stay
    dropped_after = len(")") if in_markdown else 0  # characters of `closing` that go
    pieces: list[str] = []
    copied_until = at = end = 0
    while len(pieces) < _MAX_DROPPED and (start := text.find(mark, at)) >= 0:
        if end < start + len(mark):  # else the end that was found before is also the next one after this mark
            end = text.find(closing, start + len(mark))
        if end < 0:
            break
        line_end = text.find("\n", start, end)
        if line_end >= 0:
            at = line_end  # no address that begins later on this line ends on it either
            continue
        pieces.append(text[copied_until : start + kept])
        copied_until = at = end + dropped_after
    return "".join([*pieces, text[copied_until:]]) if pieces else text
