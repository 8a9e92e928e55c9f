"""An upstream response, from the bytes of its body to the output of the tool. Imports pure code only.

`read_response` is all that touches a body. Its cost depends on what a page's author wrote, so `client.py` has a worker
process run it, except for bodies that are known to be cheap.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from itertools import chain
from typing import Any, cast

import orjson

from openapi_tool.jina import remarks
from openapi_tool.jina.content import RenderContext, page_output, search_output, usage_of
from openapi_tool.jina.failures import ONCE, Failures, Rule, status_inside, upstream_failure, worded
from openapi_tool.protocol import errors
from openapi_tool.protocol.errors import ToolError, UpstreamUnavailable
from openapi_tool.protocol.jsontext import JsonObject, as_object, loads, storable_text
from openapi_tool.protocol.payload import Parts, Payload, pack, pack_parts, pack_texts
from openapi_tool.telemetry import redact
from openapi_tool.telemetry.redact import Redactor, of_call
from openapi_tool.tools.output import Item, ToolOutput, Usage, cost

Render = Callable[[Mapping[str, Any], Mapping[str, Any], RenderContext], ToolOutput]


@dataclass(frozen=True, slots=True)
class NothingToShow:
    """Result of a request that succeeded and is paid, although its response has nothing to show: `error` says why."""

    error: ToolError

    @property
    def usage(self) -> Usage:
        """Upstream cost of the request."""
        return cost(self.error)


UpstreamResult = ToolOutput | NothingToShow
"""Of a request that succeeded."""


@dataclass(frozen=True, slots=True)
class Responses:
    """How the responses of one operation are read: `render` makes the output of a success, `failures` the errors."""

    render: Render
    failures: Failures = field(default=Failures())


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
"""By the name of an operation."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known of a response before it arrives, and its reading depends on.

    `parameters` are those of the request, `names` maps them to the model's names. `offered` are the arguments that a
    remedy may name. `denied` are the hosts that are not shown (`UrlPolicy.deny`).
    """

    operation: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    offered: frozenset[str] = frozenset()
    denied: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Received:
    """What is known of a response once its body arrives: status, header, and the secrets of its call, to be masked."""

    http_status: int
    retry_after: str | None = None
    secrets: frozenset[str] = frozenset()


class MayHoldSecret(Exception):
    """A response must be masked, whose cost has no bound."""


def read_response(
    body: bytes | bytearray | memoryview, expected: Expected, received: Received, *, inline: bool = False
) -> UpstreamResult:
    """Return the result of a successful request. Raises ToolError if the upstream failed.

    With `inline` nothing is masked but short texts in errors and warnings: raises MayHoldSecret if there may be more.
    """
    redactor = of_call(received.secrets)
    responses = RESPONSES[expected.operation]
    envelope = _envelope(_parsed(body), expected, received, redactor)
    context = RenderContext(redactor, expected.offered.__contains__, expected.names, expected.denied)
    try:
        output = responses.render(envelope, expected.parameters, context)
    except ToolError as error:
        error.tokens = usage_of(envelope).tokens  # the upstream charges for the page
        return NothingToShow(error)
    del envelope  # up to four times the bytes of the body
    if not inline:
        output = _masked(output, redactor)
    elif _may_hold_secret(output, redactor):
        raise MayHoldSecret
    return _storable(output)


def unread_failure(expected: Expected, received: Received) -> ToolError | None:
    """Return the error of a response whose body cannot be read, None for a success."""
    if received.http_status == HTTPStatus.OK:
        return None
    failures = RESPONSES[expected.operation].failures
    offers = expected.offered.__contains__
    return upstream_failure(received.http_status, None, received.retry_after, failures=failures, offers=offers)


def _envelope(value: object, expected: Expected, received: Received, redactor: Redactor) -> dict[str, Any]:
    """Return the success envelope, `{code, status, data, meta}`. Raises ToolError.

    With the HTTP status 200 the body may report a failure; it is then the same as with that HTTP status.
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
    offers = expected.offered.__contains__
    raise upstream_failure(status, value, received.retry_after, redactor, expected.names, failures, filters, offers)


def _may_hold_secret(output: ToolOutput, redactor: Redactor) -> bool:
    try:
        state = orjson.dumps(output.state).decode()
    except orjson.JSONEncodeError:  # a number beyond 64 bits
        return True
    return redactor.is_suspect(output.content) or redactor.is_suspect(state)


def _masked(output: ToolOutput, redactor: Redactor) -> ToolOutput:
    """Mask secrets, before the output is truncated: afterwards the redactor would not recognize half a key.

    All texts are searched as one, as nearly all are returned as they came.
    """
    items = output.items
    if redactor.is_suspect(output.content):
        items = tuple(one._replace(head=redactor.text(one.head), body=redactor.text(one.body)) for one in items)
    return ToolOutput(items, redactor.value(output.state), output.usage)


def _storable(output: ToolOutput) -> ToolOutput:
    """Replace what jsonb refuses."""
    content = output.content
    if storable_text(content) == content:
        return output
    return replace(output, items=tuple(Item(*map(storable_text, item)) for item in output.items))


_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPES = re.compile(rb"\\\\|(?P<pair>%b%b)|%b|%b" % (_HIGH, _LOW, _HIGH, _LOW))
"""An escaped backslash, a pair of surrogates, or one without the other."""


def _parsed(body: bytes | bytearray | memoryview) -> object:
    """Return the value, None if it is not JSON or nested too deeply.

    Senders cut strings within a pair of surrogates; the half becomes a replacement character.
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
    return escape[0] if escape["pair"] or escape[0] == rb"\\" else rb"\ufffd"


# The same in a worker process.

READ_RESPONSE = "read_response"
_ERROR_FIELDS = (
    "detail",
    "retryable",
    "retry_after",
    "max_retries",
    "http_status",
    "upstream_status",
    "timed_out",
    "tokens",
    "is_concurrency",
)
_ERRORS = {kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ToolError)}


def response_task(body: bytes | bytearray, expected: Expected, received: Received) -> Parts:
    """Return the argument of the task READ_RESPONSE, which contains the body itself."""
    value = {
        "expected": {
            "operation": expected.operation,
            "parameters": expected.parameters,
            "names": expected.names,
            "offered": sorted(expected.offered),
            "denied": expected.denied,
        },
        "received": {
            "http_status": received.http_status,
            "retry_after": received.retry_after,
            "secrets": sorted(received.secrets),
        },
    }
    return pack_parts(value, [body])


def run_response_task(task: Payload) -> bytes:
    """Run READ_RESPONSE: pack what `read_response` returns or raises."""
    of_request, of_response = cast("Any", task.value["expected"]), cast("Any", task.value["received"])
    expected = Expected(
        operation=of_request["operation"],
        parameters=of_request["parameters"],
        names=of_request["names"],
        offered=frozenset(of_request["offered"]),
        denied=tuple(of_request["denied"]),
    )
    received = Received(of_response["http_status"], of_response["retry_after"], frozenset(of_response["secrets"]))
    masked = 0

    def count(_where: str, number: int) -> None:
        nonlocal masked
        masked += number

    redact.on_masked = count  # the metric is the service's, so the number is returned
    try:
        result = read_response(task.blobs[0], expected, received)
    except ToolError as error:
        return pack({"raised": _as_json(error), "masked": masked})
    if isinstance(result, NothingToShow):
        return pack({"nothing_to_show": _as_json(result.error), "masked": masked})
    return pack_output(result, masked=masked)


def response_result(answer: Payload) -> UpstreamResult:
    """Return the result in an answer of READ_RESPONSE, or raise its ToolError. Raises ValueError if it has none."""
    masked = answer.value.get("masked")
    redact.on_masked("answer", masked if isinstance(masked, int) else 0)
    if "raised" in answer.value:
        raise _error_of(as_object(answer.value["raised"]))
    if "nothing_to_show" in answer.value:
        return NothingToShow(_error_of(as_object(answer.value["nothing_to_show"])))
    return unpack_output(answer)


def pack_output(output: ToolOutput, **more: object) -> bytes:
    """Return the bytes that `unpack_output` reads: items, state and usage."""
    texts = list(chain.from_iterable(output.items))
    usage = output.usage
    return pack_texts({"state": output.state, "usage": [usage.tokens, usage.requests], **more}, texts)


def unpack_output(packed: Payload) -> ToolOutput:
    """Return a packed output. Raises ValueError."""
    texts = packed.texts()
    width = len(Item._fields)
    items = tuple(Item(*texts[at : at + width]) for at in range(0, len(texts), width))
    match packed.value.get("usage"):
        case [int(tokens), int(requests)] if tokens >= 0 and requests >= 0:
            return ToolOutput(items, as_object(packed.value.get("state")), Usage(tokens, requests))
    raise ValueError("the packed output has no usage")


def _as_json(error: ToolError) -> dict[str, object]:
    return {"code": error.code, "message": error.message, **{name: getattr(error, name) for name in _ERROR_FIELDS}}


def _error_of(described: JsonObject) -> ToolError:
    error = _ERRORS[str(described["code"])](str(described["message"]))
    for name in _ERROR_FIELDS:
        setattr(error, name, described[name])
    return error
