"""`openapi-tool tools list`, `show`, `delete`: what a project has, through the kernel's API or its database."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from openapi_tool.cli.common import INTERRUPTED, USAGE, fail
from openapi_tool.cli.management_api import ManagementApi
from openapi_tool.cli.tools_files import settings_failed, settings_without_database
from openapi_tool.kernel.registration import ToolRows
from openapi_tool.prepared import operator_envs
from openapi_tool.protocol.errors import ToolMisconfigured
from openapi_tool.settings import SettingsError, load_settings
from openapi_tool.tools.arguments import OperatorEnvs
from openapi_tool.tools.definition import parse_definition
from openapi_tool.tools.document import stored_record
from openapi_tool.tools.exports import as_yaml
from openapi_tool.tools.lint import part
from openapi_tool.tools.registry import Registry, RegistryError

FAILED = 1
_DESCRIPTION_CHARS = 60

T = TypeVar("T")

ApiOption = Annotated[str | None, typer.Option("--api", help="URL of the kernel's management API.", show_default=False)]
DatabaseOption = Annotated[bool, typer.Option("--db", help="Straight in the kernel's database, which PG_DSN names.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on standard output, nothing else.")]
ProjectOption = Annotated[str, typer.Option(help="Project.", show_default=False)]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def list_(
    *, project: ProjectOption, api: ApiOption = None, db: DatabaseOption = False, as_json: JsonOption = False
) -> None:
    """List the definitions of a project, and why this configuration of the executor would refuse some.

    Exit codes: 0, 1 the project cannot be read, 2 usage or configuration.
    """
    rows, operator = (
        run_with(api, db, lambda registry: registry.rows(project)),
        operator_envs(settings_without_database()),
    )
    if as_json:
        for row in rows:
            _, problems = _kind(row, operator)
            sys.stdout.write(json.dumps({**row, "problems": problems}, ensure_ascii=False) + "\n")
        return
    table = Table(*(Column(name, no_wrap=True) for name in ("tool", "is", "waits s")), "description, or what is wrong")
    for row in rows:
        kind, problems = _kind(row, operator)
        waits = part(row, "options").get("suspend_timeout_seconds", "-")
        description = textwrap.shorten(row["description"] or "", _DESCRIPTION_CHARS, placeholder=" …")
        table.add_row(row["tool_name"], kind, str(waits), Text("; ".join(problems) or description))
    Console().print(table if rows else f"project {project} has no tools")


def show(
    tool: Annotated[str, typer.Argument(help="A tool's name.")],
    *,
    project: ProjectOption,
    api: ApiOption = None,
    db: DatabaseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show one definition whole, as YAML. Exit codes: 0, 1 there is none of this name, 2 usage or configuration."""
    row = run_with(api, db, lambda registry: registry.row(project, tool))
    if row is None:
        fail(f"project {project} has no tool {tool!r}", FAILED)
    sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n" if as_json else as_yaml(row))


def delete(
    tools: Annotated[list[str], typer.Argument(help="Names of tools.")],
    *,
    project: ProjectOption,
    api: ApiOption = None,
    db: DatabaseOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Take definitions away; running calls end. Exit codes: 0, 1 one could not be deleted, 2 usage or configuration."""
    if not yes and not confirmed(f"Delete {', '.join(tools)} of project {project}?"):
        fail("nothing was changed", FAILED)

    async def take_away(registry: Registry) -> list[dict[str, Any]]:
        return [await _deleted(registry, project, tool) for tool in tools]

    outcomes = run_with(api, db, take_away)
    for outcome in outcomes:
        told = f"{outcome['tool_name']}: {outcome['outcome']}" + (f", {outcome['reason']}" if outcome["reason"] else "")
        sys.stdout.write((json.dumps(outcome) if as_json else told) + "\n")
    if any(outcome["outcome"] != "deleted" for outcome in outcomes):
        raise typer.Exit(FAILED)


async def _deleted(registry: Registry, project: str, tool: str) -> dict[str, Any]:
    try:
        outcome, reason = ("deleted", None) if await registry.delete(project, tool) else ("absent", None)
    except RegistryError as error:
        outcome, reason = "failed", str(error)
    return {"project_id": project, "tool_name": tool, "outcome": outcome, "reason": reason}


def confirmed(question: str) -> bool:
    """Whether a person agrees; nobody there is a no."""
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:
        return False


def run_with(api: str | None, db: bool, work: Callable[[Registry], Coroutine[Any, Any, T]]) -> T:  # noqa: FBT001
    """Do something with the registry that was chosen; what keeps it from being done is said in a line."""

    async def open_and_work() -> T:
        async with _registry(api, db=db) as registry:
            return await work(registry)

    if (api is not None) == db:
        fail("give exactly one of --api URL and --db", USAGE)
    try:
        return asyncio.run(open_and_work())
    except SettingsError as error:
        settings_failed(error)
    except RegistryError as error:
        fail(str(error), FAILED)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


@asynccontextmanager
async def _registry(api: str | None, *, db: bool) -> AsyncIterator[Registry]:
    if db:
        postgres = load_settings({}).postgres
        async with ToolRows.open(postgres.dsn.get_secret_value(), postgres.timeout_s) as rows:
            yield rows
    else:
        async with ManagementApi.open(api or "") as client:
            yield client


def _kind(row: dict[str, Any], operator: OperatorEnvs) -> tuple[str, list[str]]:
    """Name of the built-in tool that a stored definition is, and the reasons for which the executor would refuse it."""
    try:
        definition = parse_definition(stored_record(row))
        operator.over(definition)
    except ToolMisconfigured as error:
        return "unusable", error.detail["problems"] if isinstance(error.detail, dict) else [error.message]
    return definition.tool.name, []
