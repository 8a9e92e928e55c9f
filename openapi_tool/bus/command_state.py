"""State of one command in NATS, for `openapi-tool inspect`: message, durable, lease, doorbells, dead letters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import orjson
from nats.aio.client import Client
from nats.js.errors import KeyNotFoundError, NotFoundError

from openapi_tool.bus import leases
from openapi_tool.bus.dead_letter_reader import dead_letters, stream_messages
from openapi_tool.bus.dead_letters import DeadLetter
from openapi_tool.bus.stats import gather_stats
from openapi_tool.bus.streams import DurableOptions
from openapi_tool.bus.wire import delivery_of
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.dialect import claimed_identity
from openapi_tool.protocol.identity import TRACEPARENT
from openapi_tool.protocol.subject import command_filter, doorbell_filter

MAX_SEARCHED = 100_000
"""Maximum number of messages of the command stream to search."""
_REPLY_TIMEOUT_S = 0.5
_MAX_CLOCK_SKEW = timedelta(seconds=60)  # clocks of database and NATS differ
_MAX_DOORBELL_DELAY = timedelta(hours=1)  # after the report; redeliveries of the command publish it again


@dataclass(frozen=True, slots=True)
class CommandState:
    """State of a command: stream position, delivery state of the durable, lease.

    `delivered` and `ack_floor` are stream sequences of the durable, None without a durable. `lease` is None for a
    command that was delivered once, or whose record expired, an hour after its last change. `holder` is the replica
    that reported that it holds the command, and runs it if `running`. `answering` is True if any replica replied.
    """

    sequence: int
    subject: str
    published_at: datetime
    delivered: int | None = None
    ack_floor: int | None = None
    pending: int = 0
    paused: bool = False
    lease: dict[str, Any] | None = None
    holder: str | None = None
    running: bool = False
    answering: bool = False


async def commands_of(
    client: Client, options: DurableOptions, project_id: str, tool_call_id: str, since: datetime | None
) -> list[CommandState]:
    """Return the commands of a call in the stream, searched from `since`; of a replayed call there are several.

    Raises nats.errors.Error.
    """
    jetstream = client.jetstream()
    try:
        stream = await jetstream.find_stream_name_by_subject(options.filter_subject)
    except NotFoundError:
        return []
    target = options.filter_subject.split(".")[6]
    subject = command_filter(options.version, project_id, "*", target)
    deliveries: list[Delivery] = []
    searched = 0
    async for message in stream_messages(client, stream, subject, since and since - _MAX_CLOCK_SKEW):
        searched += 1
        delivery = delivery_of(message)
        claimed = claimed_identity(delivery.subject, delivery.headers, delivery.data)
        if claimed.tool_call_id == tool_call_id:
            deliveries.append(delivery)
        if searched >= MAX_SEARCHED:
            break
    return [await _state(client, options, stream, delivery) for delivery in deliveries]


@dataclass(frozen=True, slots=True)
class Doorbell:
    """Stored doorbell message."""

    sequence: int
    subject: str
    published_at: datetime


async def doorbells_of(
    client: Client, options: DurableOptions, project_id: str, traceparent: str, reported_at: datetime
) -> list[Doorbell]:
    """Return the doorbells of a report, which carry the `traceparent` of its inbox row. Raises nats.errors.Error."""
    try:
        stream = await client.jetstream().find_stream_name_by_subject(options.filter_subject)
    except NotFoundError:
        return []
    doorbells: list[Doorbell] = []
    searched = 0
    subject = doorbell_filter(options.version, project_id)
    async for message in stream_messages(client, stream, subject, reported_at - _MAX_CLOCK_SKEW):
        searched += 1
        published_at = message.metadata.timestamp
        if (message.headers or {}).get(TRACEPARENT) == traceparent:
            doorbells.append(Doorbell(message.metadata.sequence.stream, message.subject, published_at))
        if searched >= MAX_SEARCHED or published_at > reported_at + _MAX_DOORBELL_DELAY:
            break
    return doorbells


async def with_holder(client: Client, options: DurableOptions, state: CommandState) -> CommandState:
    """Ask the replicas who holds a command, if it is delivered and not settled. Raises nats.errors.Error."""
    if state.delivered is None or not (state.ack_floor or 0) < state.sequence <= state.delivered:
        return state
    replicas = await gather_stats(client, _REPLY_TIMEOUT_S)
    for replica in replicas:
        for work in replica.get("work") or ():
            running = state.sequence in work["running"]
            if work["durable"] == options.name and (running or state.sequence in work["waiting"]):
                return replace(state, holder=replica["instance"], running=running, answering=True)
    return replace(state, answering=bool(replicas))


async def _state(client: Client, options: DurableOptions, stream: str, delivery: Delivery) -> CommandState:
    state = CommandState(delivery.stream_sequence, delivery.subject, delivery.published_at)
    try:
        info = await client.jetstream().consumer_info(stream, options.name)
    except NotFoundError:
        return state
    return CommandState(
        state.sequence,
        state.subject,
        state.published_at,
        info.delivered.stream_seq if info.delivered else 0,
        info.ack_floor.stream_seq if info.ack_floor else 0,
        info.num_pending or 0,
        bool(getattr(info, "paused", False)),
        await _lease(client, stream, delivery.stream_sequence),
    )


async def _lease(client: Client, stream: str, sequence: int) -> dict[str, Any] | None:
    try:
        entry = await (await client.jetstream().key_value(leases.BUCKET)).get(leases.lease_key(stream, sequence))
    except (KeyNotFoundError, NotFoundError):
        return None
    value = orjson.loads(entry.value or b"null")
    return value if isinstance(value, dict) else None


async def dead_letters_of(
    client: Client,
    options: DurableOptions,
    project_id: str,
    tool_call_id: str,
    clean: Callable[[DeadLetter], DeadLetter],
) -> list[dict[str, Any]]:
    """Return reason, message and times of the call's dead letters, masked by `clean`. Raises nats.errors.Error.

    The stream may have dead letters of kernels of several protocol versions, with equal ids.
    """
    letters = []
    async for letter in dead_letters(client):
        claimed = claimed_identity(letter.subject, letter.headers, letter.data)
        ids = (letter.version, claimed.project_id, claimed.tool_call_id)
        if ids == (options.version, project_id, tool_call_id):
            shown = asdict(clean(letter))
            letters.append({name: shown[name] for name in ("number", "reason", "message", "published_at", "attempt")})
    return letters
