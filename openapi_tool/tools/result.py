"""Result of a call on its way from a tool's output to the stored card.

A `ToolOutput` becomes a `ShownOutput`: its text is cut if it is too long (`engine/pagination.py`). That becomes
`ResultFields`, as does an error. The call's door stores these in the tool.result card, or what it has in place of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openapi_tool.protocol.attempts import UpstreamAttempt, attempt_objects, requests_resent
from openapi_tool.protocol.cards import StoredText
from openapi_tool.protocol.errors import Status, ToolError
from openapi_tool.protocol.jsontext import storable, storable_text
from openapi_tool.protocol.result_objects import ArtifactObject, BudgetObject, ErrorObject, ToolOutputObject
from openapi_tool.tools.definition import ResultFormat
from openapi_tool.tools.output import ToolOutput, cost


@dataclass(frozen=True, slots=True)
class RenderedResult:
    """Text that the model is shown of an output.

    `artifact_ref` refers to the whole stored text, None without one. `next_cursor` gets the part that follows, None
    after the last.
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

    `tool` (name of the built-in tool), `cached` and `truncated` are for telemetry.
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

    `full_text` is the whole text if the model is shown a part of it and the text may be stored, else None.
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
    """Return the fields of a success.

    With `result_format` `text` the result is the text, and all else is in `tool_output`. With `object` the result is an
    object with the text and all that the model may read, and `tool_output` has only the rest. `repaired` names the
    arguments that were repaired.
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
    unshown = _unshown(attempts, session, budget)
    if result_format == "object":
        result = {"content": result, **tool_output}
        tool_output = unshown
    else:
        tool_output.update(unshown)
    return ResultFields(
        status="success",
        result=result,
        error=None,
        tool_output=tool_output,
        tool=tool,
        cached=output.cached,
        truncated=rendered.truncated,
    )


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
        usage=cost(error).as_dict(), latency_ms=latency_ms, **_unshown(attempts, session, budget)
    )
    return ResultFields(error.status, result, described, tool_output, tool)


def _unshown(attempts: Sequence[UpstreamAttempt], session: str | None, budget: BudgetObject | None) -> ToolOutputObject:
    """Return the members of `tool_output` that no model is shown."""
    unshown = ToolOutputObject(retries=requests_resent(attempts))
    if session is not None:
        unshown["session"] = session
    if attempts:
        unshown["attempts"] = attempt_objects(attempts)
    if budget is not None:
        unshown["budget"] = budget
    return unshown
