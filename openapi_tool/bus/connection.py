"""One NATS connection for everything."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from openapi_tool.protocol.errors import Unavailable

__all__ = ["INBOX", "BusOptions", "Client", "Denied", "connected"]

log = logging.getLogger(__name__)

INBOX = "_INBOX.openapi_tool"
"""Where answers to our requests come in: a prefix of our own, so that we need not hear other clients' answers."""

_CONNECT_TIMEOUT_S = 5
_RECONNECT_WAIT_S = 0.5
_PING_S = 10
_DENIAL = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"')


@dataclass(frozen=True, slots=True)
class BusOptions:
    """Where the servers are and how to authenticate; `login` holds the client library's own options."""

    servers: Sequence[str] = field(repr=False)
    name: str
    tls: ssl.SSLContext | None = None
    login: Mapping[str, str] = field(default_factory=dict, repr=False)


class Denied(nats.errors.Error):
    """The server does not let us use `subject`, which only an operator can mend."""

    def __init__(self, subject: str) -> None:
        super().__init__(
            f"{subject} is denied. Only an operator can mend this: `openapi-tool nats permissions` lists what is needed"
        )


class _PermissionClient(Client):
    """A client whose requests end with Denied at once where the server refuses them; by itself it would only wait."""

    def __init__(self) -> None:
        super().__init__()
        self._asking: dict[asyncio.Future[str], str] = {}
        self._deaf_since: int | None = None

    async def request(self, subject: str, *request: Any, **options: Any) -> Msg:
        """Ask and wait for the answer. Raises nats.errors.Error, Denied where the server refuses."""
        if self._deaf_since == self.stats["reconnects"]:
            raise Denied(f"{INBOX}.>")
        denied: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asking = asyncio.ensure_future(super().request(subject, *request, **options))
        self._asking[denied] = subject
        try:
            await asyncio.wait((asking, denied), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise Denied(denied.result())
            return asking.result()
        finally:
            del self._asking[denied]
            asking.cancel()

    async def hear_error(self, error: Exception) -> None:
        """Log whatever the client reports; a denial ends the requests that it is about."""
        denied = _DENIAL.search(str(error).lower())
        if denied is None:
            log.warning("NATS: %s", error, extra={"action": "nats.error", "error": type(error).__name__})
            return
        kind, subject = denied.groups()
        subject = self._end(subject) if kind == "publish" else self._end_all(subject)
        log.error("NATS: %s", Denied(subject), extra={"action": "nats.denied", "subject": subject})

    def _end(self, lowered: str) -> str:
        """End requests on a subject, which the client reports in lower case; returns it as it is spelled, if known."""
        asked = {subject for subject in self._asking.values() if subject.lower() == lowered}
        for denied, subject in self._asking.items():
            if subject in asked and not denied.done():
                denied.set_result(subject)
        return next(iter(asked), lowered)

    def _end_all(self, lowered: str) -> str:
        """Without an inbox no request can be answered, for as long as this connection lasts."""
        if not lowered.startswith(INBOX.lower()):
            return lowered
        self._deaf_since = self.stats["reconnects"]
        for denied in self._asking:
            if not denied.done():
                denied.set_result(f"{INBOX}.>")
        return f"{INBOX}.>"


@asynccontextmanager
async def connected(options: BusOptions) -> AsyncIterator[Client]:
    """A connection that outlives any outage, the one at the start included."""
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

    client = _PermissionClient()
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
