"""Names of tools, and their forms for models and people."""

from __future__ import annotations

import re

RESERVED_NAMES = frozenset({"delegate_async", "launch_principal", "ask_expert", "fork_join", "provision_agent"})
"""Names of the kernel's own tools (protocol section 4)."""

MAX_CHARS = 64  # that model providers accept, of the mangled name
_ALLOWED = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_AMBIGUOUS = ("__", "_.", "._", "..")
_WORD_END = re.compile(r"[._-]+(.)?")  # separators, and the first character of the next word


def mangled(name: str) -> str:
    """Return a name for model providers that allow no dots: `jina__search`."""
    return name.replace(".", "__")


def unmangled(name: str) -> str:
    """Return the tool's name; exact if `name_problem` accepts it."""
    return name.replace("__", ".")


def name_problem(name: str) -> str | None:
    """Return why a tool cannot have this name, or None."""
    if name in RESERVED_NAMES:
        return f"{name!r} is reserved by the kernel; choose another name"
    if not _ALLOWED.fullmatch(name) or name.endswith("."):
        return "must begin with a letter and contain only letters, digits, '_', '-' and '.'"
    if any(pair in name for pair in _AMBIGUOUS):
        return "may not contain '__', nor a dot beside '_' or '.': '__' replaces a dot for some model providers"
    if len(mangled(name)) > MAX_CHARS:
        return f"may have at most {MAX_CHARS} characters, a dot counted twice"
    return None


def camel_case(name: str) -> str:
    """Return `webSearch` for `web_search`."""
    return _WORD_END.sub(lambda match: (match[1] or "").upper(), name)


def in_words(name: str) -> str:
    """Return `Web search` for `web_search`."""
    text = _WORD_END.sub(lambda match: f" {match[1]}" if match[1] else "", name)
    return text[:1].upper() + text[1:]
