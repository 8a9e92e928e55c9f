"""`openapi-tool tools disable`, `enable` and `disabled`: the switches of tools.

A *switch* is a record that disables one tool, all tools of a project, or all tools (`ALL`). Executors read the switches
in NATS, processes of a gateway those in their state.
"""

from __future__ import annotations

import getpass
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from openapi_tool.bootstrap import Bootstrap
from openapi_tool.cli.gateway_state import with_state
from openapi_tool.cli.given_names import check_given
from openapi_tool.cli.nats_connection import ask_replicas, with_nats
from openapi_tool.cli.output import fail, print_json, print_status
from openapi_tool.cli.selection import command_about_same, selected_state
from openapi_tool.cli.tables import Rows, output
from openapi_tool.gateway import operator
from openapi_tool.gateway.opening import NATS
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.nats_records.shared_bucket import BUCKET, RESTRICT, STREAM
from openapi_tool.nats_records.switches import SWITCHES_KEY, SWITCHES_REMEDY, change_switches, load_switches
from openapi_tool.protocol.subjects import is_token
from openapi_tool.state.port import AccessDenied
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.stored_rows import registration
from openapi_tool.tools.switches import ALL, MAX_SWITCHES, MAX_TEXT_CHARS, Switch, Switches, SwitchRecordInvalid
from openapi_tool.tools.wording import did_you_mean, short

_NOT_DISABLED = 1
T = TypeVar("T")


def disable(
    name: str | None,
    *,
    project: str | None,
    all_projects: bool,
    reason: str,
    by: str | None,
    as_json: bool,
    state: Path | None = None,
) -> None:
    """Disable a tool within two seconds on all replicas."""
    switch = _switch(name, project, reason, by, all_projects=all_projects)

    def change(switches: Switches) -> Switches:
        changed = switches.with_disabled(switch)
        if len(changed.all) > MAX_SWITCHES:
            fail(f"{MAX_SWITCHES:,} tools are disabled already; disable a whole project or all tools instead")
        return changed

    path = selected_state(state)
    _change_switches(change, path)
    _remark_on_name(switch.tool_name, of_gateway=path is not None)  # first, as perhaps nothing is stopped
    _show_change("disabled", switch, as_json=as_json)


def _remark_on_name(name: str, *, of_gateway: bool) -> None:
    """Warn that perhaps nothing is stopped, if no built-in tool is registered by this name and one is meant."""
    registered = {built_in: str(registration(tool)["tool_name"]) for built_in, tool in CATALOGUE.items()}
    if name in registered:
        print_status(
            f"{_perhaps_nothing(name)}: no built-in tool is registered by this name, but as {registered[name]!r}"
        )
    elif of_gateway and name not in (ALL, *registered.values()):  # a kernel has tools of its own
        hint = did_you_mean(name, registered.values())
        print_status(
            f"{_perhaps_nothing(name)}: no built-in tool is registered as {name!r}{hint} "
            "(a gateway with --tools FOLDER has those of that folder)"
        )


def _perhaps_nothing(name: str) -> str:
    return f"warning: this stops no call unless a tool is named {name!r} in its project"


def enable(
    name: str | None,
    *,
    project: str | None,
    all_projects: bool,
    reason: str,
    by: str | None,
    as_json: bool,
    state: Path | None = None,
) -> None:
    """Enable again exactly what was disabled, within two seconds on all replicas."""
    switch = _switch(name, project, reason, by, all_projects=all_projects)
    before, after = _change_switches(lambda switches: switches.with_enabled(switch), selected_state(state))
    if len(before.all) == len(after.all):
        fail(
            f"{_named(switch)} is not disabled; {command_about_same('tools disabled', state)} lists what is",
            _NOT_DISABLED,
        )
    _show_change("enabled", switch, as_json=as_json)


def disabled(*, as_json: bool, state: Path | None = None) -> None:
    """Print what is disabled, since when, by whom and why."""
    path = selected_state(state)
    if path is None or path == NATS:
        switches = _with_switches_in_nats(load_switches, is_gateway=path is not None).switches.all
    else:
        switches = with_state(path, operator.read_switches).all
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
    """Return the switch that the options describe; exit with 2 if one of them is invalid."""
    check_given("NAME", name, "name of a tool, or leave NAME out for all tools")
    is_one_project = project is not None
    if is_one_project == all_projects:
        fail("name either --project P or --all-projects")
    if project is not None and not is_token(project):
        fail(f"--project: {short(project)!r} is no project; all projects are --all-projects")
    who = _user() if by is None else by
    for option, text in (("--reason", reason), ("--by", who), ("NAME", name or ALL), ("--project", project or ALL)):
        if not text.strip() or len(text) > MAX_TEXT_CHARS or not text.isprintable():
            fail(f"{option} must have 1 to {MAX_TEXT_CHARS} printable characters")
    reason = reason.strip()
    if reason[-1] not in ".!?":
        reason += "."  # the model reads further sentences after it
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return Switch(project or ALL, name or ALL, reason, who, at)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        fail("name yourself with --by")


def _named(switch: Switch) -> str:
    tools = "all tools" if switch.tool_name == ALL else f"tool {switch.tool_name!r}"
    projects = "all projects" if switch.project_id == ALL else f"project {switch.project_id!r}"
    return f"{tools} of {projects}"


def _show_change(verb: str, switch: Switch, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(switch))
    else:
        print_status(f"{verb} {_named(switch)}")


_NOT_TO_GRANT = {
    f".STREAM.MSG.GET.{STREAM}": f"an earlier version created the bucket openapi_tool; run: {RESTRICT}",
    f".STREAM.CREATE.{STREAM}": "start an executor, which creates the missing bucket openapi_tool",
}
"""What to do if a subject with this ending is denied: `nats permissions --for switches` does not list it."""


def _change_switches(change: Callable[[Switches], Switches], path: Path | None) -> tuple[Switches, Switches]:
    """Change the switches of a kernel's executors, or of a gateway with this state; return those before and after."""
    if path is None or path == NATS:
        return _with_switches_in_nats(lambda client: change_switches(client, change), is_gateway=path is not None)
    return with_state(path, lambda opened: operator.change_switches(opened, change))


def _with_switches_in_nats(work: Callable[[BusClient], Awaitable[T]], *, is_gateway: bool) -> T:
    """Return the result of `work`; exit with 2 and the remedy if it fails."""

    async def explained(_: Bootstrap, client: BusClient) -> T:
        try:
            return await work(client)
        except AccessDenied as denied:
            for subject, why in _NOT_TO_GRANT.items():
                if denied.subject.endswith(subject):
                    fail(f"permission for {denied.subject} is denied, and need not be granted: {why}")
            raise

    try:
        return with_nats(explained, user=NatsUser.SWITCHES, advice=ask_replicas(is_gateway=is_gateway))
    except SwitchRecordInvalid as invalid:
        fail(f"key {SWITCHES_KEY} in bucket {BUCKET}: {invalid}; {SWITCHES_REMEDY}")
