"""The bound of a whole message, for errors of every door and of the command line."""

from __future__ import annotations


def abridged(text: str, max_chars: int) -> str:
    """Shorten a message in its middle: its beginning has what happened, its end the remedy.

    Values in a message are shortened where they are quoted. This is for those that are not, as a value may have 256 kB.
    """
    if len(text) <= max_chars:
        return text
    end_chars = max_chars // 4
    return f"{text[: max_chars - end_chars - 3]} … {text[-end_chars:]}"
