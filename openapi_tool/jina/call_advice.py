"""Advice for the model after a call that was expensive, or that got no answer in time.

`cost_advice.py` has what may help with each operation. Here that becomes a sentence about the call.
"""

from __future__ import annotations

from collections.abc import Sequence

from openapi_tool.jina.batches import item_arguments
from openapi_tool.jina.endpoints import endpoint_of
from openapi_tool.jina.prepared_item import offered_arguments
from openapi_tool.jina.resolved_parameters import resolve_parameters
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.definition import ToolDefinition

_TIMEOUT = "timeout"


def cost_advice(definition: ToolDefinition, arguments: Arguments, batch: Sequence[str], tokens: int) -> str:
    """Return advice on how to lower the cost of a call, which was `tokens`; empty if there is none.

    `batch` are the different items of a batch, empty for a call of one item.
    """
    # The items of a batch differ in nothing that its cost depends on.
    of_one_item = item_arguments(definition, arguments, batch[0]) if batch else arguments
    parameters = resolve_parameters(definition, of_one_item).parameters
    offers = offered_arguments(definition, arguments).__contains__
    ways = endpoint_of(definition).cheaper(parameters, tokens, max(1, len(batch)), offers)
    return f" Cheaper: {' or '.join(ways)}." if ways else ""


def time_advice(definition: ToolDefinition, arguments: Arguments, *, is_limited_by_model: bool) -> str:
    """Return advice on how to get an answer in time: ask for less, or give more time; empty if there is none.

    `is_limited_by_model` is what `model_limits_time` returned when the call began.
    """
    resolved = resolve_parameters(definition, arguments)
    offers = offered_arguments(definition, arguments).__contains__
    ways = endpoint_of(definition).quicker(resolved.parameters, resolved.names, offers)
    less = f" Ask for less: {', '.join(ways)}." if ways else ""
    more_time = f" A longer {_TIMEOUT} may help." if is_limited_by_model else ""
    return less + more_time


def model_limits_time(definition: ToolDefinition, arguments: Arguments, deadline: Deadline) -> bool:
    """Return whether the call would have more time without the model's own `timeout`."""
    if _TIMEOUT not in arguments.by_model:
        return False
    given_s = arguments.values.get(_TIMEOUT)
    return isinstance(given_s, int | float) and given_s < deadline.shortened(definition.timeout_s).remaining()
