"""Which `dev` of this user a command is about.

`dev` runs a simulated kernel on this machine. The one that --dev names goes first, then what the settings name, then a
running `dev` that nothing named. A command that found one by itself says so in a line on standard error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_settings import SettingsError as UnreadableVariable

from openapi_tool.cli.output import fail, print_status
from openapi_tool.environment import DEV_VARIABLE
from openapi_tool.settings import given_values
from openapi_tool.settings.sources import SourceUnreadable
from openapi_tool.tools.wording import first_of

if TYPE_CHECKING:
    from openapi_tool.local.dev_state import StackAddress


def is_dev_named() -> bool:
    """Return whether the option --dev, or its variable, names a `dev`."""
    return bool(os.environ.get(DEV_VARIABLE))


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


def named_dev() -> StackAddress | None:
    """Return the running `dev` that the option --dev names; None without the option."""
    return find_dev().stack if is_dev_named() else None


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


def is_given(configured: Mapping[str, Any], section: str, key: str) -> bool:
    """Return whether files or environment set a key of a section."""
    values = configured.get(section, {})
    return not isinstance(values, Mapping) or key in values  # `load_settings` reports another type


def say_dev_in_use(alternative: str = "") -> None:
    """Print which `dev` a command is about, if it was not named; `alternative` is for `find_dev`."""
    with suppress(SourceUnreadable, UnreadableVariable):  # reported when the settings are loaded
        stack = dev_in_use(alternative)
        if stack is not None and not is_dev_named():
            print_status(stack.described)


def names_of_dev() -> str:
    """Return the names of this user's running dev stacks for a message; empty if none runs."""
    running = _running_devs()
    if not running:
        return ""
    from openapi_tool.local.dev_state import MAX_SHOWN_NAMES  # noqa: PLC0415 - see `_has_dev`

    return first_of(running, MAX_SHOWN_NAMES)


def only_dev() -> str | None:
    """Return the name of the running `dev` if the settings name no server; None if several run, or none."""
    with suppress(SourceUnreadable, UnreadableVariable):
        if not settings_name_servers():
            running = _running_devs()
            return running[0] if len(running) == 1 else None
    return None


def _running_devs() -> list[str]:
    """Return the names of this user's running dev stacks; none if this installation has no `dev`."""
    if not _has_dev():
        return []
    from openapi_tool.local.dev_state import running_stacks  # noqa: PLC0415 - see `_has_dev`

    return running_stacks()


def _has_dev() -> bool:
    return find_spec("openapi_tool.local") is not None  # the image does not contain the embedded stack


def project_of_dev() -> str:
    """Return the project that each `dev` has."""
    from openapi_tool.local.dev import PROJECT  # noqa: PLC0415 - see `_has_dev`

    return PROJECT


def servers_of(stack: StackAddress | None) -> Mapping[str, Any]:
    """Return the settings that name the servers of a `dev`; none without one."""
    if stack is None:
        return {}
    return {
        "postgres": {"dsn": stack.pg_dsn},
        "nats": {"servers": stack.nats_servers},
        "protocol": {"version": stack.protocol},
    }
