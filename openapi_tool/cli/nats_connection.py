"""One connection to NATS for a command, and every obstacle in one line."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from openapi_tool.bootstrap import Bootstrap, build_bootstrap
from openapi_tool.bus.connection import BusClient, connected, outage_as_unavailable
from openapi_tool.cli.common import USAGE, fail
from openapi_tool.cli.tools_files import settings_failed
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.settings import SettingsError, load_settings

CONNECT_S = 2.0  # with the start of the program, the message is there within 3 s

T = TypeVar("T")


def with_nats(
    work: Callable[[Bootstrap, BusClient], Awaitable[T]], listed_by: str, flags: Mapping[str, Any] | None = None
) -> T:
    """Return the result of `work` with a connection to NATS, or print what is in the way and exit with 2.

    `listed_by` is the command that prints the permissions that the user needs; `flags` are settings.
    """
    try:
        bootstrap = build_bootstrap(load_settings(flags or {}), os.environ)
    except SettingsError as error:
        settings_failed(error)
    try:
        return asyncio.run(_connected(bootstrap, work, listed_by))
    except Unavailable as error:
        fail(bootstrap.redactor.text(str(error)), USAGE)


async def _connected(bootstrap: Bootstrap, work: Callable[[Bootstrap, BusClient], Awaitable[T]], listed_by: str) -> T:
    bus = replace(bootstrap.bus, once=True, listed_by=listed_by)
    with outage_as_unavailable(bus.where):
        timeout = asyncio.timeout(CONNECT_S)
        try:
            async with timeout, connected(bus) as client:
                timeout.reschedule(None)
                return await work(bootstrap, client)
        except TimeoutError:
            if not timeout.expired():
                raise
            raise Unavailable(
                f"cannot connect to NATS at {bus.where}: no answer within {CONNECT_S:g} s; "
                "check nats.servers (NATS_SERVERS)"
            ) from None
