"""`openapi-tool tools list`, `show` and `delete`: the definitions that a kernel has stored."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from openapi_tool.bootstrap import tool_secrets
from openapi_tool.cli.given_names import check_given
from openapi_tool.cli.kernel import NO_DATABASE
from openapi_tool.cli.output import USAGE, fail, print_json, print_line
from openapi_tool.cli.registry import FAILED, Registry, confirmed, dev_of_registry, registry_project, run_with
from openapi_tool.cli.stored_definitions import judge, stored_check
from openapi_tool.cli.tables import Rows, cell, output
from openapi_tool.environment import likely_secrets
from openapi_tool.protocol.jsontext import object_at
from openapi_tool.protocol.printable import printable_json
from openapi_tool.settings import load_settings
from openapi_tool.telemetry.redact import MASK, Redactor
from openapi_tool.tools.key_shapes import without_keys
from openapi_tool.tools.registry import RegistryError
from openapi_tool.tools.stored_rows import as_yaml
from openapi_tool.tools.wording import did_you_mean, short

_PROJECT_ID = "project id"
_TOOL_NAME = "name of a tool"
_DESCRIPTION_CHARS = 60
_NAMES_SHOWN = 20


def list_(*, project: str | None, api: str | None, db: bool, as_json: bool) -> None:
    """Print the definitions of a project, and their mistakes as an executor with these settings sees them."""
    check_given("--project", project, _PROJECT_ID)
    chosen = registry_project(project, api, db=db)

    async def read(registry: Registry, version: str | None) -> tuple[list[dict[str, Any]], str | None]:
        return await registry.rows(chosen.name), version  # of the kernel's protocol

    stored, version = run_with(read, api, db=db, default_project=chosen.default)
    mask = _masking()
    check = stored_check(load_settings(NO_DATABASE), dev_of_registry(api, db=db))
    rows = [mask({**row, **judge(row, check, version)._asdict()}) for row in stored]
    if as_json:
        for row in rows:
            print_json({name: value for name, value in row.items() if name != "kind"})
        return
    table = Rows("tool", "is", "waits s", "description, or what is wrong")
    for row in rows:
        waits = object_at(row, "options").get("suspend_timeout_seconds", "-")
        description = textwrap.shorten(row["description"] or "", _DESCRIPTION_CHARS, placeholder=" …")
        table.add(row["tool_name"], row["kind"], waits, "; ".join(row["problems"]) or description)
    output().print(table if rows else cell(f"project {chosen.name} has no tools"))


def show(tool: str, *, project: str | None, api: str | None, db: bool, as_json: bool) -> None:
    """Print one definition as YAML; keys pasted into it are masked."""
    check_given("TOOL", tool, _TOOL_NAME)
    check_given("--project", project, _PROJECT_ID)
    chosen = registry_project(project, api, db=db)

    async def read(registry: Registry, _: object) -> dict[str, Any]:
        return await registry.row(chosen.name, tool) or await _no_such_tool(registry, chosen.name, tool)

    row = _masking()(run_with(read, api, db=db, default_project=chosen.default))
    sys.stdout.write(printable_json(row) + "\n" if as_json else as_yaml(row))


def delete(
    tools: list[str],
    *,
    project: str,
    api: str | None,
    db: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete definitions, after a check that all of them exist."""
    for tool in tools:
        check_given("TOOLS", tool, _TOOL_NAME)
    check_given("--project", project, _PROJECT_ID)

    async def delete_all(registry: Registry, _: object) -> list[dict[str, Any]]:
        known = {row["tool_name"] for row in await registry.rows(project)}
        for tool in tools:
            if tool not in known:
                await _no_such_tool(registry, project, tool)
        if not yes and not confirmed(f"Delete {', '.join(tools)} of project {project}?"):
            fail("nothing was changed", FAILED)
        return [await _deleted(registry, project, tool) for tool in tools]

    outcomes = run_with(delete_all, api, db=db)
    for outcome in outcomes:
        if as_json:
            print_json(outcome)
        else:
            reason = f", {outcome['reason']}" if outcome["reason"] else ""
            print_line(f"{outcome['tool_name']}: {outcome['outcome']}{reason}")
    if any(outcome["outcome"] != "deleted" for outcome in outcomes):
        raise typer.Exit(FAILED)


async def _no_such_tool(registry: Registry, project: str, tool: str) -> NoReturn:
    known = [short(str(row["tool_name"])) for row in await registry.rows(project)]
    hint = did_you_mean(tool, known) or f"; its tools: {', '.join(known[:_NAMES_SHOWN]) or 'none'}"
    fail(f"project {short(project)} has no tool {short(tool)!r}{hint}", USAGE)


async def _deleted(registry: Registry, project: str, tool: str) -> dict[str, Any]:
    reason = None
    try:
        outcome = "deleted" if await registry.delete(project, tool) else "absent"
    except RegistryError as error:
        outcome, reason = "failed", str(error)
    return {"project_id": project, "tool_name": tool, "outcome": outcome, "reason": reason}


def _masking() -> Callable[[Any], Any]:
    """Return a function that masks likely keys and known secrets, since others may read the terminal."""
    secrets = tool_secrets(load_settings(NO_DATABASE), os.environ).values()
    redactor = Redactor([*likely_secrets(os.environ), *secrets.values()])
    return lambda row: redactor.value(without_keys(row, MASK))
