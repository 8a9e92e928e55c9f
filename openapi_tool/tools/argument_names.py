"""Names of arguments: how they are compared, and what a wrong name probably means.

Names are compared *folded*, without case and separators.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from openapi_tool.tools.argument_hints import hint
from openapi_tool.tools.wording import close_to

_MAX_COMPARED = 40  # names, and characters of each: the search for a similar name is slow

_SYNONYMS = {
    "query": "q searchquery searchterm keywords question text",
    "url": "uri link address href targeturl pageurl website page",
    "count": "n num limit maxresults numresults numberofresults topk size results",
    "country": "gl region countrycode",
    "language": "hl lang languagecode",
    "site": "sites domain domains includedomains includesites",
    "exclude_sites": "excludedomains blockeddomains",
    "after": "since startdate fromdate publishedafter",
    "file_type": "filetype ext extension",
    "title_words": "intitle",
    "with_content": "content includecontent fullcontent rawcontent includerawcontent",
    "format": "respondwith returnformat outputformat",
    "target_selector": "selector css cssselector",
    "max_tokens": "tokens tokenlimit maxlength maxchars",
    "with_links": "links includelinks",
    "with_images": "images includeimages",
    "no_cache": "nocache fresh refresh",
}
_BY_SYNONYM = {other: name for name, others in _SYNONYMS.items() for other in others.split()}
"""Arguments by the folded names that Jina and other search tools give them."""

_PLURALS = {"query": "queries", "url": "urls"}


def fold(name: str) -> str:
    """Return a name in lower case without separators: `target_url`, `targetUrl`, `Target-URL` are equal."""
    return name.replace("_", "").replace("-", "").lower()


def probably_meant(name: str, known: Iterable[str]) -> str | None:
    """Return the known argument that an unknown name probably means; long names are ignored."""
    by_folded = {fold(other): other for other in islice(known, _MAX_COMPARED)}
    if len(name) > _MAX_COMPARED or not by_folded:
        return None
    folded = fold(name)
    meant = _BY_SYNONYM.get(folded, folded)
    for candidate in (folded, fold(meant), _PLURALS.get(meant)):
        if candidate in by_folded:
            return by_folded[candidate]
    similar = close_to(folded, by_folded)
    return by_folded[similar[0]] if similar else None


def not_taken(name: str, known: Iterable[str], *, suggest: bool = True) -> str:
    """Return the problem of an argument that a tool does not take; with `suggest` also a similar name."""
    known = list(known)
    instead = hint(fold(name), {fold(other) for other in known[:_MAX_COMPARED]})
    if instead:
        return f"is not an argument that this tool takes; {instead}"
    other = probably_meant(name, known) if suggest else None
    question = f"; did you mean {other}?" if other else ""
    return f"is not an argument that this tool takes{question}"
