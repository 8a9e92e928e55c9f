"""The command message: subject, headers and body, decoded without losing who asked (section 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, cast

from openapi_tool.protocol.errors import BadRequest
from openapi_tool.protocol.identity import ClaimedIdentity, read_identity
from openapi_tool.protocol.jsontext import loads, storable_text
from openapi_tool.protocol.subject import parse_command_subject

AfterExecution = Literal["suspend", "terminate"]
AFTER_EXECUTION = ("suspend", "terminate")
MAX_BODY_BYTES = 64 * 1024
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADER_LINES = 256
HEARTBEAT_NAMES = frozenset({"skills.task_watch", "skills.job_watch"})
"""Function names that a worker takes for heartbeats; no result may carry one (section 3)."""

INLINE_DATA = frozenset({"args", "arguments", "result"})
CONTROL_FIELDS = frozenset(
    {
        "project_id",
        "channel_id",
        "channel",
        "agent_id",
        "agent_turn_id",
        "turn_epoch",
        "step_id",
        "tool_call_id",
        "trace_id",
        "traceparent",
        "tracestate",
        "parent_agent_id",
        "parent_agent_turn_id",
        "parent_step_id",
        "parent_traceparent",
        "recursion_depth",
    }
)


@dataclass(frozen=True, slots=True)
class Delivery:
    """One delivery of a command by the bus.

    `published_at` is the stream's timestamp (UTC), the same for every redelivery; `attempt` counts
    deliveries from 1. `exhausted` means that so many executors were lost on it that it is answered
    without being run once more. Without `headers_complete` there were more than may be read.
    """

    subject: str
    headers: Mapping[str, str]
    data: bytes
    published_at: datetime
    attempt: int
    stream_sequence: int
    exhausted: bool = False
    headers_complete: bool = True


@dataclass(frozen=True, slots=True)
class Command:
    """A decoded command. With a `violation` it is not executed, only answered."""

    identity: ClaimedIdentity
    suffix: str
    card_id: str | None
    tool_name: str | None
    after_execution: AfterExecution | None
    violation: BadRequest | None

    @property
    def function_name(self) -> str:
        """The name under which the call is answered: the tool's, else the subject's suffix."""
        name = self.tool_name or self.suffix
        return f"tool.{name}" if name in HEARTBEAT_NAMES else name


def decode_command(delivery: Delivery) -> Command:
    """Decode a delivery. Raises Unanswerable only if its subject is no tool command's."""
    subject = parse_command_subject(delivery.subject)
    identity = read_identity(subject, delivery.headers)
    body, problems = _read_body(delivery.data)
    if not delivery.headers_complete:
        problems = [f"the headers have more than {MAX_HEADER_LINES} lines or {MAX_HEADER_BYTES:,} bytes", *problems]
    problems = [*identity.problems, *problems]
    after_execution = body.get("after_execution")
    return Command(
        identity=identity,
        suffix=subject.suffix,
        card_id=_text(body.get("tool_call_card_id")),
        tool_name=_text(body.get("tool_name")),
        after_execution=cast("AfterExecution", after_execution) if after_execution in AFTER_EXECUTION else None,
        violation=_violation(problems) if problems else None,
    )


def _read_body(data: bytes) -> tuple[dict[str, object], list[str]]:
    if len(data) > MAX_BODY_BYTES:
        return {}, [f"the body is larger than {MAX_BODY_BYTES:,} bytes"]
    try:
        body = loads(data)
    except ValueError:
        return {}, ["the body is not JSON"]
    if not isinstance(body, dict):
        return {}, ["the body is not a JSON object"]
    return body, _body_problems(body)


def _body_problems(body: dict[str, object]) -> list[str]:
    problems = [f"body field {name} must be a non-empty string" for name in _missing_text(body)]
    if _text(body.get("tool_name")) in HEARTBEAT_NAMES:
        problems.append("body field tool_name is a name that workers take for heartbeats")
    if body.get("after_execution") not in AFTER_EXECUTION:
        problems.append("body field after_execution must be 'suspend' or 'terminate'")
    inline = sorted(INLINE_DATA & body.keys())
    if inline:
        problems.append(f"inline data is forbidden in the body ({', '.join(inline)}): it belongs in the tool.call card")
    control = sorted(CONTROL_FIELDS & body.keys())
    if control:
        problems.append(f"control fields are forbidden in the body ({', '.join(control)}): they belong in CG-* headers")
    return problems


def _missing_text(body: dict[str, object]) -> list[str]:
    return [name for name in ("tool_call_card_id", "tool_name") if _text(body.get(name)) is None]


def _text(value: object) -> str | None:
    return storable_text(value).strip() or None if isinstance(value, str) else None


def _violation(problems: list[str]) -> BadRequest:
    return BadRequest(
        "The tool call's command breaks the protocol; the calling system must correct it: " + "; ".join(problems) + ".",
        detail={"problems": problems},
    )
