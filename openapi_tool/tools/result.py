"""Fields of a result card, and the text that a model is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openapi_tool.protocol.attempts import UpstreamAttempt, attempt_objects
from openapi_tool.protocol.cards import StoredText
from openapi_tool.protocol.errors import Status, ToolError
from openapi_tool.protocol.jsontext import storable, storable_text
from openapi_tool.protocol.result_objects import ArtifactObject, BudgetObject, ErrorObject, ToolOutputObject
from openapi_tool.tools.definition import ResultFormat
from openapi_tool.tools.output import ToolOutput, cost


@dataclass(frozen=True, slots=True)
class RenderedResult:
    """Text that the model is shown of an output.

    `artifact_ref` refers to the whole stored text, `next_cursor` to the part that follows; None without one.
    """

    content: str
    truncated: bool = False
    artifact_ref: ArtifactObject | None = None
    next_cursor: str | None = None


@dataclass(frozen=True, slots=True)
class ShownOutput:
    """Output of a tool, and what the model is shown of it.

    `full_text` is the whole text if that is truncated and the text may be stored, else None.
    """

    output: ToolOutput
    rendered: RenderedResult
    full_text: StoredText | None = None


@dataclass(frozen=True, slots=True)
class ResultFields:
    """Fields of a tool.result card that depend on the outcome, storable in jsonb.

    `tool`, `cached` and `truncated` are for telemetry.
    """

    status: Status
    result: object
    error: ErrorObject | None
    tool_output: ToolOutputObject | None
    tool: str = ""
    cached: bool = False
    truncated: bool = False

    @property
    def error_code(self) -> str | None:
        """Code of the error, None for a success."""
        return str(self.error["code"]) if self.error else None


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of a call as `ToolRunner.run` returns it; its door stores both fields.

    `full_text` is the whole text if the model is shown a part of it that it can continue.
    """

    fields: ResultFields
    full_text: StoredText | None = None


def success(
    output: ToolOutput,
    rendered: RenderedResult,
    result_format: ResultFormat,
    latency_ms: int,
    attempts: Sequence[UpstreamAttempt] = (),
    tool: str = "",
    session: str | None = None,
    budget: BudgetObject | None = None,
    repaired: Sequence[str] = (),
) -> ResultFields:
    """Return the fields of a success: the text as result and the rest as `tool_output`.

    `repaired` names the arguments that were repaired. With `result_format` `object` the result is an object with both;
    then `tool_output` has only the `_extras`.
    """
    tool_output = storable(
        ToolOutputObject(
            state=output.state,
            usage=output.usage.as_dict(),
            truncated=rendered.truncated,
            artifact_ref=rendered.artifact_ref,
            next_cursor=rendered.next_cursor,
            cached=output.cached,
            latency_ms=latency_ms,
        )
    )
    if repaired:
        tool_output["repaired"] = storable(list(repaired))
    result: object = storable_text(rendered.content)
    extras = _extras(attempts, session, budget)
    if result_format == "object":
        result, tool_output = {"content": result, **tool_output}, extras
    else:
        tool_output.update(extras)
    return ResultFields("success", result, None, tool_output, tool, output.cached, rendered.truncated)


def failure(
    error: ToolError,
    latency_ms: int,
    attempts: Sequence[UpstreamAttempt] = (),
    tool: str = "",
    session: str | None = None,
    budget: BudgetObject | None = None,
) -> ResultFields:
    """Return the fields of a failure, whose message is all that the model sees."""
    described = storable(error.as_error())
    result: dict[str, object] = {"error_code": error.code, "error_message": described["message"], "error": described}
    if error.detail is not None:
        result["error_detail"] = storable(error.detail)
    tool_output = ToolOutputObject(
        usage=cost(error).as_dict(), latency_ms=latency_ms, **_extras(attempts, session, budget)
    )
    return ResultFields(error.status, result, described, tool_output, tool)


def _extras(attempts: Sequence[UpstreamAttempt], session: str | None, budget: BudgetObject | None) -> ToolOutputObject:
    """Return the members of `tool_output` that no model is shown."""
    extras = ToolOutputObject(retries=sum(attempt.resends > 0 for attempt in attempts))
    if session is not None:
        extras["session"] = session
    if attempts:
        extras["attempts"] = attempt_objects(attempts)
    if budget is not None:
        extras["budget"] = budget
    return extras
