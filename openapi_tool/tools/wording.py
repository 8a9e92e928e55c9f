"""Wording of messages: shortened texts, counts, lists, suggestions."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_SHORT_CHARS = 80


def short(text: str, max_chars: int = _SHORT_CHARS) -> str:
    """Truncate a text for a message: a name in a definition or call may have 256 kB."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` if a known name is close, else an empty text."""
    close = close_to(name, known)
    return f"; did you mean {close[0]!r}?" if close else ""


def close_to(name: str, known: Iterable[str]) -> list[str]:
    """Return a list of the closest known name; empty if none is close."""
    return difflib.get_close_matches(name, list(known), n=1)


def counted(number: int, noun: str, participle: str = "") -> str:
    """Return `2,000 items`; with a participle, such as `left out`, also the verb: `1 item is left out`."""
    if number == 1:
        return f"1 {noun} is {participle}" if participle else f"1 {noun}"
    return f"{number:,} {noun}s are {participle}" if participle else f"{number:,} {noun}s"


def any_of(words: Iterable[str]) -> str:
    """Return `'a', 'b' or 'c'`."""
    *most, last = (repr(word) for word in words)
    return f"{', '.join(most)} or {last}" if most else last


def first_of(names: Sequence[str], most: int) -> str:
    """Return the first names, each shortened, and how many more there are: `a, b and 3 more`."""
    shown = ", ".join(map(short, names[:most]))
    left = len(names) - most
    return f"{shown} and {left:,} more" if left > 0 else shown


def one_line(text: str) -> str:
    """Return the text with runs of white space and control characters as one blank."""
    if not text.isprintable():
        text = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(text.split())
