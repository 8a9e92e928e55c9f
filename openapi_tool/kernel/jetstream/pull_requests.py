"""What pull consumer and look-ahead share: subject and status of requests, and the end of a subscription."""

from __future__ import annotations

import asyncio
import logging

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import Header

from openapi_tool.kernel.jetstream.streams import Durable
from openapi_tool.nats_client.client import BusClient

log = logging.getLogger(__name__)

_UNSUBSCRIBE_TIMEOUT_S = 2.0


def next_subject(durable: Durable) -> str:
    """Return the subject of requests for the next messages of a durable."""
    return f"$JS.API.CONSUMER.MSG.NEXT.{durable.stream}.{durable.name}"


def server_status(message: Msg) -> str | None:
    """Return the status with which the server answers a request; None for a stored message.

    A stored message may have a header of that name, too. It differs by its reply subject, on which it is acknowledged.
    """
    is_stored_message = bool(message.reply)
    if is_stored_message or not message.headers:
        return None
    return message.headers.get(Header.STATUS)


async def unsubscribe(client: BusClient, subscription: Subscription) -> None:
    """End a subscription; messages that the server has already sent are still received."""
    try:
        if client.is_connected:
            async with asyncio.timeout(_UNSUBSCRIBE_TIMEOUT_S):
                await subscription.drain()  # type: ignore[no-untyped-call]
    except (nats.errors.Error, OSError) as error:
        log.info(
            "cannot unsubscribe; messages in transit are redelivered after AckWait",
            extra={"action": "pull.broken_off", "error": f"{type(error).__name__}: {error}"},
        )
    finally:
        client.drop(subscription)
