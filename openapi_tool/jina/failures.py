"""Failed responses of the upstream: each becomes a typed error with a message for the model (jina-api section 4).

`failure_envelope.py` reads what the upstream says, and `rule_choice.py` chooses a rule by that. The rule
(`failure_rules.py`) says what the model is told, and whether to try again. The message for the model is written here.
It may quote the upstream, but only within limits: the upstream itself may quote a page, its server or the request.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from openapi_tool.jina.failure_envelope import (
    ERROR_NAME,
    MAX_READ_CHARS,
    blocked_s,
    message_of,
    own_words,
    says_concurrency,
    says_timeout,
    searched_message,
)
from openapi_tool.jina.failure_rules import COMMON_FAILURES, Failures, Rule, blocked_for
from openapi_tool.jina.remarks import Offers
from openapi_tool.jina.retry_after import retry_after_s
from openapi_tool.jina.rule_choice import rule_of
from openapi_tool.protocol import errors
from openapi_tool.protocol.errors import ToolError, ToolTimeout
from openapi_tool.protocol.jsontext import whole_number
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.tools.wording import one_line

NO_SECRETS = Redactor(where="error")
"""Masks what looks like a key, and no secret of a request."""

_MAX_REASON_CHARS = 300  # of an upstream message that are quoted
_MAX_VALUE_CHARS = 80  # of a value of the request that it refuses

_QUOTES = re.compile('["\u201c-\u201f\u2033\u2036\u300c-\u300f\u301d-\u301f\u00ab\u00bb\uff02\uff62\uff63]')
"""Characters that a model could read as the end of a quotation."""
_VALIDATOR = "Rejected by validator"  # followed by source code of the validator
_SELECTORS = ("targetSelector", "waitForSelector", "removeSelector")
_NO_MATCH = " with target selector "  # in the message about a selector that matches nothing
_BAD_SELECTOR = re.compile(
    r"Failed to process the page: (?:Expected |Unmatched |Empty sub-selector|Malformed |Unknown pseudo|Attribute sel)"
    r"|not a valid selector"
)
"""Errors of the parsers of CSS selectors in the server and in its browser."""


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
    rule = rule_of(http_status, envelope, failures)
    wait_s = retry_after_s(envelope, retry_after)
    if http_status == HTTPStatus.UNPROCESSABLE_ENTITY:  # the cause may be a selector of the model
        advice = _selector_advice(envelope, context.names)
        if advice:
            rule = replace(rule, message=advice, quotes_reason=False)
    if rule.error is errors.TargetRefused:  # perhaps only for some time
        seconds = blocked_s(envelope)
        if seconds is not None:
            rule = blocked_for(seconds)
            wait_s = seconds
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
    error.is_concurrency = http_status == HTTPStatus.TOO_MANY_REQUESTS and says_concurrency(envelope)
    return error


def key_failure(status: int) -> ToolError:
    """Return the error for a key that the upstream is known to refuse with this five-digit status."""
    return upstream_failure(status // 100, {"status": status}, None)


def too_late() -> ToolTimeout:
    """Return the error for a response that does not arrive within the time of its call."""
    return ToolTimeout(
        "The service did not answer within the time of this call; try again, ask for less or use another source."
    )


def quoted(text: str) -> str:
    """Return a text of others as one short line in quotes, without quotes inside: a page may have chosen its words."""
    line = one_line(text[:MAX_READ_CHARS])[:_MAX_REASON_CHARS]
    return '"' + _QUOTES.sub("'", line) + '"'


def _selector_advice(envelope: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Return advice about the model's CSS selectors if one made the request fail, else an empty text."""
    given = {name: names[name] for name in _SELECTORS if name in names}
    if not given:
        return ""
    text = searched_message(envelope)
    target = given.get("targetSelector")
    wait = given.get("waitForSelector")
    if target and _NO_MATCH in text:
        return f"{target}: matches nothing on the page; use another selector, or read the page without one."
    if _BAD_SELECTOR.search(text):
        selectors = " or ".join(given.values())
        return f"{selectors}: is no CSS selector that the service understands; correct it, or leave it out."
    if wait and says_timeout(own_words(envelope)):
        return f"The page took too long: perhaps nothing on it matches {wait}; correct it, or leave it out."
    return ""


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
    text = context.redactor.head(message_of(envelope), MAX_READ_CHARS)
    match = ERROR_NAME.match(text)
    parameter = match["path"] if match else None
    words = one_line(ERROR_NAME.sub("", text))
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
    shown = redactor.head(one_line(str(value)[:MAX_READ_CHARS]), _MAX_VALUE_CHARS)
    return f"the value {shown!r} is not accepted" if shown else "its value is not accepted"


def _models_name(parameter: str, names: Mapping[str, str]) -> str:
    """Return the model's name for a parameter, which the upstream names without its parent; else the parameter."""
    for name, models_name in names.items():
        _, _, last = name.rpartition(".")
        if last == parameter:
            return models_name
    return parameter
