"""Hand the durable over to the kernel's own executor (protocol section 12), for `openapi-tool nats durable`.

The kernel has a tool executor of its own, which this program replaces by consuming from the same durable. An operator
who goes back to it first stops all our executors. The durable then needs other settings than ours.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import nats.errors
from nats.aio.client import Client
from nats.js.api import ConsumerInfo
from nats.js.errors import NotFoundError

from openapi_tool.kernel.jetstream.durable import DurableMissing
from openapi_tool.kernel.jetstream.stored_messages import stream_messages
from openapi_tool.nats_client.options import DurableOptions
from openapi_tool.nats_records.replica_statistics import gather_stats
from openapi_tool.protocol.command import Delivery
from openapi_tool.tools.wording import counted

# Settings of the durable that the kernel's own executor needs (protocol section 1).
KERNEL_ACK_WAIT_S = 30.0
KERNEL_MAX_DELIVER = 3

_STATS_TIMEOUT_S = 0.5  # for the replies of all replicas together
_MAX_NAMED = 5  # replicas that a message names
_ACK_TIMEOUT_S = 5.0


class StillPulled(nats.errors.Error):
    """An executor still consumes from the durable."""


@dataclass(frozen=True, slots=True)
class DurableShown:
    """State of the durable for the command line.

    `waiting` is the number of commands that were never delivered, `unacknowledged` of those that were, but are not
    settled.
    """

    durable: str
    stream: str
    filter_subject: str
    ack_wait_s: float
    max_deliver: int
    waiting: int
    unacknowledged: int
    open_pull_requests: int


async def durable_shown(client: Client, options: DurableOptions) -> DurableShown:
    """Return the state of the durable. Raises DurableMissing, or another nats.errors.Error."""
    return _shown(await _info(client, options))


HasResult = Callable[[Delivery], Awaitable[bool]]
"""Returns whether a command has a result."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """The durable before and after, and the number of commands that were acknowledged; None if none was looked for."""

    before: DurableShown
    after: DurableShown
    acknowledged: int | None


async def hand_to_kernel(client: Client, options: DurableOptions, has_result: HasResult | None) -> HandOver:
    """Acknowledge the commands that have a result, and set what the kernel's own executor needs.

    A command that has a result, but whose acknowledgement was lost, is redelivered. The kernel's executor fails on the
    existing result, and the command occupies its only slot for 30 s at each delivery. With our settings the number of
    deliveries is unlimited, so such commands are acknowledged here; without `has_result` none is.

    Raises StillPulled, DurableMissing, or another nats.errors.Error.
    """
    before = await _info(client, options)
    await _refuse_if_pulled(client, options, before)
    config = before.config.evolve(
        name=options.name, ack_wait=KERNEL_ACK_WAIT_S, max_deliver=KERNEL_MAX_DELIVER, backoff=None
    )
    acknowledged = None if has_result is None else await _acknowledge_answered(client, before, options, has_result)
    await client.jetstream().add_consumer(before.stream_name, config)
    return HandOver(_shown(before), _shown(await _info(client, options)), acknowledged)


async def _refuse_if_pulled(client: Client, options: DurableOptions, durable: ConsumerInfo) -> None:
    """Raise StillPulled if an executor runs, or has an open pull request.

    Without a free slot, or during an outage of the database, a running replica has no open pull request. A replica that
    does not name its durable may consume from this one.
    """
    replicas = await gather_stats(client, _STATS_TIMEOUT_S)
    running = [str(replica["instance"]) for replica in replicas if replica.get("durable", options.name) == options.name]
    if running:
        named = ", ".join(running[:_MAX_NAMED])
        if len(running) > _MAX_NAMED:
            named += ", …"
        raise StillPulled(
            f"the durable {options.name!r} still has {counted(len(running), 'running replica')} ({named})"
        )
    if durable.num_waiting:
        raise StillPulled(f"the durable {options.name!r} still has open pull requests ({durable.num_waiting})")


async def _acknowledge_answered(
    client: Client, durable: ConsumerInfo, options: DurableOptions, has_result: HasResult
) -> int:
    """Acknowledge the delivered commands that have a result; return their number.

    They are not received for that: it would also count as a delivery of commands without a result, and the kernel's
    executor gets only three deliveries of each. Instead, the deliveries that other processes received are acknowledged.
    The subject of an acknowledgement names the command's sequence, by which the server finds it; the server ignores the
    other tokens.
    """
    floor = durable.ack_floor.stream_seq if durable.ack_floor else 0
    delivered = durable.delivered.stream_seq if durable.delivered else 0
    acknowledged = 0
    if floor < delivered:
        async for message in stream_messages(client, durable.stream_name, options.filter_subject, first=floor + 1):
            if message.sequence > delivered:
                break
            if await has_result(message.delivery):
                # $JS.ACK.STREAM.DURABLE.DELIVERIES.SEQUENCE.…: only the sequence in the stream matters
                subject = f"$JS.ACK.{durable.stream_name}.{durable.name}.1.{message.sequence}.1.1.0"
                await client.request(subject, b"+ACK", timeout=_ACK_TIMEOUT_S)
                acknowledged += 1
    return acknowledged


async def _info(client: Client, options: DurableOptions) -> ConsumerInfo:
    jetstream = client.jetstream()
    try:
        stream = await jetstream.find_stream_name_by_subject(options.filter_subject)
        info: ConsumerInfo = await jetstream.consumer_info(stream, options.name)
    except NotFoundError:
        raise DurableMissing(f"there is no durable {options.name!r} for {options.filter_subject}") from None
    return info


def _shown(info: ConsumerInfo) -> DurableShown:
    config = info.config
    return DurableShown(
        durable=info.name,
        stream=info.stream_name,
        filter_subject=config.filter_subject or ", ".join(config.filter_subjects or ()),
        ack_wait_s=config.ack_wait or 0.0,
        max_deliver=config.max_deliver or 0,
        waiting=info.num_pending or 0,
        unacknowledged=info.num_ack_pending or 0,
        open_pull_requests=info.num_waiting or 0,
    )
