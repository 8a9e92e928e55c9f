"""Rules: which error a failed response of the upstream becomes, and what its message says (jina-api section 4).

`rule_choice.py` chooses the rule of a response. RULES holds for all operations, and `Failures` has what one operation
adds to that: SEARCH_FAILURES and READER_FAILURES.

A rule is chosen by a status. An error body has two: `code`, which is the HTTP status, and `status`. That one may have
five digits, an HTTP status and two digits more, and then tells the cause.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from openapi_tool.protocol import errors
from openapi_tool.protocol.errors import ToolError

# How often a request is sent again at most, by the kind of failure.
ONCE = 1  # it failed by chance: a second failure probably has a lasting cause
SOME = 3  # the service is busy, which passes

MIN_FIVE_DIGIT_STATUS = 10_000  # a smaller `status` in a body is an HTTP status, too


@dataclass(frozen=True, slots=True)
class Rule:
    """The error that one kind of failed response becomes.

    - `message`: what the model is told.
    - `quotes_reason`: the upstream's own text follows the message, unless the response is a 5xx.
    - `max_retries`: retries within the call.
    - `retryable`: a later or smaller call may succeed, even if the call itself makes no retries.
    - `timed_out`: more time might have helped.
    - `remedy`: an argument, and a further sentence for the model if it may give that argument; or two empty texts.
    """

    error: type[ToolError]
    message: str
    max_retries: int = 0
    retryable: bool = False
    quotes_reason: bool = True
    timed_out: bool = False
    remedy: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures of one operation, in addition to those of all operations.

    - `rules`: by status, used in place of the same status in RULES. The rule of 408 is also that of a 422 about a page
      that timed out.
    - `nothing_found`: a 422 whose text begins with this is no error, but an empty result (jina-api 2.2).
    - `texts`: messages for a 422, by the beginning of its text.
    - `causes`: messages for a 422, by words anywhere in its text, except in addresses and selectors.
    """

    rules: Mapping[int, Rule] = field(default_factory=dict)
    nothing_found: str | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    causes: Mapping[str, str] = field(default_factory=dict)


COMMON_FAILURES = Failures()
"""For an operation that adds nothing."""

_BUSY = "The service is overloaded or restarting; try again in a moment."
_ACCOUNT = "The operator's account does not allow this request; it will not work until an operator acts."

SERVER_FAILED = Rule(errors.UpstreamUnavailable, _BUSY, max_retries=SOME)
"""For each 5xx without a rule of its own."""
REFUSED = Rule(errors.UpstreamRejected, "The service refused the request; change it or use another source.")
"""For each other status without a rule of its own."""

_BY_FIVE_DIGIT_STATUS: Mapping[int, Rule] = {
    40003: Rule(errors.UpstreamUnavailable, "The page's transfer broke off; try again.", max_retries=ONCE),
    40004: Rule(errors.UpstreamRejected, "The page is of a type that cannot be read; use another source."),
    40104: Rule(
        errors.AuthFailed,
        "The account of this tool's key is not verified; an operator must verify it.",
        quotes_reason=False,
    ),
    40202: Rule(errors.AuthFailed, "The operator's plan does not include this feature; call without it."),
    40301: Rule(
        errors.TargetRefused,
        "This page failed too often lately and is blocked for a while; use another, or try again when that is over.",
        retryable=True,
    ),
    40902: Rule(errors.TargetRefused, "The site's robots.txt forbids reading this page; use another source."),
    40904: Rule(errors.BudgetExceeded, "The page costs more than the token budget; read a smaller page or part."),
    41302: Rule(errors.UpstreamRejected, "The target file is too large to be read; use another source."),
    42204: Rule(errors.UpstreamUnavailable, "A service behind the search failed; try again.", max_retries=SOME),
    42205: Rule(errors.UpstreamUnavailable, "A service behind the search failed; try again.", max_retries=SOME),
    45102: Rule(errors.TargetRefused, "This address may not be read (private, local or blocked); use a public page."),
}
"""By the `status` in the body of an error, if that has five digits."""

_BY_HTTP_STATUS: Mapping[int, Rule] = {
    400: Rule(errors.BadRequest, "The request was refused; correct the arguments and call again."),
    401: Rule(
        errors.AuthFailed, "The key of this tool was refused; an operator must set a valid one.", quotes_reason=False
    ),
    402: Rule(errors.BudgetExceeded, _ACCOUNT),
    403: Rule(errors.AuthFailed, _ACCOUNT),
    404: Rule(errors.UpstreamRejected, "The service has no such route; an operator must check the tool's definition."),
    405: Rule(errors.UpstreamRejected, "The service has no such route; an operator must check the tool's definition."),
    408: Rule(
        errors.UpstreamUnavailable,
        "There was no answer; try again later or use another source.",
        max_retries=SOME,
        timed_out=True,
    ),
    409: SERVER_FAILED,
    412: Rule(errors.BadRequest, "The request holds too many items; ask for fewer."),
    413: Rule(errors.UpstreamRejected, "The request is too large; shorten it."),
    422: REFUSED,
    429: Rule(
        errors.RateLimited, "The rate limit is reached; wait, then call again.", max_retries=SOME, quotes_reason=False
    ),
    431: Rule(errors.BadRequest, "The request is too large; shorten it."),
    451: Rule(errors.TargetRefused, "This target is blocked for legal reasons; use another source."),
    500: Rule(errors.UpstreamUnavailable, _BUSY, max_retries=ONCE),
    501: Rule(errors.UpstreamRejected, "The service cannot do this; use another source."),
    504: replace(SERVER_FAILED, timed_out=True),
    524: Rule(errors.UpstreamUnavailable, "The service took too long; ask for less.", retryable=True),
}

RULES: Mapping[int, Rule] = {**_BY_FIVE_DIGIT_STATUS, **_BY_HTTP_STATUS}
"""Rules of all operations by status; the two kinds of status have no number in common."""


def _reworded(messages: Mapping[int, str]) -> dict[int, Rule]:
    """Return the rules of these statuses in RULES, each with another message."""
    return {status: replace(RULES[status], message=message) for status, message in messages.items()}


SEARCH_FAILURES = Failures(
    _reworded({524: "The service took too long; ask for less (fewer results, no page content)."}),
    nothing_found="No search results available",
    texts={
        "No content available for query": "No page of the results could be read; search without page content, then "
        "read single pages."
    },
)

_PAGE_TOO_LARGE = Rule(
    errors.UpstreamRejected,
    "The page or file is too large for the service; use another source.",
    remedy=("pdf_page", "If it is a PDF, a single page of it, chosen with pdf_page, may be readable."),
)
READER_FAILURES = Failures(
    {
        413: _PAGE_TOO_LARGE,
        41302: _PAGE_TOO_LARGE,
        **_reworded(
            {
                408: "The page did not answer in time; try again later or use another source.",
                422: "The page could not be read; check the address or use another source.",
                431: "The address is too long; use a shorter one.",
                500: "The service failed at this page; try again in a moment, or use another source.",
            }
        ),
    },
    causes={
        "net::ERR_ABORTED": "The service could not open this, which is probably only offered for download; use another "
        "source."
    },
)

REDIRECT = Rule(
    errors.UpstreamRejected,
    "The service answered with a redirect, which is not followed; an operator must check the tool's definition.",
    quotes_reason=False,
)
EDGE_BLOCK = Rule(
    errors.UpstreamUnavailable,
    "The service's own protection refused this request; try again in a moment.",
    max_retries=ONCE,
    quotes_reason=False,
)
"""For a 403 without a body: a proxy in front of the upstream sends it."""


def blocked_for(seconds: float) -> Rule:
    """Return the rule of an address that the upstream does not read for some time."""
    wait = f"in {max(1, math.ceil(seconds)):,} s"
    return Rule(
        errors.TargetRefused,
        f"This address is blocked for a while; use another source, or try again {wait}.",
        retryable=True,
    )


def _transient(message: str) -> Rule:
    return Rule(errors.UpstreamUnavailable, f"{message}; try again later or use another source.", max_retries=ONCE)


_TRANSIENT_PATTERNS = (
    (
        # Of the upstream itself: its proxies and its browser.
        r"""\bproxy\ (?:handshake|connect|error|fail|tunnel) | (?:resolve|from)\ proxy | connect\ tunnel\ failed
        | net::ERR_(?:PROXY|TUNNEL|SOCKS)_CONNECTION_FAILED | net::ERR_(?:NETWORK_CHANGED|INTERNET_DISCONNECTED)
        | (?:target|session|page)\ (?:closed|crashed) | detached\ frame | frame\ was\ detached
        | context\ was\ destroyed | browser\ has\ disconnected | no\ provider\ can\ do
        | requesting\ main\ frame\ too\ early | EAI_AGAIN""",
        "A part of the service failed",
    ),
    (
        r"""connection\ (?:was\ )?refused | ECONNREFUSED | (?:failed\ to|could\ not|couldn't)\ connect
        | net::ERR_(?:CONNECTION_(?:REFUSED|FAILED)|ADDRESS_UNREACHABLE)""",
        "The server refused the connection, or cannot be reached",
    ),
    (
        r"""connection\ (?:was\ )?(?:reset|closed|aborted) | ECONNRESET | EPIPE | broken\ pipe | socket\ hang\ up
        | empty\ reply\ from\ server | (?:send|recv)\ failure | failure\ when\ receiving | transfer\ closed\ with
        | partial\ file | not\ closed\ cleanly | did\ not\ return\ a\ body
        | net::ERR_(?:\w*CONNECTION|EMPTY_RESPONSE|INCOMPLETE_CHUNKED|CONTENT_LENGTH_MISMATCH|(?:HTTP2|QUIC)_)""",
        "The server broke the connection",
    ),
)
"""Parts of error messages of the upstream's browser, curl and proxies, such as `net::ERR_CONNECTION_REFUSED`."""

TRANSIENT: Sequence[tuple[re.Pattern[str], Rule]] = tuple(
    (re.compile(pattern, re.IGNORECASE | re.VERBOSE), _transient(message)) for pattern, message in _TRANSIENT_PATTERNS
)
"""Rules of errors that pass, by the text of a 422. The first that matches counts.

Errors of TLS and name resolution are missing, since they last.
"""
