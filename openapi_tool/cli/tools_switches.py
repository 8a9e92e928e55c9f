"""`openapi-tool tools disable`, `enable` and `disabled`: stop calls on all replicas without a restart."""

from __future__ import annotations

import getpass
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, TypeVar

import typer

from openapi_tool.bootstrap import Bootstrap
from openapi_tool.bus.connection import BusClient
from openapi_tool.bus.switch_store import change_switches, load_switches
from openapi_tool.cli.common import fail, print_json, print_status
from openapi_tool.cli.kernel_option import ProtocolOption, ProtocolVersion
from openapi_tool.cli.nats_connection import with_nats
from openapi_tool.cli.tables import Rows, output
from openapi_tool.cli.tools_registry import JsonOption
from openapi_tool.protocol.subject import is_token
from openapi_tool.tools.problems import short
from openapi_tool.tools.switches import (
    ALL,
    MAX_SWITCHES,
    MAX_TEXT_CHARS,
    Switch,
    Switches,
    SwitchRecordInvalid,
)

_NOT_DISABLED = 1
T = TypeVar("T")

NameArgument = Annotated[str | None, typer.Argument(help="Tool, by its name in the project; without it all of them.")]
ProjectOption = Annotated[str | None, typer.Option(help="Project of the tool.")]
EverywhereOption = Annotated[bool, typer.Option("--all-projects", help="All projects instead of one.")]
ReasonOption = Annotated[str, typer.Option(help="Why; models and the log of every replica get it.")]
ByOption = Annotated[str | None, typer.Option(help="Who; by default the user of this machine.")]


def disable(
    name: NameArgument = None,
    *,
    project: ProjectOption = None,
    all_projects: EverywhereOption = False,
    reason: ReasonOption,
    by: ByOption = None,
    protocol: ProtocolOption = None,
    as_json: JsonOption = False,
) -> None:
    """Disable a tool within two seconds on all replicas: its calls fail with tool_not_available and the reason.

    Nothing is sent upstream for them. Running calls are finished. It applies to every kernel on these NATS servers.
    Exit codes: 0, 2 invalid options or settings, or NATS cannot be reached.
    """
    switch = _switch(name, project, reason, by, all_projects=all_projects)

    def change(switches: Switches) -> Switches:
        changed = switches.disabled(switch)
        if len(changed.all) > MAX_SWITCHES:
            fail(f"{MAX_SWITCHES:,} tools are disabled already; disable a whole project or all tools instead")
        return changed

    _with_store(lambda client: change_switches(client, change), protocol)
    if as_json:
        print_json(asdict(switch))
    else:
        print_status(f"disabled {_named(switch)}")


def enable(
    name: NameArgument = None,
    *,
    project: ProjectOption = None,
    all_projects: EverywhereOption = False,
    reason: ReasonOption,
    by: ByOption = None,
    protocol: ProtocolOption = None,
    as_json: JsonOption = False,
) -> None:
    """Enable again exactly what was disabled, within two seconds on all replicas.

    Exit codes: 0, 1 it is not disabled, 2 invalid options or settings, or NATS cannot be reached.
    """
    switch = _switch(name, project, reason, by, all_projects=all_projects)
    before, after = _with_store(lambda client: change_switches(client, lambda state: state.enabled(switch)), protocol)
    if len(before.all) == len(after.all):
        fail(f"{_named(switch)} is not disabled; openapi-tool tools disabled lists what is", _NOT_DISABLED)
    if as_json:
        print_json(asdict(switch))
    else:
        print_status(f"enabled {_named(switch)}")


def disabled(*, protocol: ProtocolOption = None, as_json: JsonOption = False) -> None:
    """List what is disabled, since when, by whom and why. Exit codes: 0, 2 invalid settings, NATS cannot be reached."""
    switches = _with_store(load_switches, protocol).switches.all
    if as_json:
        print_json([asdict(switch) for switch in switches])
        return
    if not switches:
        print_status("nothing is disabled")
        return
    table = Rows("project", "tool", "since", "by", "reason")
    for switch in switches:
        table.add(switch.project_id, switch.tool_name, switch.at, switch.by, switch.reason)
    output().print(table)


def _switch(name: str | None, project: str | None, reason: str, by: str | None, *, all_projects: bool) -> Switch:
    if (project is None) is not all_projects:
        fail("name either --project P or --all-projects")
    if project is not None and not is_token(project):
        fail(f"--project: {short(project)!r} is no project; all projects are --all-projects")
    who = _user() if by is None else by
    for option, text in (("--reason", reason), ("--by", who), ("NAME", name or ALL), ("--project", project or ALL)):
        if not text.strip() or len(text) > MAX_TEXT_CHARS or not text.isprintable():
            fail(f"{option} must have 1 to {MAX_TEXT_CHARS} printable characters")
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return Switch(project or ALL, name or ALL, _sentence(reason), who, at)


def _sentence(reason: str) -> str:
    """Return the reason with a full stop: in the text for the model further sentences follow."""
    reason = reason.strip()
    return reason if reason[-1] in ".!?" else f"{reason}."


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        fail("name yourself with --by")


def _named(switch: Switch) -> str:
    tools = "all tools" if switch.tool_name == ALL else f"tool {switch.tool_name!r}"
    return f"{tools} of {'all projects' if switch.project_id == ALL else f'project {switch.project_id!r}'}"


def _with_store(work: Callable[[BusClient], Awaitable[T]], protocol: ProtocolVersion | None) -> T:
    """Return the result of `work` with a connection; exits if NATS is unavailable or the stored record invalid."""

    async def with_client(bootstrap: Bootstrap, client: BusClient) -> T:
        del bootstrap
        return await work(client)

    try:
        return with_nats(with_client, protocol, permissions_command="openapi-tool nats permissions --for switches")
    except SwitchRecordInvalid as invalid:
        fail(f"key switches in bucket openapi_tool: {invalid}; delete it: nats kv del openapi_tool switches")
