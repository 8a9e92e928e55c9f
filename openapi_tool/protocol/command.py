"""Delivery, decoded command and settlement; an invalid command keeps its identity (protocol section 2)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from openapi_tool.frozen import frozen
from openapi_tool.protocol.errors import BadRequest
from openapi_tool.protocol.identity import ClaimedIdentity
from openapi_tool.protocol.subject import MAX_ID_BYTES

AfterExecution = Literal["suspend", "terminate"]
AFTER_EXECUTION = ("suspend", "terminate")
MAX_BODY_BYTES = 64 * 1024
HEAD_BYTES = 8 * 1024  # of a larger body are stored
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADER_LINES = 256
HEARTBEAT_NAMES = frozenset({"skills.task_watch", "skills.job_watch"})
"""Function names that a worker treats as heartbeats; no result may carry one (protocol section 3)."""


@dataclass(frozen=True, slots=True)
class BodyDigest:
    """Size in bytes and SHA-256 in hex of a body."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> BodyDigest:
        """Return size and hash of a body."""
        return cls(len(data), hashlib.sha256(data).hexdigest())


@frozen
class Delivery:
    """Delivery of a command by the bus.

    `published_at` is the stream's timestamp (UTC), the same for every redelivery; `attempt` counts deliveries from 1.
    `exhausted` means that too many executors died while running it: it gets an error result without being run. `stream`
    and `stream_sequence` locate it.

    If the body is larger than MAX_BODY_BYTES, which could fill the memory, `data` contains its first HEAD_BYTES and
    `truncated_body` size and hash of the whole. `headers_complete` is False if there were more headers than are read.
    """

    subject: str
    headers: Mapping[str, str]
    data: bytes
    published_at: datetime
    attempt: int
    stream_sequence: int
    exhausted: bool = False
    stream: str = ""
    truncated_body: BodyDigest | None = None
    headers_complete: bool = True


@frozen
class Command:
    """Decoded command. If it has a `violation`, it is not run, and its result is that error."""

    identity: ClaimedIdentity
    suffix: str
    card_id: str | None
    tool_name: str | None
    after_execution: AfterExecution | None
    violation: BadRequest | None

    @property
    def function_name(self) -> str:
        """Return the function name of the result: the tool's name, else the subject's suffix."""
        name = self.tool_name or self.suffix[:MAX_ID_BYTES]
        return f"tool.{name}" if name in HEARTBEAT_NAMES else name


@frozen
class Acknowledge:
    """Acknowledge the command: its result is committed."""


@dataclass(frozen=True, slots=True)
class Requeue:
    """Requeue the command after `delay_s` seconds: the failure is temporary or ours.

    After an outage retries are not limited. After a `defect`, which may be permanent, they count as lost runs, which
    are limited. `reason` is for the log.
    """

    delay_s: float
    defect: bool = False
    reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Record the command as a dead letter and end its deliveries: it can never get a result."""

    reason: str
    message: str
    terminate: bool


Settlement = Acknowledge | Requeue | DeadLetter
