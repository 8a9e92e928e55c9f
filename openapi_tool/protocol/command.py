"""Commands of the kernel: how they arrive, and what they say (protocol section 2).

A *command* is a message that asks for one tool call. Its body names the tool and the card with the arguments, its
subject and headers say who calls. The bus delivers it again if it is not acknowledged in time, so one command may have
several *deliveries*. Each is decoded by the dialect of its protocol version (`dialect.py`) with the functions here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, cast

from openapi_tool.protocol.errors import BadRequest
from openapi_tool.protocol.identity import ClaimedIdentity
from openapi_tool.protocol.ids import MAX_ID_BYTES, is_too_long
from openapi_tool.protocol.jsontext import JsonObject, loads, storable_text
from openapi_tool.protocol.subjects import CommandSubject

AfterExecution = Literal["suspend", "terminate"]
"""What the turn does after the result: go on (`suspend`), or end (`terminate`)."""

AFTER_EXECUTION = ("suspend", "terminate")

# Limits of a command. A command beyond them is not run, and gets an error result.
MAX_BODY_BYTES = 64 * 1024
HEAD_BYTES = 8 * 1024  # of a larger body, the beginning that is kept
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADER_LINES = 256

BODY_SIZE_HEADER = "Nats-Msg-Size"  # size of a body that the server left out, in bytes
HEARTBEAT_NAMES = frozenset({"skills.task_watch", "skills.job_watch"})
"""Functions whose results a worker treats as heartbeats: no result may have these names (protocol section 3)."""

INLINE_DATA = frozenset({"args", "arguments", "result"})
"""Fields that are forbidden in a body: data belongs in cards."""


@dataclass(frozen=True, slots=True)
class BodyDigest:
    """Size of a body in bytes, and its SHA-256 in hex."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> BodyDigest:
        """Digest a body."""
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True, slots=True)
class Delivery:
    """Delivery of a command by the bus.

    - `data`: the body; of one larger than MAX_BODY_BYTES only the first HEAD_BYTES.
    - `truncated_body`: digest of the whole body if `data` is only a part of it, else None.
    - `published_at`: the stream's timestamp (UTC), the same for every delivery.
    - `number`: 1 for the first delivery, 2 for the second, and so on.
    - `stream`, `stream_sequence`: where the bus keeps the command.
    - `exhausted`: whether too many runs of the command were lost, so that it gets an error result without another run.
    - `headers_complete`: False if the headers exceed the limits, so that some are left out.
    """

    subject: str
    headers: Mapping[str, str]
    data: bytes
    published_at: datetime
    number: int
    stream_sequence: int
    exhausted: bool = False
    stream: str = ""
    truncated_body: BodyDigest | None = None
    headers_complete: bool = True

    @property
    def lacks_body(self) -> bool:
        """Return whether the server left out the body, as it does while its consumer has `headers_only` set.

        A publisher can set the same header, so this is not certain.
        """
        return not self.data and self.headers.get(BODY_SIZE_HEADER, "0") != "0"


@dataclass(frozen=True, slots=True)
class Command:
    """Decoded command.

    - `suffix`: the end of its subject, which usually names the tool, too.
    - `card_id`, `tool_name`, `after_execution`: fields of its body; None if they are missing or invalid.
    - `violation`: error for a command that breaks the protocol. Such a command is not run, and gets this error as
      result.
    """

    identity: ClaimedIdentity
    suffix: str
    card_id: str | None
    tool_name: str | None
    after_execution: AfterExecution | None
    violation: BadRequest | None

    @property
    def function_name(self) -> str:
        """Function name of the result: the tool's name, else the subject's suffix."""
        name = self.tool_name or self.suffix[:MAX_ID_BYTES]
        return f"tool.{name}" if name in HEARTBEAT_NAMES else name


@dataclass(frozen=True, slots=True)
class CommandBody:
    """Parsed body of a command.

    `fields` is empty if the body is no JSON object. `problems` are the ways in which the body breaks the protocol; the
    dialect of a version adds its own.
    """

    fields: JsonObject
    problems: list[str] = field(default_factory=list)


def read_body(delivery: Delivery) -> CommandBody:
    """Parse the body of a delivery and check the fields that all versions have. Raises nothing."""
    if delivery.truncated_body is not None:
        body = CommandBody({}, [f"the body is larger than {MAX_BODY_BYTES:,} bytes"])
    else:
        body = _parsed(delivery.data)
    if not delivery.headers_complete:
        body.problems.insert(0, f"the headers have more than {MAX_HEADER_LINES} lines or {MAX_HEADER_BYTES:,} bytes")
    return body


def _parsed(data: bytes) -> CommandBody:
    try:
        body = loads(data)
    except ValueError:
        return CommandBody({}, ["the body is not JSON"])
    if not isinstance(body, dict):
        return CommandBody({}, ["the body is not a JSON object"])
    return CommandBody(body, _problems(body))


def _problems(body: JsonObject) -> list[str]:
    """Return how the fields of a body break the protocol."""
    invalid = [name for name in ("tool_call_card_id", "tool_name") if valid_name(body.get(name)) is None]
    problems = [f"body field {name} must be a non-empty string of at most {MAX_ID_BYTES} bytes" for name in invalid]
    if valid_name(body.get("tool_name")) in HEARTBEAT_NAMES:
        problems.append("body field tool_name is reserved: workers treat results of this name as heartbeats")
    if body.get("after_execution") not in AFTER_EXECUTION:
        problems.append("body field after_execution must be 'suspend' or 'terminate'")
    inline = sorted(INLINE_DATA & body.keys())
    if inline:
        problems.append(f"inline data is forbidden in the body ({', '.join(inline)}): it belongs in the tool.call card")
    return problems


def command_of(subject: CommandSubject, identity: ClaimedIdentity, body: CommandBody) -> Command:
    """Return the decoded command; problems of identity and body make it a violation."""
    after_execution = body.fields.get("after_execution")
    problems = [*identity.problems, *body.problems]
    violation = None
    if problems:
        listed = "; ".join(problems)
        violation = BadRequest(
            f"The tool call's command breaks the protocol; the calling system must correct it: {listed}.",
            detail={"problems": problems},
        )
    return Command(
        identity=identity,
        suffix=subject.suffix,
        card_id=valid_name(body.fields.get("tool_call_card_id")),
        tool_name=valid_name(body.fields.get("tool_name")),
        after_execution=cast("AfterExecution", after_execution) if after_execution in AFTER_EXECUTION else None,
        violation=violation,
    )


def valid_name(value: object) -> str | None:
    """Return a name or id without surrounding white space; None if it is empty, too long or no text."""
    if not isinstance(value, str):
        return None
    text = storable_text(value).strip()
    return text if text and not is_too_long(text) else None
