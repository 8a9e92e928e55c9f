"""The outcome of `openapi-tool call`, and how it is printed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import typer

from openapi_tool.cli.output import fail, is_terminal, json_default, print_status
from openapi_tool.local.caller import ResultRows
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.protocol.cards import as_model_reads
from openapi_tool.protocol.printable import printable_lines
from openapi_tool.protocol.subjects import default_durable, parse_command_subject
from openapi_tool.telemetry.redact import Redactor

_FAILED = 1
_NO_RESULT = 3


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """A call with its result; without one `why_no_result` says why.

    `times` are milliseconds since the call was published, by step; there are none if that failed.
    """

    call: PlacedCall
    result: ResultRows | None
    times: Mapping[str, int | None]
    why_no_result: str = ""

    @property
    def _card(self) -> Mapping[str, Any]:
        return self.result.card if self.result else {}

    @property
    def content(self) -> Mapping[str, Any]:
        """Content of the card of the result; empty without one."""
        return self._card.get("content") or {}

    @property
    def repaired(self) -> list[str]:
        """Names of arguments that were repaired or dropped."""
        # They are in the result if that is an object, as `result_format` of a definition may say, else in the metadata.
        result = self.content.get("result")
        metadata = self._card.get("metadata") or {}
        output = result if isinstance(result, dict) else metadata.get("tool_output") or {}
        names: list[str] = output.get("repaired", [])
        return names

    def as_object(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "status": self.content.get("status"),
            "content": as_model_reads(self.content) if self.content else None,
            "result": self.content.get("result"),
            "error": self.content.get("error"),
            "repaired": self.repaired,
            "inbox_row": self.result and self.result.inbox_row,
            "doorbell": self.result and self.result.doorbell,
            "trace_id": self.call.trace_id,
            "tool_call_id": self.call.tool_call_id,
            "times": self.times,
        }


def print_outcome(outcome: CallOutcome, redactor: Redactor, program: str, *, as_json: bool) -> None:
    """Print the result on standard output, and what happened on standard error; exit unless the call succeeded.

    `program` is the beginning of a command line about the same kernel.
    """
    if as_json:
        typer.echo(redactor.text(json.dumps(outcome.as_object(), default=json_default)))
    elif outcome.content:
        # In a terminal the text stands beside the status lines, so that none of its lines may begin like one.
        indent = "  " if is_terminal() else ""
        typer.echo(indent + printable_lines(redactor.text(as_model_reads(outcome.content)), indent))
    if outcome.result is None:
        _fail_without_result(outcome, redactor, program)
    if outcome.result.doorbell is None:
        print_status("no doorbell followed the result: a worker would only find it by its inbox scan")
    if outcome.repaired:
        print_status(f"arguments that were repaired or dropped: {redactor.text(', '.join(outcome.repaired))}")
    call = outcome.call
    status = outcome.content.get("status")
    succeeded = status == "success"
    if not succeeded:  # the message is on standard output
        error = outcome.content.get("error") or {}
        retryable = "retryable" if error.get("retryable") else "not retryable"
        status = redactor.text(f"{status} with {error.get('code')} ({retryable})")
    print_status(f"{status}: {_steps(outcome.times)} (tool_call_id {call.tool_call_id}, trace {call.trace_id})")
    if not succeeded:
        raise typer.Exit(_FAILED)


def _steps(times: Mapping[str, int | None]) -> str:
    """Return the steps that were reached: placed → committed 24 ms → doorbell 27 ms."""
    reached = {step: ms for step, ms in times.items() if ms is not None}
    return " → ".join(f"{step} {ms} ms" if ms else step for step, ms in reached.items())


def _fail_without_result(outcome: CallOutcome, redactor: Redactor, program: str) -> NoReturn:
    call = outcome.call
    why = redactor.text(outcome.why_no_result)
    if not outcome.times:
        fail(
            f"no stream has confirmed the command of {call.tool_call_id}: {why}\n"
            f"{program} check says what NATS lacks, {program} nats durable what the stream holds. "
            "The call is saved; without its command no executor runs it.",
            _NO_RESULT,
        )
    durable = default_durable(call.version, parse_command_subject(call.subject).target)
    fail(
        f"no result of {call.tool_call_id}: {why}\n"
        f"{program} inspect {call.tool_call_id} --project {call.project_id} says where it is, "
        f"{program} top what calls wait for. Does an executor consume {call.subject} (default durable "
        f"{durable})?",
        _NO_RESULT,
    )
