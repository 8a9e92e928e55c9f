"""Texts in their *folded* form, in which they are searched, with the positions of the original.

The folded form has no differences of case, of width and form of characters (NFKC), of hyphens, of blanks and of quotes,
and no backslashes of Markdown. In Latin and Greek it also has no marks: é is e, ø is o. In other scripts a mark makes
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
# Invisible characters: soft hyphens, joiners, marks of direction.
_IGNORED = re.compile("[\u00ad\u034f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]")

# Characters that change the one before: marks of Latin, Greek, Cyrillic and Arabic letters, the Hindi dot, marks of
# voiced kana, and later parts of a Hangul syllable.
_JOINING = (
    "\u0300-\u036f\u0483-\u0487\u0653-\u0655\u093c\u1160-\u11ff\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\u3099\u309a"
    "\ufe20-\ufe2f\uff9e\uff9f"
)
_ESCAPE = r"\\(?=[*_`~#=+.!<>|(){}\[\]-])"
r"""Backslash of Markdown, as in `snake\_case`. One before a letter, as in `C:\Users`, is part of the text."""
_JOINS = re.compile(f"[{_JOINING}]")
# Letters of Latin and Greek.
_HAS_PLAIN_MARKS = re.compile(
    "[a-z\u00aa\u00ba\u00df-\u02af\u0370-\u03ff\u1d00-\u1dbf\u1e00-\u1fff\u2c60-\u2c7f\ua722-\ua7ff\uab30-\uab6f]"
)


class _Change(NamedTuple):
    """Characters whose number changed: `chars` from `start` on in the text became `folded_chars`."""

    start: int
    chars: int
    folded_chars: int


class Folded:
    """A folded text (`folded`), with the positions of its characters in the original text."""

    def __init__(self, text: str) -> None:
        text = text.replace("İ", "i").lower()  # the only letter whose lower case has two characters
        for blank in _ASCII_BLANKS:
            text = text.replace(blank, " ")
        self._changes: list[_Change] = []
        self._folded_starts: list[int] = []  # where in the folded text each change begins
        letters = "" if text.isascii() else "".join(sorted(set(text)))
        folded_letters = {letter: _folded_letter(letter) for letter in letters}
        resized = "".join(letter for letter, becomes in folded_letters.items() if len(becomes) != 1)
        if any(len(becomes) == 1 and becomes != letter for letter, becomes in folded_letters.items()):
            text = text.translate(_SINGLE)
        if resized or "  " in text or "\\" in text or _JOINS.search(letters):
            text = self._change(text, _resized_pattern(resized))
        self.folded = text

    def _change(self, text: str, pattern: re.Pattern[str]) -> str:
        """Fold what `pattern` finds, and record where that changes the number of characters."""
        pieces: list[str] = []
        done = 0  # characters of `text` that are in the pieces
        length = 0  # of the pieces
        for found in pattern.finditer(text):
            start, end = found.span()
            if start > done and _JOINS.match(found[0]):
                start -= 1  # the letter that the mark belongs to
            becomes = "" if found[0] == "\\" else _folded_letter(text[start:end])
            length += start - done
            if len(becomes) != end - start:
                self._folded_starts.append(length)
                self._changes.append(_Change(start, end - start, len(becomes)))
            pieces += (text[done:start], becomes)
            length += len(becomes)
            done = end
        return "".join([*pieces, text[done:]])

    def original_position(self, folded_position: int) -> int:
        """Return the position in the original text of a position in the folded text."""
        index = bisect_right(self._folded_starts, folded_position) - 1  # of the last change before it
        if index < 0:
            return folded_position
        change = self._changes[index]
        distance = folded_position - self._folded_starts[index]
        if distance < change.folded_chars:
            return change.start
        return change.start + change.chars + distance - change.folded_chars

    def folded_position(self, position: int) -> int:
        """Return the first position in the folded text that stands for nothing before `position` in the original."""
        index = bisect_right(self._changes, position, key=lambda change: change.start) - 1
        if index < 0:
            return position
        change = self._changes[index]
        folded_start = self._folded_starts[index]
        distance = position - change.start
        if not distance:
            return folded_start
        return folded_start + change.folded_chars + max(0, distance - change.chars)


@lru_cache(maxsize=256)
def _resized_pattern(resized: str) -> re.Pattern[str]:
    """Return a pattern of what changes its length: runs of blanks and of marks, escapes, and the letters `resized`."""
    letters = f"|[{re.escape(resized)}]" if resized else ""
    return re.compile(rf" {{2,{MAX_FOLDED_FROM}}}|[{_JOINING}]{{1,8}}|{_ESCAPE}{letters}")


@lru_cache(maxsize=4_096)  # a text has few different letters
def _folded_letter(letter: str) -> str:
    """Fold a letter with its marks, or a run of blanks."""
    if letter[0] == " ":
        return " "
    text = unicodedata.normalize("NFKC", _IGNORED.sub("", letter)).casefold()
    kept: list[str] = []
    strips_marks = False  # of the letter before
    for char in unicodedata.normalize("NFKD", text):
        if not unicodedata.combining(char):
            strips_marks = _HAS_PLAIN_MARKS.match(char) is not None
        elif strips_marks:
            continue
        kept.append(char)
    return "".join(_SAME.get(char, char) for char in unicodedata.normalize("NFKC", "".join(kept)))


class _SingleLetters(dict[int, str]):
    """Table for `str.translate` of characters that become one other character; others stay."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        becomes = _folded_letter(char)
        self[code] = becomes if len(becomes) == 1 else char
        return self[code]


_SINGLE = _SingleLetters()


def folded(text: str) -> str:
    """Return the folded text."""
    return Folded(text).folded
