"""An upstream response, from the bytes of its body to the output of the tool. Imports pure code only.

`read_response` alone reads a body: it parses, renders and masks. How long it takes depends on what a page's author
wrote, so a worker process runs it (`response_task.py`), except for bodies that are known to be cheap. It gets:

- `Responses`: how the responses of an operation are read, known when the program starts;
- `Expected`: what its request tells about a response, known before that arrives;
- `Received`: what came with the body.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

import orjson

from openapi_tool.jina import remarks
from openapi_tool.jina.failure_rules import COMMON_FAILURES, ONCE, Failures, Rule, worded
from openapi_tool.jina.failures import MessageContext, status_inside, upstream_failure
from openapi_tool.jina.page_content import page_output
from openapi_tool.jina.rendering import RenderContext, usage_of
from openapi_tool.jina.search_content import search_output
from openapi_tool.protocol import errors
from openapi_tool.protocol.errors import ToolError, UpstreamUnavailable
from openapi_tool.protocol.jsontext import as_object, loads, storable_text
from openapi_tool.telemetry.redact import Redactor, of_call
from openapi_tool.tools.output import Item, ToolOutput, Usage, cost

Render = Callable[[Mapping[str, Any], Mapping[str, Any], RenderContext], ToolOutput]
"""Makes the output of a success envelope; its second argument are the parameters of the request."""


@dataclass(frozen=True, slots=True)
class NothingToShow:
    """Result of a request that succeeded and is paid, but whose response has nothing to show: `error` says why."""

    error: ToolError

    @property
    def usage(self) -> Usage:
        """Upstream cost of the request."""
        return cost(self.error)


UpstreamResult = ToolOutput | NothingToShow
"""Result of a request that succeeded, and is paid."""


@dataclass(frozen=True, slots=True)
class Responses:
    """How the responses of one operation are read: `render` makes the output of a success, `failures` the errors."""

    render: Render
    failures: Failures = COMMON_FAILURES


SEARCH_RESPONSES = Responses(
    search_output,
    Failures(
        worded({524: "The service took too long; ask for less (fewer results, no page content)."}),
        nothing_found="No search results available",
        texts={
            "No content available for query": "No page of the results could be read; search without page content, then "
            "read single pages."
        },
    ),
)
_PAGE_TOO_LARGE = Rule(
    errors.UpstreamRejected,
    "The page or file is too large for the service; use another source.",
    remedy=("pdf_page", "If it is a PDF, a single page of it, chosen with pdf_page, may be readable."),
)
READER_RESPONSES = Responses(
    page_output,
    Failures(
        {
            413: _PAGE_TOO_LARGE,
            41302: _PAGE_TOO_LARGE,
            **worded(
                {
                    408: "The page did not answer in time; try again later or use another source.",
                    422: "The page could not be read; check the address or use another source.",
                    431: "The address is too long; use a shorter one.",
                    500: "The service failed at this page; try again in a moment, or use another source.",
                }
            ),
        },
        causes={
            "net::ERR_ABORTED": "The service could not open this, which is probably only offered for download; use "
            "another source."
        },
    ),
)
RESPONSES: Mapping[str, Responses] = {"search": SEARCH_RESPONSES, "reader": READER_RESPONSES}
"""By the name of their operation."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the request tells about its response; the reading depends on it.

    - `operation`: name of the operation, a key of RESPONSES.
    - `parameters`: those of the request, by the parameter's name.
    - `names`: the model's names for the parameters that it gave, by the parameter's name.
    - `offered`: arguments of the model that a remedy may name.
    - `denied`: hosts that are not shown (`UrlPolicy.deny`).
    """

    operation: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    offered: frozenset[str] = frozenset()
    denied: tuple[str, ...] = ()

    def offers(self, argument: str) -> bool:
        """Return whether a remedy may name an argument."""
        return argument in self.offered


@dataclass(frozen=True, slots=True)
class Received:
    """What came with a body: HTTP status and header. `secrets` are those of its call, which are masked in it."""

    http_status: int
    retry_after: str | None = None
    secrets: frozenset[str] = frozenset()


class MayHoldSecret(Exception):
    """A response may hold a secret. To mask it may take any time, so a worker process must read it."""


def read_response(
    body: bytes | bytearray | memoryview, expected: Expected, received: Received, *, inline: bool = False
) -> UpstreamResult:
    """Return the result of a successful request. Raises ToolError if the upstream failed.

    With `inline`, in the event loop, the output is not masked, as that may take long; only short texts in errors and
    warnings are. Raises MayHoldSecret then if the output may hold a secret.
    """
    redactor = of_call(received.secrets)
    responses = RESPONSES[expected.operation]
    envelope = _envelope(_parsed(body), expected, received, redactor)
    context = RenderContext(redactor, expected.offers, expected.names, expected.denied)
    try:
        output = responses.render(envelope, expected.parameters, context)
    except ToolError as error:
        error.tokens = usage_of(envelope).tokens  # the upstream charges for the page
        return NothingToShow(error)
    del envelope  # it takes up to four times the bytes of the body
    if not inline:
        output = _masked(output, redactor)
    elif _may_hold_secret(output, redactor):
        raise MayHoldSecret
    return _storable(output)


def unread_failure(expected: Expected, received: Received) -> ToolError | None:
    """Return the error of a response whose body cannot be read; None if its HTTP status says success."""
    if received.http_status == HTTPStatus.OK:
        return None
    failures = RESPONSES[expected.operation].failures
    context = MessageContext(offers=expected.offers)
    return upstream_failure(received.http_status, None, received.retry_after, failures, context)


def _envelope(value: object, expected: Expected, received: Received, redactor: Redactor) -> dict[str, Any]:
    """Return the envelope of a success, `{code, status, data, meta}`. Raises ToolError.

    With the HTTP status 200 the body may report another one, and then counts as if it had come with that.
    """
    status = received.http_status
    failures = RESPONSES[expected.operation].failures
    if status == HTTPStatus.OK:
        if not isinstance(value, dict):
            raise UpstreamUnavailable(
                "The service's response was not the JSON that was asked for; try again.", max_retries=ONCE
            )
        status = status_inside(value)
        if status == HTTPStatus.OK:
            return value
    if failures.nothing_found and status == HTTPStatus.UNPROCESSABLE_ENTITY:
        message = as_object(value).get("message")
        if isinstance(message, str) and message.startswith(failures.nothing_found):
            return {"code": HTTPStatus.OK, "data": []}
    filters = remarks.filters(expected.parameters, expected.names)
    context = MessageContext(redactor, expected.names, filters, expected.offers)
    raise upstream_failure(status, value, received.retry_after, failures, context)


def _may_hold_secret(output: ToolOutput, redactor: Redactor) -> bool:
    """Return whether text or state contains what may be a secret: a part of one, or the shape of a key."""
    try:
        state = orjson.dumps(output.state).decode()
    except orjson.JSONEncodeError:  # a number beyond 64 bits
        return True
    return redactor.is_suspect(output.content) or redactor.is_suspect(state)


def _masked(output: ToolOutput, redactor: Redactor) -> ToolOutput:
    """Return the output with masked secrets.

    It is masked before it is truncated: afterwards the redactor would not recognize half a key. At first all texts are
    searched as one, which is fast: nearly no output holds a secret.
    """
    items = output.items
    if redactor.is_suspect(output.content):
        items = tuple(item._replace(head=redactor.text(item.head), body=redactor.text(item.body)) for item in items)
    return ToolOutput(items, redactor.value(output.state), output.usage)


def _storable(output: ToolOutput) -> ToolOutput:
    """Return the output without characters that PostgreSQL's jsonb refuses."""
    content = output.content
    if storable_text(content) == content:
        return output
    return replace(output, items=tuple(Item(*map(storable_text, item)) for item in output.items))


# JSON writes a character beyond 16 bits as two escapes, a pair of surrogates: `\ud83d\ude00`.
_HIGH = rb"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPES = re.compile(rb"\\\\|(?P<pair>%b%b)|%b|%b" % (_HIGH, _LOW, _HIGH, _LOW))
"""An escaped backslash, a pair of surrogates, or one surrogate without the other."""


def _parsed(body: bytes | bytearray | memoryview) -> object:
    """Return the value of a body; None if it is not JSON, or is nested too deeply.

    Some senders cut a text within a pair of surrogates. The half that is left is no valid JSON, so it is replaced by
    the replacement character U+FFFD.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    try:
        return loads(_ESCAPES.sub(_repaired, bytes(body)))
    except ValueError:
        return None


def _repaired(escape: re.Match[bytes]) -> bytes:
    is_valid = escape["pair"] or escape[0] == rb"\\"
    return escape[0] if is_valid else rb"\ufffd"
