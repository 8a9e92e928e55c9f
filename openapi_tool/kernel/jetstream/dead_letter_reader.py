"""Read and replay dead letters and abandoned commands, for `openapi-tool deadletters`.

A command is *abandoned* if the server redelivers it no more, although it has neither a result nor a dead letter.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import replace

import nats.errors
from nats.aio.client import Client
from nats.js.errors import APIError, NotFoundError

from openapi_tool.kernel.jetstream.dead_letter_records import DeadLetter, decode, unmasked_letter
from openapi_tool.kernel.jetstream.dead_letters import STREAM
from openapi_tool.kernel.jetstream.stored_messages import StoredMessage, stored_message, stream_messages
from openapi_tool.nats_client.options import DurableOptions
from openapi_tool.protocol.command import BodyDigest, Delivery

UNREADABLE = "unreadable"
_TIMEOUT_S = 5.0

_NEVER_REPLAYABLE = {  # reason of a dead letter, and why it cannot be replayed
    "bad_subject": "its subject is not that of a command; no executor would receive it",
    UNREADABLE: "the record cannot be read",
}
_REFUSALS = (nats.errors.BadHeaderError, nats.errors.BadSubjectError, nats.errors.MaxPayloadError, APIError)
"""Errors that concern one dead letter only: others can still be replayed."""

_SERVER_PREFIX = "nats-"  # of headers that control the server


class NotReplayable(Exception):
    """The command of a dead letter cannot be replayed; the message says why."""


async def dead_letters(client: Client) -> AsyncGenerator[DeadLetter, None]:
    """Yield all dead letters, oldest first. Do not collect them: they may be 512 MiB. Raises nats.errors.Error."""
    async for message in stream_messages(client, STREAM):
        yield _letter(message)


async def abandoned_commands(
    client: Client,
    options: DurableOptions,
    recorded: Collection[int],
    has_result: Callable[[Delivery], Awaitable[bool]],
) -> list[DeadLetter]:
    """Return the commands below the durable's ack floor that have neither a result nor a dead letter.

    The server redelivers none of them. For example, another executor had limited the durable's deliveries
    (`max_deliver`), and they were used up. `recorded` are the stream sequences of commands with a dead letter.
    Raises nats.errors.Error.
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
            letter = _without_record(delivery, "abandoned", why)
            found.append(replace(letter, abandoned=True))
    return found


async def replay(client: Client, letter: DeadLetter) -> None:
    """Publish the command again and delete its record. Raises NotReplayable, nats.errors.Error; then the record stays.

    Headers that control the server are removed. By such a header the sender of the command could have the new message
    refused, or dropped as a duplicate.
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
    """Return the letter with the whole command, which is read from its stream. Raises NotReplayable."""
    place = f"{letter.stream}, message {letter.stream_sequence}"  # for the messages
    stored = await stored_message(client, letter.stream, seq=letter.stream_sequence)
    if stored is None:
        raise NotReplayable(f"its record holds only a part of it, and its stream no longer holds it ({place})")
    has_same_body = BodyDigest.of(stored.data) == BodyDigest(letter.size, letter.sha256)
    if not has_same_body or stored.subject != letter.subject:
        raise NotReplayable(f"its record holds only a part of it, and its stream holds another message now ({place})")
    if not stored.headers.complete:
        raise NotReplayable("it has more headers than the executor reads, and would be refused again")
    return replace(letter, headers=stored.headers, data=stored.data)


def _letter(message: StoredMessage) -> DeadLetter:
    """Decode a record; a foreign or damaged one becomes a letter with the reason `unreadable`."""
    try:
        return decode(message.data, message.sequence)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        letter = _without_record(message.delivery, UNREADABLE, f"not a dead letter record: {type(error).__name__}")
        # `data` is the whole body of the message; a delivery may hold only the beginning.
        return replace(letter, data=message.data, headers={}, whole=False, stream="", stream_sequence=0)


def _without_record(delivery: Delivery, reason: str, message: str) -> DeadLetter:
    """Return the letter of a message that is not a dead letter record, numbered as the message."""
    letter = unmasked_letter(delivery, reason, message)
    published_at = delivery.published_at.isoformat(timespec="seconds")
    return replace(letter, number=delivery.stream_sequence, published_at=published_at, attempt=0)
