"""How a call at a kernel ended, or why it has no result, for `openapi-tool inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openapi_tool.cli.call_history import CallHistory, run_events
from openapi_tool.cli.selection import command_about_same
from openapi_tool.kernel.jetstream.command_state import CommandState
from openapi_tool.tools.wording import counted


def verdict_on(history: CallHistory) -> str:
    """Return how the call ended, or why it has no result."""
    result = history.card("tool.result")
    if result is not None:
        return _verdict_on_result(history, result)
    if history.dead_letters:
        letter = history.dead_letters[-1]
        return f"no result: dead-lettered as {letter['reason']}: {letter['message']}"
    if not history.commands:
        return "no result: the stream has no command of this call, so the kernel never sent it or it expired"
    return f"no result: {_why_unanswered(history.commands[-1])}"


def _verdict_on_result(history: CallHistory, result: Mapping[str, Any]) -> str:
    result_row = history.row("tool_result")
    if result_row is None:
        return "a result card without an inbox row: the next delivery of the command reports it"
    error = f" ({result['error_code']})" if result["error_code"] else ""
    answer = f"answered with {result['status']}{error}"
    row_status = result_row["status"]
    if row_status not in ("pending", "deferred"):
        return f"{answer}; the worker claimed it"
    no_doorbell = "" if history.doorbells else ", and the stream has no doorbell of it"
    return f"{answer}; the worker has not claimed it: its row is {row_status}{no_doorbell}"


def _why_unanswered(command: CommandState) -> str:
    """Return what the durable knows of a command without a result, else the lease, else the replicas."""
    if command.delivered is None:
        return "there is no durable; no executor has used this stream yet"
    if command.paused:
        return "the durable is paused; `nats consumer resume` ends that"
    if command.sequence > command.delivered:
        waiting = counted(command.pending, "command")
        return f"the durable has not delivered it; it has {waiting} to deliver, see `{command_about_same('top')}`"
    lease = command.lease or {}
    if lease.get("owner"):
        runs = run_events(command)
        executor = runs[-1].executor if runs else lease["owner"]
        return f"executor {executor} runs it; lost runs so far: {lease.get('lost', 0)}"
    if command.ack_floor is not None and command.sequence <= command.ack_floor:
        list_abandoned = command_about_same("deadletters list --abandoned")
        return f"its command is settled without a result; `{list_abandoned}` finds it"
    return _what_replicas_said(command)


def _what_replicas_said(command: CommandState) -> str:
    if command.running:
        return f"executor {command.holder} runs it"
    if command.holder is not None:
        return f"executor {command.holder} holds it until a slot is free"
    if command.answering:
        return "it is delivered and not settled, and none of the replicas that answer holds it: its redelivery is due"
    return "it is delivered and not settled, and no replica answers: its redelivery is due"
