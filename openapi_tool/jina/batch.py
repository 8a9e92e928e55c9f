"""Batch calls: several queries or pages in one call, requested in parallel, one result (tool-design section 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from openapi_tool.protocol.errors import BadRequest, ToolError
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.definition import ToolDefinition, unusable
from openapi_tool.tools.names import fold
from openapi_tool.tools.problems import Problem, argument_path, listed
from openapi_tool.tools.result import Item, ToolOutput, Usage, cost, one_line

_SHOWN_CHARS = 200
_DETAIL_CHARS = 500  # of an item in an error's detail, which is stored several times


def batch_items(definition: ToolDefinition, arguments: Arguments, max_items: int) -> list[str] | None:
    """Return the items of a batch call in the model's order; None for a tool without batches.

    Raises BadRequest, whose message lists every invalid item, or ToolMisconfigured if the definition sets the items.
    """
    plural = definition.built_in.items
    if plural is None:
        return None
    problems = item_problems(definition, arguments, max_items)
    item_errors = [problem for problem in problems if problem.path[0] == plural]
    if item_errors and plural in arguments.values.keys() - arguments.by_model:
        group = ("options", "args", "fixed" if plural in definition.fixed else "defaults")
        lines = [str(replace(problem, path=(*group, *problem.path))) for problem in item_errors]
        raise unusable(definition.tool_name, listed(lines))
    if problems:
        lines = listed([f"{argument_path(problem.path)}: {problem.message}" for problem in problems])
        raise BadRequest("Correct these and call again: " + "; ".join(lines), detail={"problems": lines})
    return list(cast("list[str]", arguments.values[plural]))


def item_problems(definition: ToolDefinition, arguments: Arguments, max_items: int) -> list[Problem]:
    """Return the problems of a batch call: wrong items, and arguments that only a single call takes."""
    plural = definition.built_in.items or ""
    items = arguments.values.get(plural)
    single = [name for name in sorted(arguments.by_model) if fold(name) in definition.operation.main_parameter_names]
    problems = [Problem((name,), f"is not an argument of this tool, which takes {plural}") for name in single]
    if not isinstance(items, list) or not 1 <= len(items) <= max_items:
        return [Problem((plural,), f"must be a list of 1 to {max_items} texts"), *problems]
    wrong = [place for place, item in enumerate(items) if not isinstance(item, str) or not item.strip()]
    return [*(Problem((plural, place), "must be a text that is not empty") for place in wrong), *problems]


def item_arguments(definition: ToolDefinition, arguments: Arguments, item: str) -> Arguments:
    """Return the arguments of the call for one item."""
    operation, plural = definition.operation, definition.built_in.items
    shared = {
        name: value
        for name, value in arguments.values.items()
        if name != plural and fold(name) not in operation.main_parameter_names
    }
    by_model = arguments.by_model - {plural} | ({operation.argument} if plural in arguments.by_model else set())
    return replace(arguments, values={**shared, operation.argument: item}, by_model=by_model)


def without_secrets(error: ToolError, redactor: Redactor) -> ToolError:
    """Mask secrets in the error of an item, since the model reads it within a successful result."""
    error.message = redactor.text(error.message)
    error.detail = redactor.value(error.detail)
    return error


def batch_output(
    items: Sequence[str], outcomes: Mapping[str, ToolOutput | ToolError], redactor: Redactor
) -> ToolOutput:
    """Combine all items into one output, secrets masked in their names. Raises ToolError if no item succeeded."""
    outputs = {item: outcome for item, outcome in outcomes.items() if isinstance(outcome, ToolOutput)}
    errors = {item: outcome for item, outcome in outcomes.items() if isinstance(outcome, ToolError)}
    if not outputs:
        raise _all_failed(items, errors)
    succeeded = sum(item in outputs for item in items)
    shown = (
        [Item(caption=f"{succeeded} of {len(items)} succeeded; the errors of the others are below.")] if errors else []
    )
    for item, outcome in outcomes.items():
        label = f"{_positions(items, item)} of {len(items)}"
        caption = f"## {label}: {redactor.head(one_line(item), _SHOWN_CHARS)}"
        first, *others = (item._replace(label=label) for item in _items(outcome))
        shown += [first._replace(caption=f"{caption}\n{first.caption}".rstrip()), *others]
    results = [_entry(redactor.text(item), outcomes[item]) for item in items]
    return ToolOutput(
        tuple(shown),
        {"succeeded": succeeded, "failed": len(items) - succeeded, "results": results},
        sum(map(cost, outcomes.values()), Usage()),
        cached=not errors and all(output.cached for output in outputs.values()),
        may_store=all(output.may_store for output in outputs.values()),
    )


def _positions(items: Sequence[str], item: str) -> str:
    """Return the positions of an item in the call, such as `1 and 3`: a repeated item is requested only once."""
    return " and ".join(str(number) for number, given in enumerate(items, start=1) if given == item)


def _items(outcome: ToolOutput | ToolError) -> tuple[Item, ...]:
    if isinstance(outcome, ToolOutput):
        return outcome.items
    return (Item(caption=f"Failed ({outcome.code}): {outcome.message}"),)


def _entry(item: str, outcome: ToolOutput | ToolError) -> dict[str, Any]:
    if isinstance(outcome, ToolOutput):
        return {"item": item, "status": "success", **outcome.state}
    return {"item": item, "status": outcome.status, "error": outcome.as_error()}


def _all_failed(items: Sequence[str], errors: Mapping[str, ToolError]) -> ToolError:
    """Return an error of the first one's type whose message lists each reason once."""
    first = next(iter(errors.values()))
    reasons: dict[str, list[str]] = {}
    for item, error in errors.items():
        reasons.setdefault(error.message, []).append(f"{_positions(items, item)} ({_short(item)})")
    message = (
        first.message
        if len(reasons) == 1
        else "Every item failed. " + " ".join(f"{', '.join(named)}: {reason}" for reason, named in reasons.items())
    )
    failure = type(first)(
        message,
        detail={"results": [{"item": item[:_DETAIL_CHARS], **error.as_error()} for item, error in errors.items()]},
        retryable=any(error.retryable for error in errors.values()),
        retry_after=max((error.retry_after for error in errors.values() if error.retry_after), default=None),
        http_status=first.http_status,
    )
    usage = sum(map(cost, errors.values()), Usage())
    failure.tokens, failure.requests = usage.tokens, usage.requests
    return failure


def _short(item: str) -> str:
    return one_line(item)[:_SHOWN_CHARS]
