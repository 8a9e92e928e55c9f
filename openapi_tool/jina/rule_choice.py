"""Chooses the rule of a failed response: by its status, or by what the upstream says where no status tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from openapi_tool.jina.failure_envelope import ERROR_NAME, own_words, says_timeout, searched_message
from openapi_tool.jina.failure_rules import (
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
)
from openapi_tool.protocol.jsontext import whole_number


def rule_of(http_status: int, envelope: Mapping[str, Any], failures: Failures) -> Rule:
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
    by_status = rules.get(http_status)
    if by_status is not None:
        return by_status
    return SERVER_FAILED if http_status >= HTTPStatus.INTERNAL_SERVER_ERROR else REFUSED


def _rule_by_text(envelope: Mapping[str, Any], failures: Failures, rules: Mapping[int, Rule]) -> Rule | None:
    """Return the rule of a 422 whose text says what happened: the upstream has no status for it."""
    words = own_words(envelope)
    if says_timeout(words):
        return replace(rules[HTTPStatus.REQUEST_TIMEOUT], max_retries=ONCE)
    for pattern, rule in TRANSIENT:
        if pattern.search(words):
            return rule
    message = _message_by_text(envelope, words, failures)
    if message is None:
        return None
    return replace(rules[HTTPStatus.UNPROCESSABLE_ENTITY], message=message)


def _message_by_text(envelope: Mapping[str, Any], words: str, failures: Failures) -> str | None:
    """Return the operation's own message for the text of a 422, if it has one."""
    text = ERROR_NAME.sub("", searched_message(envelope), count=1)
    for start, message in failures.texts.items():
        if text.startswith(start):
            return message
    for cause, message in failures.causes.items():
        if cause in words:
            return message
    return None
