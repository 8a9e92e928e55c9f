"""Drop the addresses of inline images: `data:` addresses, and `blob:` ones, which only the browser of the upstream has.

A model cannot open them, and one may be longer than its page.
"""

from __future__ import annotations

from openapi_tool.concurrency import Steps

_MARKS = (("](blob:", ")"), ("](data:image/", ")"), ('src="data:image/', '"'), ("src='data:image/", "'"))
"""Delimiters of an address in Markdown and HTML: its beginning and its end."""
_MAX_DROPPED = 10_000


def is_inline(url: str) -> bool:
    """Return whether an address is that of an inline image."""
    return url.startswith(("blob:", "data:"))


def without_inline_images(texts: list[str]) -> Steps[list[str]]:
    """Return the texts with `![alt]` for `![alt](blob:…)`, and `src=""` for `src="data:image/…"`.

    An address must end on its line. Takes linear time; drops at most 10,000 addresses of each kind in each text.
    """
    for text in texts:
        if "blob:" in text or "data:image/" in text:
            break
    else:
        return texts
    found = []
    for text in texts:
        for mark, closing in _MARKS:
            text = (yield from _drop_addresses(text, mark, closing)) if mark in text else text  # noqa: PLW2901 - step by step
        found.append(text)
    return found


def _drop_addresses(text: str, mark: str, closing: str) -> Steps[str]:
    pieces: list[str] = []
    copied_until = at = end = 0
    while len(pieces) < _MAX_DROPPED and (start := text.find(mark, at)) >= 0:
        if end < start + len(mark):  # otherwise the delimiter found before still follows this mark
            end = text.find(closing, start + len(mark))
        if end < 0:
            break
        line_end = text.find("\n", start, end)
        if line_end >= 0:
            at = line_end  # no address before the end of this line is closed on it
            yield
            continue
        in_markdown = mark[0] == "]"
        pieces.append(text[copied_until : start + (1 if in_markdown else len("src=."))])
        copied_until = at = end + in_markdown
        yield
    return "".join([*pieces, text[copied_until:]]) if pieces else text
