"""The kernel of the settings, or of the running `dev`, and connections to its servers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic_settings import SettingsError as UnreadableVariable

from openapi_tool.bootstrap import Bootstrap, build_bootstrap
from openapi_tool.cli.output import fail, print_json
from openapi_tool.cli.tables import output, redraw
from openapi_tool.environment import DEV_VARIABLE
from openapi_tool.kernel.postgres.failures import located
from openapi_tool.kernel.postgres.store import KernelStore
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.connection import connected, outage_as_unavailable
from openapi_tool.nats_client.connection_errors import Denied
from openapi_tool.nats_client.options import BusOptions
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.nats_records.record_store import BUDGETS
from openapi_tool.nats_records.replica_statistics import gather_stats
from openapi_tool.options.budgets import time_zone
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.dialect import claimed_identity
from openapi_tool.protocol.errors import Unanswerable, Unavailable
from openapi_tool.protocol.projects import quota_project
from openapi_tool.protocol.subjects import parse_command_subject
from openapi_tool.quotas.amounts import Amount
from openapi_tool.quotas.charged import charged
from openapi_tool.quotas.periods import Period
from openapi_tool.settings import given_values, load_settings
from openapi_tool.settings.model import with_values
from openapi_tool.settings.sources import SourceUnreadable
from openapi_tool.state.nats_kv import NatsKvRecords

if TYPE_CHECKING:
    from rich.console import RenderableType

    from openapi_tool.local.dev_state import StackAddress

CONNECT_S = 1.5  # together with the start of the program, a failure is printed within 3 s
NO_DATABASE = {"postgres": {"dsn": "postgresql://unused@unused"}}
"""Settings of commands that use no database: `postgres.dsn` is required. It names a user, as otherwise the name of the
operating system's user is looked up, and in a container that user may have none."""

_NO_REPLICA = 1
_REPLIES_S = 1.0
_WITHOUT_NATS = (
    "replicas are asked over NATS, so this says nothing about them; "
    "a kernel's commands wait in NATS meanwhile, a gateway's calls go on"
)
_ASK_REPLICAS = (
    "ask each replica itself: GET /readyz on its health.port says which dependency is down, since when and why; "
    "`openapi-tool check` tests NATS and PostgreSQL from here"
)

Replicas = Sequence[Mapping[str, Any]]
T = TypeVar("T")


def kernel_bootstrap(*, database: bool = True) -> Bootstrap:
    """Return the bootstrap from the settings, else from this user's running `dev`.

    Without `database` the settings need not name one. Raises SettingsError.
    """
    return build_bootstrap(load_settings(_servers(database=database)), os.environ)


def _servers(*, database: bool) -> Mapping[str, Any]:
    try:
        configured = given_values()
    except (SourceUnreadable, UnreadableVariable):
        return {}  # `load_settings` reports the mistake
    if not os.environ.get(DEV_VARIABLE):
        if is_given(configured, "postgres", "dsn"):
            return {}
        if is_given(configured, "nats", "servers"):
            return {} if database else NO_DATABASE
    if stack := find_dev()[0]:
        return _servers_of(stack)
    return {} if database else NO_DATABASE


def servers_of_named_dev() -> Mapping[str, Any]:
    """Return the settings of the running `dev` that the option --dev names; none without the option."""
    stack = find_dev()[0] if os.environ.get(DEV_VARIABLE) else None
    return _servers_of(stack) if stack else {}


def names_of_dev() -> list[str]:
    """Return the names of this user's running dev stacks; none if this installation has no `dev`."""
    if not find_spec("openapi_tool.local"):  # the image does not contain the embedded stack
        return []
    from openapi_tool.local.dev_state import running_stacks  # noqa: PLC0415 - see above

    return running_stacks()


def _servers_of(stack: StackAddress) -> Mapping[str, Any]:
    return {
        "postgres": {"dsn": stack.pg_dsn},
        "nats": {"servers": stack.nats_servers},
        "protocol": {"version": stack.protocol},
    }


def is_given(configured: Mapping[str, Any], section: str, key: str) -> bool:
    """Return whether files or environment set a key of a section."""
    values = configured.get(section, {})
    return not isinstance(values, Mapping) or key in values  # `load_settings` reports another type


def find_dev() -> tuple[StackAddress | None, str]:
    """Return this user's running `dev`, else None and the reason, empty if this installation has no `dev`.

    Exits if several run and none was named, or if the named one does not run.
    """
    if not find_spec("openapi_tool.local"):  # the image does not contain the embedded stack
        return None, ""
    from openapi_tool.local.dev_state import DevError, SeveralStacks, running_dev  # noqa: PLC0415 - see above

    try:
        return running_dev(), ""
    except DevError as error:
        if isinstance(error, SeveralStacks) or os.environ.get(DEV_VARIABLE):
            fail(str(error))
        return None, str(error)


def with_nats(
    work: Callable[[Bootstrap, BusClient], Awaitable[T]],
    *,
    user: NatsUser,
    database: bool = False,
    advice: str = _ASK_REPLICAS,
) -> T:
    """Return the result of `work` with a connection to the kernel's NATS, or print why there is none and exit with 2.

    Replies arrive on the inbox of `user`, and messages name the command that prints its permissions. `database` is True
    if `work` connects to PostgreSQL, too. `advice` says where else to look during an outage.
    """
    bootstrap = kernel_bootstrap(database=database)
    try:
        return asyncio.run(_connected(bootstrap, work, user))
    except Unavailable as error:  # `located` adds the address to an error of PostgreSQL; one of NATS has its own
        problem = bootstrap.redactor.text(located(str(error), bootstrap.pool))
        is_outage = not isinstance(error.__cause__, Denied)
        fail(f"{problem}\n{advice}" if advice and is_outage else problem)


async def charged_in_nats(
    bootstrap: Bootstrap, project: str, start: datetime, end: datetime, user: NatsUser = NatsUser.INSPECT
) -> Mapping[Period, Amount]:
    """Return what the accounts of a project hold (`charged`). Raises Unavailable."""
    settings = bootstrap.settings
    account_project = quota_project(settings.quota_namespace, project)
    zone = time_zone(settings.budgets.time_zone)

    async def work(_: Bootstrap, client: BusClient) -> Mapping[Period, Amount]:
        return await charged(NatsKvRecords(client, BUDGETS.bucket), account_project, start, end, zone)

    return await _connected(replace(bootstrap, bus=bootstrap.quotas or bootstrap.bus), work, user)


async def _connected(bootstrap: Bootstrap, work: Callable[[Bootstrap, BusClient], Awaitable[T]], user: NatsUser) -> T:
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
async def result_lookup(bootstrap: Bootstrap) -> AsyncIterator[Callable[[Delivery], Awaitable[bool]]]:
    """Yield a function that returns whether a command has a result. Raises Unavailable."""
    # Only reads: no check that calls can be committed.
    kernel = await KernelStore.open(replace(bootstrap.pool, inspect_on_connect=False))

    async def has_result(command: Delivery) -> bool:
        try:
            project_id = parse_command_subject(command.subject).project_id
        except Unanswerable:
            return False
        claimed = claimed_identity(command.subject, command.headers, command.data)
        return await kernel.has_result(project_id, claimed.tool_call_id or "")

    try:
        yield has_result
    finally:
        await kernel.aclose()


def names_database(bootstrap: Bootstrap) -> bool:
    """Return whether the settings of a command that can do without one name a database."""
    return bootstrap.pool.dsn != NO_DATABASE["postgres"]["dsn"]


def show_statistics(
    draw: Callable[[Replicas], RenderableType],
    select: Callable[[Replicas], Any],
    *,
    as_json: bool,
    every_s: float | None = None,
) -> None:
    """Draw the statistics of all replicas, once or every `every_s` seconds, or print what `select` returns as JSON."""

    async def work(bootstrap: Bootstrap, client: BusClient) -> None:
        ask = partial(gather_stats, client, _REPLIES_S, bootstrap.version)

        async def redrawn() -> RenderableType:
            return draw(await ask())

        replicas = await ask()
        if not replicas:
            fail(
                "no replica answers on openapi_tool.stats: none runs, none has a connection to NATS, or its user lacks "
                f"permission\n{_ASK_REPLICAS}",
                _NO_REPLICA,
            )
        if as_json:
            print_json(select(replicas))
        elif every_s is None:
            output().print(draw(replicas))
        else:
            await redraw(output(), draw(replicas), redrawn, every_s)

    with_nats(work, user=NatsUser.TOP, advice=f"{_WITHOUT_NATS}\n{_ASK_REPLICAS}")


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
        why = f"no answer within {CONNECT_S:g} s: is it a NATS server? check {bus.setting}"
        raise Unavailable(f"cannot connect to NATS at {bus.where}: {why}") from None
