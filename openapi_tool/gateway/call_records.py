"""What remains of a call of a gateway: its row for `inspect` and `usage`, and its facts for logs and metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping

from openapi_tool.engine.call import Call
from openapi_tool.gateway.running_call import RunningCall
from openapi_tool.gateway.stored import CANCELLED, CallRow
from openapi_tool.protocol.attempts import attempt_objects
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.telemetry.calls import CallFacts
from openapi_tool.tools.result import ResultFields
from openapi_tool.tools.wording import short


def row_of(running: RunningCall, call: Call, fields: ResultFields | None) -> CallRow:
    """Return the row of a call that ends now; without `fields` it was cancelled."""
    lasted_s = time.monotonic() - running.began
    tool_output = (fields.tool_output if fields else None) or {}
    return CallRow(
        at=time.time() - lasted_s,
        tool_call_id=running.id,
        project=running.caller.project_id,
        agent=running.caller.agent_id,
        session=tool_output.get("session"),
        tool=running.tool.definition.tool_name,
        status=fields.status if fields else CANCELLED,
        error=fields.error if fields else None,
        tokens=call.spent.tokens,
        requests=call.spent.requests,
        cached=bool(fields and fields.cached),
        truncated=bool(fields and fields.truncated),
        retries=sum(attempt.resends > 0 for attempt in call.attempts),
        latency_ms=round(lasted_s * 1000),
        attempts=attempt_objects(call.attempts),
    )


def facts_of(running: RunningCall, call: Call, row: CallRow, fields: ResultFields | None) -> CallFacts:
    """Return the facts of a call; without `fields` it was cancelled."""
    return CallFacts(
        ids=log_ids(call.identity),
        trace_id=running.trace_id,
        protocol="gateway",
        function_name=short(running.tool.definition.tool_name),
        delivery_attempt=1,
        age_s=0.0,
        began=running.began,
        loaded=running.began,
        tool=running.tool.definition.built_in.name,
        status=row.status,
        error_code=fields.error_code if fields else CANCELLED,
        tokens=row.tokens,
        attempts=call.attempts,
        permit_waits=call.permit_waits,
        cached=row.cached,
        truncated=row.truncated,
    )


def log_ids(identity: CallIdentity) -> Mapping[str, str]:
    """Return the ids in each log line of a call."""
    names = ("project_id", "agent_id", "tool_call_id", "trace_id")
    return {name: getattr(identity, name) or "" for name in names}
