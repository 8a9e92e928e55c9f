"""What NATS knows of one call, for `openapi-tool inspect`: commands with their leases, doorbells, dead letters.

The kernel sends a *command* for a call. A *doorbell* is the message that tells the kernel of its result; both are
stored in the command stream. A *lease* is the right of one executor to run a command that was delivered more than once
(`leases.py`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import orjson
from nats.aio.client import Client
from nats.js.errors import KeyNotFoundError, NotFoundError

from openapi_tool.kernel.jetstream import leases
from openapi_tool.kernel.jetstream.dead_letter_reader import dead_letters
from openapi_tool.kernel.jetstream.dead_letter_records import DeadLetter
from openapi_tool.kernel.jetstream.stored_messages import StoredMessage, stream_messages
from openapi_tool.nats_client.options import DurableOptions
from openapi_tool.nats_records.replica_statistics import gather_stats
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.dialect import claimed_identity
from openapi_tool.protocol.headers import TRACEPARENT
from openapi_tool.protocol.subjects import command_filter, doorbell_filter

_TARGET = 6  # index of the target in `cg.VERSION.PROJECT.CHANNEL.cmd.tool.TARGET.SUFFIX`, the subject of commands
_MAX_SEARCHED = 100_000  # messages of the command stream, in one search
_REPLY_TIMEOUT_S = 0.5  # for the replies of all replicas together
_MAX_CLOCK_SKEW = timedelta(seconds=60)  # between the clocks of database and NATS
_MAX_DOORBELL_DELAY = timedelta(hours=1)  # after the report; a late redelivery of the command may publish a doorbell


@dataclass(frozen=True, slots=True)
class CommandState:
    """State of a command.

    - `delivered`, `ack_floor`: stream sequences up to which the durable has delivered commands, and up to which all are
      acknowledged; None without a durable.
    - `pending`: number of commands that the durable has not delivered.
    - `paused`: whether the durable is paused.
    - `lease`: record of the command's lease; None after a single delivery, and from an hour after its last change on.
    - `holder`: name of the replica that holds the command; `running`: whether this replica runs it.
    - `answering`: whether any replica replied when asked.
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
    """Return the commands of a call that were published from `since` on; several if the call was replayed.

    Raises nats.errors.Error.
    """
    target = options.filter_subject.split(".")[_TARGET]
    subject = command_filter(options.version, project_id, "*", target)
    deliveries: list[Delivery] = []
    async for message in _searched(client, options, subject, since):
        delivery = message.delivery
        claimed = claimed_identity(delivery.subject, delivery.headers, delivery.data)
        if claimed.tool_call_id == tool_call_id:
            deliveries.append(delivery)
    return [await _state(client, options, delivery) for delivery in deliveries]


async def _searched(
    client: Client, options: DurableOptions, subject: str, since: datetime | None
) -> AsyncGenerator[StoredMessage, None]:
    """Yield the messages of a subject in the command stream, at most _MAX_SEARCHED."""
    try:
        stream = await client.jetstream().find_stream_name_by_subject(options.filter_subject)
    except NotFoundError:
        return
    if since is not None:
        since -= _MAX_CLOCK_SKEW
    searched = 0
    async with aclosing(stream_messages(client, stream, subject, since)) as messages:
        async for message in messages:
            yield message
            searched += 1
            if searched == _MAX_SEARCHED:
                return


@dataclass(frozen=True, slots=True)
class StoredDoorbell:
    """Stored doorbell message."""

    sequence: int
    subject: str
    published_at: datetime


async def doorbells_of(
    client: Client, options: DurableOptions, project_id: str, traceparent: str, reported_at: datetime
) -> list[StoredDoorbell]:
    """Return the doorbells of a report, by its `traceparent`. Raises nats.errors.Error."""
    doorbells: list[StoredDoorbell] = []
    subject = doorbell_filter(options.version, project_id)
    # `aclosing` ends the generator here. Otherwise it would end in a task of its own, perhaps after the connection.
    async with aclosing(_searched(client, options, subject, reported_at)) as messages:
        async for message in messages:
            if message.headers.get(TRACEPARENT) == traceparent:
                doorbells.append(StoredDoorbell(message.sequence, message.subject, message.published_at))
            if message.published_at > reported_at + _MAX_DOORBELL_DELAY:
                break
    return doorbells


async def with_holder(client: Client, options: DurableOptions, state: CommandState) -> CommandState:
    """Ask the replicas who holds a command that is delivered and not settled. Raises nats.errors.Error."""
    if state.delivered is None:  # there is no durable
        return state
    may_be_held = (state.ack_floor or 0) < state.sequence <= state.delivered
    if not may_be_held:
        return state
    replicas = await gather_stats(client, _REPLY_TIMEOUT_S)
    for replica in replicas:
        work = replica.get("work") or {}
        is_running = state.sequence in work.get("running", ())
        is_waiting = state.sequence in work.get("waiting", ())
        shares_durable = replica.get("durable") == options.name  # sequences of another stream mean other commands
        if shares_durable and (is_running or is_waiting):
            return replace(state, holder=replica["instance"], running=is_running, answering=True)
    return replace(state, answering=bool(replicas))


async def _state(client: Client, options: DurableOptions, delivery: Delivery) -> CommandState:
    state = CommandState(delivery.stream_sequence, delivery.subject, delivery.published_at)
    try:
        info = await client.jetstream().consumer_info(delivery.stream, options.name)
    except NotFoundError:
        return state
    return replace(
        state,
        delivered=info.delivered.stream_seq if info.delivered else 0,
        ack_floor=info.ack_floor.stream_seq if info.ack_floor else 0,
        pending=info.num_pending or 0,
        paused=bool(getattr(info, "paused", False)),
        lease=await _lease(client, delivery.stream, delivery.stream_sequence),
    )


async def _lease(client: Client, stream: str, sequence: int) -> dict[str, Any] | None:
    try:
        bucket = await client.jetstream().key_value(leases.BUCKET)
        entry = await bucket.get(leases.lease_key(stream, sequence))
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
    """Return reason, message and times of the call's dead letters, masked by `clean`. Raises nats.errors.Error."""
    letters = []
    async for letter in dead_letters(client):
        claimed = claimed_identity(letter.subject, letter.headers, letter.data)
        # Kernels of several protocol versions may share the stream, with equal ids, so the version is compared, too.
        ids = (letter.version, claimed.project_id, claimed.tool_call_id)
        if ids == (options.version, project_id, tool_call_id):
            shown = asdict(clean(letter))
            letters.append({name: shown[name] for name in ("number", "reason", "message", "published_at", "attempt")})
    return letters
