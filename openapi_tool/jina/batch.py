"""Several questions or pages in one call: told apart, asked in parallel, answered together (tool-design section 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from openapi_tool.protocol.errors import BadRequest, ToolError
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.tools.arguments import Arguments, fold
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.problems import listed, short
from openapi_tool.tools.result import ToolOutput, Usage, cost, one_line

_SINGLE: Mapping[str, tuple[str, ...]] = {"search": ("query", "q"), "reader": ("url", "targeturl")}
_SHOWN_CHARS = 200


def batch_items(definition: ToolDefinition, arguments: Arguments, most: int) -> list[str] | None:
    """The items of a batch tool's call in the model's order; None for a tool of one.

    Raises BadRequest naming every wrong item.
    """
    plural = definition.tool.items
    if plural is None:
        return None
    items, problems = arguments.values.get(plural), []
    if not isinstance(items, list) or not 1 <= len(items) <= most:
        problems.append(f"{plural}: must be a list of 1 to {most} texts")
    else:
        problems += [
            f"{plural}[{place}]: must be a text that is not empty"
            for place, item in enumerate(items)
            if not isinstance(item, str) or not item.strip()
        ]
    problems += [
        f"{short(name)}: is not an argument of this tool, which takes {plural}"
        for name in sorted(arguments.by_model)
        if fold(name) in _SINGLE[definition.mode]
    ]
    if problems:
        problems = listed(problems)
        raise BadRequest("Correct these and call again: " + "; ".join(problems), detail={"problems": problems})
    return [item for item in items or () if isinstance(item, str)]


def item_arguments(definition: ToolDefinition, arguments: Arguments, item: str) -> Arguments:
    """The arguments of a call for one item of the batch."""
    single, plural = _SINGLE[definition.mode], definition.tool.items
    shared = {name: value for name, value in arguments.values.items() if name != plural and fold(name) not in single}
    by_model = (arguments.by_model - {plural}) | {single[0]}
    return replace(arguments, values={**shared, single[0]: item}, by_model=by_model)


def without_secrets(error: ToolError, redactor: Redactor) -> ToolError:
    """The failure of an item, which a model may read in a success, without anything secret."""
    error.message = redactor.text(error.message)
    error.detail = redactor.value(error.detail)
    return error


def batch_output(
    items: Sequence[str], outcomes: Mapping[str, ToolOutput | ToolError], redactor: Redactor
) -> ToolOutput:
    """One output of all items, which are named without secrets. Raises the items' ToolError where none succeeded."""
    good = {item: outcome for item, outcome in outcomes.items() if isinstance(outcome, ToolOutput)}
    errors = {item: outcome for item, outcome in outcomes.items() if isinstance(outcome, ToolError)}
    if not good:
        raise _all_failed(errors)
    blocks = [f"{len(good)} of {len(outcomes)} succeeded; what failed says why below."] if errors else []
    for number, (item, outcome) in enumerate(outcomes.items(), start=1):
        first, *others = _blocks(outcome)
        blocks += [f"## {number} of {len(outcomes)}: {redactor.head(one_line(item), _SHOWN_CHARS)}\n{first}", *others]
    results = [_entry(redactor.text(item), outcomes[item]) for item in items]
    failed = sum(item in errors for item in items)
    return ToolOutput(
        tuple(blocks),
        {"succeeded": len(items) - failed, "failed": failed, "results": results},
        sum(map(cost, outcomes.values()), Usage()),
        cached=not errors and all(output.cached for output in good.values()),
        whole=all(output.whole for output in good.values()),
        keep=all(output.keep for output in good.values()),
    )


def _blocks(outcome: ToolOutput | ToolError) -> tuple[str, ...]:
    return outcome.blocks if isinstance(outcome, ToolOutput) else (f"Failed ({outcome.code}): {outcome.message}",)


def _entry(item: str, outcome: ToolOutput | ToolError) -> dict[str, Any]:
    if isinstance(outcome, ToolOutput):
        return {"item": item, "status": "success", **outcome.state}
    return {"item": item, "status": outcome.status, "error": outcome.as_error()}


def _all_failed(errors: Mapping[str, ToolError]) -> ToolError:
    """An error of the kind of the first, whose message says each reason once."""
    first = next(iter(errors.values()))
    reasons: dict[str, list[str]] = {}
    for item, error in errors.items():
        reasons.setdefault(error.message, []).append(_short(item))
    message = (
        first.message
        if len(reasons) == 1
        else "Every item failed. " + " ".join(f"{', '.join(named)}: {reason}" for reason, named in reasons.items())
    )
    failure = type(first)(
        message,
        detail={"results": [{"item": item, **error.as_error()} for item, error in errors.items()]},
        retryable=any(error.retryable for error in errors.values()),
        retry_after=max((error.retry_after for error in errors.values() if error.retry_after), default=None),
        http_status=first.http_status,
    )
    usage = sum(map(cost, errors.values()), Usage())
    failure.tokens, failure.requests = usage.tokens, usage.requests
    return failure


def _short(item: str) -> str:
    return one_line(item)[:_SHOWN_CHARS]
