"""What a kernel's servers have stored of one call, for `openapi-tool inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from openapi_tool.bootstrap import Bootstrap
from openapi_tool.kernel.jetstream.command_state import (
    CommandState,
    StoredDoorbell,
    commands_of,
    dead_letters_of,
    doorbells_of,
    with_holder,
)
from openapi_tool.kernel.jetstream.dead_letter_records import without_secrets
from openapi_tool.kernel.postgres.call_rows import CallRows, call_rows
from openapi_tool.nats_client.client import BusClient

_MAX_EPOCH_S = 1e11  # larger times in a record are no times of a call, and might not be shown as a date


@dataclass(frozen=True, slots=True)
class CallHistory:
    """Stored data of a call.

    `rows` are from PostgreSQL. A call that was replayed has several commands. A doorbell is the message that tells the
    kernel's worker of the result.
    """

    rows: CallRows
    commands: list[CommandState] = field(default_factory=list)
    dead_letters: list[dict[str, Any]] = field(default_factory=list)
    doorbells: list[StoredDoorbell] = field(default_factory=list)

    def row(self, message_type: str) -> Mapping[str, Any] | None:
        """Return the first inbox row of a type, such as `tool_result`."""
        for row in self.rows.inbox:
            if row["message_type"] == message_type:
                return row
        return None

    def card(self, kind: str) -> Mapping[str, Any] | None:
        """Return the first card of a type, such as `tool.result`."""
        for card in self.rows.cards:
            if card["type"] == kind:
                return card
        return None

    @property
    def is_empty(self) -> bool:
        """Whether nothing of the call is stored."""
        rows = self.rows
        return not (self.commands or self.dead_letters or rows.inbox or rows.edges or rows.cards)


async def stored_history(bootstrap: Bootstrap, client: BusClient, project: str, tool_call_id: str) -> CallHistory:
    """Read what is stored of a call. Raises Unavailable, nats.errors.Error."""
    durable, redactor = bootstrap.durable, bootstrap.redactor
    rows = await call_rows(bootstrap.pool, project, tool_call_id)
    written_at = [row["created_at"] for row in (*rows.inbox, *rows.edges)]
    commands = await commands_of(client, durable, project, tool_call_id, min(written_at, default=None))
    has_result = any(card["type"] == "tool.result" for card in rows.cards)
    if commands and not has_result:
        commands[-1] = await with_holder(client, durable, commands[-1])
    letters = await dead_letters_of(
        client, durable, project, tool_call_id, lambda letter: without_secrets(letter, redactor)
    )
    history = CallHistory(rows, commands, letters)
    result_row = history.row("tool_result")
    if result_row is None or not result_row["traceparent"]:
        return history
    # A doorbell names no call. Its trace is that of the result's row.
    since = result_row["created_at"]
    doorbells = await doorbells_of(client, durable, project, result_row["traceparent"], since)
    return replace(history, doorbells=doorbells)


class RunEvent(BaseModel):
    """A run of the command by an executor has begun, ended or was lost."""

    event: Annotated[str, Field(max_length=32)]
    delivery: int
    executor: Annotated[str, Field(max_length=256)]
    at: Annotated[float, Field(ge=0, le=_MAX_EPOCH_S)]


_RUN_EVENTS = TypeAdapter(list[RunEvent])


def run_events(command: CommandState) -> list[RunEvent]:
    """Return the events in the lease of a command, the record of which executor runs it."""
    try:
        return _RUN_EVENTS.validate_python((command.lease or {}).get("runs", []))
    except ValidationError:  # written by another version
        return []
