"""Reads frames as a model does: by the mark that the first introduction names; a page may write others."""

from __future__ import annotations

import re

INTRODUCED = re.compile(r"\[Untrusted web content between marks (\d{6,}): ")


def framed_items(content: str) -> list[str]:
    """Return the web content of each frame, character by character. Raises AssertionError for a broken frame."""
    introduced = INTRODUCED.findall(content)
    if not introduced:
        return []
    mark = introduced[0]
    begun = re.findall(rf"^\[{mark}\] ", content, re.MULTILINE)
    found = re.findall(rf"^\[{mark}\] (.*?)\n(?=\[{mark}[ \]])", content, re.MULTILINE | re.DOTALL)
    assert len(begun) == len(found) > 0
    return found


def repeated_lines(content: str) -> list[int]:
    """Return how many lines each item of a later part begins with that an earlier part has shown."""
    notes = re.findall(r"^\[Continued: .*?\]$", content, re.MULTILINE)
    found = [re.search(r"its first (?:(\d+) lines are|line is) repeated", note) for note in notes]
    return [0 if lines is None else int(lines[1] or 1) for lines in found]
