"""The process's only NATS connection, and the publisher of doorbells (protocol section 6)."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import nats.errors
import nats.js.errors
from tenacity import RetryCallState, stop_after_delay, wait_exponential_jitter

from openapi_tool.bus.client import INBOX, LISTED_BY, BusClient
from openapi_tool.bus.connection_errors import SERVERS_SETTING, describe_connection_error, describe_jetstream_error
from openapi_tool.concurrency import retried
from openapi_tool.protocol.command import Wakeup
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.tools.problems import short

__all__ = ["BusClient", "BusOptions", "connected", "outage_as_unavailable"]

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5
_RECONNECT_WAIT_S = 0.5
_PING_INTERVAL_S = 10
_CLOSE_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class BusOptions:
    """Servers and authentication; `login` holds options of nats-py.

    `once` makes a single connection attempt, for CLI commands. Error messages contain `listed_by` (the command that
    prints the needed permissions), `where` (hosts and ports of the servers) and `setting` (the setting with the
    servers). `on_trouble` is called with the reason of every failed attempt until the first connection.
    """

    servers: Sequence[str] = field(repr=False)
    name: str
    tls: ssl.SSLContext | None = None
    login: Mapping[str, str] = field(default_factory=dict, repr=False)
    domain: str | None = None
    inbox: str = INBOX
    once: bool = False
    listed_by: str = LISTED_BY
    where: str = ""
    setting: str = SERVERS_SETTING
    on_trouble: Callable[[str], None] | None = None


@asynccontextmanager
async def connected(options: BusOptions) -> AsyncIterator[BusClient]:
    """Connect, and reconnect after any outage; wait while NATS is unavailable at the start.

    Raises Unavailable if TLS is required and no server offers it, or with `once` if the attempt fails.
    """
    closing = asyncio.Event()
    client = await _connect(options, closing)
    try:
        yield client
    finally:
        closing.set()
        await _close(client)


async def _close(client: BusClient) -> None:
    """Close; an unresponsive server may never accept the pending writes."""
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await client.close()
    except (nats.errors.Error, OSError) as error:
        log.info(
            "cannot close the NATS connection gracefully",
            extra={"action": "nats.connection_dropped", "error": f"{type(error).__name__}: {error}"},
        )


@contextmanager
def outage_as_unavailable(where: str = "") -> Iterator[None]:
    """Translate errors of NATS and of the network into Unavailable, which names the server."""
    try:
        yield
    except (nats.errors.Error, OSError) as error:
        raise Unavailable(describe_jetstream_error(error, where)) from error


async def _connect(options: BusOptions, closing: asyncio.Event) -> BusClient:
    async def log_disconnect() -> None:
        if not closing.is_set() and not options.once:
            log.warning("lost the connection to NATS; reconnecting", extra={"action": "nats.disconnected"})

    client = BusClient(
        tls_required=options.tls is not None,
        domain=options.domain,
        inbox=options.inbox,
        listed_by=options.listed_by,
        quiet=options.once,
        where=options.where,
        setting=options.setting,
        on_trouble=options.on_trouble,
    )
    settings: dict[str, Any] = {
        "servers": list(options.servers),
        "name": options.name,
        "tls": options.tls,
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "allow_reconnect": not options.once,
        "max_reconnect_attempts": 1 if options.once else -1,
        "reconnect_time_wait": _RECONNECT_WAIT_S,
        "ping_interval": _PING_INTERVAL_S,
        "inbox_prefix": options.inbox,
        "error_cb": client.on_error,
        "disconnected_cb": log_disconnect,
        "reconnected_cb": _log_reconnect,
        **options.login,
    }
    with outage_as_unavailable():
        try:
            await client.connect(**settings)
        except asyncio.CancelledError:
            client.abort()  # nats-py would leave the socket of a login under way open
            raise
        except (nats.errors.Error, OSError) as error:
            if not options.once:
                raise
            cause = describe_connection_error(client.reported_error or error, options.where, options.setting)
            raise Unavailable(f"cannot connect to {cause}") from error
    return client


async def _log_reconnect() -> None:
    log.info("reconnected to NATS", extra={"action": "nats.reconnected"})


_RETRY_LIMIT_S = 3.0
"""Retry limit in seconds, while the call occupies a slot; then the command is handed back and retried."""

_WAIT = wait_exponential_jitter(multiplier=0.1, max=1.0, jitter=0.1)
_TIMEOUT_S = 2.0
_OUTAGE = (nats.errors.Error, OSError)
_PERMANENT = (nats.errors.BadSubjectError, nats.errors.MaxPayloadError, nats.js.errors.BadRequestError)
"""Permanent errors. All others are outages, also "no responders" and "no stream": a stream may have no leader."""


@dataclass(frozen=True, slots=True)
class WakeupPublisher:
    """Publishes doorbells; if that is impossible, the kernel's periodic scan of the inbox finds the result."""

    client: BusClient

    async def publish(self, wakeup: Wakeup) -> bool:
        """Publish a doorbell; return False if NATS refuses it permanently.

        Raises Unavailable in an outage of NATS: the command is then requeued, and its next delivery publishes again.
        """
        try:
            return await retried(
                lambda: self._publish(wakeup),
                on=_OUTAGE,
                wait=_WAIT,
                stop=stop_after_delay(_RETRY_LIMIT_S),
                before_sleep=_log_retry,
            )
        except _OUTAGE as error:
            raise Unavailable(f"NATS: cannot publish the doorbell: {type(error).__name__}: {error}") from error

    async def _publish(self, wakeup: Wakeup) -> bool:
        try:
            await self.client.publish_to_stream(wakeup.subject, wakeup.body, dict(wakeup.headers), _TIMEOUT_S)
        except _PERMANENT as error:
            log.warning(
                "cannot publish the doorbell; the kernel's inbox scan will find the result",
                extra={
                    "action": "doorbell.failed",
                    "subject": short(wakeup.subject),
                    "error": f"{type(error).__name__}: {error}",
                },
            )
            return False
        return True


def _log_retry(state: RetryCallState) -> None:
    outage = state.outcome and state.outcome.exception()
    log.info("cannot publish the doorbell; retrying: %s", outage, extra={"action": "doorbell.retried"})
