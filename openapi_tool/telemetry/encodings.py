"""Encodings of a secret in which the redactor finds it: plain, escaped, base64, hex.

Each encoding has marks: literal texts, one of which occurs in every match of its pattern. The pattern only runs if a
substring search finds a mark. Marks are as long as possible: a search for 60 characters takes 0.05 ms/MB, for 4
characters ten times that. One automaton for all marks (`ahocorasick_rs`) would take 2 ms/MB.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from types import MappingProxyType

REACH_CHARS = 40
"""Overlap of slices in characters: an encoding with more characters per character of the secret may be missed."""

_SHORTEST_MARK = 3
_BASE64_BITS, _BYTE_BITS, _BLOCK_BYTES = 6, 8, 3
_FLOAT_DIGITS = 15  # preserved by every float formatter
_DECIMALS = (14, 15, 16)  # in forms with an exponent
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

    def may_match(self, text: str, start: int, end: int) -> bool:
        """Return whether a slice of a text contains a mark, so that the pattern must run."""
        for mark in self.marks:  # no `any`: its generator would take longer than the search
            if text.find(mark, start, end) >= 0:
                return True
        return not self.marks

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Pattern, compiled on first use: compiling takes milliseconds, and most secrets never occur."""
        return re.compile(self.source, re.IGNORECASE)


@lru_cache(maxsize=1_024)
def encodings(secret: str) -> tuple[Encoding, ...]:
    """Return all encodings of `secret` (at least one character) that the redactor searches for."""
    value = secret.encode("utf-8", "surrogatepass")
    return (
        _escaped(secret),
        *(_uniform(secret, escape) for escape in _UNIFORM_ESCAPES),
        Encoding(_cases(value.hex()), value.hex()),
        *_rounded(secret),
        *(_escaped(text, {"+": "[-+]", "/": "[/_]"}, any_case=False) for text in _base64(value)),
    )


def _rounded(secret: str) -> Iterator[Encoding]:
    """Yield the encodings of a long decimal secret written as a float, rounded to 15 to 17 digits."""
    if secret.isascii() and secret.isdecimal() and len(secret) > _FLOAT_DIGITS:
        number = float(secret)
        texts = (
            secret,
            f"{number:.0f}",
            *(f"{number:.{digits}e}" for digits in _DECIMALS),
            repr(number),
        )
        for first, others in sorted({(digits[0], digits[1:]) for digits in map(_leading_digits, texts)}):
            if len(others) >= _MIN_DIGITS:
                yield Encoding((others,), rf"{first}\.?{others}\d{{0,40}}(?:e\+?\d{{1,3}})?")


def _leading_digits(number: str) -> str:
    """Return the digits with which every text of this number begins, without trailing zeros."""
    return number.partition("e")[0].replace(".", "")[:_FLOAT_DIGITS].rstrip("0")


def _escaped(text: str, instead: Mapping[str, str] = MappingProxyType({}), *, any_case: bool = True) -> Encoding:
    """Return the encoding with plain letters and digits, in any case, and all other characters plain or escaped.

    `instead` maps a character to a pattern that also matches its alternatives.
    """
    runs = ["".join(group) for plain, group in groupby(text, _is_plain) if plain]
    mark = max(runs, key=len, default="")
    marks = (_cases(mark) if any_case else (mark,)) if len(mark) >= _SHORTEST_MARK else ()
    return Encoding(marks, "".join(_run(char, len(list(group)), instead) for char, group in groupby(text)))


def _run(char: str, length: int, instead: Mapping[str, str]) -> str:
    """Return the pattern of a run of one character.

    A run of backslashes becomes a single repeat: with one repeat each, matching would backtrack exponentially.
    """
    if char == "\\":
        return f"{_BACKSLASH}{{{length},{8 * length}}}"
    return length * (char if _is_plain(char) else _any_form(char, instead.get(char)))


def _is_plain(char: str) -> bool:
    return char.isascii() and char.isalnum()


def _cases(text: str) -> tuple[str, ...]:
    return tuple({text: None, text.lower(): None, text.upper(): None})


def _any_form(char: str, literal: str | None = None) -> str:
    """Return a pattern for one character: plain, behind backslashes, or escaped in any way."""
    return f"(?:{'|'.join(_forms(char, literal or re.escape(char)))})"


def _forms(char: str, literal: str) -> Iterator[str]:
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


def _utf16(char: str) -> Iterator[int]:
    raw = char.encode("utf-16-be", "surrogatepass")
    return (int.from_bytes(raw[at : at + 2], "big") for at in range(0, len(raw), 2))


_UNIFORM_ESCAPES: tuple[Callable[[str], str], ...] = (
    lambda char: "".join(f"%{byte:02x}" for byte in char.encode("utf-8", "surrogatepass")),
    lambda char: "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogatepass")),
    lambda char: "".join(f"\\u{unit:04x}" for unit in _utf16(char)),
    lambda char: f"&#{ord(char)};",
    lambda char: f"&#x{ord(char):x};",
)


def _uniform(secret: str, escape: Callable[[str], str]) -> Encoding:
    form = "".join(map(escape, secret))
    upper = _HEX.sub(lambda digits: digits[0].upper(), form)
    return Encoding(tuple({form: None, upper: None}), re.escape(form))


def _base64(secret: bytes) -> Iterator[str]:
    """Return the base64 text that does not depend on the bytes around the secret, for each alignment."""
    for before in range(_BLOCK_BYTES):
        encoded = base64.b64encode(bytes(before) + secret).decode()
        first = -(-before * _BYTE_BITS // _BASE64_BITS)
        last = (before + len(secret)) * _BYTE_BITS // _BASE64_BITS
        yield encoded[first:last]
