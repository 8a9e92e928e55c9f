"""Which kernel a command is about: the one whose servers the settings name, else this user's running `dev`.

`dev` runs a simulated kernel on this machine. The option --dev NAME chooses one, whatever the settings say.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_settings import SettingsError as UnreadableVariable

from openapi_tool.bootstrap import Bootstrap, build_bootstrap
from openapi_tool.cli.output import fail
from openapi_tool.environment import DEV_VARIABLE
from openapi_tool.kernel.postgres.store import KernelStore
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.dialect import claimed_identity
from openapi_tool.protocol.errors import Unanswerable
from openapi_tool.protocol.subjects import parse_command_subject
from openapi_tool.settings import given_values, load_settings
from openapi_tool.settings.sources import SourceUnreadable

if TYPE_CHECKING:
    from openapi_tool.local.dev_state import StackAddress

NO_DATABASE = {"postgres": {"dsn": "postgresql://unused@unused"}}
"""Settings of commands that use no database: `postgres.dsn` is required. It names a user, as otherwise the name of the
operating system's user is looked up, and in a container that user may have none."""


def kernel_bootstrap(*, database: bool = True) -> Bootstrap:
    """Return the bootstrap from the settings, else from this user's running `dev`.

    Without `database` the settings need not name one. Raises SettingsError.
    """
    return build_bootstrap(load_settings(_added_settings(database=database)), os.environ)


def _added_settings(*, database: bool) -> Mapping[str, Any]:
    """Return the servers that the settings lack: those of `dev`, or a database that is never used."""
    try:
        configured = given_values()
    except (SourceUnreadable, UnreadableVariable):
        return {}  # `load_settings` reports the mistake
    without_dev = {} if database else NO_DATABASE
    if not os.environ.get(DEV_VARIABLE):
        if is_given(configured, "postgres", "dsn"):
            return {}
        if is_given(configured, "nats", "servers"):
            return without_dev
    stack = find_dev().stack
    return without_dev if stack is None else _servers_of(stack)


def is_given(configured: Mapping[str, Any], section: str, key: str) -> bool:
    """Return whether files or environment set a key of a section."""
    values = configured.get(section, {})
    return not isinstance(values, Mapping) or key in values  # `load_settings` reports another type


def names_database(bootstrap: Bootstrap) -> bool:
    """Return whether the settings of a command that can do without one name a database."""
    return bootstrap.pool.dsn != NO_DATABASE["postgres"]["dsn"]


class FoundDev(NamedTuple):
    """The running `dev` of this user, or None and the reason, which is empty if this installation has no `dev`."""

    stack: StackAddress | None
    reason: str


def find_dev() -> FoundDev:
    """Look for this user's running `dev`.

    Exits if several run and none was named, or if the named one does not run.
    """
    if not _has_dev():
        return FoundDev(None, "")
    from openapi_tool.local.dev_state import DevError, SeveralStacks, running_dev  # noqa: PLC0415 - see `_has_dev`

    try:
        return FoundDev(running_dev(), "")
    except DevError as error:
        if isinstance(error, SeveralStacks) or os.environ.get(DEV_VARIABLE):
            fail(str(error))
        return FoundDev(None, str(error))


def names_of_dev() -> list[str]:
    """Return the names of this user's running dev stacks; none if this installation has no `dev`."""
    if not _has_dev():
        return []
    from openapi_tool.local.dev_state import running_stacks  # noqa: PLC0415 - see `_has_dev`

    return running_stacks()


def _has_dev() -> bool:
    return find_spec("openapi_tool.local") is not None  # the image does not contain the embedded stack


def servers_of_named_dev() -> Mapping[str, Any]:
    """Return the settings of the running `dev` that the option --dev names; none without the option."""
    stack = find_dev().stack if os.environ.get(DEV_VARIABLE) else None
    return {} if stack is None else _servers_of(stack)


def _servers_of(stack: StackAddress) -> Mapping[str, Any]:
    return {
        "postgres": {"dsn": stack.pg_dsn},
        "nats": {"servers": stack.nats_servers},
        "protocol": {"version": stack.protocol},
    }


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
