"""Texts in the form in which they are searched, with the positions of the original.

Without differences of case, of width and form of characters (NFKC), of hyphens, of blanks and of quotes, and without
the backslashes of markdown. In Latin and Greek also without marks: é is e, ø is o. In other scripts a mark makes
another letter: ガ is not カ, й is not и.

Lengths and positions are in characters. Imports pure code only.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple

MAX_FOLDED_FROM = 16
"""Characters of a text that one folded character stands for, at most: a run of blanks, or a letter with its marks."""

_ASCII_BLANKS = "\n\r\t\x0b\x0c"
_SAME = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
    **dict.fromkeys("\u2018\u2019\u201a\u201b\u2039\u203a", "'"),
    **dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb", '"'),
    "\u2044": "/",  # of fractions
    # Letters with a stroke and ligatures, which Unicode does not decompose.
    **dict(zip("\u00f8\u0111\u0142\u0127\u0167\u0131", "odlhti", strict=True)),
    "\u00e6": "ae",
    "\u0153": "oe",
}
_IGNORED = re.compile("[\u00ad\u034f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]")

# Characters that change the one before: marks of Latin, Greek, Cyrillic and Arabic letters, the Hindi dot, marks of
# voiced kana, and later parts of a Hangul syllable.
_JOINING = (
    "\u0300-\u036f\u0483-\u0487\u0653-\u0655\u093c\u1160-\u11ff\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\u3099\u309a"
    "\ufe20-\ufe2f\uff9e\uff9f"
)
_ESCAPE = r"\\(?=[*_`~#=+.!<>|(){}\[\]-])"
"""Backslash of markdown before a character; in a path one stands before a letter."""
_JOINS = re.compile(f"[{_JOINING}]")
_HAS_PLAIN_MARKS = re.compile(
    "[a-z\u00aa\u00ba\u00df-\u02af\u0370-\u03ff\u1d00-\u1dbf\u1e00-\u1fff\u2c60-\u2c7f\ua722-\ua7ff\uab30-\uab6f]"
)
"""Letters of Latin and Greek."""


@lru_cache(maxsize=256)
def _letters(several: str) -> re.Pattern[str]:
    """Return a pattern of runs of blanks, of marks, of escapes, and of the characters that become several or none."""
    others = f"|[{re.escape(several)}]" if several else ""
    return re.compile(rf" {{2,{MAX_FOLDED_FROM}}}|[{_JOINING}]{{1,8}}|{_ESCAPE}{others}")


class _Change(NamedTuple):
    """Characters whose number changed: `chars` from `start` on in the text became `folded_chars`."""

    start: int
    chars: int
    folded_chars: int


class Folded:
    """A folded text."""

    def __init__(self, text: str) -> None:
        text = text.replace("İ", "i").lower()  # the only letter whose lower case has two characters
        for blank in _ASCII_BLANKS:
            text = text.replace(blank, " ")
        self._starts: list[int] = []  # of each change in the folded text
        self._changes: list[_Change] = []
        letters = "" if text.isascii() else "".join(sorted(set(text)))
        folded_letters = [_folded_letter(letter) for letter in letters]
        several = [letter for letter, found in zip(letters, folded_letters, strict=True) if len(found) != 1]
        if len(several) < sum(map(str.__ne__, letters, folded_letters)):  # else it takes time for nothing
            text = text.translate(_SINGLE)
        changes = bool(several) or "  " in text or "\\" in text or _JOINS.search(letters) is not None
        self.text = self._changed(text, _letters("".join(several))) if changes else text

    def _changed(self, text: str, pattern: re.Pattern[str]) -> str:
        """Fold what `pattern` finds, and record where that changes the number of characters."""
        pieces: list[str] = []
        copied = length = 0  # of `text`, and of the pieces
        for found in pattern.finditer(text):
            start, end = found.span()
            if start > copied and _JOINS.match(found[0]):
                start -= 1  # the letter that the mark belongs to
            folded = "" if found[0] == "\\" else _folded_letter(text[start:end])
            length += start - copied
            if len(folded) != end - start:
                self._starts.append(length)
                self._changes.append(_Change(start, end - start, len(folded)))
            pieces += (text[copied:start], folded)
            length += len(folded)
            copied = end
        return "".join([*pieces, text[copied:]])

    def origin(self, at: int) -> int:
        """Return the position in the text of a position in the folded text."""
        found = bisect_right(self._starts, at) - 1
        if found < 0:
            return at
        change = self._changes[found]
        beyond = at - self._starts[found]
        if beyond < change.folded_chars:
            return change.start
        return change.start + change.chars + beyond - change.folded_chars

    def place(self, origin: int) -> int:
        """Return the first position in the folded text that stands for nothing before `origin`."""
        found = bisect_right(self._changes, origin, key=lambda change: change.start) - 1
        if found < 0:
            return origin
        start = self._starts[found]
        change = self._changes[found]
        beyond = origin - change.start
        if not beyond:
            return start
        return start + change.folded_chars + max(0, beyond - change.chars)


@lru_cache(maxsize=4_096)  # a text has few different letters
def _folded_letter(letter: str) -> str:
    """Fold a letter with its marks, or a run of blanks."""
    if letter[0] == " ":
        return " "
    text = unicodedata.normalize("NFKC", _IGNORED.sub("", letter)).casefold()
    kept: list[str] = []
    strips = False  # the marks of the last letter
    for char in unicodedata.normalize("NFKD", text):
        if not unicodedata.combining(char):
            strips = _HAS_PLAIN_MARKS.match(char) is not None
        elif strips:
            continue
        kept.append(char)
    return "".join(_SAME.get(char, char) for char in unicodedata.normalize("NFKC", "".join(kept)))


class _SingleLetters(dict[int, str]):
    """Table for `str.translate` of characters that become one other character; others stay."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        found = _folded_letter(char)
        self[code] = found if len(found) == 1 else char
        return self[code]


_SINGLE = _SingleLetters()


def folded(text: str) -> str:
    """Return the folded text."""
    return Folded(text).text
