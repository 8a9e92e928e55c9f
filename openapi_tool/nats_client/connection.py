"""Opening of a NATS connection that outlives outages, and translation of the errors of NATS into our own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import nats.errors
import nats.js.errors

from openapi_tool.nats_client.client import RECONNECT_WAIT_S, BusClient
from openapi_tool.nats_client.connection_errors import describe_jetstream_error
from openapi_tool.nats_client.options import BusOptions
from openapi_tool.protocol.errors import Unavailable

log = logging.getLogger(__name__)

_PING_INTERVAL_S = 10  # two missing answers mean that the connection is lost
_CLOSE_TIMEOUT_S = 3.0
OUTAGE = (nats.errors.Error, OSError)
"""Errors of an outage. Among them are "no responders" and "no stream", as a stream may have no leader for a while."""


@asynccontextmanager
async def connected(options: BusOptions) -> AsyncIterator[BusClient]:
    """Connect, and reconnect after any outage; wait while NATS is unavailable at the start.

    Raises Unavailable if TLS is required and no server offers it, or with `once` if the attempt fails.
    """
    client = await _connect(options)
    try:
        yield client
    finally:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):  # an unresponsive server may never accept the pending writes
                await client.close()
        except OUTAGE as error:
            log.info(
                "cannot close the NATS connection gracefully",
                extra={"action": "nats.connection_dropped", "error": f"{type(error).__name__}: {error}"},
            )


@contextmanager
def outage_as_unavailable(where: str = "") -> Iterator[None]:
    """Translate errors of NATS and of the network into Unavailable; `where` are the servers, for its message."""
    try:
        yield
    except OUTAGE as error:
        raise Unavailable(describe_jetstream_error(error, where)) from error


async def _connect(options: BusOptions) -> BusClient:
    client = BusClient(options)

    async def log_disconnect() -> None:
        if not client.is_closed and not options.once:
            log.warning("lost the connection to NATS; reconnecting", extra={"action": "nats.disconnected"})

    async def log_reconnect() -> None:
        log.info("reconnected to NATS", extra={"action": "nats.reconnected"})

    try:
        await client.connect(
            list(options.nats.servers),
            name=options.name,
            connect_timeout=5,
            allow_reconnect=not options.once,
            max_reconnect_attempts=1 if options.once else -1,
            reconnect_time_wait=RECONNECT_WAIT_S,  # nats-py declares an int, and takes a float
            ping_interval=_PING_INTERVAL_S,
            inbox_prefix=options.nats.inbox_prefix,
            error_cb=client.on_error,
            disconnected_cb=log_disconnect,
            reconnected_cb=log_reconnect,
        )
    except asyncio.CancelledError:
        client.abort()  # nats-py would leave the socket of a login under way open
        raise
    except OUTAGE as error:
        if not options.once:
            raise Unavailable(describe_jetstream_error(error, where="")) from error
        client.reported_error = client.reported_error or error
        if client.last_error is not None:  # an attempt was made
            await client.close()  # nats-py would leave the session of a WebSocket open
        raise Unavailable(f"cannot connect to {client.outage}") from error
    return client
