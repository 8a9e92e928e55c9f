"""The registry of a kernel, which stores the definitions of tools: reached through the kernel's API or its database."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import typer
from pydantic_settings import SettingsError as UnreadableVariable

from openapi_tool.bootstrap import pool_options
from openapi_tool.cli.dev_choice import find_dev, is_dev_named, project_of_dev, settings_name_servers
from openapi_tool.cli.kernel import NO_DATABASE
from openapi_tool.cli.management_api import ManagementApi
from openapi_tool.cli.output import INTERRUPTED, USAGE, fail, print_status
from openapi_tool.kernel.postgres.failures import located
from openapi_tool.kernel.postgres.tool_rows import ToolRows
from openapi_tool.options.postgres import PoolOptions
from openapi_tool.protocol.printable import printable_line
from openapi_tool.settings import given_values, load_settings
from openapi_tool.settings.sources import SourceUnreadable
from openapi_tool.tools.registry import NoSuchProject, RegistryError, RegistryUnreachable

if TYPE_CHECKING:
    from openapi_tool.local.dev_state import StackAddress

FAILED = 1
_CHOOSE_REGISTRY = "give exactly one of --api URL and --db"
_OTHER_REGISTRY = "another kernel: --api URL or --db"
_SETTINGS_PRECEDE = (
    "the settings name servers, so no running `dev` is used unless it is named: "
    "give --db (PG_DSN), --api URL, or openapi-tool --dev NAME …"
)

T = TypeVar("T")
Registry = ToolRows | ManagementApi


def run_with(
    work: Callable[[Registry, str | None], Coroutine[Any, Any, T]],
    api: str | None,
    *,
    db: bool,
    default_project: str = "",
) -> T:
    """Run `work` with the registry and its kernel's protocol version, None if unknown; on a failure exit.

    `api` is the URL of the kernel's API, `db` asks for the database of the settings. After --dev, or without both if
    the settings name no server, it is that of `dev`. `default_project` is the project if none was named.
    """
    if api is not None and db:
        fail(_CHOOSE_REGISTRY, USAGE)

    async def open_and_work() -> T:
        async with _registry(api, db=db, default_project=default_project) as (registry, version):
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
async def _registry(api: str | None, *, db: bool, default_project: str) -> AsyncIterator[tuple[Registry, str | None]]:
    if api is not None:
        async with ManagementApi.open(api) as client:
            yield client, _configured_version()
        return
    is_of_settings = db and not is_dev_named()
    pool = pool_options(load_settings(), os.environ) if is_of_settings else _pool_of_dev(default_project)
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


class RegistryProject(NamedTuple):
    """The project of a command, and the default that it is if none was named, else an empty text."""

    name: str
    default: str = ""


def registry_project(option: str | None, api: str | None, *, db: bool) -> RegistryProject:
    """Return the project of a command, by default that of `dev`. Exits if none is named for another kernel."""
    if option is not None:
        return RegistryProject(option)
    if api is not None or (db and not is_dev_named()):
        fail("--project is missing; name the project")
    _running_dev()  # exits if there is none
    return RegistryProject(project_of_dev(), project_of_dev())


def dev_of_registry(api: str | None, *, db: bool) -> StackAddress | None:
    """Return the `dev` that has the registry, None for another kernel."""
    return None if api is not None or (db and not is_dev_named()) else _running_dev()


def _running_dev() -> StackAddress:
    """Return the named `dev`, else the running one; exit if there is none, or the settings name servers."""
    with suppress(SourceUnreadable, UnreadableVariable):  # reported when the settings are loaded
        if not is_dev_named() and settings_name_servers():
            fail(_SETTINGS_PRECEDE)
    found = find_dev(_OTHER_REGISTRY)
    if found.stack is None:
        or_dev = f", or start `openapi-tool dev`: {found.reason}" if found.reason else ""
        fail(_CHOOSE_REGISTRY + or_dev, USAGE)
    return found.stack


def _pool_of_dev(default_project: str) -> PoolOptions:
    """Return how to reach the database of `dev`; print which one it is, if it or the project was not named."""
    stack = _running_dev()
    pool = pool_options(load_settings({"postgres": {"dsn": stack.pg_dsn}}), os.environ)
    if default_project or not is_dev_named():
        of_project = f", project {default_project}" if default_project else ""
        print_status(f"{stack.described}{of_project}")
    return replace(pool, version=stack.protocol)


def confirmed(question: str) -> bool:
    """Ask for confirmation. Exits if standard input is closed."""
    typer.echo(f"{printable_line(question)} [y/N]: ", nl=False, err=True)
    answer = sys.stdin.readline()
    if not answer:
        print_status("")
        fail("nothing was changed: no terminal to ask; use --yes", FAILED)
    return answer.strip().lower() in ("y", "yes")
