"""Output of a tool, before it is cut for the model: texts in items, state for a UI, and the upstream cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from openapi_tool.protocol.errors import ToolError
from openapi_tool.protocol.result_objects import UsageObject

PARAGRAPH_GAP = "\n\n"
"""Between head and body of an item, and between the texts of a stored text."""

COPIES_OF_COMMIT = 5
"""Copies of a text in memory until it is committed: JSON, jsonb encoding, buffers of driver and transport."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Upstream cost of a call."""

    tokens: int = 0
    requests: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.tokens + other.tokens, self.requests + other.requests)

    def as_dict(self) -> UsageObject:
        """Return the form of a result card."""
        return {"tokens": self.tokens, "requests": self.requests}


NO_USAGE = Usage()


class Meter:
    """Counter of usage.

    Several calls may wait for one request. The one that reports its cost takes it (`take`), so each request is reported
    in exactly one result.
    """

    __slots__ = ("requests", "tokens")

    def __init__(self) -> None:
        self.tokens = self.requests = 0

    @property
    def usage(self) -> Usage:
        """Return the count."""
        return Usage(self.tokens, self.requests)

    def add(self, usage: Usage) -> None:
        """Count more."""
        self.tokens += usage.tokens
        self.requests += usage.requests

    def take(self) -> Usage:
        """Return the count and reset it."""
        taken = self.usage
        self.tokens = self.requests = 0
        return taken


class Item(NamedTuple):
    """One search result or page of an output; without web content it is a remark of this service.

    - `head`, `body`: web content; the head has title, address and snippet.
    - `caption`, `after`: texts of this service before and after it.
    - `label`: name of the item in later parts, such as `3 of 4` in a batch.
    """

    head: str = ""
    body: str = ""
    caption: str = ""
    after: str = ""
    label: str = ""

    @property
    def chars(self) -> int:
        """Length of the web content."""
        return len(self.head) + len(self._gap) + len(self.body)

    @property
    def text(self) -> str:
        """The web content."""
        return f"{self.head}{self._gap}{self.body}"

    def part(self, end: int) -> str:
        """Return the first `end` characters of the web content, without building the rest."""
        start = f"{self.head}{self._gap}"
        return start[:end] if end <= len(start) else start + self.body[: end - len(start)]

    @property
    def _gap(self) -> str:
        return PARAGRAPH_GAP if self.head and self.body else ""


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """Output of a tool.

    - `items`: text for the model.
    - `state`: data for a UI. With the definition's `result_format` `object` the model reads it, too.
    - `cached`: no request was sent, so `usage` is zero.
    - `may_store`: whether the whole text may be stored if it is truncated.
    - `cost_advice`: text for the model on lowering a high cost, else empty.
    """

    items: tuple[Item, ...]
    state: Mapping[str, object] = field(default_factory=dict)
    usage: Usage = NO_USAGE
    cached: bool = False
    may_store: bool = True
    cost_advice: str = ""

    @property
    def content(self) -> str:
        """The whole text as it is stored, without frames."""
        return PARAGRAPH_GAP.join(texts(self.items))


def items_chars(items: Iterable[Item]) -> int:
    """Return the number of characters of all items, labels included, without the gaps between them."""
    return sum(map(len, chain.from_iterable(items)))


def texts(items: Iterable[Item]) -> Iterator[str]:
    """Return the non-empty texts of items, in order."""
    return filter(None, chain.from_iterable((item.caption, item.head, item.body, item.after) for item in items))


def cost(outcome: ToolOutput | ToolError) -> Usage:
    """Return the upstream cost of a success or failure."""
    if isinstance(outcome, ToolOutput):
        return outcome.usage
    return Usage(outcome.tokens, outcome.requests)
