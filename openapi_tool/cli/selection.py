"""What a command is about: a kernel, or the state of a gateway; and of which project.

A command that chose by itself says so in a line on standard error, with the option that names the other candidate.
"""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic_settings import SettingsError as UnreadableVariable

from openapi_tool.cli.dev_choice import dev_in_use, is_dev_named, is_given, only_dev, project_of_dev
from openapi_tool.cli.kernel import kernel_settings
from openapi_tool.cli.output import fail, print_status
from openapi_tool.environment import DEV_VARIABLE
from openapi_tool.gateway.opening import NATS
from openapi_tool.protocol.subjects import is_token
from openapi_tool.settings import given_values
from openapi_tool.settings.sources import SourceUnreadable
from openapi_tool.state.sqlite import MEMORY
from openapi_tool.state.sqlite_file import StateUnusable, default_path
from openapi_tool.tools.wording import short

if TYPE_CHECKING:
    from openapi_tool.local.dev_state import StackAddress

DEFAULT_PROJECT = "local"
"""Project of `mcp` without --project, and of `gateway` without tokens."""


def chosen_state(option: Path | None) -> Path:
    """Return the state of a gateway: by default in the NATS of the settings, without one the default file.

    Exits with 2 if the option names NATS and the settings name no server.
    """
    if option is not None:
        _check_servers(option)
        return option
    try:
        return NATS if is_given(given_values(), "nats", "servers") else default_path(os.environ)
    except (SourceUnreadable, UnreadableVariable, StateUnusable) as error:
        fail(str(error))


def _check_servers(option: Path) -> None:
    """Exit with 2 if the state is in NATS, and the settings name no server."""
    with suppress(SourceUnreadable, UnreadableVariable):  # reported when the settings are loaded
        if option == NATS and not is_given(given_values(), "nats", "servers"):
            fail("--state: no NATS server is configured; set NATS_SERVERS")


def check_not_memory(option: Path | None) -> None:
    """Exit with 2 if a command is to be about the memory of a process, which no other process can use."""
    if option == MEMORY:
        fail(f"--state: only the process itself can use {MEMORY}; name a file")


class _Selection(NamedTuple):
    """What a command is about: the state of a gateway, or a kernel (None), which may be a `dev`.

    `is_default_file` is True for a state file that neither an option nor the settings named.
    """

    state: Path | None
    dev: StackAddress | None = None
    is_default_file: bool = False


def selected_state(option: Path | None) -> Path | None:
    """Return the state that a command is about, None for a kernel; print what it is if nothing named it.

    Without the option the settings decide:

    - PostgreSQL is configured, or `--dev` names a dev stack: a kernel.
    - Servers of NATS are configured: the state in NATS.
    - Something else of NATS is configured, or a dev stack runs: a kernel.
    - Nothing is configured: the default file, if it exists.
    """
    selection = _selection(option)
    _say(selection)
    return selection.state


def _selection(option: Path | None) -> _Selection:
    if option is not None:
        check_not_memory(option)
        _check_servers(option)
        return _Selection(option)
    try:
        dev = dev_in_use(f"a gateway's state: --state {shlex.quote(str(_existing_default_file() or 'FILE'))}")
        configured = given_values()
    except (SourceUnreadable, UnreadableVariable):
        return _Selection(None)  # reported when the settings are loaded
    if dev is not None or "postgres" in configured:
        return _Selection(None, dev)
    if is_given(configured, "nats", "servers"):
        return _Selection(NATS)
    if "nats" in configured:
        return _Selection(None)
    return _default_file()


def _default_file() -> _Selection:
    """Return the default state file; say so if there is none, as the command then has nothing to ask."""
    file = _existing_default_file()
    if file is not None:
        return _Selection(file, is_default_file=True)
    with suppress(StateUnusable):
        path = default_path(os.environ)
        print_status(
            f"no settings name a server, no `dev` runs, and there is no gateway's state file {path}: see --state"
        )
    return _Selection(None)


def _existing_default_file() -> Path | None:
    """Return the default state file if there is one."""
    try:
        path = default_path(os.environ)
        return path if path.exists() else None
    except (StateUnusable, PermissionError):  # the second for a folder that may not be read
        return None


def say_default_file(path: Path) -> None:
    """Print that a command is about the default state file."""
    _say(_Selection(path, is_default_file=True))


def _say(selection: _Selection, default_project: str = "") -> None:
    """Print what a command is about, if nothing named it or its project, which is then `default_project`."""
    of_project = f", project {default_project}" if default_project else ""
    if selection.is_default_file:
        print_status(f"of the gateway with the state file {selection.state}{of_project}")
    elif selection.state is not None and default_project:
        named = "with its state in NATS" if selection.state == NATS else "that --state names"
        print_status(f"of the gateway {named}{of_project}")
    elif selection.dev is not None and (default_project or not is_dev_named()):
        other = None if is_dev_named() else _existing_default_file()
        instead = f"; of the gateway instead: --state {shlex.quote(str(other))}" if other else ""
        print_status(f"{selection.dev.described}{of_project}{instead}")


def selected_file(option: Path | None) -> Path | None:
    """Return the state file that a command is about; None for a kernel, and for a gateway whose state is in NATS.

    For commands that ask these two in the same way, over NATS.
    """
    path = selected_state(option)
    return None if path == NATS else path


class StateAndProject(NamedTuple):
    """The state and the project that a command is about; the state is None for a kernel."""

    state: Path | None
    project: str


def selected_project(state_option: Path | None, project_option: str | None) -> StateAndProject:
    """Return the state and the project that a command is about; print them if nothing named them.

    Without the option for the project it is the default project of a gateway's doors, or that of `dev`. Exits with 2 if
    it is invalid, or missing for another kernel.
    """
    selection = _selection(state_option)
    project = project_option
    if project is None and selection.state is not None:
        project = DEFAULT_PROJECT
    elif project is None and selection.dev is not None:
        project = project_of_dev()
    if project is None:
        kernel_settings()  # fails first if the settings lack the kernel's database
        fail("--project is missing; name the project")
    if not is_token(project):
        fail(f"--project: {short(project)!r} is no project id: it is empty or contains blanks or `.*>`")
    _say(selection, "" if project_option else project)
    return StateAndProject(selection.state, project)


def other_project(option: str | None) -> str:
    """Return the end of a message that something was not found in a project: which option names another one."""
    return "" if option else "; name another project with --project"


_ABOUT_KERNELS_ONLY = ("check", "deadletters", "nats")
"""Commands without the option --state."""


def command_about_same(words: str, state: Path | None = None) -> str:
    """Return a command line that is about the same as this command: the same `dev`, or the state of its option.

    `words` are the command and its arguments.
    """
    if state is not None:
        option = "" if words.split(maxsplit=1)[0] in _ABOUT_KERNELS_ONLY else f" --state {shlex.quote(str(state))}"
        return f"openapi-tool {words}{option}"
    name = os.environ.get(DEV_VARIABLE) or only_dev()
    return f"openapi-tool --dev {shlex.quote(name)} {words}" if name else f"openapi-tool {words}"
