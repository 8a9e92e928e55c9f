"""`openapi-tool inspect`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from openapi_tool.bootstrap import Bootstrap
from openapi_tool.cli import gateway
from openapi_tool.cli.kernel import with_nats
from openapi_tool.cli.output import fail, json_default, print_json, print_line
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
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.protocol.jsontext import storable_text
from openapi_tool.protocol.subjects import is_token
from openapi_tool.tools.wording import counted, short

# Larger times in a card or record are no times of a call, and might not be shown as a date.
_MAX_MS = 86_400_000
_MAX_EPOCH_S = 1e11


@dataclass(frozen=True, slots=True)
class Event:
    """Event in the timeline."""

    at: datetime
    what: str
    about: str


_Ms = Annotated[int, Field(ge=0, le=_MAX_MS)]


class _StoredAttempt(BaseModel):
    at_ms: _Ms
    ms: _Ms | None = None
    http_status: int | None = None
    error_code: str | None = None


_ATTEMPTS = TypeAdapter(list[_StoredAttempt])


class _StoredRunEvent(BaseModel):
    event: Annotated[str, Field(max_length=32)]
    delivery: int
    executor: Annotated[str, Field(max_length=256)]
    at: Annotated[float, Field(ge=0, le=_MAX_EPOCH_S)]


_RUN_EVENTS = TypeAdapter(list[_StoredRunEvent])


@dataclass(frozen=True, slots=True)
class CallHistory:
    """Stored data of a call; `card` and `row` return its first one of a type."""

    rows: CallRows
    commands: list[CommandState] = field(default_factory=list)
    dead_letters: list[dict[str, Any]] = field(default_factory=list)
    doorbells: list[StoredDoorbell] = field(default_factory=list)

    def row(self, message_type: str) -> Mapping[str, Any] | None:
        """Return an inbox row."""
        return next((row for row in self.rows.inbox if row["message_type"] == message_type), None)

    def card(self, kind: str) -> Mapping[str, Any] | None:
        """Return a card."""
        return next((card for card in self.rows.cards if card["type"] == kind), None)


def inspect(tool_call_id: str, *, project: str | None, as_json: bool, state: Path | None = None) -> None:
    """Print the timeline of one call, and why it has no result if it has none."""
    path = gateway.selected_state(state)
    _inspect(tool_call_id, gateway.project_or_default(project, path), path, as_json=as_json)


def _inspect(tool_call_id: str, project: str, path: Path | None, *, as_json: bool) -> None:
    if not is_token(project):
        fail(f"--project: {short(project)!r} is no project id: it is empty or contains blanks or `.*>`")
    if not tool_call_id or storable_text(tool_call_id) != tool_call_id:  # PostgreSQL takes no NUL or lone surrogate
        fail(f"TOOL_CALL_ID: {short(tool_call_id)!r} is no tool call id: it contains NUL or is not UTF-8")
    if path is not None:
        gateway.inspect(path, tool_call_id, project=project, as_json=as_json)
        return

    async def gather(bootstrap: Bootstrap, client: BusClient) -> CallHistory:
        durable, redactor = bootstrap.durable, bootstrap.redactor
        rows = await call_rows(bootstrap.pool, project, tool_call_id)
        moments = [row["created_at"] for row in (*rows.inbox, *rows.edges)]
        commands = await commands_of(client, durable, project, tool_call_id, min(moments, default=None))
        if commands and not any(card["type"] == "tool.result" for card in rows.cards):
            commands[-1] = await with_holder(client, durable, commands[-1])
        letters = await dead_letters_of(
            client, durable, project, tool_call_id, lambda letter: without_secrets(letter, redactor)
        )
        history = CallHistory(rows, commands, letters)
        result_row = history.row("tool_result")
        if result_row is None or not result_row["traceparent"]:
            return history
        since = result_row["created_at"]
        doorbells = await doorbells_of(client, durable, project, result_row["traceparent"], since)
        return replace(history, doorbells=doorbells)

    history = with_nats(gather, user=NatsUser.INSPECT, database=True)
    rows = history.rows
    if not (history.commands or history.dead_letters or rows.inbox or rows.edges or rows.cards):
        fail(f"project {project!r} has no call {tool_call_id!r}, or its command and rows are gone")
    events = sorted(_events(history), key=lambda event: event.at)
    verdict = conclusion(history)
    if as_json:
        print_json(
            {"tool_call_id": tool_call_id, "project_id": project, "verdict": verdict, **_as_json(history, events)}
        )
        return
    _draw(tool_call_id, events, verdict)


def _as_json(history: CallHistory, events: list[Event]) -> dict[str, Any]:
    shown = {"events": [asdict(event) for event in events], **asdict(history)}
    for card in shown["rows"]["cards"]:
        card["attempts"] = orjson.loads(card["attempts"] or "null")
    return orjson.loads(orjson.dumps(shown, default=json_default))  # type: ignore[no-any-return]


def _draw(tool_call_id: str, events: list[Event], verdict: str) -> None:
    print_line(f"call {tool_call_id}")
    for number, event in enumerate(events):
        sign = "├"
        if number == len(events) - 1:
            sign = "└"
        elif number == 0:
            sign = "┌"
        offset_s = (event.at - events[0].at).total_seconds()
        print_line(f"  {sign} {offset_s:+10.3f} s  {event.what:<15} {event.about}".rstrip())
    print_line(f"=> {verdict}")


def _events(history: CallHistory) -> Iterator[Event]:
    for row in history.rows.inbox:
        yield from _row_events(row)
    for edge in history.rows.edges:
        about = f"by {edge['source_agent_id']}, depth {edge['recursion_depth']}, trace {edge['trace_id']}"
        yield Event(edge["created_at"], f"{edge['edge_phase']} edge", about)
    for command in history.commands:
        yield Event(command.published_at, "command", f"message {command.sequence} on {command.subject}")
        for event in _run_events(command):
            about = f"delivery {event.delivery}, executor {event.executor}"
            yield Event(datetime.fromtimestamp(event.at, UTC), f"run {event.event.replace('_', ' ')}", about)
    for doorbell in history.doorbells:
        yield Event(doorbell.published_at, "doorbell", f"message {doorbell.sequence} on {doorbell.subject}")
    for letter in history.dead_letters:
        at = datetime.fromisoformat(letter["published_at"])
        yield Event(at, "dead letter", f"{letter['number']}, {letter['reason']}, delivery {letter['attempt']}")
    for card in history.rows.cards:
        yield from _card_events(card)


def _run_events(command: CommandState) -> list[_StoredRunEvent]:
    try:
        return _RUN_EVENTS.validate_python((command.lease or {}).get("runs", []))
    except ValidationError:  # written by another version
        return []


def _row_events(row: Mapping[str, Any]) -> Iterator[Event]:
    if row["message_type"] == "command_anchor":
        yield Event(row["created_at"], "anchor row", f"turn {row['agent_turn_id']} of {row['agent_id']} waits")
        return
    yield Event(row["created_at"], "inbox row", "committed")
    if row["processed_at"] is not None:
        yield Event(row["processed_at"], "claim", f"by the worker; the inbox row is {row['status']}")


def _card_events(card: Mapping[str, Any]) -> Iterator[Event]:
    if card["type"] == "tool.call":
        yield Event(card["created_at"], "call card", str(card["function_name"] or ""))
        return
    attempts = _attempts(card)
    took_ms = max((attempt.at_ms + (attempt.ms or 0) for attempt in attempts), default=0)
    for attempt in attempts:  # the card is written right after the last response
        at = card["created_at"] - timedelta(milliseconds=took_ms - attempt.at_ms)
        ended = "not ended" if attempt.ms is None else f"{attempt.ms} ms"
        error = f", {attempt.error_code}" if attempt.error_code else ""
        yield Event(at, "request", f"HTTP {attempt.http_status or 'without response'}, {ended}{error}")
    error = f", {card['error_code']}: {card['error_message']}" if card["error_code"] else ""
    yield Event(card["created_at"], "result card", f"{card['status']} by {card['author_id']}{error}")


def _attempts(card: Mapping[str, Any]) -> list[_StoredAttempt]:
    try:
        return _ATTEMPTS.validate_json(card["attempts"] or "[]")
    except ValidationError:  # another author's card
        return []


def conclusion(history: CallHistory) -> str:
    """Return how the call ended, or why it has no result."""
    result = history.card("tool.result")
    result_row = history.row("tool_result")
    if result is not None:
        if result_row is None:
            return "a result card without an inbox row: the next delivery of the command reports it"
        error = f" ({result['error_code']})" if result["error_code"] else ""
        row_status = result_row["status"]
        claimed = row_status not in ("pending", "deferred")
        waits = "the worker claimed it" if claimed else f"the worker has not claimed it: its row is {row_status}"
        silent = "" if claimed or history.doorbells else ", and the stream has no doorbell of it"
        return f"answered with {result['status']}{error}; {waits}{silent}"
    if history.dead_letters:
        letter = history.dead_letters[-1]
        return f"no result: dead-lettered as {letter['reason']}: {letter['message']}"
    if not history.commands:
        return "no result: the stream has no command of this call, so the kernel never sent it or it expired"
    return f"no result: {_waiting(history.commands[-1])}"


def _waiting(command: CommandState) -> str:
    if command.delivered is None:
        return "there is no durable; no executor has used this stream yet"
    if command.paused:
        return "the durable is paused; `nats consumer resume` ends that"
    if command.sequence > command.delivered:
        waiting = counted(command.pending, "command")
        return f"the durable has not delivered it; it has {waiting} to deliver, see `openapi-tool top`"
    lease = command.lease or {}
    if lease.get("owner"):
        executors = [event.executor for event in _run_events(command)] or [lease["owner"]]
        return f"executor {executors[-1]} runs it; lost runs so far: {lease.get('lost', 0)}"
    if command.ack_floor is not None and command.sequence <= command.ack_floor:
        return "its command is settled without a result; `openapi-tool deadletters list --abandoned` finds it"
    return _holder(command)


def _holder(command: CommandState) -> str:
    if command.holder is not None:
        return f"executor {command.holder} " + ("runs it" if command.running else "holds it until a slot is free")
    if command.answering:
        return "it is delivered and not settled, and none of the replicas that answer holds it: its redelivery is due"
    return "it is delivered and not settled, and no replica answers: its redelivery is due"
