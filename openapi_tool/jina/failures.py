"""Failed responses of the upstream: each becomes a typed error with a message for the model (jina-api section 4).

An error body is an *envelope*, an object with `code`, `status` and the upstream's message in `readableMessage`. From
status and message `upstream_failure` chooses a rule (`failure_rules.py`), which says what the model is told and whether
to try again.

The message may quote a page, its server or the request. So only some of it is passed on, within limits, and it is
searched only within the first characters, which bounds the time of the patterns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from openapi_tool.jina.failure_rules import (
    COMMON_FAILURES,
    EDGE_BLOCK,
    MIN_FIVE_DIGIT_STATUS,
    ONCE,
    REDIRECT,
    REFUSED,
    RULES,
    SERVER_FAILED,
    TRANSIENT,
    Failures,
    Rule,
    blocked_for,
)
from openapi_tool.jina.remarks import Offers
from openapi_tool.jina.retry_after import retry_after_s, seconds_of
from openapi_tool.protocol import errors
from openapi_tool.protocol.errors import ToolError, ToolTimeout
from openapi_tool.protocol.jsontext import whole_number
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.tools.wording import one_line

NO_SECRETS = Redactor(where="error")
"""Masks what looks like a key, and no secret of a request."""

_MAX_READ_CHARS = 4_000  # of an upstream message that are searched
_MAX_REASON_CHARS = 300  # of it that are quoted
_MAX_VALUE_CHARS = 80  # of a value of the request that it refuses

_QUOTES = re.compile('["\u201c-\u201f\u2033\u2036\u300c-\u300f\u301d-\u301f\u00ab\u00bb\uff02\uff62\uff63]')
"""Characters that a model could read as the end of a quotation."""
_VALIDATOR = "Rejected by validator"  # followed by source code of the validator
_ERROR_NAME = re.compile(r"\b(?:[A-Z]\w*)?Error(?:\((?P<path>[^()]*)\))?(?:: |$)")
"""Error class before the upstream's message, as in `ParamValidationError(url): …`; `path` is the parameter."""
_HTTP_STATUSES = range(100, 600)

_SELECTORS = ("targetSelector", "waitForSelector", "removeSelector")
_NO_MATCH = " with target selector "  # in the upstream's message that nothing on a page matches it
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
_OPEN_AGAIN = re.compile(
    r"(?:blocked until|retry after) (?P<date>\w{3} \w{3} \d\d \d{4} [\d:]{8} GMT[+-]\d{4}|[\d-]{10}T[\d:.]{8,15}Z?)",
    re.IGNORECASE,
)
"""Time at which a blocked address may be read again, as JavaScript writes it."""


@dataclass(frozen=True, slots=True)
class MessageContext:
    """What the message about a failed request may name, and what it must hide.

    - `redactor` masks the secrets of the request.
    - `names`: the model's names for the parameters that it gave, by the parameter's name.
    - `filters`: the model's names of what restricts a search. If the upstream failed, the search may work without them.
    - `offers` tells whether a remedy may name an argument.
    """

    redactor: Redactor = NO_SECRETS
    names: Mapping[str, str] = field(default_factory=dict)
    filters: Sequence[str] = ()
    offers: Offers = lambda _: False


def upstream_failure(
    http_status: int,
    body: Any,
    retry_after: str | None,
    failures: Failures = COMMON_FAILURES,
    context: MessageContext = MessageContext(),
) -> ToolError:
    """Return the typed error of an unsuccessful response.

    `body` is the decoded JSON, None without any; `retry_after` is the header, not parsed yet; `failures` are those of
    the operation. The model sees no text of a 5xx response, and none outside of Jina's envelope.
    """
    envelope = body if isinstance(body, dict) else {}
    rule = _rule(http_status, envelope, failures)
    wait_s = retry_after_s(envelope, retry_after)
    if http_status == HTTPStatus.UNPROCESSABLE_ENTITY:
        advice = _selector_advice(envelope, context.names)
        if advice:
            rule = replace(rule, message=advice, quotes_reason=False)
    if rule.error is errors.TargetRefused:
        blocked_s = _blocked_s(envelope)
        if blocked_s is not None:
            rule = blocked_for(blocked_s)
            wait_s = blocked_s
    error = rule.error(
        _message(rule, http_status, envelope, context),
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


def key_failure(status: int) -> ToolError:
    """Return the error for a key that the upstream is known to refuse with this five-digit status."""
    return upstream_failure(status // 100, {"status": status}, None)


def too_late() -> ToolTimeout:
    """Return the error for a response that does not arrive within the time of its call."""
    return ToolTimeout(
        "The service did not answer within the time of this call; try again, ask for less or use another source."
    )


def status_inside(body: Mapping[str, Any]) -> int:
    """Return the HTTP status that a body reports by `code`, else by `status`; 200 if it reports none.

    Either may be a text of digits. A `code` that is no HTTP status counts as 502. A `status` of five digits begins with
    the HTTP status.
    """
    member = body.get("code")
    code = int(member) if isinstance(member, bool) else whole_number(member)
    if code is not None and code != HTTPStatus.OK:
        return code if code in _HTTP_STATUSES else HTTPStatus.BAD_GATEWAY
    status = whole_number(body.get("status"))
    if status is None:
        return HTTPStatus.OK
    if status >= MIN_FIVE_DIGIT_STATUS:
        status //= 100
    return status if status in _HTTP_STATUSES else HTTPStatus.OK


def quoted(text: str) -> str:
    """Return a text of others as one short line in quotes: a page's server chose some of its words."""
    return '"' + _QUOTES.sub("'", one_line(text[:_MAX_READ_CHARS])[:_MAX_REASON_CHARS]) + '"'


def _rule(http_status: int, envelope: Mapping[str, Any], failures: Failures) -> Rule:
    """Return the rule of a failed response.

    Of these, it is the first that applies:

    1. that of the five-digit status in the body;
    2. EDGE_BLOCK for a 403 without a body;
    3. REDIRECT for a 3xx;
    4. that of the text of a 422;
    5. that of the HTTP status;
    6. SERVER_FAILED for a 5xx, else REFUSED.
    """
    rules = {**RULES, **failures.rules}
    status = whole_number(envelope.get("status"))
    if status is not None and status >= MIN_FIVE_DIGIT_STATUS and status in rules:
        return rules[status]
    if http_status == HTTPStatus.FORBIDDEN and not envelope:
        return EDGE_BLOCK
    if HTTPStatus.MULTIPLE_CHOICES <= http_status < HTTPStatus.BAD_REQUEST:
        return REDIRECT
    if http_status == HTTPStatus.UNPROCESSABLE_ENTITY:
        by_text = _rule_by_text(envelope, failures, rules)
        if by_text is not None:
            return by_text
    if http_status in rules:
        return rules[http_status]
    return SERVER_FAILED if http_status >= HTTPStatus.INTERNAL_SERVER_ERROR else REFUSED


def _rule_by_text(envelope: Mapping[str, Any], failures: Failures, rules: Mapping[int, Rule]) -> Rule | None:
    """Return the rule of a 422 whose text says what happened: the upstream has no status for it."""
    own_words = _own_words(envelope)
    if _TIMED_OUT.search(own_words):
        return replace(rules[HTTPStatus.REQUEST_TIMEOUT], max_retries=ONCE)
    for pattern, rule in TRANSIENT:
        if pattern.search(own_words):
            return rule
    message = _message_by_text(envelope, own_words, failures)
    if message is None:
        return None
    return replace(rules[HTTPStatus.UNPROCESSABLE_ENTITY], message=message)


def _message_by_text(envelope: Mapping[str, Any], own_words: str, failures: Failures) -> str | None:
    """Return the operation's own message for the text of a 422, if it has one."""
    words = _ERROR_NAME.sub("", _text(envelope)[:_MAX_READ_CHARS], count=1)
    for start, message in failures.texts.items():
        if words.startswith(start):
            return message
    for cause, message in failures.causes.items():
        if cause in own_words:
            return message
    return None


def _selector_advice(envelope: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Return advice about the model's CSS selectors if one made the request fail, else an empty text."""
    selectors = {name: names[name] for name in _SELECTORS if name in names}
    if not selectors:
        return ""
    text = _text(envelope)[:_MAX_READ_CHARS]
    target = selectors.get("targetSelector")
    wait = selectors.get("waitForSelector")
    if target and _NO_MATCH in text:
        return f"{target}: matches nothing on the page; use another selector, or read the page without one."
    if _BAD_SELECTOR.search(text):
        listed = " or ".join(selectors.values())
        return f"{listed}: is no CSS selector that the service understands; correct it, or leave it out."
    if wait and _TIMED_OUT.search(_own_words(envelope)):
        return f"The page took too long: perhaps nothing on it matches {wait}; correct it, or leave it out."
    return ""


def _blocked_s(envelope: Mapping[str, Any]) -> float | None:
    """Return the seconds until an address may be read again, None if the upstream names no time."""
    match = _OPEN_AGAIN.search(_text(envelope)[:_MAX_READ_CHARS])
    return None if match is None else seconds_of(match["date"])


def _message(rule: Rule, http_status: int, envelope: Mapping[str, Any], context: MessageContext) -> str:
    """Return what the model is told: the rule's message, what may help, and what the upstream says."""
    message = rule.message
    if context.filters and rule.error is errors.UpstreamUnavailable:
        message = f"{message.removesuffix('.')}, or search without {' or '.join(context.filters)}."
    argument, remedy = rule.remedy
    if argument and context.offers(argument):
        message = f"{message} {remedy}"
    if not rule.quotes_reason or http_status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return message
    reason = _reason(envelope, context)
    return f"{message} The service says: {quoted(reason)}" if reason else message


def _reason(envelope: Mapping[str, Any], context: MessageContext) -> str:
    """Return what the upstream says, without secrets and error class names, behind the parameter that it is about.

    For example `url: is not a valid address` for `ParamValidationError(url): is not a valid address`.
    """
    text = context.redactor.head(_text(envelope), _MAX_READ_CHARS)
    match = _ERROR_NAME.match(text)
    parameter = match["path"] if match else None
    words = one_line(_ERROR_NAME.sub("", text))
    if words.startswith(_VALIDATOR):
        words = _refused_value(envelope, context.redactor)
    if not parameter or parameter == "undefined":
        return words
    return f"{_models_name(parameter, context.names)}: {words}"


def _refused_value(envelope: Mapping[str, Any], redactor: Redactor) -> str:
    """Return that the upstream's validator refused a value, and the value if it is plain: str() of a deep one fails."""
    value = envelope.get("value")
    if not isinstance(value, str | int | float):
        return "its value is not accepted"
    shown = redactor.head(one_line(str(value)[:_MAX_READ_CHARS]), _MAX_VALUE_CHARS)
    return f"the value {shown!r} is not accepted" if shown else "its value is not accepted"


def _models_name(parameter: str, names: Mapping[str, str]) -> str:
    """Return the model's name for a parameter, which the upstream names without its parent; else the parameter."""
    for name, models_name in names.items():
        _, _, last = name.rpartition(".")
        if last == parameter:
            return models_name
    return parameter


def _says_concurrency(envelope: Mapping[str, Any]) -> bool:
    """Return whether a 429 is due to the number of open requests: no status of the upstream says so, only a text."""
    texts = [str(envelope.get(member))[:_MAX_READ_CHARS] for member in ("name", "readableMessage")]
    return any("concurren" in text.lower() for text in texts)


def _own_words(envelope: Mapping[str, Any]) -> str:
    """Return the upstream's message without addresses and selectors, which may contain any word."""
    return _ADDRESS_OR_SELECTOR.sub("", _text(envelope)[:_MAX_READ_CHARS])


def _text(envelope: Mapping[str, Any]) -> str:
    """Return the upstream's message, empty if it has none."""
    text = envelope.get("readableMessage")
    return text if isinstance(text, str) else ""
