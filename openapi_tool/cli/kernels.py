"""The option `--protocol`, which selects a kernel, and the connection to its NATS."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from pydantic_settings import SettingsError as UnreadableVariable

from openapi_tool.bootstrap import Bootstrap, build_bootstrap
from openapi_tool.bus.connection import BusClient, BusOptions, connected, outage_as_unavailable
from openapi_tool.cli.common import NO_DATABASE, USAGE, fail
from openapi_tool.cli.tools_files import settings_failed
from openapi_tool.kernel.failures import located
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.settings import SettingsError, given_values, load_settings
from openapi_tool.settings.sources import SourceUnreadable

if TYPE_CHECKING:
    from openapi_tool.local.dev import StackAddress


class ProtocolVersion(StrEnum):
    """Protocol version of a kernel."""

    V1R4 = "v1r4"
    V1R3 = "v1r3"


ProtocolOption = Annotated[
    ProtocolVersion | None,
    typer.Option("--protocol", help="Protocol version of the kernel; default: the main kernel's.", show_default=False),
]


def kernel_bootstrap(protocol: ProtocolVersion | None, *, database: bool = True) -> Bootstrap:
    """Return the bootstrap of the kernel of a version: from the settings, else from this user's running `dev`.

    Without `database` the settings need not name one. Exits with 2 if they are invalid.
    """
    try:
        flags = _servers(protocol, database=database)
        return build_bootstrap(load_settings(flags).of_version(protocol), os.environ)
    except SettingsError as error:
        settings_failed(error)


def _servers(protocol: ProtocolVersion | None, *, database: bool) -> Mapping[str, Any]:
    try:
        configured = given_values()
    except (SourceUnreadable, UnreadableVariable):
        return {}  # `load_settings` reports the mistake
    if _is_given(configured, "postgres", "dsn"):
        return {}
    if not _is_given(configured, "nats", "servers") and (stack := _running_dev(protocol)):
        return {
            "postgres": {"dsn": stack.pg_dsn},
            "nats": {"servers": stack.nats_servers},
            "protocol": {"version": stack.protocol},
        }
    return {} if database else NO_DATABASE


def _is_given(configured: Mapping[str, Any], section: str, key: str) -> bool:
    """Return whether a setting is given; True also if its section is not a mapping, which `load_settings` reports."""
    values = configured.get(section, {})
    return not isinstance(values, Mapping) or key in values


def _running_dev(protocol: ProtocolVersion | None) -> StackAddress | None:
    if not find_spec("openapi_tool.local"):  # the image does not contain the embedded stack
        return None
    from openapi_tool.local.dev import DevError, running_dev  # noqa: PLC0415 - see above

    try:
        return running_dev(protocol)
    except DevError:
        return None


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
