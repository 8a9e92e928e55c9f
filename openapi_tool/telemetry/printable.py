"""Escape text for terminals and console logs, so that it cannot move the cursor, hide text or forge a line."""

from __future__ import annotations

import json
import re
from typing import Any

_UNSAFE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f]"
)
"""Control characters (C0, C1), line separators, bidirectional controls, lone surrogates (not encodable), and invisible
characters: soft hyphens, zero-width spaces, tags. Not the joiners U+200C and U+200D: languages and emoji need them.
"""

_BREAK = re.compile(r"\r\n|\n")


def printable_line(text: str) -> str:
    r"""Return `text` as one line, each unsafe character as its escape: `\x1b`, `\n`, `\u202e`."""
    if text.isprintable():
        return text
    return _UNSAFE.sub(lambda unsafe: unsafe[0].encode("unicode_escape").decode(), text)


def printable_lines(text: str, indent: str = "") -> str:
    """Return `text` with unsafe characters escaped, except tabs and line breaks; `indent` precedes further lines."""
    lines = (line.split("\t") for line in _BREAK.split(text))
    return f"\n{indent}".join("\t".join(map(printable_line, parts)) for parts in lines)


def printable_json(value: Any, indent: int | None = None) -> str:
    """Return JSON with unsafe characters escaped; it parses to the same value."""
    lines = json.dumps(value, ensure_ascii=False, indent=indent).split("\n")
    return "\n".join(_UNSAFE.sub(_json_escape, line) for line in lines)


def _json_escape(unsafe: re.Match[str]) -> str:
    """Return the JSON escape, a surrogate pair beyond U+FFFF. `json` does not escape DEL, so do that here."""
    return json.dumps(unsafe[0])[1:-1] if unsafe[0] > "\x7f" else f"\\u{ord(unsafe[0]):04x}"
