"""Result fields of a card from a tool's output or error (tool-design: content, state, usage)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import chain
from typing import Any, NamedTuple

from openapi_tool.frozen import frozen
from openapi_tool.protocol.attempts import Attempt, attempt_objects
from openapi_tool.protocol.errors import Status, ToolError
from openapi_tool.protocol.jsontext import storable, storable_text
from openapi_tool.protocol.jsonvalue import ErrorObject, ToolOutputObject, UsageObject
from openapi_tool.tools.definition import ResultFormat

BLOCK_GAP = "\n\n"


@frozen
class Usage:
    """Upstream cost of a call: tokens charged, requests sent."""

    tokens: int = 0
    requests: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.tokens + other.tokens, self.requests + other.requests)

    def as_dict(self) -> UsageObject:
        """Return the form of a result card."""
        return {"tokens": self.tokens, "requests": self.requests}


NO_USAGE = Usage()


class Meter:
    """Counts the usage of requests until a result takes it, so that each is reported in exactly one result."""

    def __init__(self) -> None:
        self.usage = NO_USAGE

    def add(self, usage: Usage) -> None:
        """Count more."""
        self.usage += usage

    def take(self) -> Usage:
        """Return the count and reset it."""
        taken, self.usage = self.usage, NO_USAGE
        return taken


class Item(NamedTuple):
    """One result or page of an output, or a remark of this service.

    `head` (title, address, snippet) and `body` are web content. Heads have priority: all are shown before
    any body. `caption` is the service's text before them, `after` its text after their end.
    `label`, such as `3 of 4`, names the item of a batch in later parts.
    """

    head: str = ""
    body: str = ""
    caption: str = ""
    after: str = ""
    label: str = ""

    @property
    def chars(self) -> int:
        """Return the length of the web content."""
        return len(self.head) + len(self.body) + (len(BLOCK_GAP) if self.head and self.body else 0)

    @property
    def text(self) -> str:
        """Return the web content."""
        return f"{self.head}{self._gap}{self.body}"

    def part(self, end: int) -> str:
        """Return the first `end` characters of the web content, without building the rest."""
        start = f"{self.head}{self._gap}"
        return start[:end] if end <= len(start) else start + self.body[: end - len(start)]

    @property
    def _gap(self) -> str:
        return BLOCK_GAP if self.head and self.body else ""


@frozen
class ToolOutput:
    """Output of a tool: text for the model in items, `state` for what a UI renders.

    `may_store` permits to store the whole text if it is truncated. `cached` means that no request was sent, so `usage`
    is zero. `cost_advice` says how to lower a high cost; empty if the model cannot.
    """

    items: tuple[Item, ...]
    state: Mapping[str, Any] = field(default_factory=dict)
    usage: Usage = NO_USAGE
    cached: bool = False
    may_store: bool = True
    cost_advice: str = ""

    @property
    def content(self) -> str:
        """Return the whole text as it is stored: every part, a blank line between them, without frames."""
        return BLOCK_GAP.join(texts(self.items))


def items_chars(items: Iterable[Item]) -> int:
    """Return the approximate number of characters of all items."""
    return sum(map(len, chain.from_iterable(items)))


def texts(items: Iterable[Item]) -> Iterator[str]:
    """Return the texts of items that are not empty, in order."""
    for item in items:
        yield from filter(None, (item.caption, item.head, item.body, item.after))


@frozen
class RenderedResult:
    """Part of an output that the model is shown, with a reference to the whole text if it was truncated."""

    content: str
    truncated: bool = False
    artifact_ref: Mapping[str, Any] | None = None
    next_cursor: str | None = None
    repaired: tuple[str, ...] = ()


@frozen
class ResultFields:
    """The parts of a tool.result card that depend on the outcome; all of it is storable in jsonb.

    `tool` (the built-in tool, empty if unknown), `cached` and `truncated` are for logs, metrics and spans.
    """

    status: Status
    result: Any
    error: ErrorObject | None
    tool_output: ToolOutputObject | None
    tool: str = ""
    cached: bool = False
    truncated: bool = False

    @property
    def error_code(self) -> str | None:
        """Code of the error, None for a success."""
        return str(self.error["code"]) if self.error else None


def success(
    output: ToolOutput,
    shown: RenderedResult,
    result_format: ResultFormat,
    latency_ms: int,
    attempts: Sequence[Attempt] = (),
    tool: str = "",
    session: str | None = None,
    budget: Mapping[str, Any] | None = None,
) -> ResultFields:
    """Return the fields of a success: the text as result and the rest as `tool_output`.

    With `result_format` `object` the result is one object with text and rest, except session, attempts and `budget`.
    """
    tool_output = storable(
        ToolOutputObject(
            state=output.state,
            usage=output.usage.as_dict(),
            truncated=shown.truncated,
            artifact_ref=shown.artifact_ref,
            next_cursor=shown.next_cursor,
            cached=output.cached,
            latency_ms=latency_ms,
            **({"repaired": list(shown.repaired)} if shown.repaired else {}),
        )
    )
    content = storable_text(shown.content)
    extras = _extras(attempts, session, budget)
    traits = (tool, output.cached, shown.truncated)
    if result_format == "object":
        return ResultFields("success", {"content": content, **tool_output}, None, extras, *traits)
    tool_output.update(extras)
    return ResultFields("success", content, None, tool_output, *traits)


def cost(outcome: ToolOutput | ToolError) -> Usage:
    """Return the upstream cost of an outcome, also of a failure."""
    return outcome.usage if isinstance(outcome, ToolOutput) else Usage(outcome.tokens, outcome.requests)


def failure(
    error: ToolError,
    latency_ms: int,
    attempts: Sequence[Attempt] = (),
    tool: str = "",
    session: str | None = None,
    budget: Mapping[str, Any] | None = None,
) -> ResultFields:
    """Return the fields of a failure. The model sees `error` only, so its message says what to do instead."""
    described = storable(error.as_error())
    result: dict[str, object] = {"error_code": error.code, "error_message": described["message"], "error": described}
    if error.detail is not None:
        result["error_detail"] = storable(error.detail)
    tool_output = ToolOutputObject(
        usage=cost(error).as_dict(), latency_ms=latency_ms, **_extras(attempts, session, budget)
    )
    return ResultFields(error.status, result, described, tool_output, tool)


def _extras(attempts: Sequence[Attempt], session: str | None, budget: Mapping[str, Any] | None) -> ToolOutputObject:
    """Return session, attempts, retries (those among the attempts) and budgets of a call."""
    extras = ToolOutputObject(retries=sum(attempt.resends > 0 for attempt in attempts))
    if session is not None:
        extras["session"] = session
    if attempts:
        extras["attempts"] = attempt_objects(attempts)
    if budget is not None:
        extras["budget"] = budget
    return extras


def one_line(text: str) -> str:
    """Return the text with each run of white space and control characters as one blank."""
    if text.isprintable():
        return " ".join(text.split())
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
