"""How a secret may be written: exactly, escaped by whatever stood between, in base64 or in hex.

Each spelling has marks, literal texts of which one stands wherever its pattern matches; a pattern runs only over a text
that has one. Marks are as long as they can be: looking for 60 characters takes 0.05 ms/MB, for 4 ten times that (an
automaton for all marks at once, `ahocorasick_rs`, takes 2 ms/MB, an alternation of them 5 to 80 ms/MB).
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
"""Where a text is taken in parts: a spelling that takes more characters for one of the secret may be halved."""

_SHORTEST_MARK = 3
_BASE64_BITS, _BYTE_BITS, _BLOCK_BYTES = 6, 8, 3
_HEX = re.compile(r"[0-9a-f]{2,}")

# What escapes an escape: JSON in JSON doubles backslashes, a URL in a URL percent signs, HTML in HTML ampersands.
_PERCENT = r"%(?:25){0,3}"
_AMPERSAND = rf"(?:&(?:amp;){{0,3}}|{_PERCENT}26(?:amp(?:;|{_PERCENT}3[Bb])){{0,3}})"
_SEMICOLON = rf"(?:;|{_PERCENT}3[Bb])?"
_NUMBER = rf"(?:#|{_PERCENT}23)"
_BACKSLASH = rf"(?:\\|{_PERCENT}5[Cc]|{_AMPERSAND}{_NUMBER}(?:0{{0,6}}92|x0{{0,6}}5c){_SEMICOLON})"
_NAMES = {"&": "amp", "<": "lt", ">": "gt", '"': "quot", "'": "apos"}


@dataclass(frozen=True)
class Spelling:
    """One way to write a secret; without marks its pattern runs over every text."""

    marks: tuple[str, ...]
    source: str

    def stands_in(self, text: str, start: int, end: int) -> bool:
        """Whether the part of a text has a mark, so that the pattern is worth its time."""
        return not self.marks or any(text.find(mark, start, end) >= 0 for mark in self.marks)

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Compiled where the first mark is met: it takes milliseconds, and most secrets never come back."""
        return re.compile(self.source, re.IGNORECASE)


@lru_cache(maxsize=1_024)
def spellings(secret: str) -> tuple[Spelling, ...]:
    """Every way to write `secret` (at least one character) that is looked for."""
    value = secret.encode("utf-8", "surrogatepass")
    return (
        _escaped(secret),
        *(_uniform(secret, escape) for escape in _UNIFORM),
        Spelling(_cases(value.hex()), value.hex()),
        *(_escaped(text, {"+": "[-+]", "/": "[/_]"}, any_case=False) for text in _base64(value)),
    )


def _escaped(text: str, instead: Mapping[str, str] = MappingProxyType({}), *, any_case: bool = True) -> Spelling:
    """A text whose letters and digits stand as they are, in any case, and whose other characters are escaped or not.

    `instead` has the pattern of a character that may also stand as another.
    """
    runs = ["".join(group) for plain, group in groupby(text, _is_plain) if plain]
    mark = max(runs, key=len, default="")
    marks = (_cases(mark) if any_case else (mark,)) if len(mark) >= _SHORTEST_MARK else ()
    return Spelling(marks, "".join(_run(char, len(list(group)), instead) for char, group in groupby(text)))


def _run(char: str, length: int, instead: Mapping[str, str]) -> str:
    """The same character so many times.

    Backslashes are one repeat together: each with a repeat of its own would be tried in every combination.
    """
    if char == "\\":
        return f"{_BACKSLASH}{{{length},{8 * length}}}"
    return length * (char if _is_plain(char) else _any_form(char, instead.get(char)))


def _is_plain(char: str) -> bool:
    return char.isascii() and char.isalnum()


def _cases(text: str) -> tuple[str, ...]:
    return tuple({text: None, text.lower(): None, text.upper(): None})


def _any_form(char: str, literal: str | None = None) -> str:
    """A pattern for one character as it is, behind backslashes, or in any escape."""
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


_UNIFORM: tuple[Callable[[str], str], ...] = (
    lambda char: "".join(f"%{byte:02x}" for byte in char.encode("utf-8", "surrogatepass")),
    lambda char: "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogatepass")),
    lambda char: "".join(f"\\u{unit:04x}" for unit in _utf16(char)),
    lambda char: f"&#{ord(char)};",
    lambda char: f"&#x{ord(char):x};",
)


def _uniform(secret: str, escape: Callable[[str], str]) -> Spelling:
    """Every character in the same escape."""
    form = "".join(map(escape, secret))
    upper = _HEX.sub(lambda digits: digits[0].upper(), form)
    return Spelling(tuple({form: None, upper: None}), re.escape(form))


def _base64(secret: bytes) -> Iterator[str]:
    """What of the base64 text is certain, whichever bytes stand before and behind the secret."""
    for before in range(_BLOCK_BYTES):
        encoded = base64.b64encode(bytes(before) + secret).decode()
        first = -(-before * _BYTE_BITS // _BASE64_BITS)
        last = (before + len(secret)) * _BYTE_BITS // _BASE64_BITS
        yield encoded[first:last]
