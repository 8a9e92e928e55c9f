"""Which kernel a command is about: the one whose servers the settings name, else this user's running `dev`.

`dev` runs a simulated kernel on this machine. The option --dev NAME chooses one, whatever the settings say. A command
that found one by itself says so in a line on standard error.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_settings import SettingsError as UnreadableVariable

from openapi_tool.bootstrap import Bootstrap, build_bootstrap
from openapi_tool.cli.output import fail, print_status
from openapi_tool.environment import DEV_VARIABLE
from openapi_tool.kernel.postgres.store import KernelStore
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.dialect import claimed_identity
from openapi_tool.protocol.errors import Unanswerable
from openapi_tool.protocol.subjects import parse_command_subject
from openapi_tool.settings import Settings, given_values, load_settings
from openapi_tool.settings.sources import SourceUnreadable
from openapi_tool.tools.wording import first_of

if TYPE_CHECKING:
    from openapi_tool.local.dev_state import StackAddress

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


def dev_in_use(alternative: str = "") -> StackAddress | None:
    """Return the `dev` that a command is about: the one of --dev, else a running one if the settings name no server.

    `alternative` is for `find_dev`. Raises SourceUnreadable, UnreadableVariable.
    """
    if not is_dev_named() and settings_name_servers():
        return None
    return find_dev(alternative).stack


def settings_name_servers() -> bool:
    """Return whether the settings name a server of a kernel. Raises SourceUnreadable, UnreadableVariable."""
    configured = given_values()
    return is_given(configured, "postgres", "dsn") or is_given(configured, "nats", "servers")


def is_dev_named() -> bool:
    """Return whether the option --dev, or its variable, names a `dev`."""
    return bool(os.environ.get(DEV_VARIABLE))


def say_dev_in_use(alternative: str = "") -> None:
    """Print which `dev` a command is about, if it was not named; `alternative` is for `find_dev`."""
    with suppress(SourceUnreadable, UnreadableVariable):  # reported when the settings are loaded
        stack = dev_in_use(alternative)
        if stack is not None and not is_dev_named():
            print_status(stack.described)


_ABOUT_KERNELS_ONLY = ("check", "deadletters", "nats")
"""Commands without the option --state."""


def command_about_same(words: str, state: Path | None = None) -> str:
    """Return a command line that is about the same as this command: the same `dev`, or the state of its option.

    `words` are the command and its arguments.
    """
    if state is not None:
        option = "" if words.split(maxsplit=1)[0] in _ABOUT_KERNELS_ONLY else f" --state {shlex.quote(str(state))}"
        return f"openapi-tool {words}{option}"
    name = os.environ.get(DEV_VARIABLE) or _only_dev()
    return f"openapi-tool --dev {shlex.quote(name)} {words}" if name else f"openapi-tool {words}"


def _only_dev() -> str | None:
    """Return the name of the running `dev` if the settings name no server; None if several run, or none."""
    with suppress(SourceUnreadable, UnreadableVariable):
        if not settings_name_servers():
            running = _running_devs()
            return running[0] if len(running) == 1 else None
    return None


def project_of_dev() -> str:
    """Return the project that each `dev` has."""
    from openapi_tool.local.dev import PROJECT  # noqa: PLC0415 - see `_has_dev`

    return PROJECT


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


def find_dev(alternative: str = "") -> FoundDev:
    """Look for this user's running `dev`.

    Exits if several run and none was named, or if the named one does not run. `alternative` says what the user could
    name instead of one of several.
    """
    if not _has_dev():
        return FoundDev(None, "")
    from openapi_tool.local.dev_state import DevError, SeveralStacks, running_dev  # noqa: PLC0415 - see `_has_dev`

    try:
        return FoundDev(running_dev(), "")
    except DevError as error:
        if isinstance(error, SeveralStacks):
            fail(f"{error}; or name {alternative}" if alternative else str(error))
        if is_dev_named():
            fail(str(error))
        return FoundDev(None, str(error))


def names_of_dev() -> str:
    """Return the names of this user's running dev stacks for a message; empty if none runs."""
    running = _running_devs()
    if not running:
        return ""
    from openapi_tool.local.dev_state import MAX_SHOWN_NAMES  # noqa: PLC0415 - see `_has_dev`

    return first_of(running, MAX_SHOWN_NAMES)


def _running_devs() -> list[str]:
    """Return the names of this user's running dev stacks; none if this installation has no `dev`."""
    if not _has_dev():
        return []
    from openapi_tool.local.dev_state import running_stacks  # noqa: PLC0415 - see `_has_dev`

    return running_stacks()


def _has_dev() -> bool:
    return find_spec("openapi_tool.local") is not None  # the image does not contain the embedded stack


def named_dev() -> StackAddress | None:
    """Return the running `dev` that the option --dev names; None without the option."""
    return find_dev().stack if is_dev_named() else None


def servers_of(stack: StackAddress | None) -> Mapping[str, Any]:
    """Return the settings that name the servers of a `dev`; none without one."""
    if stack is None:
        return {}
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
