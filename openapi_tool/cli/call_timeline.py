"""The events in the life of a call at a kernel, for `openapi-tool inspect`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from openapi_tool.cli.call_history import CallHistory, run_events

_MAX_MS = 86_400_000  # larger times in a card are no times of a call


@dataclass(frozen=True, slots=True)
class Event:
    """Event in the timeline: what happened, and to what, or by whom."""

    at: datetime
    what: str
    about: str


def timeline(history: CallHistory) -> list[Event]:
    """Return the events in the order of time."""
    return sorted(_events(history), key=lambda event: event.at)


def _events(history: CallHistory) -> Iterator[Event]:
    for row in history.rows.inbox:
        yield from _row_events(row)
    for edge in history.rows.edges:
        about = f"by {edge['source_agent_id']}, depth {edge['recursion_depth']}, trace {edge['trace_id']}"
        yield Event(edge["created_at"], f"{edge['edge_phase']} edge", about)
    for command in history.commands:
        yield Event(command.published_at, "command", f"message {command.sequence} on {command.subject}")
        for event in run_events(command):
            about = f"delivery {event.delivery}, executor {event.executor}"
            yield Event(datetime.fromtimestamp(event.at, UTC), f"run {event.event.replace('_', ' ')}", about)
    for doorbell in history.doorbells:
        yield Event(doorbell.published_at, "doorbell", f"message {doorbell.sequence} on {doorbell.subject}")
    for letter in history.dead_letters:
        at = datetime.fromisoformat(letter["published_at"])
        yield Event(at, "dead letter", f"{letter['number']}, {letter['reason']}, delivery {letter['attempt']}")
    for card in history.rows.cards:
        yield from _card_events(card)


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
    for attempt in attempts:
        # Attempts have times relative to the start of the call; the card is written right after the last response.
        at = card["created_at"] - timedelta(milliseconds=took_ms - attempt.at_ms)
        ended = "not ended" if attempt.ms is None else f"{attempt.ms} ms"
        error = f", {attempt.error_code}" if attempt.error_code else ""
        yield Event(at, "request", f"HTTP {attempt.http_status or 'without response'}, {ended}{error}")
    error = f", {card['error_code']}: {card['error_message']}" if card["error_code"] else ""
    yield Event(card["created_at"], "result card", f"{card['status']} by {card['author_id']}{error}")


_Ms = Annotated[int, Field(ge=0, le=_MAX_MS)]


class _StoredAttempt(BaseModel):
    at_ms: _Ms
    ms: _Ms | None = None
    http_status: int | None = None
    error_code: str | None = None


_ATTEMPTS = TypeAdapter(list[_StoredAttempt])


def _attempts(card: Mapping[str, Any]) -> list[_StoredAttempt]:
    try:
        return _ATTEMPTS.validate_json(card["attempts"] or "[]")
    except ValidationError:  # another author's card
        return []
