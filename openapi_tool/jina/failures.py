"""Failures of the upstream: typed errors with a message for the model (jina-api section 4)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from itertools import chain
from typing import Any

from openapi_tool.jina.remarks import Offers
from openapi_tool.protocol import errors
from openapi_tool.protocol.errors import ToolError, ToolTimeout
from openapi_tool.protocol.jsontext import whole_number
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.tools.wording import one_line

NO_SECRETS = Redactor(where="error")

# Maximum retries of a request.
ONCE = 1  # after a failure by chance: a second one probably has a lasting cause
SOME = 3  # if the service is busy, which passes

_MAX_READ_CHARS = 4_000
"""Limit of an upstream message in characters; it bounds the time of the patterns below."""
_MAX_REASON_CHARS = 300
_MAX_VALUE_CHARS = 80
_QUOTES = re.compile('["\u201c-\u201f\u2033\u2036\u300c-\u300f\u301d-\u301f\u00ab\u00bb\uff02\uff62\uff63]')
"""Characters that a model could read as the end of a quotation."""
_VALIDATOR = "Rejected by validator"  # followed by source code of the validator
_MAX_WAIT_CHARS = 500
_MAX_WAIT_S = 1e9
_ERROR_NAME = re.compile(r"\b(?:[A-Z]\w*)?Error(?:\((?P<path>[^()]*)\))?(?:: |$)")
"""Error class before the upstream's message, as in `ParamValidationError(url): …`; `path` is the parameter."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Error for one kind of response.

    `message` is for the model; with `reason` the upstream's own text follows it, unless the response is a 5xx.
    `max_retries` limits the retries within the call. `retryable` without retries says that a later or smaller call may
    succeed. `timed_out` says that more time might have helped. `remedy` is an argument, and a further sentence for
    calls that may be given it.
    """

    error: type[ToolError]
    message: str
    max_retries: int = 0
    retryable: bool = False
    reason: bool = True
    timed_out: bool = False
    remedy: tuple[str, str] = ("", "")


_BUSY = "The service is overloaded or restarting; try again in a moment."
_ACCOUNT = "The operator's account does not allow this request; it will not work until an operator acts."
_SERVER = Rule(errors.UpstreamUnavailable, _BUSY, max_retries=SOME)
_OTHER = Rule(errors.UpstreamRejected, "The service refused the request; change it or use another source.")
_MIN_FIVE_DIGIT_STATUS = 10_000  # a smaller number is an HTTP status
_HTTP_STATUSES = range(100, 600)

RULES: Mapping[int, Rule] = {
    # By the `status` in the body: the HTTP status, and two digits more.
    40003: Rule(errors.UpstreamUnavailable, "The page's transfer broke off; try again.", max_retries=ONCE),
    40004: Rule(errors.UpstreamRejected, "The page is of a type that cannot be read; use another source."),
    40104: Rule(
        errors.AuthFailed, "The account of this tool's key is not verified; an operator must verify it.", reason=False
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
    # By the HTTP status.
    400: Rule(errors.BadRequest, "The request was refused; correct the arguments and call again."),
    401: Rule(errors.AuthFailed, "The key of this tool was refused; an operator must set a valid one.", reason=False),
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
    409: _SERVER,
    412: Rule(errors.BadRequest, "The request holds too many items; ask for fewer."),
    413: Rule(errors.UpstreamRejected, "The request is too large; shorten it."),
    422: _OTHER,
    429: Rule(errors.RateLimited, "The rate limit is reached; wait, then call again.", max_retries=SOME, reason=False),
    431: Rule(errors.BadRequest, "The request is too large; shorten it."),
    451: Rule(errors.TargetRefused, "This target is blocked for legal reasons; use another source."),
    500: Rule(errors.UpstreamUnavailable, _BUSY, max_retries=ONCE),
    501: Rule(errors.UpstreamRejected, "The service cannot do this; use another source."),
    504: replace(_SERVER, timed_out=True),
    524: Rule(errors.UpstreamUnavailable, "The service took too long; ask for less.", retryable=True),
}
"""Rules of all operations, by the five-digit `status` of an error body, else by HTTP status (`_rule`)."""


def worded(messages: Mapping[int, str]) -> dict[int, Rule]:
    """Return the rules of these statuses in RULES, each with this message in place of its own."""
    return {status: replace(RULES[status], message=message) for status, message in messages.items()}


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures of one operation.

    - `rules`: precede RULES; that of 408 is also used for a 422 about a page that timed out.
    - `nothing_found`: a 422 whose text begins with this is no error, but has no results (jina-api 2.2).
    - `texts`: messages for a 422, by the beginning of its text.
    - `causes`: messages for a 422, by words anywhere in its text outside of addresses and selectors.
    """

    rules: Mapping[int, Rule] = field(default_factory=dict)
    nothing_found: str | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    causes: Mapping[str, str] = field(default_factory=dict)


_REDIRECT = Rule(
    errors.UpstreamRejected,
    "The service answered with a redirect, which is not followed; an operator must check the tool's definition.",
    reason=False,
)
_EDGE_BLOCK = Rule(
    errors.UpstreamUnavailable,
    "The service's own protection refused this request; try again in a moment.",
    max_retries=ONCE,
    reason=False,
)

_SELECTORS = ("targetSelector", "waitForSelector", "removeSelector")
_NO_MATCH = " with target selector "
_BAD_SELECTOR = re.compile(
    r"Failed to process the page: (?:Expected |Unmatched |Empty sub-selector|Malformed |Unknown pseudo|Attribute sel)"
    r"|not a valid selector"
)
"""Errors of the parsers of CSS selectors in the server and in its browser."""

# `\b` and the possessive `++` keep the time linear; without them a match would be tried at each letter of a long word.
_ADDRESS_OR_SELECTOR = re.compile(r"\b\w++://\S*| with target selector .*", re.DOTALL)
_TIMED_OUT = re.compile(
    r"""timed\ out | TimeoutError | (?:navigation|connection)\ timeout | timeout\ (?:exceeded|was\ reached)
    | net::ERR_\w*TIMED_OUT | ETIMEDOUT""",
    re.IGNORECASE | re.VERBOSE,
)


def _transient(message: str) -> Rule:
    return Rule(errors.UpstreamUnavailable, f"{message}; try again later or use another source.", max_retries=ONCE)


_TRANSIENT: Sequence[tuple[re.Pattern[str], Rule]] = tuple(
    (re.compile(pattern, re.IGNORECASE | re.VERBOSE), _transient(message))
    for pattern, message in (
        (
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
)
"""Transient errors of the server's browser, curl and proxies; the first that matches counts, after `_TIMED_OUT`.

Errors of TLS and name resolution are permanent."""

_OPEN_AGAIN = re.compile(
    r"(?:blocked until|retry after) (?P<date>\w{3} \w{3} \d\d \d{4} [\d:]{8} GMT[+-]\d{4}|[\d-]{10}T[\d:.]{8,15}Z?)",
    re.IGNORECASE,
)
"""Time at which a blocked address may be read again, as JavaScript writes it."""


def upstream_failure(
    http_status: int,
    body: Any,
    retry_after: str | None,
    redactor: Redactor = NO_SECRETS,
    names: Mapping[str, str] | None = None,
    failures: Failures = Failures(),
    filters: Sequence[str] = (),
    offers: Offers = lambda _: False,
) -> ToolError:
    """Return the typed error of an unsuccessful response.

    `body` is the decoded JSON envelope, None without one; `retry_after` the unparsed header; `names` maps upstream
    parameters to the model's names for them. `filters` are the model's names of what restricts a search, which may
    succeed without them if the upstream failed; `offers` tells which arguments a remedy may name. The model never sees
    texts of 5xx responses, texts outside of Jina's envelope, or secrets of `redactor`.
    """
    envelope = body if isinstance(body, dict) else {}
    names = names or {}
    rule = _rule(http_status, envelope, failures)
    wait_s = _retry_after(envelope, retry_after)
    if http_status == HTTPStatus.UNPROCESSABLE_ENTITY:
        selectors = {name: names[name] for name in _SELECTORS if name in names}
        if advice := _selector_advice(envelope, selectors):
            rule = replace(rule, message=advice, reason=False)
    if rule.error is errors.TargetRefused and (blocked_s := _blocked_s(envelope)) is not None:
        rule = _blocked(blocked_s)
        wait_s = blocked_s
    reason = ""
    if rule.reason and http_status < HTTPStatus.INTERNAL_SERVER_ERROR:
        reason = _reason(envelope, redactor, names)
    error = rule.error(
        _message(rule, reason, filters, offers),
        detail=None if wait_s is None else {"retry_after_s": max(1, math.ceil(wait_s))},
        retryable=rule.retryable or rule.max_retries > 0,
        max_retries=rule.max_retries,
        retry_after=wait_s,
        http_status=http_status,
    )
    error.timed_out = rule.timed_out
    error.upstream_status = whole_number(envelope.get("status"))
    error.is_concurrency = http_status == HTTPStatus.TOO_MANY_REQUESTS and _says_concurrency(envelope)
    return error


def _message(rule: Rule, reason: str, filters: Sequence[str], offers: Offers) -> str:
    """Return what the model is told; `reason` is what the upstream says, and may be empty."""
    message = rule.message
    if filters and rule.error is errors.UpstreamUnavailable:
        message = f"{message.removesuffix('.')}, or search without {' or '.join(filters)}."
    argument, remedy = rule.remedy
    if argument and offers(argument):
        message = f"{message} {remedy}"
    return f"{message} The service says: {quoted(reason)}" if reason else message


def status_inside(body: Mapping[str, Any]) -> int:
    """Return the HTTP status that a body reports by `code`, else by `status`; 200 if it reports none.

    Either may be a text of digits. A `code` that is no HTTP status counts as 502; a `status` begins with one.
    """
    given = body.get("code")
    code = int(given) if isinstance(given, bool) else whole_number(given)
    if code is not None and code != HTTPStatus.OK:
        return code if code in _HTTP_STATUSES else HTTPStatus.BAD_GATEWAY
    status = whole_number(body.get("status"))
    if status is None:
        return HTTPStatus.OK
    status = status // 100 if status >= _MIN_FIVE_DIGIT_STATUS else status
    return status if status in _HTTP_STATUSES else HTTPStatus.OK


def too_late() -> ToolTimeout:
    """Return the error for a response that does not arrive within the time of its call."""
    return ToolTimeout(
        "The service did not answer within the time of this call; try again, ask for less or use another source."
    )


def key_failure(status: int) -> ToolError:
    """Return the error for a key that the upstream is known to refuse with this five-digit status."""
    return upstream_failure(status // 100, {"status": status}, None)


def quoted(text: str) -> str:
    """Return one short line in quotes: it may contain words that a page's server chose (HTTP status text)."""
    return '"' + _QUOTES.sub("'", one_line(text[:_MAX_READ_CHARS])[:_MAX_REASON_CHARS]) + '"'


def _selector_advice(envelope: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Return advice about the model's CSS selectors (`names`) if one made the request fail, else an empty text."""
    if not names:
        return ""
    text = _text(envelope)[:_MAX_READ_CHARS]
    target = names.get("targetSelector")
    wait = names.get("waitForSelector")
    if target and _NO_MATCH in text:
        return f"{target}: matches nothing on the page; use another selector, or read the page without one."
    if _BAD_SELECTOR.search(text):
        given = " or ".join(names.values())
        return f"{given}: is no CSS selector that the service understands; correct it, or leave it out."
    if wait and _TIMED_OUT.search(_own_words(envelope)):
        return f"The page took too long: perhaps nothing on it matches {wait}; correct it, or leave it out."
    return ""


def _rule(http_status: int, envelope: Mapping[str, Any], failures: Failures) -> Rule:
    """Return the first that applies: five-digit status, block without a body, redirect, text of a 422, HTTP status."""
    rules = {**RULES, **failures.rules}
    status = whole_number(envelope.get("status"))
    if status is not None and status >= _MIN_FIVE_DIGIT_STATUS and status in rules:
        return rules[status]
    if http_status == HTTPStatus.FORBIDDEN and not envelope:
        return _EDGE_BLOCK
    if HTTPStatus.MULTIPLE_CHOICES <= http_status < HTTPStatus.BAD_REQUEST:
        return _REDIRECT
    if http_status == HTTPStatus.UNPROCESSABLE_ENTITY:
        if rule := _transient_rule(envelope, rules[HTTPStatus.REQUEST_TIMEOUT]):
            return rule
        words = _ERROR_NAME.sub("", _text(envelope)[:_MAX_READ_CHARS], count=1)
        own = _own_words(envelope)
        of_start = (text for start, text in failures.texts.items() if words.startswith(start))
        of_cause = (text for cause, text in failures.causes.items() if cause in own)
        if message := next(chain(of_start, of_cause), None):
            return replace(rules[HTTPStatus.UNPROCESSABLE_ENTITY], message=message)
    return rules.get(http_status, _SERVER if http_status >= HTTPStatus.INTERNAL_SERVER_ERROR else _OTHER)


def _transient_rule(envelope: Mapping[str, Any], timed_out: Rule) -> Rule | None:
    """Return the rule of a page that timed out or whose connection failed: the upstream has no status for these."""
    text = _own_words(envelope)
    if _TIMED_OUT.search(text):
        return replace(timed_out, max_retries=ONCE)
    return next((rule for pattern, rule in _TRANSIENT if pattern.search(text)), None)


def _own_words(envelope: Mapping[str, Any]) -> str:
    """Return the message without addresses and selectors, which may contain any word."""
    return _ADDRESS_OR_SELECTOR.sub("", _text(envelope)[:_MAX_READ_CHARS])


def _blocked_s(envelope: Mapping[str, Any]) -> float | None:
    """Return the seconds until an address may be read again, None if the upstream names no time."""
    match = _OPEN_AGAIN.search(_text(envelope)[:_MAX_READ_CHARS])
    return None if match is None else _seconds(match["date"])


def _blocked(seconds: float) -> Rule:
    wait = f"in {max(1, math.ceil(seconds)):,} s"
    return Rule(
        errors.TargetRefused,
        f"This address is blocked for a while; use another source, or try again {wait}.",
        retryable=True,
    )


def _reason(envelope: Mapping[str, Any], redactor: Redactor, names: Mapping[str, str]) -> str:
    """Return the readable message, without secrets and error class names."""
    text = redactor.head(_text(envelope), _MAX_READ_CHARS)
    match = _ERROR_NAME.match(text)
    path = match["path"] if match else None
    words = one_line(_ERROR_NAME.sub("", text))
    if words.startswith(_VALIDATOR):
        given_value = envelope.get("value")  # only a plain one is shown: str() of a deep one would fail
        plain = str(given_value)[:_MAX_READ_CHARS] if isinstance(given_value, str | int | float) else ""
        value = redactor.head(one_line(plain), _MAX_VALUE_CHARS)
        words = f"the value {value!r} is not accepted" if value else "its value is not accepted"
    if not path or path == "undefined":
        return words
    given = (own for name, own in names.items() if name.rpartition(".")[2] == path)  # the model's name for it
    return f"{next(given, path)}: {words}"


def _says_concurrency(envelope: Mapping[str, Any]) -> bool:
    """Return whether a 429 is due to the number of open requests: no status of the upstream says so, only a text."""
    return any("concurren" in str(envelope.get(name))[:_MAX_READ_CHARS].lower() for name in ("name", "readableMessage"))


def _text(envelope: Mapping[str, Any]) -> str:
    text = envelope.get("readableMessage")
    return text if isinstance(text, str) else ""


def _retry_after(envelope: Mapping[str, Any], header: str | None) -> float | None:
    """Return the seconds of the header, else of the body's number, else of the body's date."""
    candidates = (header, envelope.get("retryAfter"), envelope.get("retryAfterDate"))
    return next((seconds for value in candidates if (seconds := _seconds(value)) is not None), None)


def _seconds(value: Any) -> float | None:
    """Take a number, a text of digits, or an HTTP or ISO 8601 date."""
    if isinstance(value, str):
        text = value[:_MAX_WAIT_CHARS].strip()
        value = float(text) if text.isascii() and text.isdigit() else _seconds_until(text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    seconds = float(min(max(value, 0), _MAX_WAIT_S))  # first, as an integer may have any size
    return None if math.isnan(seconds) else seconds


def _seconds_until(date: str) -> float | None:
    for parse in (datetime.fromisoformat, parsedate_to_datetime, _javascript_date):
        try:
            return (parse(date) - datetime.now(UTC)).total_seconds()
        except (TypeError, ValueError, OverflowError):
            continue
    return None


def _javascript_date(text: str) -> datetime:
    return datetime.strptime(text, "%a %b %d %Y %H:%M:%S GMT%z")
