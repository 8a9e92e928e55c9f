"""Redactor: masks known secrets in their common encodings, and anything that looks like a Jina API key.

Each encoding has marks: literal texts, one of which occurs in every match of its pattern. The pattern only runs if a
search finds a mark. Marks are as long as possible: a search for 60 characters takes 0.05 ms/MB, for 4 ten times that.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from types import MappingProxyType
from typing import Any

import orjson

REACH_CHARS = 40
"""Characters behind a cut that are searched, too, per byte of the longest secret; longer encodings may be missed."""

_SHORTEST_MARK = 3
_FLOAT_DIGITS = 15  # significant digits that every float formatter preserves
_MIN_DIGITS = 5  # fewer occur in too many other numbers
_HEX = re.compile(r"[0-9a-f]{2,}")

# Nested escapes: JSON in JSON doubles backslashes, a URL in a URL escapes percent signs, HTML in HTML ampersands.
_PERCENT = r"%(?:25){0,3}"
_AMPERSAND = rf"(?:&(?:amp;){{0,3}}|{_PERCENT}26(?:amp(?:;|{_PERCENT}3[Bb])){{0,3}})"
_SEMICOLON = rf"(?:;|{_PERCENT}3[Bb])?"
_NUMBER = rf"(?:#|{_PERCENT}23)"
_BACKSLASH = rf"(?:\\|{_PERCENT}5[Cc]|{_AMPERSAND}{_NUMBER}(?:0{{0,6}}92|x0{{0,6}}5c){_SEMICOLON})"
_NAMES = {"&": "amp", "<": "lt", ">": "gt", '"': "quot", "'": "apos"}


@dataclass(frozen=True)
class Encoding:
    """One encoding of a secret; without marks its pattern runs over every text."""

    marks: tuple[str, ...]
    source: str
    flags: re.RegexFlag = re.IGNORECASE

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Compiled on first use: that takes milliseconds, and most secrets never occur."""
        return re.compile(self.source, self.flags)


@lru_cache(maxsize=1_024)
def encodings(secret: str) -> tuple[Encoding, ...]:
    """Return the encodings of a secret, which must not be empty."""
    value, codes = secret.encode("utf-8", "surrogatepass"), [ord(char) for char in secret]
    escapes = (
        ("%{:02x}", value),
        ("\\x{:02x}", value),
        ("\\u{:04x}", _utf16(secret)),
        ("&#{};", codes),
        ("&#x{:x};", codes),
    )
    return (
        _escaped(secret),
        *(_uniform("".join(map(escape.format, units))) for escape, units in escapes),
        Encoding(_cases(value.hex()), value.hex()),
        *_rounded(secret),
        *(_escaped(text, {"+": "[-+]", "/": "[/_]"}, any_case=False) for text in _base64(value)),
    )


def _rounded(secret: str) -> Iterator[Encoding]:
    """Yield the encodings of a decimal secret written as a float, rounded to 15 to 17 digits."""
    if secret.isascii() and secret.isdecimal() and len(secret) > _FLOAT_DIGITS:
        number = float(secret)
        texts = (secret, f"{number:.0f}", *(f"{number:.{digits}e}" for digits in (14, 15, 16)), repr(number))
        for first, others in sorted({(digits[0], digits[1:]) for digits in map(_leading_digits, texts)}):
            if len(others) >= _MIN_DIGITS:
                yield Encoding((others,), rf"{first}\.?{others}\d{{0,40}}(?:e\+?\d{{1,3}})?")


def _leading_digits(number: str) -> str:
    return number.partition("e")[0].replace(".", "")[:_FLOAT_DIGITS].rstrip("0")


def _escaped(text: str, instead: Mapping[str, str] = MappingProxyType({}), *, any_case: bool = True) -> Encoding:
    """Return the encoding with other characters than letters and digits plain, escaped or as `instead`."""
    runs = ["".join(group) for plain, group in groupby(text, _is_plain) if plain]
    mark = max(runs, key=len, default="")
    marks = (_cases(mark) if any_case else (mark,)) if len(mark) >= _SHORTEST_MARK else ()
    return Encoding(marks, "".join(_run(char, len(list(group)), instead) for char, group in groupby(text)))


def _run(char: str, length: int, instead: Mapping[str, str]) -> str:
    if char == "\\":  # with one repeat each, matching would backtrack exponentially
        return f"{_BACKSLASH}{{{length},{8 * length}}}"
    return length * (char if _is_plain(char) else f"(?:{'|'.join(_forms(char, instead.get(char, re.escape(char))))})")


def _is_plain(char: str) -> bool:
    return char.isascii() and char.isalnum()


def _cases(text: str) -> tuple[str, ...]:
    return tuple({text: None, text.lower(): None, text.upper(): None})


def _forms(char: str, literal: str) -> Iterator[str]:
    """Yield patterns of a character: `literal` or escaped, also behind backslashes."""
    code, value = ord(char), char.encode("utf-8", "surrogatepass")
    named = f"|{_AMPERSAND}{_NAMES[char]}{_SEMICOLON}" if char in _NAMES else ""
    entity = f"{_AMPERSAND}{_NUMBER}(?:0{{0,6}}{code}|x0{{0,6}}{code:x}){_SEMICOLON}"
    percent = "".join(f"{_PERCENT}{byte:02x}" for byte in value)
    yield f"{_BACKSLASH}{{0,8}}(?:{literal}|{entity}|{percent}{named})"
    if char == " ":
        yield r"\+"
    yield "".join(f"{_BACKSLASH}{{1,8}}x{byte:02x}" for byte in value)
    yield "".join(f"{_BACKSLASH}{{1,8}}u{unit:04x}" for unit in _utf16(char))
    yield f"{_BACKSLASH}{{1,8}}(?:x{code:02x}|u\\{{?0{{0,4}}{code:x}\\}}?)"


def _utf16(text: str) -> list[int]:
    raw = text.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(raw[at : at + 2], "big") for at in range(0, len(raw), 2)]


def _uniform(form: str) -> Encoding:
    upper = _HEX.sub(lambda digits: digits[0].upper(), form)
    return Encoding(tuple({form: None, upper: None}), re.escape(form))


def _base64(secret: bytes) -> Iterator[str]:
    """Yield the base64 text that does not depend on the bytes around the secret, for each alignment."""
    for before, first in enumerate((0, 2, 3)):
        last = (before + len(secret)) * 8 // 6
        yield base64.b64encode(bytes(before) + secret).decode()[first:last]


MASK = "[redacted]"
MIN_SECRET_CHARS = 6
"""Shorter values occur in too many ordinary words to be masked."""

_COMMON_WORDS = frozenset({"postgres", "postgresql", "password", "secret", "kernel", "executor", "openapi-tool"})
"""Passwords of samples; masking these words in log messages would reveal them."""

# Long enough not to match names of tools or durables. The reader escapes `_` in markdown, hence `jina\_…`. A pattern
# that begins with a text, in the case given, is searched for ten times as fast.
_JINA_KEY = Encoding(
    ("jina",),
    r"jina(?<![A-Za-z0-9]jina)(?:\\{0,4}_|%5[Ff]|&#95;)[A-Za-z0-9]{20,200}(?:\\{0,4}[_-]|[A-Za-z0-9]){0,200}",
    re.NOFLAG,
)
_JINA_KEY_REACH = 1_500
_ESCAPES = "%\\&"  # first characters of escapes; few short texts have one, so marks with them are searched only then

Range = tuple[int, int]


Count = Callable[[str, int], object]
on_masked: Count = lambda where, number: None  # noqa: ARG005, E731 - replaced, see below
"""Called with the place and the number of masked texts; `telemetry.metrics` sets it, which workers do not import."""


def is_maskable(secret: str) -> bool:
    """Return whether a secret is long enough, and not a common word."""
    return len(secret) >= MIN_SECRET_CHARS and secret.lower() not in _COMMON_WORDS


class Redactor:
    """Replaces every `known` secret and every Jina-shaped key; `where` is the label of the metric."""

    def __init__(self, secrets: Iterable[str] = (), where: str = "log") -> None:
        self._where = where
        self._by_label: dict[str, Redactor] = {}
        self._set_secrets(frozenset(secret for secret in secrets if is_maskable(secret)))

    def _set_secrets(self, secrets: frozenset[str]) -> None:
        self.known = secrets
        self._encodings = (_JINA_KEY, *(encoding for secret in sorted(secrets) for encoding in encodings(secret)))
        marks = [mark for encoding in self._encodings[1:] for mark in encoding.marks]  # _JINA_KEY: see is_suspect
        self._marks = tuple(mark for mark in marks if mark[0] not in _ESCAPES)
        self._escaped_marks = {sign: tuple(mark for mark in marks if mark[0] == sign) for sign in _ESCAPES}
        self._has_unmarked = any(not encoding.marks for encoding in self._encodings)
        self._reach = max(
            [_JINA_KEY_REACH, *(REACH_CHARS * len(secret.encode("utf-8", "surrogatepass")) for secret in secrets)]
        )

    def with_label(self, label: str) -> Redactor:
        """Return a redactor for the same secrets, also later ones, that counts under another label."""
        return self._by_label.setdefault(label, Redactor(self.known, label))

    def add(self, secrets: Iterable[str]) -> None:
        """Mask these secrets, too, from now on."""
        known = self.known | Redactor(secrets).known
        if known == self.known:
            return
        for redactor in (self, *self._by_label.values()):
            redactor._set_secrets(known)  # noqa: SLF001 - of the same class

    def text(self, text: str) -> str:
        """Return `text` with secrets masked."""
        return self._masked_text(text, self._spans(text), len(text))

    def head(self, text: str, chars: int) -> str:
        """Return the first `chars` characters with secrets masked, also one that the cut would halve."""
        if len(text) <= chars:
            return self.text(text)
        spans = [span for span in self._spans(text[: chars + self._reach]) if span[0] < chars]
        return self._masked_text(text, spans, chars)

    def is_suspect(self, text: str) -> bool:
        """Return whether `text` may hold a secret. Takes a small part of the time of `text`, which then decides."""
        # Names of tools contain `jina`, too, so run the pattern.
        if "jina" in text and _JINA_KEY.pattern.search(text):
            return True
        holds = text.__contains__  # with `map`: a generator would take longer than the search
        if self._has_unmarked or any(map(holds, self._marks)):
            return True
        return any(sign in text and any(map(holds, marks)) for sign, marks in self._escaped_marks.items())

    def finds_in(self, text: str) -> bool:
        """Return whether `text` holds a secret."""
        return bool(self._spans(text))

    def value(self, value: Any) -> Any:
        """Return a JSON-like value with secrets masked, also in keys; other objects become their text."""
        if isinstance(value, dict | list):
            with suppress(TypeError, ValueError):
                if not self.finds_in(orjson.dumps(value).decode()):  # much faster than a traversal
                    return value
        return self._masked_value(value)

    def _masked_value(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self.text(str(key)): self._masked_value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return list(map(self._masked_value, value))
        text = value if isinstance(value, str) else str(value)
        clean = self.text(text)
        return value if clean == text and (value is None or isinstance(value, str | int | float)) else clean

    def _spans(self, text: str) -> list[Range]:
        if not self.is_suspect(text):
            return []
        holds = text.__contains__
        patterns = (each.pattern for each in self._encodings if not each.marks or any(map(holds, each.marks)))
        return [found.span() for pattern in patterns for found in pattern.finditer(text)]

    def _masked_text(self, text: str, spans: list[Range], end: int) -> str:
        """Return the text up to `end`, or that of the last span if it is later, with the spans masked."""
        if not spans:
            return text[:end]
        pieces, done = list[str](), 0
        for start, stop in sorted(spans):
            if start >= done:
                pieces += [text[done:start], MASK]
            done = max(done, stop)
        on_masked(self._where, len(pieces) // 2)
        return "".join([*pieces, text[done:end]])


_of_call = lru_cache(maxsize=256)(Redactor)


def of_call(secrets: Iterable[str]) -> Redactor:
    """Return a (cached) redactor for the response of one call, which masks only the secrets sent with it.

    Otherwise a page could list guesses of another secret, and its author would learn which guess is masked.
    """
    return _of_call(frozenset(secrets), "answer")
