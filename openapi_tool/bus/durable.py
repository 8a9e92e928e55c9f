"""State of the durable, and clock of the NATS server (protocol section 12)."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import nats.errors
import orjson

from openapi_tool.bus.client import BusClient
from openapi_tool.bus.streams import Durable

log = logging.getLogger(__name__)

_WINDOW_S = 30.0  # in which a sample counts
_WARN_ABOVE_S = 2.0  # offset of the local clock
_TOLERANCE_S = 0.05  # in addition to the error bounds of two samples


@dataclass(frozen=True, slots=True)
class _Sample:
    """Offset of the server's clock from our monotonic clock, measured `at` a monotonic time."""

    at: float
    offset_s: float
    error_s: float


class ServerClock:
    """Server time, estimated from its replies: as in NTP, the one with the shortest round trip of the last 30 s counts.

    Publish times of commands are server time. By a clock 27 s ahead, no time would be left of the worker's 30 s, less
    3 s for the commit.
    """

    def __init__(self) -> None:
        self._samples: list[_Sample] = []
        self._offset_s: float | None = None
        self._warned_unknown = False
        self._warned = False

    def time(self) -> float:
        """Return the server's time in seconds since the epoch; before the first reply that of the local clock."""
        if self._offset_s is not None:
            return time.monotonic() + self._offset_s
        if not self._warned_unknown:
            self._warned_unknown = True
            log.warning("the time of NATS is not known yet; using the local clock", extra={"action": "clock.local"})
        return time.time()

    @property
    def local_offset_s(self) -> float | None:
        """Seconds by which the local wall clock is ahead of the server's; None before the first reply."""
        return None if self._offset_s is None else time.time() - time.monotonic() - self._offset_s

    def observe(self, server_time: float, requested_at: float, replied_at: float) -> None:
        """Add a reply: its `server_time` in seconds since the epoch, both other times on the monotonic clock."""
        newest = _Sample(replied_at, server_time - (requested_at + replied_at) / 2, (replied_at - requested_at) / 2)
        oldest_at = replied_at - _WINDOW_S
        self._samples = [each for each in self._samples if each.at >= oldest_at and _agree(each, newest)]
        self._samples.append(newest)
        self._offset_s = min(self._samples, key=lambda sample: sample.error_s).offset_s
        off_s = self.local_offset_s or 0.0
        too_far = abs(off_s) > _WARN_ABOVE_S
        if too_far and not self._warned:
            log.warning(
                "the local clock is %.1f s %s that of NATS, which is used; synchronize the local clock",
                abs(off_s),
                "ahead of" if off_s > 0 else "behind",
                extra={"action": "clock.offset", "offset_s": round(off_s, 3)},
            )
        self._warned = too_far


def _agree(sample: _Sample, newest: _Sample) -> bool:
    """Return whether both can be right: a suspended machine stops monotonic time, which changes the offset."""
    return abs(sample.offset_s - newest.offset_s) <= sample.error_s + newest.error_s + _TOLERANCE_S


REPLY_TIMEOUT_S = 2.0
_NANOSECONDS = 1_000_000_000
_NOT_FOUND = 404
_MAX_INACTIVE_NS = 3 * _NANOSECONDS
"""Silence of a failed follower: others are active every second, and the server reports a frozen one as online."""


class DurableMissing(nats.errors.Error):
    """The durable or its stream does not exist."""


class ErrorReply(nats.errors.Error):
    """JetStream replied with an error, such as no leader, or with an invalid message."""


HINDRANCES = ("headers_only", "max_batch", "max_expires", "max_bytes", "backoff", "priority_groups")
"""Settings of a durable with which the server refuses our pull requests, sends commands without their body, or does not
redeliver them after AckWait."""


@dataclass(frozen=True, slots=True)
class DurableState:
    """Configuration and progress of a durable.

    `paused_until` (RFC 3339) is empty unless it is paused. `leader` is empty on a single server. Without a `quorum` the
    leader still answers, but delivers nothing. `hindrances` are the names of set HINDRANCES.
    """

    filters: tuple[str, ...]
    ack_wait_s: float
    max_deliver: int
    max_ack_pending: int
    paused_until: str
    leader: str
    pending: int
    ack_pending: int
    ack_floor: int
    quorum: bool
    hindrances: tuple[str, ...] = ()


async def observe(client: BusClient, durable: Durable, clock: ServerClock) -> DurableState:
    """Return the state of the durable, and pass the server's time to `clock`.

    Raises DurableMissing, ErrorReply, or without a reply another nats.errors.Error or OSError.
    """
    requested_at = time.monotonic()
    reply = await client.request(f"$JS.API.CONSUMER.INFO.{durable.stream}.{durable.name}", b"", timeout=REPLY_TIMEOUT_S)
    replied_at = time.monotonic()
    try:
        info = orjson.loads(reply.data)
    except ValueError:
        info = None
    if not isinstance(info, dict):
        raise ErrorReply("the reply is not a JSON object")
    if error := info.get("error"):
        kind = DurableMissing if error.get("code") == _NOT_FOUND else ErrorReply
        raise kind(f"{error.get('description')} ({error.get('err_code')})")
    if timestamp := info.get("ts"):  # absent before nats-server 2.10
        clock.observe(_seconds(timestamp), requested_at, replied_at)
    return _state(info)


def _seconds(timestamp: object) -> float:
    try:
        return datetime.fromisoformat(str(timestamp)).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ErrorReply("the reply's timestamp `ts` cannot be parsed") from None


def _state(info: Mapping[str, Any]) -> DurableState:
    config = info.get("config") or {}
    cluster = info.get("cluster") or {}
    return DurableState(
        filters=tuple(config.get("filter_subjects") or [config.get("filter_subject", "")]),
        ack_wait_s=config.get("ack_wait", 0) / _NANOSECONDS,
        max_deliver=config.get("max_deliver", 0),
        max_ack_pending=config.get("max_ack_pending", 0),
        paused_until=config.get("pause_until", "") if info.get("paused") else "",
        leader=cluster.get("leader", ""),
        pending=info.get("num_pending", 0),
        ack_pending=info.get("num_ack_pending", 0),
        ack_floor=(info.get("ack_floor") or {}).get("stream_seq", 0),
        quorum=_has_quorum(cluster.get("replicas") or []),
        hindrances=tuple(name for name in HINDRANCES if config.get(name)),
    )


def _has_quorum(followers: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the leader and its active `followers` are a majority."""
    active = [peer for peer in followers if not peer.get("offline") and peer.get("active", 0) < _MAX_INACTIVE_NS]
    return 2 * (1 + len(active)) > 1 + len(followers)
