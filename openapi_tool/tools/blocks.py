"""Blocks of Markdown that a cut may split: code blocks and tables.

The second half of a split block does not show that it is code, or what its columns are. So each part of a text that
begins within a block repeats the block's *opening lines*: the fence of a code block, or header and rule of a table.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_MAX_LINE_CHARS = 200  # a block with a longer opening line is not opened again
OPENING_CHARS = 3 * _MAX_LINE_CHARS
"""This much of a block, from its start on, is enough for `opening_lines`."""

# A fence opens or closes a code block: "```python", "~~~~". Groups: its marks, and what follows them.
_FENCE = re.compile(r"^ {0,3}(`{3,}+|~{3,}+)([^`\n]*+)$", re.MULTILINE)
_FENCE_STARTS = ("```", "~~~")
_TABLE_RULE_CHARS = frozenset("|-: ")  # of the second line of a table: "| --- | :-: |"


class Block(NamedTuple):
    """Code block or table: where it starts in the stored text, and its opening lines."""

    start: int
    opening: str


def block_at_end(text: str, position: int, following: str, around: Block | None = None) -> int | None:
    """Return the start of the block that is cut at the end of `text`, None if the text ends outside of one.

    `text` begins at `position` in the stored text, within the block `around`, if any. `following` begins with the
    character after the text. The result is a position in the stored text, too.
    """
    code_start = _open_code(text, position, around)
    return code_start if code_start is not None else _open_table(text, position, following, around)


def _open_code(text: str, position: int, around: Block | None) -> int | None:
    """Return the start of the code block in which a text ends."""
    start = None
    marks = ""  # of the fence that opened the code block
    around_fence = _FENCE.match(around.opening) if around else None
    if around and around_fence:
        start, marks = around.start, around_fence[1]
    if not any(mark in text for mark in _FENCE_STARTS):  # most texts: the pattern takes much longer
        return start
    for fence in _FENCE.finditer(text):
        if start is None:
            start, marks = position + fence.start(), fence[1]
        elif fence[1].startswith(marks) and not fence[2].strip():
            start = None
    return start


def _open_table(text: str, position: int, following: str, around: Block | None) -> int | None:
    """Return the start of the table in which a text ends."""
    if text.endswith("\n") and not following.startswith("|"):
        return None
    start = _last_rows(text)
    if start is None:
        return None
    if start == 0 and around and around.opening.startswith("|"):
        return around.start
    return position + start if opening_lines(text[start : start + OPENING_CHARS]) else None


def _last_rows(text: str) -> int | None:
    """Return the start of the lines at the end of a text that all begin with `|`, None without such a line."""
    start = None
    line_end = len(text.removesuffix("\n"))
    while line_end >= 0:
        line_start = text.rfind("\n", 0, line_end) + 1
        if not text.startswith("|", line_start):
            break
        start = line_start
        line_end = line_start - 1
    return start


def opening_lines(block: str) -> str:
    """Return the lines of a block to repeat in later parts; empty if there are none, or too long ones."""
    first, second, *_ = [*block.split("\n", 2), "", ""]
    if len(first) > _MAX_LINE_CHARS or len(second) > _MAX_LINE_CHARS:
        return ""
    if _FENCE.fullmatch(first):
        return f"{first}\n"
    is_table = first.startswith("|") and "-" in second and _TABLE_RULE_CHARS.issuperset(second)
    return f"{first}\n{second}\n" if is_table else ""
