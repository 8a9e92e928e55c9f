"""Find or create the command stream, and the durable consumer that all executors share (protocol section 1).

The kernel publishes its commands to the stream, which stores them. The *durable* is JetStream's record of which of them
were delivered and acknowledged. If it is lost, a new one resumes at the ack floor, the sequence up to which the old one
had all commands acknowledged (`ack_floor.py`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import nats.errors
import orjson
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo, DeliverPolicy, RetentionPolicy, StreamConfig
from nats.js.errors import BadRequestError, NotFoundError

from openapi_tool.kernel.jetstream.ack_floor import AckFloor, load_ack_floor
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.connection_errors import Denied
from openapi_tool.nats_client.options import DurableOptions
from openapi_tool.protocol.subjects import command_stream

log = logging.getLogger(__name__)

_REPLY_TIMEOUT_S = 5.0
_MAX_WAITING = 4_096
"""Open pull requests that a new durable allows; each executor has a few. The server's default is 512, and the setting
cannot be changed later."""

UNLIMITED = -1  # of `max_deliver`


@dataclass(frozen=True, slots=True)
class Durable:
    """A durable and its stream; `stream_created` is the stream's creation time from the server, empty if unknown."""

    stream: str
    name: str
    stream_created: str = ""


class StreamMissing(nats.errors.Error):
    """The command stream is missing, and this executor must not create it."""


async def ensure_durable(client: BusClient, options: DurableOptions) -> Durable:
    """Find or create stream and durable, and give an existing durable our settings.

    Raises nats.errors.Error, Unavailable.
    """
    stream = await _ensure_stream(client, options)
    durable = Durable(stream, options.name, await _creation_time(client, stream))
    try:
        info = await client.jetstream().consumer_info(stream, options.name)
    except NotFoundError:
        await _create_durable(client, durable, options)
    else:
        await _update_settings(client, info, options)
    return durable


async def _ensure_stream(client: BusClient, options: DurableOptions) -> str:
    """Return the stream that captures our subjects; create a missing one with the kernel's configuration."""
    if found := await command_stream_of(client, options):
        return found
    name, subjects = command_stream(options.version)
    config = StreamConfig(
        name=name,
        subjects=[subjects],
        retention=RetentionPolicy.LIMITS,
        max_age=24 * 3600,
        num_replicas=options.nats.replicas or 1,
    )
    try:
        await client.jetstream().add_stream(config)
    except BadRequestError:  # another executor created it in the meantime
        return await client.jetstream().find_stream_name_by_subject(options.filter_subject)
    log.info("created the command stream", extra={"action": "stream.created", "stream": name})
    return name


async def command_stream_of(client: BusClient, options: DurableOptions) -> str | None:
    """Return the stream that captures our subjects, None if it must be created. Raises nats.errors.Error.

    Raises StreamMissing if the stream must not be created. That may be because of a leaf node with a JetStream of its
    own, which does not see the streams of the hub. A stream that is created there would never get a command, and the
    executor would look ready. So on such a server the settings must name the JetStream domain.
    """
    try:
        return await client.jetstream().find_stream_name_by_subject(options.filter_subject)
    except NotFoundError:
        missing = f"no stream captures {options.filter_subject}"
    if not options.nats.create_stream:
        raise StreamMissing(f"{missing}, and nats.create_stream is off: start the kernel, which creates it")
    if client.unconfigured_domain:
        raise StreamMissing(
            f"{missing} in the JetStream domain {client.unconfigured_domain!r} of this server: set "
            "nats.jetstream_domain to the kernel's domain, or to this one if the stream should be created here"
        )
    return None


async def _creation_time(client: BusClient, stream: str) -> str:
    """Return the stream's creation time as the server writes it, empty if this user may not read it.

    `stream_info().created` would not do: it is a datetime, which drops the nanoseconds.
    """
    try:
        reply = await client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=_REPLY_TIMEOUT_S)
    except Denied as denied:
        log.warning("a durable that is created again would start at the stream's first command: %s", denied)
        return ""
    return str(orjson.loads(reply.data).get("created", ""))


async def _create_durable(client: BusClient, durable: Durable, options: DurableOptions) -> None:
    """Create the durable; if one existed before, let it start after the stored ack floor of that one."""
    floor = 0
    if durable.stream_created:  # else it is unknown whether a stored floor is of this stream
        current = AckFloor(durable.stream, durable.stream_created, options.filter_subject, sequence=0)
        floor = await load_ack_floor(client, durable.name, current)
    config = ConsumerConfig(
        name=durable.name,  # then the subject of the request names the filter, so that a permission can be for it only
        durable_name=durable.name,
        deliver_policy=DeliverPolicy.ALL,
        ack_policy=AckPolicy.EXPLICIT,
        max_waiting=_MAX_WAITING,
        **_settings(options),
    )
    if floor > 0:
        config = config.evolve(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=floor + 1)
    await client.jetstream().add_consumer(durable.stream, config)
    log.info("created the durable", extra={"action": "durable.created", "durable": durable.name, "from": floor + 1})


def _settings(options: DurableOptions) -> dict[str, Any]:
    """Return the settings that the durable must have, new or existing."""
    return {
        "filter_subject": options.filter_subject,
        "ack_wait": options.nats.ack_wait_s,
        "max_deliver": UNLIMITED,
        "max_ack_pending": options.nats.max_ack_pending,
    }


async def _update_settings(client: BusClient, info: ConsumerInfo, options: DurableOptions) -> None:
    """Give an existing durable our settings: to consume from it would not change them."""
    settings = _settings(options)
    before = {name: getattr(info.config, name) for name in settings}
    if before == settings:
        return
    # `backoff` would override AckWait; the server refuses `filter_subjects` beside `filter_subject`.
    config = info.config.evolve(**settings, name=options.name, backoff=None, filter_subjects=None)
    await client.jetstream().add_consumer(info.stream_name, config)
    log.info(
        "changed the durable's settings",
        extra={"action": "durable.changed", "durable": options.name, "before": before, "after": settings},
    )


async def change_durable(client: BusClient, durable: Durable, **settings: Any) -> None:
    """Change only these settings of the durable. Raises nats.errors.Error."""
    jetstream = client.jetstream()
    info = await jetstream.consumer_info(durable.stream, durable.name)
    await jetstream.add_consumer(durable.stream, info.config.evolve(**settings, name=durable.name))
