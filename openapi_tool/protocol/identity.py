"""Subjects, and the caller's identity in subject and headers (protocol sections 1 and 2)."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping

from openapi_tool.protocol import frozen
from openapi_tool.protocol.errors import Unanswerable
from openapi_tool.protocol.records import CardRecord, call_metadata

MAX_ID_BYTES = 512
"""Limit of ids in UTF-8. Project, agent, turn and step are in B-tree indexes, whose rows are limited to 2,704 bytes:
the database would refuse the result of a longer one after the call was billed. Of a tool call id, which a model
provider may choose, indexes contain only the hash.
"""

_TOKENS_BEFORE_SUFFIX = 7
_MAX_TOKEN_BYTES = 1_024
_MAX_SHOWN_CHARS = 100
_TOKEN = re.compile(r"[^\s.*>\x00-\x20\x7f\ud800-\udfff]+")
_VERSION = re.compile(r"v\d+r\d+")
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f\ud800-\udfff]")
"""Control characters (jsonb refuses some), and surrogates, which represent bytes that are not UTF-8."""


def is_token(text: str) -> bool:
    """Return whether a text can be one token of a published subject."""
    return bool(_TOKEN.fullmatch(text)) and len(text.encode(errors="replace")) <= _MAX_TOKEN_BYTES


def is_too_long(value: str) -> bool:
    """Return whether a text exceeds MAX_ID_BYTES."""
    if len(value) * 4 <= MAX_ID_BYTES:  # UTF-8 has at most four bytes per character
        return False
    return len(value) > MAX_ID_BYTES or len(value.encode(errors="replace")) > MAX_ID_BYTES


@frozen
class CommandSubject:
    """Parsed subject of a tool command; `suffix` may hold dots."""

    version: str
    project_id: str
    channel_id: str
    target: str
    suffix: str


def parse_command_subject(subject: str) -> CommandSubject:
    """Parse a `cmd.tool` subject. Raises Unanswerable for any other subject and for control characters."""
    tokens = subject.split(".", _TOKENS_BEFORE_SUFFIX)
    if _FORBIDDEN.search(subject):
        raise Unanswerable("bad_subject", f"{subject!r} holds a control character or bytes that are not UTF-8")
    if len(tokens) <= _TOKENS_BEFORE_SUFFIX or tokens[0] != "cg" or tokens[4:6] != ["cmd", "tool"]:
        raise Unanswerable("bad_subject", f"{subject!r} is not a tool command's subject")
    if any(is_too_long(token) for token in tokens[2:4]):
        raise Unanswerable("bad_subject", f"project or channel of {subject!r} is longer than {MAX_ID_BYTES} bytes")
    return CommandSubject(tokens[1], tokens[2], tokens[3], tokens[6], tokens[7])


def subject_in_version(subject: str, version: str) -> str:
    """Return a command's subject or pattern in another version; any other text unchanged."""
    root, _, rest = subject.partition(".")
    known, _, rest = rest.partition(".")
    return f"cg.{version}.{rest}" if root == "cg" and _VERSION.fullmatch(known) else subject


def command_filter(version: str, project: str, channel: str, target: str) -> str:
    """Return the subject filter of an executor of `target`; `*` matches any project or channel."""
    return f"cg.{version}.{project}.{channel}.cmd.tool.{target}.>"


def command_stream(version: str) -> tuple[str, str]:
    """Return name and subjects of the kernel's command stream."""
    return f"cg_cmd_{version}", f"cg.{version}.*.*.cmd.*.*.>"


def default_durable(version: str, target: str) -> str:
    """Return the durable of the kernel's own executor: one that shares it takes over without losing a command."""
    return f"tool_{target}_openapi_cmd_{version}"


def wakeup_filter(version: str, project_id: str) -> str:
    """Return the subject filter of all doorbells of a project."""
    return f"cg.{version}.{project_id}.*.cmd.agent.*.wakeup"


def wakeup_subject(version: str, project_id: str, channel_id: str, worker_target: str) -> str:
    """Return the doorbell subject of an agent's worker. Raises ValueError for an invalid or overlong token.

    The server closes the connection on a control line over 4 KiB.
    """
    for token in (project_id, channel_id, worker_target):
        if not is_token(token):
            raise ValueError(f"{token[:_MAX_SHOWN_CHARS]!r} cannot be a token of a doorbell's subject")
    return f"cg.{version}.{project_id}.{channel_id}.cmd.agent.{worker_target}.wakeup"


def scoped_project(scope: str, project_id: str) -> str:
    """Return a project's name among kernels of several versions; no project id contains the blank."""
    return f"{scope} {project_id}".lstrip()


def bare_project(scoped: str) -> str:
    """Return the id of a scoped project."""
    return scoped.rpartition(" ")[2]


def is_storable_id(value: object) -> bool:
    """Return whether an indexed column takes a value: None or a short text."""
    return value is None or (isinstance(value, str) and not is_too_long(value))


_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACE_ID = re.compile(r"[0-9a-f]{32}")


@frozen
class SpanContext:
    """Span identity: 32 hex digits of trace, 16 of span, 2 of flags."""

    trace_id: str
    span_id: str
    flags: str = "01"

    def traceparent(self) -> str:
        """Return the header value, version 00 (https://www.w3.org/TR/trace-context/#traceparent-header)."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


@frozen
class TraceLink:
    """Parent of the report's span; `linked` is the inbound span of another trace, as in OpenTelemetry."""

    parent: SpanContext
    tracestate: str | None
    linked: SpanContext | None


def parse_traceparent(header: str) -> SpanContext:
    """Parse a `traceparent`. Raises ValueError if it is malformed."""
    match = _TRACEPARENT.fullmatch(header.strip())
    if match is None:
        raise ValueError("traceparent must look like 00-<32 hex>-<16 hex>-<2 hex>")
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or not trace_id.strip("0") or not span_id.strip("0"):
        raise ValueError("traceparent holds a forbidden version, an all-zero id or trailing data")
    return SpanContext(trace_id, span_id, flags)


def new_root(trace_id: str | None = None) -> SpanContext:
    """Return a root span of this trace, or of a new one if `trace_id` is not W3C's."""
    valid = trace_id is not None and _TRACE_ID.fullmatch(trace_id) is not None and trace_id.strip("0")
    return SpanContext(trace_id if trace_id and valid else secrets.token_hex(16), new_span_id())


def new_span_id() -> str:
    """Return 16 random hex digits, never all zero."""
    return f"{secrets.randbits(64) or 1:016x}"


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

CONTROL_FIELDS = frozenset(
    {
        "project_id",
        "channel_id",
        "channel",
        "agent_id",
        "agent_turn_id",
        "turn_epoch",
        "step_id",
        "tool_call_id",
        "trace_id",
        "traceparent",
        "tracestate",
        "parent_agent_id",
        "parent_agent_turn_id",
        "parent_step_id",
        "parent_traceparent",
        "recursion_depth",
    }
)
"""Names of ids of a call and its caller, as fields of a body."""

MAX_EPOCH = 2**63 - 1
_MAX_DIGITS = 20  # enough to exceed MAX_EPOCH; int() raises ValueError for thousands of digits


@frozen
class ClaimedIdentity:
    """Identity as a command claims it, and the problems found in it."""

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
    context_box_id: str | None = None


@frozen
class CallIdentity:
    """Identity of a call that can get a result."""

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
    recursion_depth: int | None = None
    context_box_id: str | None = None


class HeaderReader:
    """Case-insensitive reader of a command's headers; adds to `problems`."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._exact = headers
        self._folded = {name.lower(): value for name, value in headers.items()}
        self.problems: list[str] = []

    def text(self, name: str) -> str | None:
        """Return a header without surrounding white space; None if it is empty."""
        value = (self._exact.get(name) or self._folded.get(name.lower()) or "").strip()
        if "\x00" in value:
            self.problems.append(f"header {name} holds a NUL character")
            return None
        return value or None

    def id(self, name: str) -> str | None:
        """Return a header that is an id."""
        value = self.text(name)
        if value is not None and is_too_long(value):
            self.problems.append(f"header {name} is longer than {MAX_ID_BYTES} bytes")
            return None
        return value

    def required(self, name: str, read: Callable[[str], str | None]) -> str | None:
        """Return what `read` returns; a missing header is a problem."""
        before = len(self.problems)
        value = read(name)
        if value is None and len(self.problems) == before:
            self.problems.append(f"header {name} is missing")
        return value

    def number(self, name: str) -> int | None:
        """Return a header that is an integer >= 0."""
        value = self.text(name)
        if value is None:
            return None
        digits = value.lstrip("0") or value[:1]
        if not (digits.isascii() and digits.isdigit() and int(digits[:_MAX_DIGITS]) <= MAX_EPOCH):
            self.problems.append(f"header {name} must be an integer >= 0")
            return None
        return int(digits)

    def trace(self) -> SpanContext | None:
        """Return the context of the sender's span."""
        value = self.text(TRACEPARENT)
        if value is None:
            return None
        try:
            return parse_traceparent(value)
        except ValueError as error:
            self.problems.append(f"header {TRACEPARENT}: {error}")
            return None

    def must_equal(self, name: str, subject_token: str) -> None:
        """Add a problem if the header differs from the subject's token."""
        value = self.text(name)
        if value is not None and value != subject_token:
            self.problems.append(f"header {name} differs from the subject's {subject_token!r}")


def read_identity(subject: CommandSubject, headers: Mapping[str, str]) -> ClaimedIdentity:
    """Return the claimed identity with all problems of the headers; guesses nothing."""
    reader = HeaderReader(headers)
    reader.must_equal(PROJECT, subject.project_id)
    reader.must_equal(CHANNEL, subject.channel_id)
    return ClaimedIdentity(
        project_id=subject.project_id,
        channel_id=subject.channel_id,
        agent_id=reader.required(AGENT, reader.id),
        agent_turn_id=reader.id(TURN),
        turn_epoch=reader.number(EPOCH),
        step_id=reader.id(STEP),
        tool_call_id=reader.required(TOOL_CALL, reader.text),
        parent_step_id=reader.id(PARENT_STEP),
        recursion_depth=reader.number(DEPTH),
        trace=reader.trace(),
        tracestate=reader.text(TRACESTATE),
        problems=tuple(reader.problems),
    )


def identify(claimed: ClaimedIdentity, card: CardRecord | None) -> CallIdentity:
    """Complete a command's identity from its tool.call card (protocol section 2).

    Raises Unanswerable if agent, turn or tool call id stay unknown.
    """
    metadata = call_metadata(card, claimed.tool_call_id)
    agent_id = claimed.agent_id or _id(metadata.get("author_id"))
    turn_id = claimed.agent_turn_id or _id(metadata.get("agent_turn_id"))
    call_id = claimed.tool_call_id or (card.tool_call_id if card and metadata else None)
    if agent_id is None or turn_id is None or not call_id:
        raise Unanswerable(
            "no_identity",
            f"neither command nor tool.call card name agent, turn (at most {MAX_ID_BYTES} bytes each) and tool call",
        )
    return CallIdentity(
        project_id=claimed.project_id,
        channel_id=claimed.channel_id,
        agent_id=agent_id,
        agent_turn_id=turn_id,
        turn_epoch=claimed.turn_epoch or 0,
        tool_call_id=call_id,
        step_id=claimed.step_id or _id(metadata.get("step_id")),
        parent_step_id=claimed.parent_step_id or _id(metadata.get("parent_step_id")),
        trace_id=claimed.trace.trace_id if claimed.trace else _id(metadata.get("trace_id")),
        trace=claimed.trace,
        tracestate=claimed.tracestate,
        recursion_depth=claimed.recursion_depth,
        context_box_id=claimed.context_box_id,
    )


def _id(value: object) -> str | None:
    return value if isinstance(value, str) and value and is_storable_id(value) else None
