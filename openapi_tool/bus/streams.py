"""The command stream and the durable consumer that all replicas share (protocol section 1)."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo, DeliverPolicy, RetentionPolicy, StreamConfig
from nats.js.errors import BadRequestError, NotFoundError

from openapi_tool.protocol.subject import command_stream

log = logging.getLogger(__name__)

_DAY_S = 24 * 3600
_MAX_WAITING = 4_096
"""Open pulls, of which every replica has one. The server's own limit is 512, and it is never changed later."""
UNLIMITED = -1


@dataclass(frozen=True, slots=True)
class DurableOptions:
    """The durable's name and the settings that it is held to; `ack_wait_s` in seconds.

    `replicas` is how often a stream that we make is kept.
    """

    version: str
    name: str
    filter_subject: str
    ack_wait_s: float
    max_ack_pending: int
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class Durable:
    """A durable that is there, and its stream."""

    stream: str
    name: str


async def ensure_durable(client: Client, options: DurableOptions) -> Durable:
    """Find or make stream and durable, and hold the durable to our settings.

    Raises nats.errors.Error when the server refuses or does not answer.
    """
    jetstream = client.jetstream()
    stream = await _ensure_stream(jetstream, options)
    try:
        info = await jetstream.consumer_info(stream, options.name)
    except NotFoundError:
        await jetstream.add_consumer(stream, _new_durable(options))
    else:
        await _hold_to_settings(jetstream, stream, info, options)
    return Durable(stream, options.name)


async def _ensure_stream(jetstream: JetStreamContext, options: DurableOptions) -> str:
    """The stream that captures our subjects; one of the kernel's shape only where there is none."""
    try:
        return await jetstream.find_stream_name_by_subject(options.filter_subject)
    except NotFoundError:
        name, subjects = command_stream(options.version)
    try:
        await jetstream.add_stream(
            StreamConfig(
                name=name,
                subjects=[subjects],
                retention=RetentionPolicy.LIMITS,
                max_age=_DAY_S,
                num_replicas=options.replicas,
            )
        )
    except BadRequestError:  # another replica was first
        return await jetstream.find_stream_name_by_subject(options.filter_subject)
    log.info("made the command stream", extra={"action": "stream.made", "stream": name})
    return name


def _new_durable(options: DurableOptions) -> ConsumerConfig:
    """With its name the server holds us to the filter in the request's subject, so that it can be permitted alone."""
    return ConsumerConfig(
        name=options.name,
        durable_name=options.name,
        filter_subject=options.filter_subject,
        deliver_policy=DeliverPolicy.ALL,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=options.ack_wait_s,
        max_deliver=UNLIMITED,
        max_ack_pending=options.max_ack_pending,
        max_waiting=_MAX_WAITING,
    )


async def _hold_to_settings(
    jetstream: JetStreamContext, stream: str, info: ConsumerInfo, options: DurableOptions
) -> None:
    """A client that binds to a durable gets the durable's old settings, so they are set explicitly."""
    wanted = {
        "filter_subject": options.filter_subject,
        "ack_wait": options.ack_wait_s,
        "max_deliver": UNLIMITED,
        "max_ack_pending": options.max_ack_pending,
    }
    before = {name: getattr(info.config, name) for name in wanted}
    if before == wanted:
        return
    await jetstream.add_consumer(stream, info.config.evolve(**wanted, name=options.name, backoff=None))
    log.info(
        "changed the durable's settings",
        extra={"action": "durable.changed", "durable": options.name, "before": before, "after": wanted},
    )
