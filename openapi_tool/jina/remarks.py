"""Remarks for the model about an answer that looks complete but is not."""

from __future__ import annotations

from collections.abc import Iterable

_OVER = 50  # the charge of a cut text, counted afresh, may be a fiftieth above the limit (jina-api 1.3)


def is_cut(tokens: int | None, max_tokens: int | None) -> bool:
    """Return whether the upstream cut a text at `max_tokens`, which only its charge shows (jina-api section 9)."""
    return tokens is not None and max_tokens is not None and max_tokens <= tokens <= max_tokens + max_tokens // _OVER


def cut_page(max_tokens: int) -> str:
    """Return the remark about a page that the upstream cut."""
    return (
        f"[The page goes on: it was cut at max_tokens = {max_tokens:,}, and the rest is not stored. To see more, call "
        "again with a larger max_tokens, which costs more, or read a part of it with target_selector.]"
    )


def cut_results(numbers: Iterable[int], max_tokens: int) -> str:
    """Return the remark about search results whose pages the upstream cut."""
    return (
        f"[The pages of results {', '.join(map(str, numbers))} go on: they were cut at max_tokens = {max_tokens:,}, "
        "and the rest is not stored. To see more of one, read it by its address.]"
    )
