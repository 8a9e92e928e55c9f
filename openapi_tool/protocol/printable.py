"""Text for terminals and logs: control characters and invisible ones are escaped, so that no text can forge output."""

from __future__ import annotations

import json
import re

_UNSAFE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    r"\u2800\u3164\ud800-\udfff\ufe00-\ufe0d\ufeff\uffa0\ufff9-\ufffb"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
    r"|(?:^|(?<=[\ufe0e\ufe0f]))[\ufe0e\ufe0f]"
)
"""One unsafe character: a control character, line separator, lone surrogate or invisible character.

Languages and emoji need some invisible ones, so these are safe: the joiners U+200C and U+200D, and of the variation
selectors U+FE0E and U+FE0F one after another character (the last line matches the others).
"""


def printable_line(text: str) -> str:
    r"""Return `text` as one line, each unsafe character as its escape, such as `\n`."""
    if text.isascii() and text.isprintable():
        return text
    return _UNSAFE.sub(lambda unsafe: unsafe[0].encode("unicode_escape").decode(), text)


def printable_lines(text: str, indent: str = "") -> str:
    """Escape unsafe characters but tabs and line breaks; `indent` begins later lines."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        between_tabs = line.split("\t")
        lines.append("\t".join(map(printable_line, between_tabs)))
    return f"\n{indent}".join(lines)


def printable_json(value: object, indent: int | None = None) -> str:
    """Return JSON with unsafe characters escaped; it parses to the same value."""
    lines = json.dumps(value, ensure_ascii=False, indent=indent).split("\n")
    return "\n".join(_UNSAFE.sub(_json_escape, line) for line in lines)


def _json_escape(unsafe: re.Match[str]) -> str:
    """Return the JSON escape of a character; `json` itself does not escape DEL (0x7f)."""
    char = unsafe[0]
    if char > "\x7f":
        return json.dumps(char)[1:-1]  # without the quotes
    return f"\\u{ord(char):04x}"
