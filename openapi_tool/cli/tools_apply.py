"""`openapi-tool tools apply`: register definitions in projects after a comparison and one confirmation."""

from __future__ import annotations

import asyncio
import difflib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress

from openapi_tool.cli.definition_files import load_definitions
from openapi_tool.cli.given_names import check_given
from openapi_tool.cli.output import USAGE, fail, print_json, print_line, print_status
from openapi_tool.cli.registry import FAILED, Registry, confirmed, run_with
from openapi_tool.cli.tables import Rows, output
from openapi_tool.protocol.printable import printable_line
from openapi_tool.protocol.subjects import subject_in_version
from openapi_tool.tools.registry import COLUMNS, RegistryError, RegistryUnreachable
from openapi_tool.tools.stored_rows import as_yaml
from openapi_tool.tools.wording import counted, first_of

_MAX_CONCURRENT = 8  # requests: so that one command does not occupy the kernel's API
_PROJECTS_SHOWN = 5
_COLOURS = {"+": typer.colors.GREEN, "-": typer.colors.RED}

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class ApplyResult:
    """Outcome for one definition in one project.

    After the comparison it is `create`, `update` or `unchanged`, after the write `created` or `updated`; it may also be
    `failed`. `diff` shows what will change; it is empty if nothing will.
    """

    project_id: str
    tool_name: str
    outcome: str
    reason: str | None = None
    diff: str = ""


def apply(
    files: list[Path],
    *,
    project: list[str] | None,
    projects_file: Path | None,
    api: str | None,
    db: bool,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Register definitions: lint, compare with the stored ones, show differences, confirm, write."""
    if as_json and not (yes or dry_run):
        fail("--json cannot ask for confirmation: add --yes or --dry-run", USAGE)
    projects = _projects(project or [], projects_file)
    definitions = load_definitions(files)

    async def work(registry: Registry, version: str | None) -> list[ApplyResult]:  # `version` of the kernel's protocol
        rows = [definition.row for definition in definitions]
        if version is not None:
            rows = [{**row, "target_subject": subject_in_version(row["target_subject"], version)} for row in rows]
        return await _apply(registry, projects, rows, ask=not yes, dry_run=dry_run, quiet=as_json)

    results = run_with(work, api, db=db)
    if as_json:
        for result in results:
            print_json(asdict(result))
    else:
        _show(results)
    if any(result.outcome == "failed" for result in results):
        raise typer.Exit(FAILED)


def _projects(named: Sequence[str], file: Path | None) -> list[str]:
    lines: list[str] = []
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            fail(f"--projects-file: {file}: cannot be read: {error.strerror}", USAGE)
        except UnicodeDecodeError:
            fail(f"--projects-file: {file}: is not UTF-8 text; name a file with one project per line", USAGE)
    listed = [name for line in lines if (name := line.partition("#")[0].strip())]
    for option, names in (("--project", named), (f"--projects-file: {file}", listed)):
        for name in names:
            check_given(option, name, "project id")
    projects = list(dict.fromkeys((*named, *listed)))  # each once, in their order
    return projects or fail("name a project: --project P or --projects-file FILE", USAGE)


async def _apply(
    registry: Registry, projects: list[str], rows: list[dict[str, Any]], *, ask: bool, dry_run: bool, quiet: bool
) -> list[ApplyResult]:
    pairs = [(project, row) for project in projects for row in rows]
    compared = await _for_each(pairs, "comparing", lambda pair: _compared(registry, *pair), quiet=quiet)
    changes = [result for result in compared if result.diff]
    if not quiet:
        _show_differences(changes)
    if dry_run or not changes:
        return compared
    project_count = len({result.project_id for result in changes})
    if ask and not confirmed(f"Write {counted(len(changes), 'definition')} (projects: {project_count})?"):
        fail("nothing was changed", FAILED)
    results_with_rows = [(result, row) for result, (_, row) in zip(compared, pairs, strict=True)]
    return await _for_each(results_with_rows, "writing", lambda pair: _written(registry, *pair), quiet=quiet)


async def _for_each(
    items: Sequence[Item], what: str, work: Callable[[Item], Awaitable[ApplyResult]], *, quiet: bool
) -> list[ApplyResult]:
    """Run `work` concurrently, with a progress bar on a terminal. Its first exception cancels the others."""
    slots = asyncio.Semaphore(_MAX_CONCURRENT)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        bar = progress.add_task(what, total=len(items))

        async def in_slot(item: Item) -> ApplyResult:
            async with slots:
                result = await work(item)
            progress.advance(bar)
            return result

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(in_slot(item)) for item in items]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _compared(registry: Registry, project: str, row: dict[str, Any]) -> ApplyResult:
    name = row["tool_name"]
    try:
        stored = await registry.row(project, name)
    except RegistryUnreachable:
        raise  # nothing was written yet: ends the command, while a failed write is reported with the others
    except RegistryError as error:
        return ApplyResult(project, name, "failed", str(error))
    if stored == row:
        return ApplyResult(project, name, "unchanged")
    return ApplyResult(project, name, "update" if stored else "create", diff=_difference(stored, row))


async def _written(registry: Registry, compared: ApplyResult, row: dict[str, Any]) -> ApplyResult:
    if not compared.diff:
        return compared
    try:
        await registry.put(compared.project_id, row)
    except RegistryError as error:
        return replace(compared, outcome="failed", reason=str(error))
    return replace(compared, outcome=f"{compared.outcome}d")  # `created` or `updated`


def _difference(stored: dict[str, Any] | None, row: dict[str, Any]) -> str:
    before = as_yaml(_ordered_like({name: row[name] for name in COLUMNS}, stored)) if stored else ""
    after = as_yaml({name: row[name] for name in COLUMNS})
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "stored", "file", lineterm="")
    return f"{printable_line(row['tool_name'])}\n" + "\n".join(lines)


def _ordered_like(model: Any, value: Any) -> Any:
    """Return `value` with its keys in the order of `model`; jsonb does not preserve it."""
    if isinstance(model, dict) and isinstance(value, dict):
        names = [name for name in model if name in value] + [name for name in value if name not in model]
        return {name: _ordered_like(model.get(name), value[name]) for name in names}
    return value


def _show_differences(changes: list[ApplyResult]) -> None:
    """Print each difference once, below the projects that have it."""
    projects_by_diff: dict[str, list[str]] = defaultdict(list)
    for result in changes:
        projects_by_diff[result.diff].append(result.project_id)
    for diff, projects in projects_by_diff.items():
        print_status("")
        print_status(f"{first_of(projects, _PROJECTS_SHOWN)}:")
        for line in diff.splitlines():
            print_status(line, colour=_COLOURS.get(line[:1]))


def _show(results: list[ApplyResult]) -> None:
    table = Rows("project", "tool", "outcome", "why")
    for result in results:
        table.add(result.project_id, result.tool_name, result.outcome, result.reason or "")
    output().print(table)
    outcomes = [result.outcome for result in results]
    counts = [f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes)]
    print_line(", ".join(counts))
