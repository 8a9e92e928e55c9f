"""Words for the model about results: warnings about pages, by their types, and remarks on what is missing.

The model reads both outside of the markers around web content, so no page can fake one. `page_warnings.py` finds the
types of a page's warnings; `page_content.py` and `search_content.py` write the words into the output. Many words name a
*remedy*, an argument that may help in a further call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from openapi_tool.tools.wording import counted

Offers = Callable[[str], bool]
"""Returns whether words for the model may name an argument: the model may give it, and has not given it already."""

WARNINGS: Mapping[str, str] = {
    "captcha": "This is probably a bot check, not the page. Use another source.",
    "login": "This is probably a login, not the page. Use another source.",
    "consent": "This is probably a request for cookie consent, not the page. Try format markdown, or another source.",
    "javascript": "The page asks for JavaScript. Read it with wait_for_selector, or use another source.",
    "loading": "Still loading. Read it with wait_for_selector.",
    "not_found": "No such page. Check the address, or use another source.",
    "refused": "The server refused the request. Use another source.",
    "server_error": "The server failed. Use another source, or try later.",
    "empty": "The page has no text, or loads it late. Read it with wait_for_selector, or use another source.",
    "not_loaded": "The page may be incomplete. If so, read it with wait_for_selector.",
    "frames": "Embedded frames are left out. Read them by their own address.",
    "shadow_dom": "Parts of the page may be missing. If so, use another source.",
    "may_be_captcha": "The page has a captcha. If content is missing, use another source.",
    "lookalike": "The host mixes alphabets to look like another one. Use another source.",
    "stored_copy": "This is a stored copy. For the current page, read it with no_cache.",
}
"""Texts for the model, by the type of a warning in the result's `state`."""

NOT_THE_PAGE = frozenset(
    {"captcha", "login", "consent", "javascript", "loading", "not_found", "refused", "server_error", "empty"}
)
"""Types that say that the text is not the page that was asked for."""

_IF_NOT_OFFERED: Mapping[str, tuple[str, str]] = {
    "consent": ("format", "This is probably a request for cookie consent, not the page. Use another source."),
    "javascript": ("wait_for_selector", "The page asks for JavaScript. Use another source."),
    "loading": ("wait_for_selector", "Still loading. Use another source."),
    "empty": ("wait_for_selector", "The page has no text, or loads it late. Use another source."),
    "not_loaded": ("wait_for_selector", "The page may be incomplete. If so, use another source."),
    "stored_copy": ("no_cache", "This is a stored copy; the page itself may be newer."),
}
"""Warnings that name an argument: the argument, and the text in place of that in WARNINGS if it may not be named."""


def warning(kind: str, offers: Offers) -> str:
    """Return the text of a type of warnings; it names an argument that helps only if that may be named."""
    argument, text_without_it = _IF_NOT_OFFERED.get(kind, ("", ""))
    if argument and not offers(argument):
        return text_without_it
    return WARNINGS[kind]


UPSTREAM_WARNINGS: Mapping[str, str] = {
    "This page maybe not yet fully loaded, consider explicitly specify a timeout.": "not_loaded",
    "This page contains iframe that are currently hidden, consider enabling iframe processing.": "frames",
    "This page contains shadow DOM that are currently hidden, consider enabling shadow DOM processing.": "shadow_dom",
    "This page maybe requiring CAPTCHA, please make sure you are authorized to access this page.": "may_be_captcha",
    "This is a cached snapshot of the original page, consider retry with caching opt-out.": "stored_copy",
}
"""Types of the upstream's own warnings (jina-api 3.1), whose texts name parameters that only an operator sets."""

_PHRASES: Mapping[int, str] = {status.value: status.phrase for status in HTTPStatus}
_SERVER_ERRORS = range(500, 600)  # some sites refuse with 999
TARGET_ERROR_TYPES = ("not_found", "refused", "server_error")
# For example `Target URL returned error 404: Not Found`.
_TARGET_ERROR = re.compile(r"Target URL returned error ([4-9]\d\d)\b")


def target_status(warning: str) -> int | None:
    """Return the HTTP status of an error of the page's own server, which the upstream reports in a warning."""
    match = _TARGET_ERROR.match(warning)
    return None if match is None else int(match[1])


def is_plain_target_error(warning: str) -> bool:
    """Return whether a warning says only that the page's own server answered with an error, and its HTTP status.

    The type of that error (`target_error_type`) says as much, so the warning itself need not be shown.
    """
    status = target_status(warning)
    phrase = _PHRASES.get(status) if status is not None else None
    return warning in (f"Target URL returned error {status}", f"Target URL returned error {status}: {phrase}")


def page_warning(kind: str, offers: Offers, status: int | None) -> str:
    """Return a warning about a page. `status` is the HTTP status of its server's error, for the types of errors."""
    error = f"Error {status}. " if kind in TARGET_ERROR_TYPES else ""
    return f"{error}{warning(kind, offers)}"


def target_error_type(status: int) -> str:
    """Return the warning type of an error of the page's own server."""
    if status in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
        return "not_found"
    return "server_error" if status in _SERVER_ERRORS else "refused"


def target_errors(statuses: Mapping[int, int]) -> str:
    """Return a warning about search results whose pages are errors of their servers.

    `statuses` has the HTTP statuses by the number of the result.
    """
    listed = ", ".join(f"{number} ({status})" for number, status in statuses.items())
    what = f"result {listed} is a server error, not a page"
    if len(statuses) > 1:
        what = f"results {listed} are server errors, not pages"
    return f"[Warning: {what}.]"


def result_warning(kind: str, numbers: Sequence[int], offers: Offers) -> str:
    """Return the warning of a type about the search results with these numbers."""
    results = "result" if len(numbers) == 1 else "results"
    return f"[Warning about {results} {', '.join(map(str, numbers))}: {warning(kind, offers)}]"


def unreadable_results(number: int) -> str:
    """Return the remark about items of a search that hold no result."""
    are = "is" if number == 1 else "are"
    return f"[{counted(number, 'further result')} came damaged and {are} left out.]"


_TOLERANCE_DIVISOR = 50  # a cut text is charged up to 1/50 more tokens than its limit (jina-api 1.3)


def is_cut(tokens: int | None, max_tokens: int) -> bool:
    """Return whether the upstream cut a text at `max_tokens`.

    It does not say so. But for a cut text it charges that many tokens, or slightly more (jina-api section 9).
    """
    return tokens is not None and max_tokens <= tokens <= max_tokens + max_tokens // _TOLERANCE_DIVISOR


def cut_page(max_tokens: int, offers: Offers) -> str:
    """Return the remark about a cut page."""
    remedies = {
        "max_tokens": "call again with a larger max_tokens, which costs more",
        "target_selector": "read a part of it with target_selector",
    }
    ways = ", or ".join(way for argument, way in remedies.items() if offers(argument))
    more = f"To see more, {ways}." if ways else "This tool cannot show it."
    return f"[The page is longer: it was cut at max_tokens = {max_tokens:,}, and the rest is not stored. {more}]"


def end_of_cut_page(max_tokens: int) -> str:
    """Return the remark at the end of a cut page, for a reader of its last part."""
    return f"[The page was cut here, at max_tokens = {max_tokens:,}.]"


def cut_results(numbers: Sequence[int], max_tokens: int) -> str:
    """Return the remark about search results with cut pages."""
    one = len(numbers) == 1
    pages = f"The page of result {numbers[0]} is" if one else f"The pages of results {', '.join(map(str, numbers))} are"
    them = "it by its address" if one else "them by their addresses"
    return f"[{pages} longer: cut at max_tokens = {max_tokens:,}. To see more, read {them}.]"


_OPERATORS = ("site", "exclude_sites", "after", "filetype", "intitle", "ext", "loc")
"""Parameters of a search that the upstream writes into the query as operators, such as `site:example.com`."""
# An operator that the model itself wrote into its query: `site:` in `cats site:example.com`, also after a minus.
_WRITTEN_OPERATOR = re.compile(r"(?<!\S)-?(?P<name>site|filetype|ext|intitle|inurl|after|before|loc):", re.IGNORECASE)
_FILTERS = (*_OPERATORS, "location", "gl", "hl")
"""Parameters that restrict a search; without them it may find more."""


def filters(parameters: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    """Return what restricts a search, in the model's words: names of arguments, and `site: in the query`.

    `names` has the model's names for the parameters that it gave.
    """
    found = [names[name] for name in _OPERATORS if name in names]
    written = _WRITTEN_OPERATOR.search(str(parameters.get("q", "")))
    if written:
        found.append(f"{written['name'].lower()}: in the query")
    return found


def other_search(names: Mapping[str, str]) -> str:
    """Return what to change about a search without results; `names` is as for `filters`."""
    restricting = [names[name] for name in _FILTERS if name in names]
    drop = f", or drop {' or '.join(restricting)}" if restricting else ""
    end = f" The results may end before this {names['page']}." if "page" in names else ""
    return f"Use other or fewer words{drop}.{end}"
