"""Wording of messages: shortened texts, counts, lists, suggestions."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SHORT_CHARS = 80


def short(text: str, max_chars: int = _SHORT_CHARS) -> str:
    """Truncate a text for a message; names in a definition or call may have 256 kB."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` if a known name is close, else nothing."""
    return next((f"; did you mean {close!r}?" for close in close_to(name, known)), "")


def close_to(name: str, known: Iterable[str]) -> list[str]:
    """Return the closest known name, if one is close."""
    return difflib.get_close_matches(name, list(known), n=1)


def counted(number: int, noun: str, left: str = "") -> str:
    """Return `2,000 items`; with `left`, such as `left out`, also the verb: `1 item is left out`."""
    one = number == 1
    verb = f" {'is' if one else 'are'} {left}" if left else ""
    return f"{number:,} {noun if one else f'{noun}s'}{verb}"


def any_of(words: Iterable[str]) -> str:
    """Return `'a', 'b' or 'c'`."""
    *most, last = (repr(word) for word in words)
    return f"{', '.join(most)} or {last}" if most else last


def one_line(text: str) -> str:
    """Return the text with runs of white space and control characters as one blank."""
    if not text.isprintable():
        text = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(text.split())
