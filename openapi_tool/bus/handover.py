"""Hand-over of the durable to the kernel's own executor, which needs its own settings on it (protocol section 12)."""

from __future__ import annotations

from dataclasses import dataclass

import nats.errors
from nats.aio.client import Client
from nats.js.api import ConsumerInfo
from nats.js.errors import NotFoundError

from openapi_tool.bus.durable_state import DurableMissing
from openapi_tool.bus.stats import gather_stats
from openapi_tool.bus.streams import DurableOptions
from openapi_tool.tools.problems import counted

KERNEL_ACK_WAIT_S, KERNEL_MAX_DELIVER = 30.0, 3
"""The kernel executor's own settings of the durable (protocol section 1)."""

_REPLY_TIMEOUT_S = 0.5
"""Seconds to wait for the statistics of all running replicas."""

_MAX_NAMED = 5


class StillPulled(nats.errors.Error):
    """An executor still consumes from the durable."""


@dataclass(frozen=True, slots=True)
class DurableShown:
    """State of the durable for the command line; `waiting` commands were never delivered."""

    durable: str
    stream: str
    filter_subject: str
    ack_wait_s: float
    max_deliver: int
    waiting: int
    unacknowledged: int
    open_pull_requests: int


async def durable_shown(client: Client, options: DurableOptions) -> DurableShown:
    """Return the durable. Raises DurableMissing, or another nats.errors.Error."""
    return _shown(await _info(client, options))


async def hand_to_kernel(client: Client, options: DurableOptions) -> tuple[DurableShown, DurableShown]:
    """Set the durable to the settings that the kernel's own executor needs; return its state before and after.

    With our settings a command that has a result, but whose acknowledgement was lost, is redelivered every few seconds
    forever. The kernel's executor fails on it each time, and its later calls time out.

    Raises StillPulled while an executor consumes from it, DurableMissing, or another nats.errors.Error.
    """
    before = await _info(client, options)
    if before.num_waiting:
        raise StillPulled(f"the durable {options.name!r} still has open pull requests ({before.num_waiting})")
    # A replica without a free slot, or during an outage of the database, has no open pull request.
    replicas = await gather_stats(client, _REPLY_TIMEOUT_S)
    running = [str(each["instance"]) for each in replicas if options.name in each.get("durables", [options.name])]
    if running:
        named = ", ".join(running[:_MAX_NAMED]) + (", …" if len(running) > _MAX_NAMED else "")
        replicas_text = f"{counted(len(running), 'running replica')} ({named})"
        raise StillPulled(f"the durable {options.name!r} still has {replicas_text}")
    config = before.config.evolve(
        name=options.name, ack_wait=KERNEL_ACK_WAIT_S, max_deliver=KERNEL_MAX_DELIVER, backoff=None
    )
    after = await client.jetstream().add_consumer(before.stream_name, config)
    return _shown(before), _shown(after)


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
