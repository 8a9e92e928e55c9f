"""Connections to the upstream: public addresses only, TLS handshakes shared fairly."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from ipaddress import ip_address
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.tracing import Trace

from openapi_tool.concurrency.fair_semaphore import FairSemaphore
from openapi_tool.jina.url_policy import is_public
from openapi_tool.open_files import with_free_file
from openapi_tool.telemetry import metrics

log = logging.getLogger(__name__)

Resolver = AbstractResolver

PROJECT = "project"
"""Request extension with the project id, for fair shares of connections."""

HANDSHAKES = 16
"""Maximum concurrent connection attempts: handshakes then take at most 10 ms of an iteration of the event loop."""

requesting_project: ContextVar[str] = ContextVar("project", default="")

on_connected: ContextVar[Callable[[], Callable[[], None] | None]] = ContextVar("on_connected", default=lambda: None)
"""Weak reference to the function to call once the current task's request has a connection.

A connection keeps the context of the task that opened it, and must not keep that task's call in memory.
"""


class PublicResolver(Resolver):
    """DNS resolver that returns public addresses only.

    aiohttp connects to these. A check in a separate look-up could see other addresses (DNS rebinding).
    """

    def __init__(self, inner: Resolver) -> None:
        self._inner = inner

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return all addresses. Raises OSError if one is not public."""
        found = await self._inner.resolve(host, port, family)
        refused = [address["host"] for address in found if not is_public(ip_address(address["host"]))]
        if refused:
            log.error(
                "host of the upstream resolves to an address that is not public; nothing sent",
                extra={"action": "egress.address_refused", "host": host, "addresses": refused},
            )
            raise OSError("an address that is not public")
        return found

    async def close(self) -> None:
        """Close the inner resolver."""
        await self._inner.close()


def _measured(semaphore: FairSemaphore, name: str) -> FairSemaphore:
    metrics.PERMITS_USED.set_function(lambda: semaphore.used, name)
    metrics.PERMITS_WAITING.set_function(lambda: semaphore.waiting, name)
    return semaphore


class Connector(aiohttp.TCPConnector):
    """Connector that shares its connections, and HANDSHAKES concurrent attempts to open one, fairly among projects.

    Batches of one project may need all connections while slow pages load. A TLS handshake takes 0.5 ms of CPU: without
    the limit, 300 of one project in one iteration of the event loop delayed all other projects by 150 ms.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._handshakes = _measured(FairSemaphore(HANDSHAKES), "tls_handshakes")
        self._in_use = _measured(FairSemaphore(self.limit), "upstream_connections")

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's
    ) -> ResponseHandler:
        create = super()._create_connection
        async with self._handshakes.permit(requesting_project.get()):
            return await with_free_file(lambda: create(req, traces, timeout))

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's
    ) -> Connection:
        """Wait if all are in use, and call `on_connected`."""
        project = requesting_project.get()
        await self._in_use.take(project)
        try:
            connection = await super().connect(req, traces, timeout)
        except BaseException:
            self._in_use.give(project)
            raise
        connection.add_callback(partial(self._in_use.give, project))
        if connected := on_connected.get()():
            connected()
        return connection
