"""The lines that `openapi-tool dev` prints about calls: one for each event in the log of an executor.

A line begins with the time and a sign: → a call was started, ← it has a result, ↻ something is tried again, ! a
failure or warning.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from openapi_tool.local.caller import ERRORS, Caller
from openapi_tool.local.dev import PROJECT
from openapi_tool.protocol.cards import as_model_reads
from openapi_tool.tools.wording import counted, one_line

_MAX_ARGUMENTS_CHARS = 75
# Actions of log lines about a command that is delivered, or a request that is sent, more than once.
_RETRY_ACTIONS = (
    "call.redelivered",
    "call.overlapping",
    "command.requeued",
    "call.deduplicated",
    "call.unsettled",
    "upstream.retry",
)
# Logged at a normal exit, too. `dev` itself notices if NATS has ended.
_IGNORED_ACTIONS = ("nats.disconnected",)
_ALERT_LEVELS = ("warning", "error", "critical")
_SUBJECTS = ("tool_name", "project_id", "host")
# Fields of a log line that are shown after its message.
_DETAILS = ("reason", "author_id", "error", "error_code", "http_status", "attempt", "wait_s", "subject")


class Feed:
    """Turns log entries into lines. Arguments and results are not in the log, so it reads the cards of the calls.

    `on_result` gets the id of each call that has ended, and what the model reads.
    """

    def __init__(self, caller: Caller, on_result: Callable[[str, str], None] = lambda *_: None) -> None:
        self._caller = caller
        self._on_result = on_result
        self._shown_as_begun: set[str] = set()

    async def lines(self, entry: Mapping[str, Any]) -> AsyncIterator[str]:
        """Yield the lines of an entry: none, one, or two if the log lacks the start of the call."""
        action = entry["action"]
        call_id = entry.get("tool_call_id", "")
        if action in ("call.running", "call.finished") and call_id not in self._shown_as_begun:
            self._shown_as_begun.add(call_id)
            yield await self._begin(entry)
        if action == "call.finished":
            self._shown_as_begun.discard(call_id)
            yield await self._end(entry)
        elif action in _RETRY_ACTIONS:
            yield _line("↻", entry, _message(entry))
        elif entry["level"] in _ALERT_LEVELS and action not in _IGNORED_ACTIONS:
            yield _line("!", entry, _message(entry, _subjects(entry)))

    async def _begin(self, entry: Mapping[str, Any]) -> str:
        content = await self._content(entry, "tool.call")
        arguments = json.dumps(content.get("arguments"), ensure_ascii=False)
        return _line("→", entry, f"{content.get('tool_name')} {_shortened(arguments)}")

    async def _end(self, entry: Mapping[str, Any]) -> str:
        content = await self._content(entry, "tool.result")
        text = as_model_reads(content)
        self._on_result(entry["tool_call_id"], text)
        # The field `attempt` is the number of the delivery.
        again = f", delivery {entry['attempt']}" if entry["attempt"] > 1 else ""
        summary = f"{entry['tool_name']} {entry['status']}, {entry['duration_ms']} ms{again}"
        if entry["status"] != "success":
            error = content.get("error")
            message = error.get("message") if error else error
            return _line("!", entry, f"{summary}, {entry.get('error_code')}: {message}")
        return _line("←", entry, f"{summary}, {counted(len(text), 'character')}")

    async def _content(self, entry: Mapping[str, Any], card_type: str) -> Mapping[str, Any]:
        """Return what a card of the call has; nothing if it cannot be read now."""
        with suppress(*ERRORS):
            card = await self._caller.card(entry["project_id"], entry["tool_call_id"], card_type)
            content: Mapping[str, Any] = card.get("content") or {}
            return content
        return {}


def _subjects(entry: Mapping[str, Any]) -> list[str]:
    """Return the fields that say what a warning is about, unless its message or the project of `dev` says it."""
    known = {"project_id": PROJECT}
    return [
        name
        for name in _SUBJECTS
        if name in entry and entry[name] != known.get(name) and str(entry[name]) not in entry["message"]
    ]


def _message(entry: Mapping[str, Any], subjects: Sequence[str] = ()) -> str:
    first_line = entry["message"].partition("\n")[0]
    details = [f"{name}={entry[name]}" for name in (*subjects, *_DETAILS) if name in entry]
    return ", ".join([first_line, *details])


def _line(sign: str, entry: Mapping[str, Any], text: str) -> str:
    microseconds = datetime.fromisoformat(entry["time"]).astimezone().strftime("%H:%M:%S.%f")
    milliseconds = microseconds[:-3]
    call_id = entry.get("tool_call_id")
    of_call = f" [{call_id}]" if call_id else ""
    return one_line(f"{milliseconds} {sign} {text}{of_call}")


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_ARGUMENTS_CHARS else text[: _MAX_ARGUMENTS_CHARS - 1] + "…"
