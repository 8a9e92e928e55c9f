"""One item of a call, prepared: its parameters are resolved and checked, its request is built, its deadline is set.

A call of a tool without batches has one item, a batch has several. `jina/backend.py` prepares each item here, asks the
cache for its response, and else has `jina/attempts.py` send its request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from openapi_tool.engine.call import Call
from openapi_tool.jina.byte_semaphore import ResponseMemory
from openapi_tool.jina.endpoints import Endpoint, endpoint_of
from openapi_tool.jina.request import UpstreamRequest, build_request
from openapi_tool.jina.resolved_parameters import (
    ResolvedParameters,
    changed_main_argument,
    resolve_parameters,
    under_url_policy,
    with_token_limit,
)
from openapi_tool.jina.url_policy import UrlPolicy
from openapi_tool.quotas.permits import PermitRequest
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.wording import short

log = logging.getLogger(__name__)

_ADJUSTABLE = frozenset({"count", "max_tokens", "target_selector"})
"""Arguments that the model may have given, and of which advice may still suggest another value."""


@dataclass(slots=True, eq=False)
class PreparedItem:
    """One item of a call, with all that an attempt to send its request needs.

    What the call brought:

    - `definition`, `arguments`: those of the call, but with this item in place of the list of a batch.
    - `call`: the call that the item belongs to.
    - `memory`: `call.memory` with its real type.

    What was made of it:

    - `endpoint`: how a request of the definition's operation is built.
    - `resolved`: the upstream's parameters, checked.
    - `request`: the request, before `timed_request` adds the remaining time.
    - `deadline`: that of the item's requests, perhaps earlier than the call's.
    """

    definition: ToolDefinition
    arguments: Arguments
    call: Call
    memory: ResponseMemory
    endpoint: Endpoint
    resolved: ResolvedParameters
    request: UpstreamRequest
    deadline: Deadline

    @property
    def may_share(self) -> bool:
        """Whether the response may be stored for later calls, or taken from an earlier call."""
        parameters = self.resolved.parameters
        return not (parameters.get("noCache") or parameters.get("doNotTrack"))

    @property
    def min_tokens(self) -> int:
        """Minimum charge for a successful request."""
        return self.endpoint.min_tokens(self.resolved.parameters)

    @property
    def min_retry_s(self) -> float:
        """Seconds without which a retry would be useless (`Timeouts.min_retry_s`)."""
        return self.endpoint.timeouts.min_retry_s(self.resolved.parameters)

    def permit_request(self) -> PermitRequest:
        """Return what is asked for a permit. All attempts share it, since it records the keys that were refused."""
        return PermitRequest(
            variable=self.arguments.key_variable,
            endpoint=self.endpoint.operation.name,
            agent=self.call.quota_agent,
            deadline=self.deadline,
            key=self.arguments.api_key,
            slot=self.call.slot,
            call=self.call.number,
        )

    def timed_request(self) -> UpstreamRequest:
        """Return the request with a `timeout` that makes the upstream answer within the time that is left now."""
        resolved = self.resolved
        definition = self.definition
        with_timeout = self.endpoint.timeouts.within(
            resolved.parameters,
            self.deadline.remaining(),
            has_own_limit=resolved.timeout_s is not None or definition.timeout_s is not None,
        )
        if with_timeout is resolved.parameters:  # this request needs no `timeout`
            return self.request
        return build_request(definition, replace(resolved, parameters=with_timeout), self.request.expected.offered)


def prepare_item(
    definition: ToolDefinition,
    arguments: Arguments,
    deadline: Deadline,
    call: Call,
    url_policy: UrlPolicy,
    default_max_tokens: int,
) -> PreparedItem:
    """Resolve and check the arguments of an item, build its request, and shorten its deadline. Raises ToolError.

    `default_max_tokens` limits the tokens of each page if neither definition nor model does; 0 sets no limit.
    """
    endpoint = endpoint_of(definition)
    resolved = _sent_parameters(definition, arguments, call, url_policy)
    if endpoint.limits_tokens:
        resolved = with_token_limit(resolved, default_max_tokens)
    return PreparedItem(
        definition=definition,
        arguments=arguments,
        call=call,
        memory=cast("ResponseMemory", call.memory),  # `JinaBackend.call_memory` made it
        endpoint=endpoint,
        resolved=resolved,
        request=build_request(definition, resolved, offered_arguments(definition, arguments)),
        deadline=_item_deadline(definition, endpoint, resolved, deadline),
    )


def offered_arguments(definition: ToolDefinition, arguments: Arguments) -> frozenset[str]:
    """Return the arguments that advice may name: those that the model may give, and has not given or may change."""
    given = {name for name, value in arguments.values.items() if value}
    used_up = given - _ADJUSTABLE
    return definition.model_arguments - used_up


def _sent_parameters(
    definition: ToolDefinition, arguments: Arguments, call: Call, url_policy: UrlPolicy
) -> ResolvedParameters:
    """Return the parameters under the URL policy, and record how they differ from what was given.

    - The log gets options of the definition that the upstream does not take, once for all items of a call.
    - `call.repaired` gets the argument with an address that the policy repaired.
    """
    given = resolve_parameters(definition, arguments)
    if given.left_out and not call.left_out_logged:
        call.left_out_logged = True
        _log_left_out(definition, given.left_out)
    sent = under_url_policy(given, definition, url_policy)
    call.repaired |= changed_main_argument(definition, given, sent)
    return sent


def _item_deadline(
    definition: ToolDefinition, endpoint: Endpoint, resolved: ResolvedParameters, deadline: Deadline
) -> Deadline:
    """Return the deadline of the call, or an earlier one by definition, arguments or the upstream's `timeout`."""
    for limit_s in (definition.timeout_s, resolved.timeout_s, endpoint.timeouts.longest_s(resolved.parameters)):
        deadline = deadline.shortened(limit_s)
    return deadline


def _log_left_out(definition: ToolDefinition, names: Sequence[str]) -> None:
    log.warning(
        "a definition has parameters that the upstream does not take; they are not sent: %s",
        "; ".join(names),
        extra={"action": "parameter.ignored", "tool_name": short(definition.tool_name)},
    )
