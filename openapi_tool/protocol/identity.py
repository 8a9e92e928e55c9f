"""Who is calling: headers and subject are the only source of identity (protocol section 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from openapi_tool.protocol.subject import CommandSubject
from openapi_tool.protocol.trace import SpanContext, parse_traceparent

PROJECT = "CG-Project-Id"
CHANNEL = "CG-Channel-Id"
AGENT = "CG-Agent-Id"
TURN = "CG-Turn-Id"
EPOCH = "CG-Turn-Epoch"
STEP = "CG-Step-Id"
TOOL_CALL = "CG-Tool-Call-Id"
PARENT_AGENT = "CG-Parent-Agent-Id"
PARENT_TURN = "CG-Parent-Turn-Id"
PARENT_STEP = "CG-Parent-Step-Id"
DEPTH = "CG-Recursion-Depth"
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

TOPOLOGY = (PROJECT, CHANNEL, AGENT, TURN, EPOCH, STEP, TOOL_CALL, PARENT_AGENT, PARENT_TURN, PARENT_STEP, DEPTH)
"""Every header of a context, in exactly the spelling that the kernel reads."""

MAX_EPOCH = 2**63 - 1
_MAX_DIGITS = 20


@dataclass(frozen=True, slots=True)
class ClaimedIdentity:
    """What a command's headers and subject say; anything but project and channel may be missing."""

    project_id: str
    channel_id: str
    agent_id: str | None
    agent_turn_id: str | None
    turn_epoch: int | None
    step_id: str | None
    tool_call_id: str | None
    parent_step_id: str | None
    recursion_depth: int | None
    trace: SpanContext | None
    tracestate: str | None
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallIdentity:
    """A call that can be answered: its owner, turn and correlation id are known."""

    project_id: str
    channel_id: str
    agent_id: str
    agent_turn_id: str
    turn_epoch: int
    tool_call_id: str
    step_id: str | None
    parent_step_id: str | None
    trace_id: str | None
    trace: SpanContext | None
    tracestate: str | None


class _Headers:
    """A command's headers, case-insensitive, with the problems found while reading them."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._exact = headers
        self._folded = {name.lower(): value for name, value in headers.items()}
        self.problems: list[str] = []

    def text(self, name: str) -> str | None:
        value = (self._exact.get(name) or self._folded.get(name.lower()) or "").strip()
        if "\x00" in value:
            self.problems.append(f"header {name} holds a NUL character")
            return None
        return value or None

    def required(self, name: str) -> str | None:
        before = len(self.problems)
        value = self.text(name)
        if value is None and len(self.problems) == before:
            self.problems.append(f"header {name} is missing")
        return value

    def number(self, name: str) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        digits = value.lstrip("0") or value[:1]
        if not (digits.isascii() and digits.isdigit() and int(digits[:_MAX_DIGITS]) <= MAX_EPOCH):
            self.problems.append(f"header {name} must be an integer >= 0")
            return None
        return int(digits)

    def trace(self) -> SpanContext | None:
        value = self.text(TRACEPARENT)
        if value is None:
            return None
        try:
            return parse_traceparent(value)
        except ValueError as error:
            self.problems.append(f"header {TRACEPARENT}: {error}")
            return None

    def must_equal(self, name: str, subject_token: str) -> None:
        value = self.text(name)
        if value is not None and value != subject_token:
            self.problems.append(f"header {name} differs from the subject's {subject_token!r}")


def read_identity(subject: CommandSubject, headers: Mapping[str, str]) -> ClaimedIdentity:
    """Collect identity and all problems of the headers; nothing is raised, nothing is guessed."""
    read = _Headers(headers)
    read.must_equal(PROJECT, subject.project_id)
    read.must_equal(CHANNEL, subject.channel_id)
    return ClaimedIdentity(
        project_id=subject.project_id,
        channel_id=subject.channel_id,
        agent_id=read.required(AGENT),
        agent_turn_id=read.text(TURN),
        turn_epoch=read.number(EPOCH),
        step_id=read.text(STEP),
        tool_call_id=read.required(TOOL_CALL),
        parent_step_id=read.text(PARENT_STEP),
        recursion_depth=read.number(DEPTH),
        trace=read.trace(),
        tracestate=read.text(TRACESTATE),
        problems=tuple(read.problems),
    )
