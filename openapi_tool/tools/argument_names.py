"""Names of arguments: their folded form, and which one a model meant by an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice

_MAX_CHARS, _MAX_KNOWN = 40, 40
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
"""Arguments of the built-in tools by their folded names in the upstream and in other search tools."""
_PLURALS = {"query": "queries", "url": "urls"}


def fold(name: str) -> str:
    """Return an argument's name in lower case without separators: `target_url`, `targetUrl`, `Target-URL` are equal."""
    return name.replace("_", "").replace("-", "").lower()


def probably_meant(name: str, known: Iterable[str]) -> str | None:
    """Return the known argument that an unknown name probably means, None if none is close.

    Ignores long names, and all but the first known ones.
    """
    by_folded = {fold(other): other for other in islice(known, _MAX_KNOWN)}
    if len(name) > _MAX_CHARS or not by_folded:
        return None
    folded = fold(name)
    other = _BY_SYNONYM.get(folded, folded)
    for candidate in (folded, other, _PLURALS.get(other, "")):
        if (found := by_folded.get(fold(candidate))) is not None:
            return found
    close = difflib.get_close_matches(folded, by_folded, n=1)
    return by_folded[close[0]] if close else None


def not_taken(name: str, known: Iterable[str]) -> str:
    """Return the problem of an argument that a tool does not take."""
    other = probably_meant(name, known)
    return f"is not an argument that this tool takes{f'; did you mean {other}?' if other else ''}"
