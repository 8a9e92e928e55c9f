"""Names of arguments and tools: folded and mangled forms, and which argument a model meant by an unknown name."""

from __future__ import annotations

import difflib
import re
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


RESERVED_NAMES = frozenset({"delegate_async", "launch_principal", "ask_expert", "fork_join", "provision_agent"})
"""Names of the kernel's own tools (protocol section 4)."""

MAX_CHARS = 64
_ALLOWED = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_AMBIGUOUS = ("__", "_.", "._", "..")
_WORD_END = re.compile(r"[._-]+(.)?")


def mangled(name: str) -> str:
    """Return the mangled name: `jina.search` becomes `jina__search`."""
    return name.replace(".", "__")


def unmangled(name: str) -> str:
    """Return the canonical name of a mangled one; exact for every name without a `name_problem`."""
    return name.replace("__", ".")


def name_problem(name: str) -> str | None:
    """Return why a tool cannot have this name, or None."""
    if not _ALLOWED.fullmatch(name) or name.endswith("."):
        return "must begin with a letter and contain only letters, digits, '_', '-' and '.'"
    if any(pair in name for pair in _AMBIGUOUS):
        return "may not contain '__', nor a dot beside '_' or '.': '__' replaces a dot for some model providers"
    if len(mangled(name)) > MAX_CHARS:
        return f"may have at most {MAX_CHARS} characters, a dot counted twice"
    return None


def camel_case(name: str) -> str:
    """Return a name in camel case, for manifests: `web_search` becomes `webSearch`."""
    return _WORD_END.sub(lambda match: (match[1] or "").upper(), name)


def in_words(name: str) -> str:
    """Return a name in words, for titles: `web_search` becomes `Web search`."""
    text = _WORD_END.sub(lambda match: f" {match[1]}" if match[1] else "", name)
    return text[:1].upper() + text[1:]
