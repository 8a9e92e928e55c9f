"""For the CLI: dead letters, abandoned commands, and the state of one command in NATS."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import nats.errors
import orjson
from nats.aio.client import Client
from nats.js.errors import APIError, KeyNotFoundError, NotFoundError

from openapi_tool.bus import leases
from openapi_tool.bus.connection import gather_stats
from openapi_tool.bus.dead_letters import STREAM, DeadLetter, decode, unmasked_letter
from openapi_tool.bus.options import DurableOptions
from openapi_tool.bus.wire import MessageHeaders, parse_headers, stored_delivery
from openapi_tool.protocol.command import BodyDigest, Delivery
from openapi_tool.protocol.dialect import claimed_identity
from openapi_tool.protocol.identity import TRACEPARENT, command_filter, wakeup_filter

UNREADABLE = "unreadable"
_TIMEOUT_S = 5.0
_NOT_FOUND = 404
_NEVER_REPLAYABLE = {
    "bad_subject": "its subject is not that of a command; no executor would receive it",
    UNREADABLE: "the record cannot be read",
}
_REFUSALS = (nats.errors.BadHeaderError, nats.errors.BadSubjectError, nats.errors.MaxPayloadError, APIError)
"""Errors that concern one dead letter only: others can still be replayed."""

_SERVER_PREFIX = "nats-"  # of headers


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """Message of a stream; its subject has U+FFFD in place of bytes that are not UTF-8."""

    stream: str
    sequence: int
    subject: str
    headers: MessageHeaders
    data: bytes
    published_at: datetime

    @property
    def delivery(self) -> Delivery:
        """Return the first delivery of the message."""
        place = self.stream, self.sequence
        return stored_delivery(place, self.subject, self.headers, self.data, self.published_at)


class NotReplayable(Exception):
    """The command of a dead letter cannot be replayed; the message says why."""


async def dead_letters(client: Client) -> AsyncGenerator[DeadLetter, None]:
    """Yield all records, oldest first; do not collect them: they may be 512 MiB. Raises nats.errors.Error."""
    async for message in stream_messages(client, STREAM):
        yield _letter(message)


async def abandoned_commands(
    client: Client,
    options: DurableOptions,
    recorded: Collection[int],
    has_result: Callable[[Delivery], Awaitable[bool]],
) -> list[DeadLetter]:
    """Return the commands below the durable's ack floor that have neither a result nor a dead letter.

    The server redelivers none: another executor's durable used up their deliveries (`max_deliver`). `recorded` are the
    stream sequences of commands with a dead letter. Raises nats.errors.Error.
    """
    jetstream = client.jetstream()
    stream = await jetstream.find_stream_name_by_subject(options.filter_subject)
    floor = (await jetstream.consumer_info(stream, options.name)).ack_floor
    found = []
    async for message in stream_messages(client, stream, options.filter_subject):
        if floor is None or message.sequence > floor.stream_seq:
            break
        delivery = message.delivery
        if message.sequence not in recorded and not await has_result(delivery):
            why = "settled without a result, and no dead letter of it is stored (a replayed or purged one has none)"
            found.append(replace(_without_record(delivery, "abandoned", why), abandoned=True))
    return found


async def replay(client: Client, letter: DeadLetter) -> None:
    """Publish the command again and delete its record. Raises NotReplayable, nats.errors.Error, and keeps it then.

    Headers that control the server are removed: with one the sender could have the message refused, or dropped as a
    duplicate.
    """
    if letter.reason in _NEVER_REPLAYABLE:
        raise NotReplayable(_NEVER_REPLAYABLE[letter.reason])
    command = letter if letter.whole else await _original(client, letter)
    jetstream = client.jetstream()
    headers = {name: value for name, value in command.headers.items() if not name.lower().startswith(_SERVER_PREFIX)}
    try:
        await jetstream.publish(command.subject, command.data, headers=headers or None, timeout=_TIMEOUT_S)
    except _REFUSALS as error:
        raise NotReplayable(f"NATS refuses it: {error}") from error
    if not letter.abandoned:
        with suppress(NotFoundError):  # deleted by another process meanwhile
            await jetstream.delete_msg(STREAM, letter.number)


async def _original(client: Client, letter: DeadLetter) -> DeadLetter:
    place = f"{letter.stream}, message {letter.stream_sequence}"
    stored = await _get(client, letter.stream, seq=letter.stream_sequence)
    if stored is None:
        raise NotReplayable(f"its record holds only a part of it, and its stream no longer holds it ({place})")
    if BodyDigest.of(stored.data) != BodyDigest(letter.size, letter.sha256) or stored.subject != letter.subject:
        raise NotReplayable(f"its record holds only a part of it, and its stream holds another message now ({place})")
    if not stored.headers.complete:
        raise NotReplayable("it has more headers than the executor reads, and would be refused again")
    return replace(letter, headers=stored.headers, data=stored.data)


async def _get(client: Client, stream: str, **wanted: object) -> StoredMessage | None:
    """Return the message of a stream that the request selects, None without one. Raises nats.errors.Error."""
    request = orjson.dumps(wanted)
    reply = await client.request(f"$JS.API.STREAM.MSG.GET.{stream}", request, timeout=_TIMEOUT_S)
    answer = orjson.loads(reply.data)
    if error := answer.get("error"):
        if error.get("code") == _NOT_FOUND:  # no such message, or no such stream
            return None
        raise APIError.from_error(error)
    found = answer["message"]
    data, headers = (base64.b64decode(found.get(name, "")) for name in ("data", "hdrs"))
    published_at = datetime.fromisoformat(found["time"])
    return StoredMessage(stream, found["seq"], found["subject"], parse_headers(headers), data, published_at)


async def stream_messages(
    client: Client, stream: str, subject: str = ">", since: datetime | None = None, first: int = 1
) -> AsyncGenerator[StoredMessage, None]:
    """Yield the messages that a stream holds now, from `since` or the sequence `first`; nothing without such a stream.

    Each is requested by itself. A consumer would be faster, but whoever may create one can have the server publish the
    messages on any subject.
    """
    last = await _get(client, stream, last_by_subj=subject)
    if last is None:
        return
    number = first if since is None else await _first_since(client, stream, since, last.sequence)
    while number <= last.sequence:
        message = await _get(client, stream, seq=number, next_by_subj=subject)
        if message is None:
            return
        yield message
        number = message.sequence + 1


async def _first_since(client: Client, stream: str, since: datetime, last: int) -> int:
    """Return a sequence at which the messages published since then begin, by binary search; `last` + 1 without one."""
    low, high = 1, last + 1
    while low < high:
        middle = (low + high) // 2
        message = await _get(client, stream, seq=middle, next_by_subj=">")
        if message is None or message.published_at >= since:
            high = middle
        else:
            low = message.sequence + 1
    return low


def _letter(message: StoredMessage) -> DeadLetter:
    """Decode a record; a foreign or damaged one becomes a letter with the reason `unreadable`."""
    try:
        return decode(message.data, message.sequence)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        letter = _without_record(message.delivery, UNREADABLE, f"not a dead letter record: {type(error).__name__}")
        # All of it: a delivery holds only the beginning of a large body.
        return replace(letter, data=message.data, headers={}, whole=False, stream="", stream_sequence=0)


def _without_record(delivery: Delivery, reason: str, message: str) -> DeadLetter:
    letter = unmasked_letter(delivery, reason, message)
    published_at = delivery.published_at.isoformat(timespec="seconds")
    return replace(letter, number=delivery.stream_sequence, published_at=published_at, attempt=0)


_MAX_SEARCHED = 100_000  # messages of the command stream
_REPLY_TIMEOUT_S = 0.5
_MAX_CLOCK_SKEW = timedelta(seconds=60)  # clocks of database and NATS differ
_MAX_WAKEUP_DELAY = timedelta(hours=1)  # after the report: a redelivery of the command publishes the doorbell again


@dataclass(frozen=True, slots=True)
class CommandState:
    """State of a command: stream position, delivery state of the durable, lease.

    `delivered` and `ack_floor` are stream sequences, None without a durable; `pending` counts undelivered commands.
    `lease` is None after a single delivery, and from an hour after its last change. `holder` holds the command, and
    `running` means that it runs it; `answering`: any replica replied.
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
    """Return the commands of a call (several if it was replayed), searched from `since`. Raises nats.errors.Error."""
    target = options.filter_subject.split(".")[6]  # cg.VERSION.PROJECT.CHANNEL.cmd.tool.TARGET.SUFFIX
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
    try:
        stream = await client.jetstream().find_stream_name_by_subject(options.filter_subject)
    except NotFoundError:
        return
    left = _MAX_SEARCHED
    async with aclosing(stream_messages(client, stream, subject, since and since - _MAX_CLOCK_SKEW)) as messages:
        async for message in messages:
            yield message
            left -= 1
            if not left:
                return


@dataclass(frozen=True, slots=True)
class StoredWakeup:
    """Stored doorbell message."""

    sequence: int
    subject: str
    published_at: datetime


async def wakeups_of(
    client: Client, options: DurableOptions, project_id: str, traceparent: str, reported_at: datetime
) -> list[StoredWakeup]:
    """Return the doorbells of a report, by its `traceparent`. Raises nats.errors.Error."""
    wakeups: list[StoredWakeup] = []
    # Not closed here, a generator would end its subscription in a task of its own, perhaps after the connection.
    async with aclosing(_searched(client, options, wakeup_filter(options.version, project_id), reported_at)) as found:
        async for message in found:
            if message.headers.get(TRACEPARENT) == traceparent:
                wakeups.append(StoredWakeup(message.sequence, message.subject, message.published_at))
            if message.published_at > reported_at + _MAX_WAKEUP_DELAY:
                break
    return wakeups


async def with_holder(client: Client, options: DurableOptions, state: CommandState) -> CommandState:
    """Ask the replicas who holds a command that is delivered and not settled. Raises nats.errors.Error."""
    if state.delivered is None or not (state.ack_floor or 0) < state.sequence <= state.delivered:
        return state
    replicas = await gather_stats(client, _REPLY_TIMEOUT_S)
    for replica in replicas:
        for work in replica.get("work") or ():
            running = state.sequence in work["running"]
            if work["durable"] == options.name and (running or state.sequence in work["waiting"]):
                return replace(state, holder=replica["instance"], running=running, answering=True)
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
    """Return reason, message and times of the call's dead letters, masked by `clean`. Raises nats.errors.Error."""
    letters = []
    async for letter in dead_letters(client):
        claimed = claimed_identity(letter.subject, letter.headers, letter.data)
        # Kernels of several protocol versions may share the stream, with equal ids.
        ids = (letter.version, claimed.project_id, claimed.tool_call_id)
        if ids == (options.version, project_id, tool_call_id):
            shown = asdict(clean(letter))
            letters.append({name: shown[name] for name in ("number", "reason", "message", "published_at", "attempt")})
    return letters
