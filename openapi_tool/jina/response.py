"""An upstream response, from the bytes of its body to the output of the tool. Imports pure code only.

`read_response` alone reads a body: it parses, renders and masks. How long it takes depends on what a page's author
wrote, so a worker process runs it (`response_task.py`), except for bodies that are known to be cheap. It depends on:

- `Responses`: how the responses of an operation are read;
- `Expected`: what the request tells about its response;
- `Received`: what came with the body.

The JSON of a body is an *envelope*, an object `{code, status, data, meta}` around the results. `page_content.py` and
`search_content.py` render the envelope of a success; `failures.py` makes an error of any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

import orjson

from openapi_tool.jina import remarks
from openapi_tool.jina.failure_envelope import status_inside
from openapi_tool.jina.failure_rules import (
    COMMON_FAILURES,
    ONCE,
    READER_FAILURES,
    SEARCH_FAILURES,
    Failures,
)
from openapi_tool.jina.failures import MessageContext, upstream_failure
from openapi_tool.jina.json_body import parsed_body
from openapi_tool.jina.page_content import page_output
from openapi_tool.jina.rendering import RenderContext, usage_of
from openapi_tool.jina.search_content import search_output
from openapi_tool.protocol.errors import ToolError, UpstreamUnavailable
from openapi_tool.protocol.jsontext import as_object, storable_text
from openapi_tool.telemetry.redact import Redactor, of_call
from openapi_tool.tools.output import Item, ToolOutput, Usage, cost


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


Render = Callable[[Mapping[str, Any], Mapping[str, Any], RenderContext], ToolOutput]
"""Makes the output of a success envelope; its second argument are the parameters of the request."""


@dataclass(frozen=True, slots=True)
class Responses:
    """How the responses of one operation are read: `render` makes the output of a success, `failures` the errors."""

    render: Render
    failures: Failures = COMMON_FAILURES


RESPONSES: Mapping[str, Responses] = {
    "search": Responses(search_output, SEARCH_FAILURES),
    "reader": Responses(page_output, READER_FAILURES),
}
"""By the name of the operation."""


def read_response(
    body: bytes | bytearray | memoryview, expected: Expected, received: Received, *, inline: bool = False
) -> UpstreamResult:
    """Return the result of a successful request. Raises ToolError if the upstream failed.

    With `inline`, in the event loop, the output is not masked, as that may take long; only short texts in errors and
    warnings are. Raises MayHoldSecret then if the output may hold a secret.
    """
    redactor = of_call(received.secrets)
    responses = RESPONSES[expected.operation]
    envelope = _envelope(parsed_body(body), expected, received, redactor)
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
    """Return the error of a response whose body was not read: what its HTTP status says; None if that says success."""
    if received.http_status == HTTPStatus.OK:
        return None
    failures = RESPONSES[expected.operation].failures
    context = MessageContext(offers=expected.offers)
    return upstream_failure(received.http_status, None, received.retry_after, failures, context)


def _envelope(value: object, expected: Expected, received: Received, redactor: Redactor) -> dict[str, Any]:
    """Return the value of a body as the envelope of a success. Raises ToolError for a failure."""
    failures = RESPONSES[expected.operation].failures
    status = _status(value, received.http_status)
    if status == HTTPStatus.OK:
        return as_object(value)
    if _has_found_nothing(status, value, failures):
        return {"code": HTTPStatus.OK, "data": []}
    filters = remarks.filters(expected.parameters, expected.names)
    context = MessageContext(redactor, expected.names, filters, expected.offers)
    raise upstream_failure(status, value, received.retry_after, failures, context)


def _status(value: object, http_status: int) -> int:
    """Return the status of a response. With the HTTP status 200, the envelope may report another one, which counts.

    Raises ToolError if that response is no envelope.
    """
    if http_status != HTTPStatus.OK:
        return http_status
    if not isinstance(value, dict):
        raise UpstreamUnavailable(
            "The service's response was not the JSON that was asked for; try again.", max_retries=ONCE
        )
    return status_inside(value)


def _has_found_nothing(status: int, value: object, failures: Failures) -> bool:
    """Return whether a failure says that a search has no results, which is no error."""
    if failures.nothing_found is None or status != HTTPStatus.UNPROCESSABLE_ENTITY:
        return False
    message = as_object(value).get("message")
    return isinstance(message, str) and message.startswith(failures.nothing_found)


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
