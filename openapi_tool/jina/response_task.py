"""The reading of a response as a task for a worker process: `read_response` there, with all that goes in and comes out.

The service calls `response_task` and sends its bytes to a worker process. There `run_response_task` reads the response.
The service passes the answer to `response_result`, which returns or raises what `read_response` did.
"""

from __future__ import annotations

from typing import Any, cast

from openapi_tool.jina.packed_output import pack_output, unpack_output
from openapi_tool.jina.response import Expected, NothingToShow, Received, UpstreamResult, read_response
from openapi_tool.protocol import errors
from openapi_tool.protocol.errors import ToolError
from openapi_tool.protocol.jsontext import JsonObject, as_object
from openapi_tool.protocol.payload import Parts, Payload, pack, pack_parts
from openapi_tool.telemetry import redact

READ_RESPONSE = "read_response"
"""Name of the task."""

_ERROR_TYPES = {
    kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ToolError)
}
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
"""Attributes of a ToolError that `read_response` may set, beside its message."""


def response_task(body: bytes | bytearray, expected: Expected, received: Received) -> Parts:
    """Return the argument of the task; it contains the body itself, not a copy."""
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
    """Run the task in a worker process; return what `read_response` returns or raises, packed."""
    expected = _expected(cast("Any", task.value["expected"]))
    received = _received(cast("Any", task.value["received"]))
    masked = 0

    def count(_where: str, number: int) -> None:
        nonlocal masked
        masked += number

    redact.on_masked = count  # the metric is the service's, so its process must count what is masked here
    try:
        result = read_response(task.blobs[0], expected, received)
    except ToolError as error:
        return pack({"raised": _as_json(error), "masked": masked})
    if isinstance(result, NothingToShow):
        return pack({"nothing_to_show": _as_json(result.error), "masked": masked})
    return pack_output(result, masked=masked)


def response_result(answer: Payload) -> UpstreamResult:
    """Return the result in the answer of a task, or raise its ToolError. Raises ValueError if it has none."""
    masked = answer.value.get("masked")
    redact.on_masked("answer", masked if isinstance(masked, int) else 0)
    if "raised" in answer.value:
        raise _error_of(as_object(answer.value["raised"]))
    if "nothing_to_show" in answer.value:
        return NothingToShow(_error_of(as_object(answer.value["nothing_to_show"])))
    return unpack_output(answer)


def _expected(value: Any) -> Expected:
    return Expected(
        operation=value["operation"],
        parameters=value["parameters"],
        names=value["names"],
        offered=frozenset(value["offered"]),
        denied=tuple(value["denied"]),
    )


def _received(value: Any) -> Received:
    return Received(value["http_status"], value["retry_after"], frozenset(value["secrets"]))


def _as_json(error: ToolError) -> dict[str, object]:
    return {"code": error.code, "message": error.message, **{name: getattr(error, name) for name in _ERROR_FIELDS}}


def _error_of(described: JsonObject) -> ToolError:
    error = _ERROR_TYPES[str(described["code"])](str(described["message"]))
    for name in _ERROR_FIELDS:
        setattr(error, name, described[name])
    return error
