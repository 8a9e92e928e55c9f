"""Reads what the upstream says in a failed response.

The body of such a response is an *envelope*, an object with `code`, `status` and the upstream's message in
`readableMessage`. The message may be long, and may quote a page or its server. So it is searched only within its first
characters, which bounds the time of the patterns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from openapi_tool.jina.failure_rules import MIN_FIVE_DIGIT_STATUS
from openapi_tool.jina.retry_after import seconds_of
from openapi_tool.protocol.jsontext import whole_number

MAX_READ_CHARS = 4_000  # of a message that are searched

ERROR_NAME = re.compile(r"\b(?:[A-Z]\w*)?Error(?:\((?P<path>[^()]*)\))?(?:: |$)")
"""Error class before the upstream's message, as in `ParamValidationError(url): …`; `path` is the parameter."""

_HTTP_STATUSES = range(100, 600)

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


def message_of(envelope: Mapping[str, Any]) -> str:
    """Return the upstream's message, empty if it has none."""
    text = envelope.get("readableMessage")
    return text if isinstance(text, str) else ""


def searched_message(envelope: Mapping[str, Any]) -> str:
    """Return the first characters of the upstream's message."""
    return message_of(envelope)[:MAX_READ_CHARS]


def own_words(envelope: Mapping[str, Any]) -> str:
    """Return the upstream's message without addresses and selectors, which may contain any word."""
    return _ADDRESS_OR_SELECTOR.sub("", searched_message(envelope))


def says_timeout(words: str) -> bool:
    """Return whether the upstream's `own_words` say that a page took too long."""
    return _TIMED_OUT.search(words) is not None


def blocked_s(envelope: Mapping[str, Any]) -> float | None:
    """Return the seconds until an address may be read again, None if the upstream names no time."""
    match = _OPEN_AGAIN.search(searched_message(envelope))
    return None if match is None else seconds_of(match["date"])


def says_concurrency(envelope: Mapping[str, Any]) -> bool:
    """Return whether a 429 is due to the number of open requests. No status of the upstream says so, only a text."""
    texts = [str(envelope.get(member))[:MAX_READ_CHARS] for member in ("name", "readableMessage")]
    return any("concurren" in text.lower() for text in texts)


def status_inside(body: Mapping[str, Any]) -> int:
    """Return the HTTP status that a body reports by `code`, else by `status`; 200 if it reports none.

    Either may be a text of digits. A `code` that is no HTTP status counts as 502. A `status` of five digits begins with
    the HTTP status.
    """
    given = body.get("code")
    code = int(given) if isinstance(given, bool) else whole_number(given)
    if code is not None and code != HTTPStatus.OK:
        return code if code in _HTTP_STATUSES else HTTPStatus.BAD_GATEWAY
    status = whole_number(body.get("status"))
    if status is None:
        return HTTPStatus.OK
    status = status // 100 if status >= MIN_FIVE_DIGIT_STATUS else status
    return status if status in _HTTP_STATUSES else HTTPStatus.OK
