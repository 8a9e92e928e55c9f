"""Names of tools: canonical ones with dots, and their form for providers that take none (tool-design section 1)."""

from __future__ import annotations

import re

MAX_CHARS = 64
_ALLOWED = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_AMBIGUOUS = ("__", "_.", "._", "..")
_WORD_END = re.compile(r"[._-]+(.)?")


def mangled(name: str) -> str:
    """A name without dots, for a model provider: `jina.search` becomes `jina__search`."""
    return name.replace(".", "__")


def unmangled(name: str) -> str:
    """The name behind a provider's form of it; exact for every name without a `name_problem`."""
    return name.replace("__", ".")


def name_problem(name: str) -> str | None:
    """Why a tool cannot have this name, None where it can."""
    if not _ALLOWED.fullmatch(name) or name.endswith("."):
        return "may hold only letters, digits, '_', '-' and '.', and begins with a letter"
    if any(pair in name for pair in _AMBIGUOUS):
        return "may not hold '__' nor a dot beside '_' or '.': '__' stands for a dot where a provider takes none"
    if len(mangled(name)) > MAX_CHARS:
        return f"may have at most {MAX_CHARS} characters, a dot counted twice"
    return None


def camel_case(name: str) -> str:
    """A name as an API of a manifest: `web_search` becomes `webSearch`."""
    return _WORD_END.sub(lambda match: (match[1] or "").upper(), name)
