"""Commands and their settlement, and the report that announces a result (protocol sections 2 and 6)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, cast

from openapi_tool.protocol import frozen
from openapi_tool.protocol import identity as header
from openapi_tool.protocol.errors import BadRequest, ReportRefused
from openapi_tool.protocol.identity import (
    MAX_ID_BYTES,
    CallIdentity,
    ClaimedIdentity,
    CommandSubject,
    SpanContext,
    TraceLink,
    is_too_long,
    new_root,
    parse_traceparent,
)
from openapi_tool.protocol.jsontext import JsonObject, JsonValue, loads, storable_text
from openapi_tool.protocol.records import CallRecords, WaitingTurnRecord

AfterExecution = Literal["suspend", "terminate"]
AFTER_EXECUTION = ("suspend", "terminate")
MAX_BODY_BYTES = 64 * 1024
HEAD_BYTES = 8 * 1024  # length to which a larger body is truncated
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADER_LINES = 256
HEARTBEAT_NAMES = frozenset({"skills.task_watch", "skills.job_watch"})
"""Functions whose results a worker treats as heartbeats: no result may have these names (protocol section 3)."""


@dataclass(frozen=True, slots=True)
class BodyDigest:
    """Size of a body in bytes, and its SHA-256 in hex."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> BodyDigest:
        """Digest a body."""
        return cls(len(data), hashlib.sha256(data).hexdigest())


@frozen
class Delivery:
    """Delivery of a command by the bus.

    `published_at` is the stream's timestamp (UTC), the same for every redelivery; `attempt` counts deliveries from 1.
    An `exhausted` command, of which too many runs were lost, gets an error result without another run. Of a body larger
    than MAX_BODY_BYTES, `data` is the first HEAD_BYTES, and `truncated_body` digests the whole.
    """

    subject: str
    headers: Mapping[str, str]
    data: bytes
    published_at: datetime
    attempt: int
    stream_sequence: int
    exhausted: bool = False
    stream: str = ""
    truncated_body: BodyDigest | None = None
    headers_complete: bool = True


@frozen
class Command:
    """Decoded command; one with a `violation` is not run, and has that error as result."""

    identity: ClaimedIdentity
    suffix: str
    card_id: str | None
    tool_name: str | None
    after_execution: AfterExecution | None
    violation: BadRequest | None

    @property
    def function_name(self) -> str:
        """Function name of the result: the tool's name, else the subject's suffix."""
        name = self.tool_name or self.suffix[:MAX_ID_BYTES]
        return f"tool.{name}" if name in HEARTBEAT_NAMES else name


@frozen
class Acknowledge:
    """Acknowledge the command: its result is committed."""


@dataclass(frozen=True, slots=True)
class Requeue:
    """Requeue the command for `delay_s` seconds, after an outage or a `defect` of this service.

    Only a defect, which may be permanent, counts as a lost run.
    """

    delay_s: float
    defect: bool = False
    reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class StoreDeadLetter:
    """Store a dead letter; then terminate the command's message if `terminate`, else acknowledge it."""

    reason: str
    message: str
    terminate: bool


Settlement = Acknowledge | Requeue | StoreDeadLetter


@frozen
class TurnCondition:
    """Condition on which a result may be written (ADR 8): the worker has read the other results of the step.

    Besides, the step's other commands must be at least `quiet_s` seconds old; if None, there must be none.
    """

    quiet_s: float | None


INLINE_DATA = frozenset({"args", "arguments", "result"})  # body fields that are forbidden: data belongs in cards


@frozen
class CommandBody:
    """Fields, empty if the body is no JSON object, and problems, to which dialects add."""

    fields: JsonObject
    problems: list[str] = field(default_factory=list)


def read_body(delivery: Delivery) -> CommandBody:
    """Parse a body and check the fields that all versions have. Raises nothing."""
    if delivery.truncated_body is not None:
        body = CommandBody({}, [f"the body is larger than {MAX_BODY_BYTES:,} bytes"])
    else:
        body = _parsed(delivery.data)
    if not delivery.headers_complete:
        body.problems.insert(0, f"the headers have more than {MAX_HEADER_LINES} lines or {MAX_HEADER_BYTES:,} bytes")
    return body


def _parsed(data: bytes) -> CommandBody:
    try:
        body = loads(data)
    except ValueError:
        return CommandBody({}, ["the body is not JSON"])
    if not isinstance(body, dict):
        return CommandBody({}, ["the body is not a JSON object"])
    return CommandBody(body, _problems(body))


def command_of(subject: CommandSubject, identity: ClaimedIdentity, body: CommandBody) -> Command:
    """Return the decoded command; problems of identity and body make it a violation."""
    after_execution, problems = body.fields.get("after_execution"), [*identity.problems, *body.problems]
    violation = None
    if problems:
        listed = "; ".join(problems)
        violation = BadRequest(
            f"The tool call's command breaks the protocol; the calling system must correct it: {listed}.",
            detail={"problems": problems},
        )
    return Command(
        identity=identity,
        suffix=subject.suffix,
        card_id=valid_name(body.fields.get("tool_call_card_id")),
        tool_name=valid_name(body.fields.get("tool_name")),
        after_execution=cast("AfterExecution", after_execution) if after_execution in AFTER_EXECUTION else None,
        violation=violation,
    )


def valid_name(value: object) -> str | None:
    """Return a name or id without surrounding white space; None if it is empty, too long or no text."""
    text = storable_text(value).strip() if isinstance(value, str) else ""
    return text if text and not is_too_long(text) else None


def _problems(body: JsonObject) -> list[str]:
    problems = [
        f"body field {name} must be a non-empty string of at most {MAX_ID_BYTES} bytes"
        for name in ("tool_call_card_id", "tool_name")
        if valid_name(body.get(name)) is None
    ]
    if valid_name(body.get("tool_name")) in HEARTBEAT_NAMES:
        problems.append("body field tool_name is reserved: workers treat results of this name as heartbeats")
    if body.get("after_execution") not in AFTER_EXECUTION:
        problems.append("body field after_execution must be 'suspend' or 'terminate'")
    inline = sorted(INLINE_DATA & body.keys())
    if inline:
        problems.append(f"inline data is forbidden in the body ({', '.join(inline)}): it belongs in the tool.call card")
    return problems


MAX_DEPTH = 20
"""Recursion depth, the length of the chain of agents that call each other, from which the kernel refuses a report."""

STATUSES = frozenset({"success", "failed", "canceled", "timeout", "partial"})
"""Statuses of a result that the kernel's workers accept."""


@frozen
class Acceptance:
    """Data of a report that the kernel will accept, checked before the call runs.

    `worker_target` is the subject token of the agent's worker, None if unknown; `depth` the recursion depth of the
    waiting turn. In v1r3 `request_edge_id` is a new id for a missing edge, and the turn is derived from the command.
    """

    identity: CallIdentity
    worker_target: str | None
    waiting_turn: WaitingTurnRecord
    request_edge_id: str
    depth: int


@frozen
class Wakeup:
    """Doorbell."""

    subject: str
    headers: Mapping[str, str]
    body: bytes


@frozen
class Report:
    """One tool_result row with its response edge, ready to be written; `actor_id` is the sender, this service.

    `context_headers` are those of the waiting turn's row with the report's own trace; by them the worker matches the
    result to the turn. `wakeup` is published after the commit; None if no worker can be addressed.
    """

    acceptance: Acceptance
    actor_id: str
    inbox_id: str
    edge_id: str
    trace_id: str
    parent_step_id: str | None
    context_headers: Mapping[str, str]
    payload: Mapping[str, JsonValue]
    edge_metadata: Mapping[str, JsonValue]
    wakeup: Wakeup | None

    @property
    def project_id(self) -> str:
        """Project of the call."""
        return self.acceptance.identity.project_id


def refuse_reported(records: CallRecords) -> None:
    """Raise ReportRefused if a row reports the call but its card is gone: no second row can be written."""
    if records.earlier is None and records.reported_inbox_id is not None:
        raise ReportRefused("already_reported", f"row {records.reported_inbox_id!r} reports the call without a card")


def trace_headers(span: SpanContext, tracestate: str | None) -> dict[str, str]:
    """Return the trace headers of a span."""
    headers = {header.TRACEPARENT: span.traceparent()}
    return headers | {header.TRACESTATE: tracestate} if tracestate else headers


def trace_link(identity: CallIdentity, waiting_turn: WaitingTurnRecord) -> TraceLink:
    """Return parent and link of the report's span.

    The worker refuses a row of another trace than the waiting turn's, so an inbound span of another becomes a link. If
    neither has a trace, the report gets the trace id of the tool.call card.
    """
    headers, inbound = waiting_turn.context_headers, identity.trace
    try:
        of_turn = parse_traceparent(str(headers.get(header.TRACEPARENT, "")))
    except ValueError:
        of_turn = None
    if inbound is not None and (of_turn is None or inbound.trace_id == of_turn.trace_id):
        return TraceLink(parent=inbound, tracestate=identity.tracestate, linked=None)
    tracestate = headers.get(header.TRACESTATE)
    return TraceLink(
        parent=of_turn or new_root(identity.trace_id),
        tracestate=tracestate if isinstance(tracestate, str) and tracestate else None,
        linked=inbound,
    )


def reportable_content(content: Mapping[str, object]) -> bool:
    """Return whether the kernel's workers accept a stored tool.result."""
    return content.get("status") in STATUSES and content.get("after_execution") in AFTER_EXECUTION
