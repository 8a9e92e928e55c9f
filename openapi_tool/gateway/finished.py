"""What is kept of a finished call: its row in the state, and the facts for its log line and the metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping

from openapi_tool.gateway.call import RunningCall
from openapi_tool.gateway.call_row import CANCELLED, CallRow
from openapi_tool.protocol.attempts import attempt_objects, requests_resent
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.telemetry.calls import CallFacts
from openapi_tool.tools.result import ResultFields
from openapi_tool.tools.wording import short

_IDS = ("project_id", "agent_id", "tool_call_id", "trace_id")  # fields of `CallIdentity`


def row_of(running: RunningCall, fields: ResultFields | None) -> CallRow:
    """Return the row of a finished call; `fields` is None if the call was cancelled."""
    call = running.call
    tool_output = (fields.tool_output if fields else None) or {}
    seconds = time.monotonic() - running.began
    return CallRow(
        at=time.time() - seconds,
        tool_call_id=running.id,
        project=call.identity.project_id,
        agent=call.identity.agent_id,
        session=tool_output.get("session"),
        tool=running.tool.definition.tool_name,
        status=fields.status if fields else CANCELLED,
        error=fields.error if fields else None,
        tokens=call.spent.tokens,
        requests=call.spent.requests,
        cached=bool(fields and fields.cached),
        truncated=bool(fields and fields.truncated),
        retries=requests_resent(call.attempts),
        latency_ms=round(seconds * 1000),
        attempts=attempt_objects(call.attempts),
    )


def facts_of(running: RunningCall, row: CallRow, fields: ResultFields | None) -> CallFacts:
    """Return the facts of a finished call; `fields` is None if the call was cancelled."""
    call = running.call
    definition = running.tool.definition
    return CallFacts(
        ids=ids_of(call.identity),
        trace_id=call.identity.trace_id or "",
        protocol="gateway",
        function_name=short(definition.tool_name),
        # A kernel's call comes from a stream, perhaps more than once, and has waited and been loaded when it begins. A
        # gateway's call has just come.
        delivery_attempt=1,
        age_s=0.0,
        began=running.began,
        loaded=running.began,
        tool=definition.built_in.name,
        status=row.status,
        error_code=fields.error_code if fields else CANCELLED,
        tokens=row.tokens,
        attempts=call.attempts,
        permit_waits=call.permit_waits,
        cached=row.cached,
        truncated=row.truncated,
    )


def ids_of(identity: CallIdentity) -> Mapping[str, str]:
    """Return the ids that each log line of a call has."""
    return {name: getattr(identity, name) or "" for name in _IDS}
