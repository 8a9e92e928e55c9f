"""Held command: received and not settled yet; it waits for a slot or runs in one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from sys import getsizeof
from typing import Any

from nats.aio.msg import Msg

from openapi_tool.bus.leases import Lease
from openapi_tool.protocol.claims import claimed_identity
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.identity import AGENT, TRACEPARENT
from openapi_tool.protocol.subject import MAX_ID_BYTES
from openapi_tool.protocol.trace import parse_traceparent
from openapi_tool.tools.problems import short

_IDS = ("agent_id", "agent_turn_id", "tool_call_id")
_MAX_READ_BYTES = 16_384  # of a body; a command has 1 kB
_SHOWN_CHARS = 128
_PROJECT_TOKEN = 2  # index in a subject
_OVERHEAD_BYTES = 1_024
"""Memory of a held command beside subject, headers and body: objects, reply subject, queue entries."""


class FetchMode(Enum):
    """Commands that may be fetched: as many as can be held (FREE), a single PROBE, or NONE."""

    FREE = auto()
    PROBE = auto()
    NONE = auto()


@dataclass(slots=True)
class Held:
    """A received command; times are on the monotonic clock, in seconds.

    `last_progress_ack` is the time of its delivery or of the last heartbeat sent. These are True if:
    `stale`: the server may have redelivered the command elsewhere since.
    `forgive_on_hand_back`: handing it back takes this run off the count of lost runs.
    `settling`: its settlement is decided and under way.
    `probe`: it was fetched to test whether calls can be committed again.

    `flow` is (project, agent) for fair scheduling; `size` is its memory in bytes.
    """

    message: Msg
    delivery: Delivery
    since: float
    last_progress_ack: float
    stale: bool = False
    forgive_on_hand_back: bool = True
    settling: bool = False
    probe: bool = False
    lease: Lease | None = None
    flow: tuple[str, str] = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        """Compute flow and size from the delivery."""
        subject, headers = self.delivery.subject, self.delivery.headers
        self.flow = project_of(subject), headers.get(AGENT, "")[:MAX_ID_BYTES]
        # Python may store four bytes per character: one such character in a text is enough.
        texts = len(subject) + sum(map(getsizeof, headers)) + sum(map(getsizeof, headers.values()))
        self.size = _OVERHEAD_BYTES + len(self.delivery.data) + texts


def project_of(subject: str) -> str:
    """Return the project in a command's subject, empty if it has none."""
    tokens = subject.split(".", _PROJECT_TOKEN + 1)
    return tokens[_PROJECT_TOKEN] if len(tokens) > _PROJECT_TOKEN else ""


def ids_of(delivery: Delivery) -> dict[str, Any]:
    """Return what a command says of its identity, for log lines; each id cut to 128 characters."""
    claimed = _claimed(delivery.subject, delivery.headers, delivery.data)
    return {"stream_sequence": delivery.stream_sequence, **claimed}


def ids_of_message(message: Msg) -> dict[str, Any]:
    """Return the same of a message of JetStream that is not held."""
    claimed = _claimed(message.subject, message.headers or {}, message.data)
    return {"stream_sequence": message.metadata.sequence.stream, **claimed}


def _claimed(subject: str, headers: Mapping[str, str], data: bytes) -> dict[str, str]:
    claimed = claimed_identity(subject, headers, data if len(data) <= _MAX_READ_BYTES else b"")
    protocol = subject.removeprefix("cg.").partition(".")[0]
    ids = {name: getattr(claimed, name) or "" for name in _IDS}
    found = {"protocol": protocol, "project_id": project_of(subject), **ids}
    return {name: short(value, _SHOWN_CHARS) for name, value in found.items()} | _trace(headers)


def _trace(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the trace id in the command's own header; the waiting turn's, which counts, is not loaded yet."""
    try:
        return {"trace_id": parse_traceparent(headers.get(TRACEPARENT, "")).trace_id}
    except ValueError:
        return {}
