"""Headers of a command, by name (protocol section 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from openapi_tool.protocol.ids import MAX_ID_BYTES, is_too_long
from openapi_tool.protocol.tracing import SpanContext, parse_traceparent

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
"""Headers that identify a call, in the exact case that the kernel reads."""

MAX_EPOCH = 2**63 - 1  # largest bigint of PostgreSQL
_MAX_DIGITS = 20  # of a number that are read: enough to exceed MAX_EPOCH; int() raises ValueError for thousands


class HeaderReader:
    """Reads a command's headers, whatever the case of their names; collects what is wrong in `problems`."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._exact = headers
        self._folded = {name.lower(): value for name, value in headers.items()}
        self.problems: list[str] = []

    def text(self, name: str) -> str | None:
        """Return a header without surrounding white space; None if it is missing, empty or invalid."""
        value = (self._exact.get(name) or self._folded.get(name.lower()) or "").strip()
        if "\x00" in value:
            self.problems.append(f"header {name} holds a NUL character")
            return None
        return value or None

    def id(self, name: str) -> str | None:
        """Return a header that is an id; None if it is missing or invalid."""
        value = self.text(name)
        if value is not None and is_too_long(value):
            self.problems.append(f"header {name} is longer than {MAX_ID_BYTES} bytes")
            return None
        return value

    def required(self, name: str, read: Callable[[str], str | None]) -> str | None:
        """Return what `read`, a method of this reader, returns for the header; a missing header is a problem."""
        problems_before = len(self.problems)
        value = read(name)
        is_missing = value is None and len(self.problems) == problems_before  # else `read` has named the problem
        if is_missing:
            self.problems.append(f"header {name} is missing")
        return value

    def number(self, name: str) -> int | None:
        """Return a header that is an integer >= 0; None if it is missing or invalid."""
        value = self.text(name)
        if value is None:
            return None
        digits = value.lstrip("0") or value[:1]  # of `000` one zero stays
        is_number = digits.isascii() and digits.isdigit()
        if not is_number or int(digits[:_MAX_DIGITS]) > MAX_EPOCH:
            self.problems.append(f"header {name} must be an integer >= 0")
            return None
        return int(digits)

    def trace(self) -> SpanContext | None:
        """Return the context of the sender's span; None if it is missing or invalid."""
        value = self.text(TRACEPARENT)
        if value is None:
            return None
        try:
            return parse_traceparent(value)
        except ValueError as error:
            self.problems.append(f"header {TRACEPARENT}: {error}")
            return None

    def must_equal(self, name: str, subject_token: str) -> None:
        """Add a problem if the header exists and differs from the subject's token."""
        value = self.text(name)
        if value is not None and value != subject_token:
            self.problems.append(f"header {name} differs from the subject's {subject_token!r}")
