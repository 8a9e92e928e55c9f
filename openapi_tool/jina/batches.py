"""Batches: one call with a list of queries or addresses, its *items*. Splits the call, and joins the outputs.

A repeated item is requested once, so `outcomes` below has each different item once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from openapi_tool.jina.remarks import NOT_THE_PAGE
from openapi_tool.protocol.errors import ToolError
from openapi_tool.tools.argument_names import fold
from openapi_tool.tools.arguments import Arguments, correction_error
from openapi_tool.tools.definition import ToolDefinition, unusable
from openapi_tool.tools.output import Item, ToolOutput, Usage, cost
from openapi_tool.tools.problems import Problem, argument_path, listed
from openapi_tool.tools.wording import one_line

_SHOWN_CHARS = 200  # of an item in texts for the model
_DETAIL_CHARS = 500  # of an item in an error's detail, which is stored several times


def batch_items(definition: ToolDefinition, arguments: Arguments, max_items: int) -> list[str] | None:
    """Return the items of a batch call; None for a tool without batches.

    Raises BadRequest for invalid items, or ToolMisconfigured if the definition sets them. The error names all of them.
    """
    plural = definition.built_in.list_argument
    if plural is None:
        return None
    problems = item_problems(definition, arguments, max_items)
    item_errors = [problem for problem in problems if problem.path[0] == plural]
    is_set_by_definition = plural in arguments.values and plural not in arguments.by_model
    if item_errors and is_set_by_definition:
        group = ("options", "args", "fixed" if plural in definition.fixed else "defaults")
        lines = [str(replace(problem, path=(*group, *problem.path))) for problem in item_errors]
        raise unusable(definition.tool_name, listed(lines))
    if problems:
        raise correction_error(listed([f"{argument_path(problem.path)}: {problem.message}" for problem in problems]))
    return list(cast("list[str]", arguments.values[plural]))


def item_problems(definition: ToolDefinition, arguments: Arguments, max_items: int) -> list[Problem]:
    """Return the problems of the items, and of a query or address that is given beside the list."""
    plural = definition.built_in.list_argument or ""
    items = arguments.values.get(plural)
    single = [name for name in sorted(arguments.by_model) if fold(name) in definition.operation.main_parameter_names]
    problems = [Problem((name,), f"is not an argument of this tool, which takes {plural}") for name in single]
    if not isinstance(items, list) or not 1 <= len(items) <= max_items:
        return [Problem((plural,), f"must be a list of 1 to {max_items} texts"), *problems]
    wrong = [place for place, item in enumerate(items) if not isinstance(item, str) or not item.strip()]
    return [*(Problem((plural, place), "must be a text that is not empty") for place in wrong), *problems]


def item_arguments(definition: ToolDefinition, arguments: Arguments, item: str) -> Arguments:
    """Return the arguments for one item: the item in place of the list, and all other arguments."""
    operation = definition.operation
    plural = definition.built_in.list_argument
    shared = {
        name: value
        for name, value in arguments.values.items()
        if name != plural and fold(name) not in operation.main_parameter_names
    }
    by_model = arguments.by_model - {plural}
    if plural in arguments.by_model:
        by_model |= {operation.argument}
    return replace(arguments, values={**shared, operation.argument: item}, by_model=by_model)


def batch_output(items: Sequence[str], outcomes: Mapping[str, ToolOutput | ToolError]) -> ToolOutput:
    """Join the outcomes of all items to one output. Raises ToolError if no item succeeded."""
    outputs = {item: outcome for item, outcome in outcomes.items() if isinstance(outcome, ToolOutput)}
    errors = {item: outcome for item, outcome in outcomes.items() if isinstance(outcome, ToolError)}
    if not outputs:
        raise _all_failed(items, errors)
    succeeded = sum(item in outputs for item in items)
    without_page = sum(item in outputs and _is_not_the_page(outputs[item]) for item in items)
    head = _head(succeeded, without_page, len(items))
    shown = [Item(caption=head)] if head else []
    for item, outcome in outcomes.items():
        shown += _labelled(items, item, outcome)
    state: dict[str, object] = {"succeeded": succeeded, "failed": len(items) - succeeded}
    if without_page:
        state["without_page"] = without_page
    state["results"] = [{"item": item, **_state(outcomes[item])} for item in items]
    return ToolOutput(
        tuple(shown),
        state,
        sum(map(cost, outcomes.values()), Usage()),
        cached=not errors and all(output.cached for output in outputs.values()),
        may_store=all(output.may_store for output in outputs.values()),
    )


def _labelled(items: Sequence[str], item: str, outcome: ToolOutput | ToolError) -> list[Item]:
    """Return what is shown of an item, below a heading such as `## 1 and 3 of 4: ITEM`."""
    label = f"{_positions(items, item)} of {len(items)}"
    heading = f"## {label}: {one_line(item)[:_SHOWN_CHARS]}"
    if isinstance(outcome, ToolOutput):
        parts = outcome.items
    else:
        parts = (Item(caption=f"Failed ({outcome.code}): {outcome.message}"),)
    first, *others = (part._replace(label=label) for part in parts)
    return [first._replace(caption=f"{heading}\n{first.caption}".rstrip()), *others]


def _is_not_the_page(output: ToolOutput) -> bool:
    """Return whether a warning says that the text is not the page that was asked for."""
    warnings = output.state.get("warnings")
    return isinstance(warnings, list) and not NOT_THE_PAGE.isdisjoint(warnings)


def _head(succeeded: int, without_page: int, count: int) -> str:
    """Return what a reader of a batch must know first: how many of `count` items are what was asked for.

    Of those that `succeeded`, `without_page` have a text that is not the page. The head is empty if all is well.
    """
    failed = count - succeeded
    if not without_page:
        return f"{succeeded} of {count} succeeded; the errors of the others are below." if failed else ""
    text = f"{succeeded - without_page} of {count} succeeded. Without the page: {without_page}, see the warning below."
    return f"{text} Failed: {failed}, see the error below." if failed else text


def _positions(items: Sequence[str], item: str) -> str:
    """Return the positions of an item in the list, such as `1 and 3` for one that is repeated."""
    return " and ".join(str(number) for number, given in enumerate(items, start=1) if given == item)


def _state(outcome: ToolOutput | ToolError) -> dict[str, Any]:
    if isinstance(outcome, ToolOutput):
        return {"status": "success", **outcome.state}
    return {"status": outcome.status, "error": outcome.as_error()}


def _all_failed(items: Sequence[str], errors: Mapping[str, ToolError]) -> ToolError:
    """Return the error of a batch without success. It has the type of the first error."""
    first = next(iter(errors.values()))
    failure = type(first)(
        _all_reasons(items, errors),
        detail={"results": [{"item": item[:_DETAIL_CHARS], **error.as_error()} for item, error in errors.items()]},
        retryable=any(error.retryable for error in errors.values()),
        retry_after=max(filter(None, (error.retry_after for error in errors.values())), default=None),
        http_status=first.http_status,
    )
    usage = sum(map(cost, errors.values()), Usage())
    failure.tokens, failure.requests = usage.tokens, usage.requests
    return failure


def _all_reasons(items: Sequence[str], errors: Mapping[str, ToolError]) -> str:
    """Return each reason once, such as `Every item failed. 1 (ITEM), 3 (ITEM): REASON 2 (ITEM): REASON`."""
    named: dict[str, list[str]] = {}
    for item, error in errors.items():
        name = f"{_positions(items, item)} ({one_line(item)[:_SHOWN_CHARS]})"
        named.setdefault(error.message, []).append(name)
    if len(named) == 1:
        return next(iter(named))
    return "Every item failed. " + " ".join(f"{', '.join(names)}: {reason}" for reason, names in named.items())
