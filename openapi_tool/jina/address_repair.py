"""Repairs what a model gives as an address: quotes or words around it, JSON, blanks, the number of a document.

A text is repaired only if its meaning is clear; else BadRequest says what to give. All functions take linear time. They
know nothing of hosts: which of them may be read is decided in `url_policy.py`.
"""

from __future__ import annotations

import re

import orjson

from openapi_tool.protocol.errors import BadRequest

MAX_URL_CHARS = 16_000  # of an address, before and after its repair

# Characters around a text that are dropped: white space, and characters without width.
_BLANKS = " \t\r\n\f\v\u00a0\u200b\u2060\u3000\ufeff"
_WRAPPERS = {'"': '"', "'": "'", "`": "`", "<": ">", "\u201c": "\u201d", "\u2018": "\u2019", "«": "»", "*": "*"}
_WRAPPERS |= {"(": ")", "\uff08": "\uff09", "\u300a": "\u300b", "\u300c": "\u300d", "\u3010": "\u3011"}
"""What may stand around an address: the opening mark, and the closing one that belongs to it."""
# A Markdown link or image, `[text](address "title")`; the group is its address.
_LINK = re.compile(r"""!?\[.*\]\(\s*(\S+)(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)""", re.DOTALL)
# Some patterns are ASCII, because with IGNORECASE the `s` of a scheme also matches U+017F.
_DOI = re.compile(r"\A(?:doi:\s*)?(10\.[0-9]{4,9}/[^\s#?%]+)\Z", re.IGNORECASE)
"""A document's DOI. As a URL its `10.1234` would be a private IPv4 address."""
# A paper's number at arxiv.org, such as `arXiv:2501.12345v2`.
_ARXIV = re.compile(
    r"\Aarxiv:\s*((?:[0-9]{4}\.[0-9]{4,5}|[a-z-]{2,20}(?:\.[a-z]{2})?/[0-9]{7})(?:v[0-9]{1,3})?)\Z",
    re.IGNORECASE | re.ASCII,
)
_WITH_BLANKS = re.compile(
    r"((?:https?://)?[^\s/?#.]+\.[^\s/?#]+[/?#][^\s\x00-\x1f]*(?:[ \u00a0]+[^\s\x00-\x1f]+)+)", re.IGNORECASE
)
"""Address with blanks behind its host, as of a title that was put into it."""
# The beginning of a second address.
_ANOTHER = re.compile(r"[\s,;]https?://", re.IGNORECASE | re.ASCII)
_AMONG_WORDS = re.compile(
    r"""(?:[^/?#.@\\]*\s|-{0,2}url\s*[:=]\s*)["'`<(]*(https?://[^\s"'`<>]+)[^:]*""", re.IGNORECASE | re.ASCII
)
"""The only address in a text, behind words or `url:`."""
_JSON_NAMES = ("url", "target_url", "link", "href")
"""Members of a JSON object that may hold the address."""
_FORBIDDEN = re.compile(r"[\s\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # white space, control characters, surrogates
# Of an address in a message: characters before and after `repr`, which writes some of them as escapes.
_SHOWN_CHARS = 80
_MAX_SHOWN_CHARS = 160


def repaired_address(text: str) -> str:
    """Return the address that a text means, perhaps without its scheme. Raises BadRequest if that is not clear."""
    return checked_characters(_repaired(_unwrapped(bounded(text))))


def bounded(text: str) -> str:
    """Return the text. Raises BadRequest if it is too long for an address."""
    if len(text) > MAX_URL_CHARS:
        raise BadRequest(f"url: has {len(text)} characters, at most {MAX_URL_CHARS} are read. Give a shorter address.")
    return text


def checked_characters(text: str) -> str:
    """Return the text without white space at its end. Raises BadRequest for a character that no URL contains."""
    text = text.rstrip(_BLANKS)
    if _FORBIDDEN.search(text):
        raise BadRequest("url: holds blanks, line breaks or control characters. Write one address, blanks as %20.")
    if "\\" in text:
        raise BadRequest("url: holds a backslash. Write / between parts, or %5C where a backslash is meant.")
    return text


def shown_address(text: str) -> str:
    """Return an address for a message: quoted, and cut if it is long."""
    shown = repr(text[:_SHOWN_CHARS])
    return shown if len(shown) <= _MAX_SHOWN_CHARS else f"{shown[:_MAX_SHOWN_CHARS]}…"


def _repaired(text: str) -> str:
    """Return the address in a JSON text or among words, of a DOI or arXiv number, or with its blanks encoded."""
    if text[:1] in ("{", "["):
        text = _unwrapped(_in_json(text))
    among_words = _AMONG_WORDS.fullmatch(text)
    if among_words:
        text = _unwrapped(among_words[1])
    if _ANOTHER.search(text) and " " in text:
        first, *others = text.split("://")
        # Another address has a scheme, or looks like one without: `a.example/b https://c.example`.
        is_another = len(others) > 1 or any("." in word and "/" in word for word in first.split())
        raise _several() if is_another else _words_beside()
    text = _ARXIV.sub(r"https://arxiv.org/abs/\1", _DOI.sub(r"https://doi.org/\1", text))
    text = text.replace("&amp;", "&")  # copied from HTML
    if _WITH_BLANKS.fullmatch(text):
        return text.replace(" ", "%20").replace("\u00a0", "%20")
    if " " in text and "://" not in text:
        raise BadRequest(f"url: {shown_address(text)} is no address. To find pages by words, use the search tool.")
    return text


def _in_json(text: str) -> str:
    """Return the address in a JSON object or list, the text itself if it is no JSON."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    if isinstance(value, list) and len(value) > 1:
        raise _several()
    if isinstance(value, list) and value:
        value = value[0]
        if isinstance(value, str):
            return value
    # An object, also as the only item of a list.
    if isinstance(value, dict):
        for name in _JSON_NAMES:
            address = value.get(name)
            if isinstance(address, str):
                return address
    raise BadRequest("url: is JSON without an address. Give the address alone, such as https://example.com/page.")


def _several() -> BadRequest:
    return BadRequest(
        "url: holds several addresses. Give one; call the tool for each, or use the tool that takes several."
    )


def _words_beside() -> BadRequest:
    return BadRequest("url: holds words beside the address. Give the address alone.")


def _unwrapped(text: str) -> str:
    """Return the text without blanks, quotes, brackets and Markdown around it. Raises BadRequest if nothing is left."""
    text = text.strip(_BLANKS)
    while inner := _without_wrapper(text):
        text = inner
    if not text:
        raise BadRequest("url: is empty. Give the full address of a page, such as https://example.com/page.")
    return text


def _without_wrapper(text: str) -> str:
    """Return the text inside the outermost quotes, brackets or Markdown; empty if there are none.

    - The punctuation after them is dropped, too.
    - A run of the same mark (`**…**`) is removed at once; one by one would take quadratic time.
    - A comma or semicolon at the inner end is dropped, but no dot, since addresses may end in one (`/Acme_Inc.`).
    """
    wrapped = text.rstrip(".,;:!?\u3002\uff0c")
    link = _LINK.fullmatch(wrapped) if wrapped.count("](") == 1 else None
    if link:
        return link[1].rstrip(",;")
    opening, closing = wrapped[:1], wrapped[-1:]
    if _WRAPPERS.get(opening) != closing or closing in wrapped.strip(opening + closing):
        return ""
    opening_run = len(wrapped) - len(wrapped.lstrip(opening))
    closing_run = len(wrapped) - len(wrapped.rstrip(closing))
    run = min(opening_run, closing_run, len(wrapped) // 2)
    return wrapped[run:-run].strip(_BLANKS).rstrip(",;") if run else ""
