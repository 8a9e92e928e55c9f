"""State of the durable as the server reports it (protocol section 12).

The durable is the consumer that all executors share, JetStream's record of which commands are delivered and
acknowledged. In a cluster one server, the *leader*, delivers its commands; *followers* keep copies of the record.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import nats.errors
import orjson

from openapi_tool.kernel.jetstream.streams import Durable
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.server_clock import ServerClock

REPLY_TIMEOUT_S = 2.0
_NANOSECONDS = 1_000_000_000  # in a second
_NOT_FOUND = 404
_MAX_INACTIVE_NS = 3 * _NANOSECONDS
"""Silence after which a follower is taken for failed. A working one is active every second. The field `offline` is not
enough: the server reports a frozen follower as online."""


class DurableMissing(nats.errors.Error):
    """The durable or its stream does not exist."""


class ErrorReply(nats.errors.Error):
    """JetStream replied with an error, such as no leader, or with an invalid message."""


HINDRANCES = (
    "headers_only",  # the server sends commands without their body
    "max_batch",  # the server refuses our pull requests
    "max_expires",  # the same
    "max_bytes",  # the same
    "backoff",  # the server uses these times instead of AckWait
    "priority_groups",  # the server refuses our pull requests
    "inactive_threshold",  # the server deletes the durable while no replica runs
)
"""Settings of a durable that stop, delay or repeat deliveries if they have any value, with the reason."""

_UNCHANGEABLE = {"ack_policy": "explicit", "replay_policy": "instant"}
"""Settings that cannot be changed once the durable exists. With any other value calls are lost or late."""


@dataclass(frozen=True, slots=True)
class DurableState:
    """Configuration and progress of a durable.

    - `paused_until`: RFC 3339; empty unless the durable is paused.
    - `leader`: the server that delivers; empty on a single server.
    - `pending`, `ack_pending`: numbers of commands that were never delivered, and that are not acknowledged.
    - `ack_floor`: stream sequence up to which all commands are acknowledged.
    - `quorum`: whether most of the servers are there; without them the leader still answers, but delivers nothing.
    - `hindrances`: names of the HINDRANCES that have a value.
    - `unusable`: wrong settings that cannot be changed, for people to read.
    - `replicas`: 0 for as many as the stream has.
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
    unusable: tuple[str, ...] = ()
    in_memory: bool = False
    replicas: int = 0


async def observe(client: BusClient, durable: Durable, clock: ServerClock) -> DurableState:
    """Return the state of the durable, and pass the server's time to `clock`.

    Raises DurableMissing and ErrorReply; without a reply another nats.errors.Error or OSError.
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
    """Return a timestamp such as `2026-01-31T12:00:00.5Z` in seconds since the epoch. Raises ErrorReply."""
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
        unusable=_unusable(config),
        in_memory=bool(config.get("mem_storage")),
        replicas=config.get("num_replicas", 0),
    )


def _has_quorum(followers: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the leader and its active `followers` are a majority; `active` is how long one has been silent."""
    active = [peer for peer in followers if not peer.get("offline") and peer.get("active", 0) < _MAX_INACTIVE_NS]
    working_servers, all_servers = 1 + len(active), 1 + len(followers)
    return 2 * working_servers > all_servers


def _unusable(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return each wrong setting that cannot be changed, with its value, such as `ack_policy 'none'`."""
    wrong = {name: config[name] for name, ours in _UNCHANGEABLE.items() if config.get(name, ours) != ours}
    return tuple(f"{name} {value!r}" for name, value in wrong.items())
