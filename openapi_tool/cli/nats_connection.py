"""A short connection of a command to NATS: that of the kernel, or the one in which a gateway keeps its state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

from openapi_tool.bootstrap import Bootstrap
from openapi_tool.cli.kernel import kernel_bootstrap
from openapi_tool.cli.output import fail
from openapi_tool.cli.selection import command_about_same
from openapi_tool.kernel.postgres.failures import located
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.connection import connected, outage_as_unavailable
from openapi_tool.nats_client.connection_errors import Denied
from openapi_tool.nats_client.options import BusOptions
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.settings.model import with_values

CONNECT_S = 1.5  # together with the start of the program, a failure is printed within 3 s
_ASK_REPLICAS = (
    "ask each replica itself: GET /readyz on its health.port says which dependency is down, since when and why"
)

T = TypeVar("T")


def with_nats(
    work: Callable[[Bootstrap, BusClient], Awaitable[T]],
    *,
    user: NatsUser,
    database: bool = False,
    advice: str | None = None,
) -> T:
    """Return the result of `work` with a connection to the kernel's NATS, or print why there is none and exit with 2.

    Replies arrive on the inbox of `user`, and messages name the command that prints its permissions. `database` is True
    if `work` connects to PostgreSQL, too. `advice` says where else to look during an outage, by default `ask_replicas`.
    """
    bootstrap = kernel_bootstrap(database=database)
    try:
        return asyncio.run(run_connected(bootstrap, work, user))
    except Unavailable as error:  # `located` adds the address to an error of PostgreSQL; one of NATS has its own
        problem = bootstrap.redactor.text(located(str(error), bootstrap.pool))
        is_outage = not isinstance(error.__cause__, Denied)
        if advice is None:
            advice = ask_replicas(is_gateway=user is NatsUser.GATEWAY)
        fail(f"{problem}\n{advice}" if advice and is_outage else problem)


def ask_replicas(*, is_gateway: bool) -> str:
    """Return where to look if replicas cannot be asked over NATS. `check` is for kernels only: it needs PostgreSQL."""
    if is_gateway:
        return _ASK_REPLICAS
    return f"{_ASK_REPLICAS}; `{command_about_same('check')}` tests NATS and PostgreSQL from here"


async def run_connected(
    bootstrap: Bootstrap, work: Callable[[Bootstrap, BusClient], Awaitable[T]], user: NatsUser
) -> T:
    """Return the result of `work` with a connection to the NATS in `bootstrap.bus`. Raises Unavailable.

    `user` is the login that the operator should have given the command; if NATS denies a subject, the message names
    the command that lists the subjects of this login.
    """
    options = bootstrap.bus.nats
    bus = replace(
        bootstrap.bus,
        nats=with_values(options, inbox_prefix=user.inbox_prefix(options.inbox_prefix)),
        listed_by=f"openapi-tool nats permissions --for {user}",
    )
    with outage_as_unavailable(bus.where):
        async with connected_once(bus) as client:
            return await work(bootstrap, client)


@asynccontextmanager
async def connected_once(bus: BusOptions) -> AsyncIterator[BusClient]:
    """Connect within `CONNECT_S`, without a retry. Raises Unavailable."""
    timeout = asyncio.timeout(CONNECT_S)
    try:
        async with timeout, connected(replace(bus, once=True)) as client:
            timeout.reschedule(None)  # it is for the connection only, not for what the caller does with it
            yield client
    except TimeoutError:
        if not timeout.expired():
            raise
        why = f"no answer within {CONNECT_S:g} s: is it a NATS server? check {bus.setting}"
        raise Unavailable(f"cannot connect to NATS at {bus.where}: {why}") from None
