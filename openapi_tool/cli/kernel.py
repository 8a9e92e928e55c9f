"""The kernel that a command is about: its settings, and what is asked of its database.

Its servers are those that the settings name, else those of this user's `dev` (`dev_choice`).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from pydantic_settings import SettingsError as UnreadableVariable

from openapi_tool.bootstrap import Bootstrap, build_bootstrap
from openapi_tool.cli.dev_choice import dev_in_use, is_given, servers_of
from openapi_tool.kernel.postgres.store import KernelStore
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.dialect import claimed_identity
from openapi_tool.protocol.errors import Unanswerable
from openapi_tool.protocol.subjects import parse_command_subject
from openapi_tool.settings import Settings, given_values, load_settings
from openapi_tool.settings.sources import SourceUnreadable

NO_DATABASE = {"postgres": {"dsn": "postgresql://unused@unused"}}
"""Settings of commands that use no database: `postgres.dsn` is required. It names a user, as otherwise the name of the
operating system's user is looked up, and in a container that user may have none."""


def kernel_bootstrap(*, database: bool = True) -> Bootstrap:
    """Return the bootstrap from the settings, else from this user's running `dev`.

    Without `database` the settings need not name one. Raises SettingsError.
    """
    return build_bootstrap(kernel_settings(database=database), os.environ)


def kernel_settings(*, database: bool = True) -> Settings:
    """Return the settings of `kernel_bootstrap`. Raises SettingsError."""
    return load_settings(_added_settings(database=database))


def _added_settings(*, database: bool) -> Mapping[str, Any]:
    """Return the servers that the settings lack: those of `dev`, or a database that is never used."""
    try:
        stack = dev_in_use()
        has_database = is_given(given_values(), "postgres", "dsn")
    except (SourceUnreadable, UnreadableVariable):
        return {}  # `load_settings` reports the mistake
    if stack is not None:
        return servers_of(stack)
    return {} if database or has_database else NO_DATABASE


def names_database(bootstrap: Bootstrap) -> bool:
    """Return whether the settings of a command that can do without one name a database."""
    return bootstrap.pool.dsn != NO_DATABASE["postgres"]["dsn"]


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
