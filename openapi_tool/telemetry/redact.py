"""No secret in any output: values in use in their common spellings, and whatever looks like a key of Jina's."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import quote, quote_plus

import orjson

MASK = "[redacted]"
MIN_SECRET_CHARS = 6
"""Shorter values are in too many innocent words to be masked; whoever sets one is warned at the start."""

_JINA_KEY = re.compile(r"(?<![A-Za-z0-9])jina_[A-Za-z0-9]{20,}[A-Za-z0-9_-]*")  # no name of a tool or a durable
_HEX = re.compile(r"%[0-9A-F]{2}|\\u[0-9a-f]{4}")
_NOTHING = r"(?!)"
_URL_SAFE = str.maketrans("+/", "-_")
_BASE64_BITS, _BYTE_BITS, _BLOCK_BYTES = 6, 8, 3
_SHORT_TEXT_CHARS = 500  # up to here one pass of the pattern is faster than a look for each spelling


class Redactor:
    """Replaces every known secret and every Jina-shaped key in texts, at any depth.

    Secrets of less than MIN_SECRET_CHARS are left alone.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = {secret for secret in secrets if len(secret) >= MIN_SECRET_CHARS}
        self._spellings = sorted({form for secret in known for form in spellings(secret)}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, self._spellings)) or _NOTHING)

    def text(self, text: str) -> str:
        """`text` without secrets."""
        if len(text) < _SHORT_TEXT_CHARS or any(spelling in text for spelling in self._spellings):
            text = self._known.sub(MASK, text)
        return _JINA_KEY.sub(MASK, text) if "jina_" in text else text

    def value(self, value: Any) -> Any:
        """A JSON-like value without secrets, keys included; what JSON has no form for becomes its text."""
        return value if isinstance(value, dict | list) and self._is_clean(value) else self._masked(value)

    def _is_clean(self, value: Any) -> bool:
        """Whether a value has nothing to mask anywhere; its JSON as one text is looked through much faster than it."""
        try:
            text = orjson.dumps(value).decode()
        except (TypeError, ValueError):
            return False
        return text == self.text(text)

    def _masked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self._masked(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._masked(item) for item in value]
        return value if value is None or isinstance(value, int | float) else self.text(str(value))


def spellings(secret: str) -> frozenset[str]:
    """A secret as it may stand in a text: exact, escaped once or twice, and anywhere inside base64."""
    escaped = {twice for once in _escaped(secret) for twice in _escaped(once)}
    encoded = {form for text in _base64(secret.encode("utf-8", "surrogatepass")) for form in _escaped(text)}
    return frozenset(escaped | encoded)


_BOTH_QUOTES = "'\""  # with them in it, `repr` escapes the single ones


def _percent(text: str, safe: str = "") -> str:
    return quote(text, safe=safe, errors="surrogatepass")


_ESCAPES: tuple[Callable[[str], str], ...] = (
    str,
    _percent,
    lambda text: _percent(text, "/"),
    lambda text: quote_plus(text, errors="surrogatepass"),
    lambda text: json.dumps(text)[1:-1],
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: repr(text)[1:-1],
    lambda text: repr(text + _BOTH_QUOTES)[1 : -len(repr(_BOTH_QUOTES)) + 1],
    lambda text: repr(text.encode("utf-8", "surrogatepass"))[2:-1],
    html.escape,
)


def _escaped(text: str) -> Iterator[str]:
    """A text in every escape, hexadecimal digits in both cases."""
    for escape in _ESCAPES:
        form = escape(text)
        yield form
        yield _HEX.sub(lambda code: code[0].swapcase().replace("\\U", "\\u"), form)


def _base64(secret: bytes) -> Iterator[str]:
    """What of the base64 text is certain, whichever bytes stand before and behind the secret."""
    for before in range(_BLOCK_BYTES):
        encoded = base64.b64encode(bytes(before) + secret).decode()
        first = -(-before * _BYTE_BITS // _BASE64_BITS)
        last = (before + len(secret)) * _BYTE_BITS // _BASE64_BITS
        yield encoded[first:last]
        yield encoded[first:last].translate(_URL_SAFE)
