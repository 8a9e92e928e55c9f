"""Connection to NATS for one command; a failure is printed in one line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

from openapi_tool.bootstrap import Bootstrap
from openapi_tool.bus.connection import BusClient, BusOptions, connected, outage_as_unavailable
from openapi_tool.cli.common import USAGE, fail
from openapi_tool.cli.kernel_option import ProtocolVersion, kernel_bootstrap
from openapi_tool.kernel.failures import located
from openapi_tool.protocol.errors import Unavailable

CONNECT_S = 1.5  # together with the start of the program, a failure is printed within 3 s

T = TypeVar("T")


def with_nats(
    work: Callable[[Bootstrap, BusClient], Awaitable[T]],
    protocol: ProtocolVersion | None = None,
    *,
    permissions_command: str,
    database: bool = False,
) -> T:
    """Return the result of `work` with a connection to NATS, or print why there is none and exit with 2.

    `protocol` is the version of the kernel whose NATS is used, by default the main one's. Messages name
    `permissions_command`, which prints the permissions that the user needs. `database` is True if `work` connects to
    PostgreSQL, too.
    """
    bootstrap = kernel_bootstrap(protocol, database=database)
    try:
        return asyncio.run(_connected(bootstrap, work, permissions_command))
    except Unavailable as error:
        fail(bootstrap.redactor.text(located(str(error), bootstrap.pool.where, bootstrap.pool.setting)), USAGE)


async def _connected(bootstrap: Bootstrap, work: Callable[[Bootstrap, BusClient], Awaitable[T]], permissions: str) -> T:
    bus = replace(bootstrap.bus, listed_by=permissions)
    with outage_as_unavailable(bus.where):
        async with connected_once(bus) as client:
            return await work(bootstrap, client)


@asynccontextmanager
async def connected_once(bus: BusOptions) -> AsyncIterator[BusClient]:
    """Connect within `CONNECT_S`, without a retry. Raises Unavailable."""
    timeout = asyncio.timeout(CONNECT_S)
    try:
        async with timeout, connected(replace(bus, once=True)) as client:
            timeout.reschedule(None)
            yield client
    except TimeoutError:
        if not timeout.expired():
            raise
        late = f"no answer within {CONNECT_S:g} s: is it a NATS server? check {bus.setting}"
        raise Unavailable(f"cannot connect to NATS at {bus.where}: {late}") from None
