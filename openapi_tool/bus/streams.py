"""Command stream and the durable consumer that all executors share (protocol section 1)."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import nats.errors
import orjson
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo, DeliverPolicy, RetentionPolicy, StreamConfig
from nats.js.errors import BadRequestError, NotFoundError

from openapi_tool.bus.client import BusClient, Denied
from openapi_tool.bus.kv_stores import AckFloor, load_ack_floor
from openapi_tool.protocol.identity import command_stream

log = logging.getLogger(__name__)

_REPLY_TIMEOUT_S = 5.0
_DAY_S = 24 * 3600
_MAX_WAITING = 4_096
"""Maximum of open pull requests, one per executor. The server's default is 512; it cannot be changed later."""

UNLIMITED = -1


@dataclass(frozen=True, slots=True)
class DurableOptions:
    """Name and settings of the durable; `ack_wait_s` in seconds.

    With `create_stream` a missing command stream is created. `replicas` is the number of replicas of streams and
    buckets created here; None takes that of the command stream.
    """

    version: str
    name: str
    filter_subject: str
    ack_wait_s: float
    max_ack_pending: int
    replicas: int | None = None
    create_stream: bool = True


@dataclass(frozen=True, slots=True)
class Durable:
    """An existing durable and its stream; `created` is the stream's creation time from the server, empty if unknown."""

    stream: str
    name: str
    created: str = ""


class StreamMissing(nats.errors.Error):
    """There is no command stream, and this executor must not create it."""


async def ensure_durable(client: Client, options: DurableOptions) -> Durable:
    """Find or create stream and durable, and update the durable to our settings.

    Raises nats.errors.Error if the server refuses or does not answer.
    """
    jetstream = client.jetstream()
    stream = await _ensure_stream(client, jetstream, options)
    created = await _creation_time(client, stream)
    try:
        info = await jetstream.consumer_info(stream, options.name)
    except NotFoundError:
        await _create_durable(client, Durable(stream, options.name, created), options)
    else:
        await _update_settings(jetstream, stream, info, options)
    return Durable(stream, options.name, created)


async def _creation_time(client: Client, stream: str) -> str:
    """Return the creation time of a stream, empty without permission to read it."""
    try:  # the server's own text: `stream_info().created` is a datetime, which drops the nanoseconds
        reply = await client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=_REPLY_TIMEOUT_S)
    except Denied as denied:
        log.warning("a durable that is created again would start at the stream's first command: %s", denied)
        return ""
    return str(orjson.loads(reply.data).get("created", ""))


async def _create_durable(client: Client, durable: Durable, options: DurableOptions) -> None:
    """Create the durable; if one existed before, start after its ack floor."""
    config, floor = _new_durable(options), 0
    if durable.created:
        # A stored floor counts only if its stream, creation time and filter are these.
        wanted = AckFloor(durable.stream, durable.created, options.filter_subject, sequence=0)
        floor = await load_ack_floor(client, durable.name, wanted)
    if floor > 0:
        config = config.evolve(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=floor + 1)
    await client.jetstream().add_consumer(durable.stream, config)
    log.info("created the durable", extra={"action": "durable.created", "durable": durable.name, "from": floor + 1})


async def replica_count(client: Client, options: DurableOptions) -> int:
    """Return the number of replicas for streams and buckets created here: the setting, else that of the command stream.

    1 if there is no command stream yet. Raises nats.errors.Error.
    """
    if options.replicas is not None:
        return options.replicas
    jetstream = client.jetstream()
    try:
        stream = await jetstream.find_stream_name_by_subject(options.filter_subject)
        return (await jetstream.stream_info(stream)).config.num_replicas or 1
    except NotFoundError:
        return 1
    except Denied as denied:
        log.warning(
            "buckets and streams are created with one replica, because the command stream's number is not known: %s",
            denied,
            extra={"action": "replicas.unknown"},
        )
        return 1


def _check_may_create(client: Client, options: DurableOptions) -> None:
    """Raise StreamMissing if the kernel's command stream may exist in another JetStream domain.

    A leaf node with its own JetStream does not see the streams of the hub. A stream created there would never get a
    command, and the executor would look ready.
    """
    missing = f"no stream captures {options.filter_subject}"
    if not options.create_stream:
        raise StreamMissing(f"{missing}, and nats.create_stream is off: start the kernel, which creates it")
    if isinstance(client, BusClient) and client.unconfigured_domain:
        raise StreamMissing(
            f"{missing} in the JetStream domain {client.unconfigured_domain!r} of this server: set "
            "nats.jetstream_domain to the kernel's domain, or to this one if the stream should be created here"
        )


async def command_stream_of(client: Client, options: DurableOptions) -> str | None:
    """Return the stream that captures our subjects, None if it may be created. Raises nats.errors.Error."""
    try:
        return await client.jetstream().find_stream_name_by_subject(options.filter_subject)
    except NotFoundError:
        _check_may_create(client, options)
        return None


async def _ensure_stream(client: Client, jetstream: JetStreamContext, options: DurableOptions) -> str:
    """Return the stream that captures our subjects; create a missing one with the kernel's configuration."""
    if found := await command_stream_of(client, options):
        return found
    name, subjects = command_stream(options.version)
    try:
        await jetstream.add_stream(
            StreamConfig(
                name=name,
                subjects=[subjects],
                retention=RetentionPolicy.LIMITS,
                max_age=_DAY_S,
                num_replicas=options.replicas or 1,
            )
        )
    except BadRequestError:  # another executor created it in the meantime
        return await jetstream.find_stream_name_by_subject(options.filter_subject)
    log.info("created the command stream", extra={"action": "stream.created", "stream": name})
    return name


def _new_durable(options: DurableOptions) -> ConsumerConfig:
    """Return the configuration of a new durable.

    With `name` the subject of the create request contains the filter, so that NATS permissions can be limited to it.
    """
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


async def _update_settings(
    jetstream: JetStreamContext, stream: str, info: ConsumerInfo, options: DurableOptions
) -> None:
    """Update an existing durable: consuming from it does not change its settings."""
    settings = {
        "filter_subject": options.filter_subject,
        "ack_wait": options.ack_wait_s,
        "max_deliver": UNLIMITED,
        "max_ack_pending": options.max_ack_pending,
    }
    before = {name: getattr(info.config, name) for name in settings}
    if before == settings:
        return
    # `backoff` would override AckWait; the server refuses `filter_subjects` beside `filter_subject`.
    await jetstream.add_consumer(
        stream, info.config.evolve(**settings, name=options.name, backoff=None, filter_subjects=None)
    )
    log.info(
        "changed the durable's settings",
        extra={"action": "durable.changed", "durable": options.name, "before": before, "after": settings},
    )


async def reset_durable(client: Client, durable: Durable, floor: int) -> None:
    """Reset the durable to redeliver everything after `floor`, because it skipped commands while its filter was wrong.

    Redelivered commands that have a result are only acknowledged. Needs nats-server 2.14 (NATS ADR-60). Raises
    nats.errors.Error.
    """
    await client.jetstream().reset_consumer(durable.stream, durable.name, seq=floor + 1)


async def change_max_ack_pending(client: Client, durable: Durable, limit: int) -> None:
    """Change only this setting of the durable. Raises nats.errors.Error."""
    jetstream = client.jetstream()
    info = await jetstream.consumer_info(durable.stream, durable.name)
    await jetstream.add_consumer(durable.stream, info.config.evolve(name=durable.name, max_ack_pending=limit))


async def restore_settings(client: Client, durable: Durable, options: DurableOptions) -> None:
    """Restore the settings without which calls are lost: the filter, and unlimited deliveries.

    AckWait, `max_ack_pending` and a pause stay: an executor with other settings, or an operator, may have set them.
    Raises nats.errors.Error.
    """
    jetstream = client.jetstream()
    info = await jetstream.consumer_info(durable.stream, durable.name)
    config = info.config.evolve(name=options.name, max_deliver=UNLIMITED)
    config = config.evolve(filter_subject=options.filter_subject, filter_subjects=None)
    await jetstream.add_consumer(durable.stream, config)
