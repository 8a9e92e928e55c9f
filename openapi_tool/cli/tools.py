"""`openapi-tool tools`: lint, render, export, disable and enable tool definitions."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.text import Text

from openapi_tool.bootstrap import Bootstrap
from openapi_tool.cli import gateway
from openapi_tool.cli.definition_files import LINT_FAILED, LocatedProblem, file_count, lint_files, load_definitions
from openapi_tool.cli.kernel import with_nats
from openapi_tool.cli.options import ExportFormat
from openapi_tool.cli.output import USAGE, fail, print_json, print_line, print_status
from openapi_tool.cli.tables import Rows, cell, output
from openapi_tool.gateway import operator
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.nats_records.shared_bucket import BUCKET, RESTRICT, STREAM
from openapi_tool.nats_records.switches import SWITCHES_KEY, SWITCHES_REMEDY, change_switches, load_switches
from openapi_tool.protocol.subjects import is_token
from openapi_tool.state.port import AccessDenied
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.exports import FORMATS, specification
from openapi_tool.tools.shown_tools import DuplicateName, all_built_in, defined, without_duplicates
from openapi_tool.tools.stored_rows import as_yaml, registration
from openapi_tool.tools.switches import ALL, MAX_SWITCHES, MAX_TEXT_CHARS, Switch, Switches, SwitchRecordInvalid
from openapi_tool.tools.wording import counted, short

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

    _change_switches(change, state)
    _show_change("disabled", switch, as_json=as_json)
    if switch.tool_name in CATALOGUE:
        usual = registration(CATALOGUE[switch.tool_name])["tool_name"]
        print_status(f"no built-in tool is registered as {switch.tool_name!r}, but as {usual!r}: is that one meant?")


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
    before, after = _change_switches(lambda switches: switches.with_enabled(switch), state)
    if len(before.all) == len(after.all):
        fail(f"{_named(switch)} is not disabled; openapi-tool tools disabled lists what is", _NOT_DISABLED)
    _show_change("enabled", switch, as_json=as_json)


def disabled(*, as_json: bool, state: Path | None = None) -> None:
    """Print what is disabled, since when, by whom and why."""
    if (path := gateway.selected_file(state)) is not None:
        switches = gateway.with_state(path, operator.read_switches).all
    else:
        switches = _with_store(load_switches).switches.all
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
    reason = reason.strip()
    sentence = reason if reason[-1] in ".!?" else f"{reason}."  # for the model: further sentences follow
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return Switch(project or ALL, name or ALL, sentence, who, at)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        fail("name yourself with --by")


def _named(switch: Switch) -> str:
    tools = "all tools" if switch.tool_name == ALL else f"tool {switch.tool_name!r}"
    return f"{tools} of {'all projects' if switch.project_id == ALL else f'project {switch.project_id!r}'}"


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


def _change_switches(change: Callable[[Switches], Switches], state: Path | None) -> tuple[Switches, Switches]:
    """Change the switches of a kernel's executors, or of a gateway; return those before and after."""
    if (path := gateway.selected_file(state)) is not None:
        return gateway.with_state(path, lambda opened: operator.change_switches(opened, change))
    return _with_store(lambda client: change_switches(client, change))


def _with_store(work: Callable[[BusClient], Awaitable[T]]) -> T:
    async def explained(_: Bootstrap, client: BusClient) -> T:
        try:
            return await work(client)
        except AccessDenied as denied:
            for subject, why in _NOT_TO_GRANT.items():
                if denied.subject.endswith(subject):
                    fail(f"permission for {denied.subject} is denied, and need not be granted: {why}")
            raise

    try:
        return with_nats(explained, user=NatsUser.SWITCHES)
    except SwitchRecordInvalid as invalid:
        fail(f"key {SWITCHES_KEY} in bucket {BUCKET}: {invalid}; {SWITCHES_REMEDY}")


_MAX_SHOWN = 1_000  # problems


def lint(files: list[Path], *, strict: bool, config: Path | None, as_json: bool) -> None:
    """Print every problem of definitions as FILE:LINE:COLUMN."""
    problems = lint_files(files, config)
    for located in problems[:_MAX_SHOWN]:
        if as_json:
            print_json(located.as_object())
        else:
            output().print(_coloured(located), soft_wrap=True)
    if len(problems) > _MAX_SHOWN:
        print_status(f"only the first {_MAX_SHOWN:,} are shown")
    errors = sum(not located.problem.warning for located in problems)
    counts = (file_count(files), "file"), (errors, "error"), (len(problems) - errors, "warning")
    print_status(", ".join(counted(*count) for count in counts), quiet=as_json)
    if errors or (strict and problems):
        raise typer.Exit(LINT_FAILED)


def _coloured(located: LocatedProblem) -> Text:
    line = cell(located)
    level, colour = ("warning", "yellow") if located.problem.warning else ("error", "red")
    line.highlight_words([f": {level}: "], colour)
    return line


def render(file: Path, *, project: str, as_json: bool) -> None:
    """Print the row that will be stored for a project, and the schema that a model will see."""
    definition, *others = load_definitions([file])
    if others:
        fail(f"{file} holds {1 + len(others)} definitions; give a file with one", LINT_FAILED)
    shown = specification(defined(definition.row, definition.parsed))
    stored = {"project_id": project, **definition.row}
    if as_json:
        subject = definition.row["target_subject"].replace("{project_id}", project)
        built_in = definition.parsed.built_in.name
        print_json({"stored": stored, "subject": subject, "built_in": built_in, "model_sees": shown})
        return
    print_line(f"# stored in project {project}, a {definition.parsed.built_in.name}")
    sys.stdout.write(f"{as_yaml(stored)}\n# a model sees\n{as_yaml(shown)}")


def export(files: list[Path] | None, *, form: ExportFormat, output_dir: Path | None) -> None:
    """Print tools in the form of a model provider, or write them to `output_dir`."""
    if output_dir is not None and form != "kernel":
        fail("--output-dir: only --format kernel writes files; leave it out, or add --format kernel")
    if files:
        definitions = load_definitions(files)
        rows = [definition.row for definition in definitions]
        tools = [defined(definition.row, definition.parsed) for definition in definitions]
    else:
        rows = [*map(registration, CATALOGUE.values())]
        tools = all_built_in()
    if form == "kernel" and output_dir is not None:
        _write_definitions(rows, output_dir)
        return
    if form == "kernel":
        sys.stdout.write("---\n".join(as_yaml(row) for row in rows))
        return
    try:
        tools = without_duplicates(tools)
    except DuplicateName as duplicate:
        fail(str(duplicate), LINT_FAILED)
    print_json(FORMATS[form](tools), indent=2)


def _write_definitions(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write a file for each definition, and print its path; an existing file is replaced."""
    names = [row["tool_name"] for row in rows]
    if twice := next((name for name in names if names.count(name) > 1), None):
        fail(f"{twice}: two definitions have this name", LINT_FAILED)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, row in zip(names, rows, strict=True):
            file = folder / f"{name}.yaml"
            file.write_text(as_yaml(row), encoding="utf-8")
            print_line(str(file))
    except OSError as error:
        why = "is a file, not a folder" if isinstance(error, FileExistsError) else error.strerror or error
        fail(f"--output-dir: {error.filename or folder}: {why}", USAGE)
