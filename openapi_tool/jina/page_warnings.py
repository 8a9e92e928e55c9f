"""Types of the warnings about one page or search result: what is wrong with it, by its fields.

The upstream itself warns in the field `warning`, in lines of text. Other types come from the text of the page
(`barriers.py`) and from its host. `remarks.WARNINGS` has the text for each type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openapi_tool.jina import remarks
from openapi_tool.jina.barriers import barrier_type, title_type
from openapi_tool.jina.hosts import host_of, is_lookalike

_NON_TEXT_BODIES = ("html", "chunks", "screenshotUrl", "pageshotUrl")
"""Fields with a form of the page other than its text; a page with one of them is not empty."""
_WALLS = ("captcha", "login", "consent")
"""Types of barriers in place of a page. They are the cause of all that is missing, so no other warning is needed."""
_UNCERTAIN = ("not_loaded", "may_be_captcha")
"""Types of the upstream's warnings that say "maybe", which a barrier that was recognized replaces."""

_MAX_WARNINGS = 20  # lines of a warning that are read
_MAX_WARNING_CHARS = 20_000  # of a warning that are read


def warning_types(item: Mapping[str, Any], *, with_text: bool) -> tuple[str, ...]:
    """Return the types of all warnings but that of the host; `with_text` means that the page's text was asked for."""
    barrier = _barrier(item, with_text=with_text)
    of_lines = map(_type_of_line, _warning_lines(item))
    types = list(dict.fromkeys(kind for kind in (barrier, *of_lines) if kind is not None))  # each once, in order
    if barrier in _WALLS:
        # After an error 404 there is no page behind the wall, so the remedies for it would not help.
        return ("not_found",) if "not_found" in types else (barrier,)
    if barrier is None:
        return tuple(types)
    return tuple(kind for kind in types if kind not in _UNCERTAIN)


def lookalike_type(item: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the type of a host that looks like another one, or nothing."""
    return ("lookalike",) if is_lookalike(host_of(_text(item.get("url")))) else ()


def target_status(item: Mapping[str, Any]) -> int | None:
    """Return the HTTP status of the page's own server if it was an error."""
    for line in _warning_lines(item):
        status = remarks.target_status(line)
        if status is not None:
            return status
    return None


def _barrier(item: Mapping[str, Any], *, with_text: bool) -> str | None:
    """Return the type of what is shown in place of the page: a barrier, or `empty` if there is no text."""
    text = _text(item.get("content")) or _text(item.get("text"))
    title = _text(item.get("title"))
    if text and not text.isspace():
        return barrier_type(title, text)
    if not with_text or any(map(item.get, _NON_TEXT_BODIES)):
        return None
    return title_type(title) or "empty"


def _warning_lines(item: Mapping[str, Any]) -> list[str]:
    text = _text(item.get("warning"))
    return text[:_MAX_WARNING_CHARS].splitlines()[:_MAX_WARNINGS] if text else []


def _type_of_line(line: str) -> str | None:
    """Return the type of a line of the upstream's warning; None for one that is not known."""
    status = remarks.target_status(line)
    if status is None:
        return remarks.UPSTREAM_WARNINGS.get(line)
    return remarks.target_error_type(status)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
