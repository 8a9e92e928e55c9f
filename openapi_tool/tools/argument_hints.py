"""What a model should give in place of an argument that a tool does not take.

Names are folded (`argument_names.fold`), so `time_range` is `timerange` here.
"""

from __future__ import annotations

from collections.abc import Collection

MAIN_NAMES = frozenset({"query", "q", "url", "targeturl"})
"""Folded names of the query or address of a call, in every operation of the catalogue."""

# Names that models give to tools that do not take them.
_RECENCY_NAMES = frozenset(
    {"timerange", "timefilter", "recency", "freshness", "days", "daterange", "period", "tbs", "time", "past"}
)
_KIND_NAMES = frozenset({"type", "searchtype", "topic", "category", "vertical"})
_SINGLE_FORM = {"urls": "url", "links": "url", "queries": "query", "searches": "query"}


def hint(folded: str, known: Collection[str]) -> str:
    """Return what to give in place of an unknown argument, empty if nothing special is known of it.

    `folded` is its folded name, `known` are the folded names of the arguments that may be given.
    """
    if folded in _RECENCY_NAMES:
        for name in ("recency", "after"):
            if name in known:
                return f"for recent pages give {name}"
        return ""
    if folded in _KIND_NAMES and "site" in known:
        return "it searches web pages only: for news or images say so in query"
    single = _SINGLE_FORM.get(folded)
    if single and folded not in known and single in known:
        return f"give {single}, and call the tool for each, or use the tool that takes several"
    return ""


def one_of_several(value: object) -> str:
    """Return what to do about a list that is given as a query or address; empty for other values."""
    if isinstance(value, list) and len(value) > 1:
        return " (it takes one: call the tool for each, or use the tool that takes several)"
    return ""
