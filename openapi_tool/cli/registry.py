"""The registry of a kernel, which stores the definitions of tools: reached through the kernel's API or its database."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import typer

from openapi_tool.bootstrap import pool_options
from openapi_tool.cli.kernel import NO_DATABASE, find_dev
from openapi_tool.cli.management_api import ManagementApi
from openapi_tool.cli.output import INTERRUPTED, USAGE, fail, print_status
from openapi_tool.kernel.postgres.failures import located
from openapi_tool.kernel.postgres.tool_rows import ToolRows
from openapi_tool.options.postgres import PoolOptions
from openapi_tool.settings import given_values, load_settings
from openapi_tool.telemetry.printable import printable_line
from openapi_tool.tools.registry import NoSuchProject, RegistryError, RegistryUnreachable

FAILED = 1
_CHOOSE_REGISTRY = "give exactly one of --api URL and --db"

T = TypeVar("T")
Registry = ToolRows | ManagementApi


def run_with(
    work: Callable[[Registry, str | None], Coroutine[Any, Any, T]],
    api: str | None,
    *,
    db: bool,
) -> T:
    """Run `work` with the registry and its kernel's protocol version, None if unknown; on a failure exit.

    `api` is the URL of the kernel's API, `db` asks for the database of the settings. Without both it is that of `dev`.
    """
    if api is not None and db:
        fail(_CHOOSE_REGISTRY, USAGE)

    async def open_and_work() -> T:
        async with _registry(api, db=db) as (registry, version):
            return await work(registry, version)

    try:
        return asyncio.run(open_and_work())
    except (NoSuchProject, RegistryUnreachable) as error:
        fail(str(error), USAGE)
    except RegistryError as error:
        fail(str(error), FAILED)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


@asynccontextmanager
async def _registry(api: str | None, *, db: bool) -> AsyncIterator[tuple[Registry, str | None]]:
    if api is not None:
        async with ManagementApi.open(api) as client:
            yield client, _configured_version()
        return
    pool = pool_options(load_settings(), os.environ) if db else _pool_of_dev()
    try:
        async with ToolRows.open(pool) as rows:
            yield rows, pool.version
    except RegistryUnreachable as error:
        raise RegistryUnreachable(located(str(error), pool)) from error


def _configured_version() -> str | None:
    """Return the protocol version that the settings name; the API does not say which one its kernel speaks."""
    load_settings(NO_DATABASE)  # reports mistakes
    version: str | None = given_values().get("protocol", {}).get("version")
    return version


def _pool_of_dev() -> PoolOptions:
    found = find_dev()
    if found.stack is None:
        or_dev = f", or start `openapi-tool dev`: {found.reason}" if found.reason else ""
        fail(_CHOOSE_REGISTRY + or_dev, USAGE)
    pool = pool_options(load_settings({"postgres": {"dsn": found.stack.pg_dsn}}), os.environ)
    return replace(pool, version=found.stack.protocol)


def confirmed(question: str) -> bool:
    """Ask for confirmation. Exits if standard input is closed."""
    typer.echo(f"{printable_line(question)} [y/N]: ", nl=False, err=True)
    answer = sys.stdin.readline()
    if not answer:
        print_status("")
        fail("nothing was changed: no terminal to ask; use --yes", FAILED)
    return answer.strip().lower() in ("y", "yes")
