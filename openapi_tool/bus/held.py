"""Held commands: received but not settled; heartbeats are sent before their AckWait or lease ends.

A failed one is retried at the next check. Several tries fit into AckWait, even if each hangs until its timeout.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from sys import getsizeof
from typing import Any

import nats.errors
from nats.aio.msg import Msg

from openapi_tool.bus.leases import Lease, LeaseLost, Leases
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.dialect import claimed_identity
from openapi_tool.protocol.identity import AGENT, TRACEPARENT, parse_traceparent
from openapi_tool.protocol.subject import MAX_ID_BYTES
from openapi_tool.tools.problems import short

_IDS = ("agent_id", "agent_turn_id", "tool_call_id")
_MAX_PARSED_BYTES = 16_384  # of a body; a valid one has 1 kB
_MAX_LOGGED_CHARS = 128
_PROJECT_TOKEN = 2  # index in a subject
_OVERHEAD_BYTES = 1_024
"""Memory of a held command besides subject, headers and body: objects, reply subject, queue entries."""


class FetchMode(Enum):
    """Limit of fetching: none (UNLIMITED), one command that tests the database (PROBE), no command (NONE)."""

    UNLIMITED = auto()
    PROBE = auto()
    NONE = auto()


@dataclass(slots=True)
class Held:
    """Received command; times are on the monotonic clock, in seconds.

    `started_at` is the start of its run, `last_progress_ack` the last heartbeat; until then both are the time of its
    delivery. `flow` is (project, agent) for fair scheduling. Flags:
    `stale`: the server may have redelivered the command elsewhere.
    `forgive_on_hand_back`: handing it back takes this run off the count of lost runs.
    `settling`: its settlement is decided and in progress.
    `probe`: it was fetched to test whether calls can be committed again.
    """

    message: Msg
    delivery: Delivery
    started_at: float
    last_progress_ack: float
    stale: bool = False
    forgive_on_hand_back: bool = True
    settling: bool = False
    probe: bool = False
    lease: Lease | None = None
    flow: tuple[str, str] = field(init=False)
    memory_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        """Compute flow and memory from the delivery."""
        subject, headers = self.delivery.subject, self.delivery.headers
        self.flow = project_of(subject), headers.get(AGENT, "")[:MAX_ID_BYTES]
        # getsizeof, not len: one wide character makes CPython store the whole header in four bytes per character.
        texts = len(subject) + sum(map(getsizeof, headers)) + sum(map(getsizeof, headers.values()))
        self.memory_bytes = _OVERHEAD_BYTES + len(self.delivery.data) + texts


def project_of(subject: str) -> str:
    """Return the project in a command's subject, empty if it has none."""
    tokens = subject.split(".", _PROJECT_TOKEN + 1)
    return tokens[_PROJECT_TOKEN] if len(tokens) > _PROJECT_TOKEN else ""


def ids_of(delivery: Delivery) -> dict[str, Any]:
    """Return the ids that a command claims, each truncated to 128 characters, for log lines."""
    claimed = _claimed(delivery.subject, delivery.headers, delivery.data)
    return {"stream_sequence": delivery.stream_sequence, **claimed}


def ids_of_message(message: Msg) -> dict[str, Any]:
    """Return the claimed ids of a JetStream message that is not held, for log lines."""
    claimed = _claimed(message.subject, message.headers or {}, message.data)
    return {"stream_sequence": message.metadata.sequence.stream, **claimed}


def _claimed(subject: str, headers: Mapping[str, str], data: bytes) -> dict[str, str]:
    claimed = claimed_identity(subject, headers, data if len(data) <= _MAX_PARSED_BYTES else b"")
    protocol = subject.removeprefix("cg.").partition(".")[0]
    ids = {name: getattr(claimed, name) or "" for name in _IDS}
    found = {"protocol": protocol, "project_id": project_of(subject), **ids}
    return {name: short(value, _MAX_LOGGED_CHARS) for name, value in found.items()} | _trace(headers)


def _trace(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the trace id of the command's header; the waiting turn's would take precedence, but is not loaded yet."""
    try:
        return {"trace_id": parse_traceparent(headers.get(TRACEPARENT, "")).trace_id}
    except ValueError:
        return {}


log = logging.getLogger(__name__)

_DUE_SHARE = 0.45
"""Fraction of AckWait after the last acknowledged progress at which a heartbeat is due."""

_CHECK_SHARE = 1 / 12
"""Fraction of AckWait between two checks for due heartbeats."""

_TIMEOUT_SHARE = 1 / 10
"""Timeout of one heartbeat as a fraction of AckWait: 0.45 + 2 * (1/12 + 1/10) is less than 1."""

_MAX_CONCURRENT = 64
"""Hundreds of heartbeats are due together after a stall; sent one by one, the last would be too late."""


class Heartbeats:
    """Sends progress acknowledgements and renews leases; `ack_wait_s` is the durable's AckWait."""

    def __init__(self, leases: Leases, ack_wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.ack_wait_s = ack_wait_s
        self._leases = leases
        self._clock = clock

    @property
    def check_every_s(self) -> float:
        """Seconds between two checks."""
        return self.ack_wait_s * _CHECK_SHARE

    async def send(self, held: Iterable[Held]) -> None:
        """Send the heartbeats that are due, longest overdue first."""
        due_before = self._clock() - self.ack_wait_s * _DUE_SHARE
        due = [work for work in held if work.last_progress_ack <= due_before and not work.message.is_acked]
        due.sort(key=lambda work: work.last_progress_ack)
        permits = asyncio.Semaphore(_MAX_CONCURRENT)
        await asyncio.gather(*(self._beat(work, permits) for work in due))

    async def _beat(self, work: Held, permits: asyncio.Semaphore) -> None:
        try:
            async with asyncio.timeout(self.ack_wait_s * _TIMEOUT_SHARE), permits:
                sent_at = self._clock()
                await work.message.in_progress()
                if work.lease is not None:
                    await self._leases.renew(work.lease)
                work.last_progress_ack = sent_at  # only on success: a failed heartbeat must stay due
        except (nats.errors.Error, OSError, LeaseLost) as error:
            log.warning(
                "cannot send a heartbeat; retrying",
                extra={
                    "action": "heartbeat.failed",
                    "error": f"{type(error).__name__}: {error}",
                    "stream_sequence": work.delivery.stream_sequence,
                },
            )
