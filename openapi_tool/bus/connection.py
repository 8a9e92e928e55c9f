"""One NATS connection for everything."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import nats.errors
from nats.aio.client import Client

from openapi_tool.bus.client import INBOX, BusClient
from openapi_tool.protocol.errors import Unavailable

__all__ = ["BusOptions", "Client", "connected", "outage_as_unavailable"]

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5
_RECONNECT_WAIT_S = 0.5
_PING_S = 10


@dataclass(frozen=True, slots=True)
class BusOptions:
    """Where the servers are and how to authenticate; `login` holds the client library's own options."""

    servers: Sequence[str] = field(repr=False)
    name: str
    tls: ssl.SSLContext | None = None
    login: Mapping[str, str] = field(default_factory=dict, repr=False)


@asynccontextmanager
async def connected(options: BusOptions) -> AsyncIterator[Client]:
    """A connection that outlives any outage, the one at the start included.

    Raises Unavailable where TLS is asked for and no server offers it.
    """
    closing = asyncio.Event()
    client = await _connect(options, closing)
    try:
        yield client
    finally:
        closing.set()
        await client.close()


@contextmanager
def outage_as_unavailable() -> Iterator[None]:
    """Turn whatever NATS or the way to it fails with into Unavailable."""
    try:
        yield
    except (nats.errors.Error, OSError) as error:
        raise Unavailable(f"NATS: {type(error).__name__}: {error}") from error


async def _connect(options: BusOptions, closing: asyncio.Event) -> Client:
    async def log_disconnect() -> None:
        if not closing.is_set():
            log.warning("NATS is away", extra={"action": "nats.disconnected"})

    client = BusClient(tls_required=options.tls is not None)
    settings: dict[str, Any] = {
        "servers": list(options.servers),
        "name": options.name,
        "tls": options.tls,
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "allow_reconnect": True,
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": _RECONNECT_WAIT_S,
        "ping_interval": _PING_S,
        "inbox_prefix": INBOX,
        "error_cb": client.hear_error,
        "disconnected_cb": log_disconnect,
        "reconnected_cb": _log_reconnect,
        **options.login,
    }
    with outage_as_unavailable():
        await client.connect(**settings)
    return client


async def _log_reconnect() -> None:
    log.info("NATS is back", extra={"action": "nats.reconnected"})
