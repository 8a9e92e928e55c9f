"""What looks like a key, such as one pasted into a definition."""

from __future__ import annotations

import re

from openapi_tool.protocol.jsontext import JsonValue
from openapi_tool.tools.problems import Path

PREFIXED_KEY = re.compile(r"(?:\b(?:jina|sk|pk|ghp|gho|xox[abp]|glpat|hf)[_-][A-Za-z0-9_-]{16,}|(?i:bearer)\s+\S{12,})")
"""A key with a known prefix (`jina_…`, `sk-…`), or a bearer token."""

# A digit and a letter at least: names of variables have long parts without digits, and numbers have no letters.
# Matches `a1b2c3d4e5f6a7b8`.
_KEY_CHUNK = re.compile(r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{16,}")
_MAX_SHOWN_DEPTH = 100  # above the limit of definitions, below Python's


def looks_like_a_key(text: str) -> bool:
    """Return whether a text is more likely a key than the name of a variable."""
    if PREFIXED_KEY.search(text):
        return True
    return any(_KEY_CHUNK.fullmatch(chunk) for chunk in re.split(r"[^A-Za-z0-9]", text))


def without_keys(value: JsonValue, mask: str, path: Path = ()) -> JsonValue:
    """Return a stored definition with likely keys masked; `path` is that of `value` in it."""
    if len(path) > _MAX_SHOWN_DEPTH:
        return mask
    if isinstance(value, dict):
        return {
            PREFIXED_KEY.sub(mask, str(name)): without_keys(item, mask, (*path, str(name)))
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [without_keys(item, mask, (*path, index)) for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    # `looks_like_a_key` would also match ids and parts of URLs, so use it only where a variable's name belongs.
    if names_a_variable(path) and looks_like_a_key(value):
        return mask
    return PREFIXED_KEY.sub(mask, value)


def names_a_variable(path: Path) -> bool:
    """Return whether the value at this path of a definition names an environment variable."""
    if not path:
        return False
    return path[:2] == ("options", "envs") or path[-1] in ("auth_env", "env")
