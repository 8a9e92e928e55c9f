"""`openapi-tool tools list`, `show`, `delete`: stored definitions, through the kernel's API or database."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import typer

from openapi_tool.bootstrap import operator_envs, pool_options, tool_secrets
from openapi_tool.cli.kernel import NO_DATABASE, find_dev
from openapi_tool.cli.management_api import ManagementApi
from openapi_tool.cli.output import INTERRUPTED, USAGE, fail, print_json, print_line, print_status
from openapi_tool.cli.tables import Rows, cell, output
from openapi_tool.environment import likely_secrets
from openapi_tool.jina.stored_check import StoredCheck
from openapi_tool.kernel.postgres.failures import located
from openapi_tool.kernel.postgres.tool_rows import ToolRows
from openapi_tool.protocol.jsontext import object_at
from openapi_tool.settings import Settings, given_values, load_settings
from openapi_tool.telemetry.printable import printable_json, printable_line
from openapi_tool.telemetry.redact import MASK, Redactor
from openapi_tool.tools.bounds import MAX_ROW_BYTES
from openapi_tool.tools.definition import stored_record
from openapi_tool.tools.exports import as_yaml
from openapi_tool.tools.key_shapes import without_keys
from openapi_tool.tools.registry import TOO_LARGE, NoSuchProject, RegistryError, RegistryUnreachable
from openapi_tool.tools.wording import did_you_mean, short

FAILED = 1
_DESCRIPTION_CHARS = 60
_NAMES_SHOWN = 20
_CHOOSE_REGISTRY = "give exactly one of --api URL and --db"

T = TypeVar("T")
Registry = ToolRows | ManagementApi


def list_(*, project: str, api: str | None, db: bool, as_json: bool) -> None:
    """Print the definitions of a project, and their mistakes as an executor with these settings sees them."""

    async def read(registry: Registry, version: str | None) -> tuple[list[dict[str, Any]], str | None]:
        return await registry.rows(project), version

    stored, version = run_with(read, api, db=db)
    mask = _masking()
    check = stored_check(load_settings(NO_DATABASE))
    rows = [mask({**row, **judge(row, check, version)}) for row in stored]
    if as_json:
        for row in rows:
            print_json({name: value for name, value in row.items() if name != "kind"})
        return
    table = Rows("tool", "is", "waits s", "description, or what is wrong")
    for row in rows:
        waits = object_at(row, "options").get("suspend_timeout_seconds", "-")
        description = textwrap.shorten(row["description"] or "", _DESCRIPTION_CHARS, placeholder=" …")
        table.add(row["tool_name"], row["kind"], waits, "; ".join(row["problems"]) or description)
    output().print(table if rows else cell(f"project {project} has no tools"))


def show(tool: str, *, project: str, api: str | None, db: bool, as_json: bool) -> None:
    """Print one definition as YAML; keys pasted into it are masked."""

    async def read(registry: Registry, _: object) -> dict[str, Any]:
        return await registry.row(project, tool) or await _no_such_tool(registry, project, tool)

    row = _masking()(run_with(read, api, db=db))
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
    """Delete definitions: all of them, or none if one does not exist."""

    async def delete_all(registry: Registry, _: object) -> list[dict[str, Any]]:
        known = {row["tool_name"] for row in await registry.rows(project)}
        if unknown := next((tool for tool in tools if tool not in known), None):
            await _no_such_tool(registry, project, unknown)
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
    fail(f"project {project} has no tool {tool!r}{hint}", USAGE)


async def _deleted(registry: Registry, project: str, tool: str) -> dict[str, Any]:
    reason = None
    try:
        outcome = "deleted" if await registry.delete(project, tool) else "absent"
    except RegistryError as error:
        outcome, reason = "failed", str(error)
    return {"project_id": project, "tool_name": tool, "outcome": outcome, "reason": reason}


def confirmed(question: str) -> bool:
    """Ask for confirmation. Exits if standard input is closed."""
    typer.echo(f"{printable_line(question)} [y/N]: ", nl=False, err=True)
    answer = sys.stdin.readline()
    if not answer:
        print_status("")
        fail("nothing was changed: no terminal to ask; use --yes", FAILED)
    return answer.strip().lower() in ("y", "yes")


def run_with(
    work: Callable[[Registry, str | None], Coroutine[Any, Any, T]],
    api: str | None,
    *,
    db: bool,
) -> T:
    """Run `work` with the registry and its kernel's protocol version, None if unknown; on a failure exit."""

    async def open_and_work() -> T:
        async with _registry(api, db=db) as (registry, version):
            return await work(registry, version)

    if api is not None and db:
        fail(_CHOOSE_REGISTRY, USAGE)
    try:
        return asyncio.run(open_and_work())
    except RegistryError as error:
        fail(str(error), USAGE if isinstance(error, NoSuchProject | RegistryUnreachable) else FAILED)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


@asynccontextmanager
async def _registry(api: str | None, *, db: bool) -> AsyncIterator[tuple[Registry, str | None]]:
    if api is not None:
        async with ManagementApi.open(api) as client:
            yield client, _configured_version()
        return
    if db:
        pool = pool_options(load_settings(), os.environ)
    else:
        stack, why = find_dev()
        if stack is None:
            fail(_CHOOSE_REGISTRY + (f", or start `openapi-tool dev`: {why}" if why else ""), USAGE)
        pool = pool_options(load_settings({"postgres": {"dsn": stack.pg_dsn}}), os.environ)
        pool = replace(pool, version=stack.protocol)
    try:
        async with ToolRows.open(pool) as rows:
            yield rows, pool.version
    except RegistryUnreachable as error:
        raise RegistryUnreachable(located(str(error), pool)) from error


def _configured_version() -> str | None:
    """Return the protocol version that the settings name; the API does not say which one its kernel speaks."""
    load_settings(NO_DATABASE)  # reports mistakes
    version: str | None = given_values().get("protocol", {}).get("version")
    return version


def stored_check(settings: Settings) -> StoredCheck:
    """Return the check of stored definitions for an executor with these settings."""
    return StoredCheck(
        operator_envs(settings),
        tool_secrets(settings, os.environ),
        settings.url_policy,
        settings.tools.max_batch_items,
        settings.protocol.target,
    )


def judge(row: dict[str, Any], check: StoredCheck, version: str | None) -> dict[str, Any]:
    """Return the built-in tool of a stored definition, and what the executor would refuse or ignore in it.

    A tool with another target is "not ours". `version` is the kernel's protocol version, None if unknown.
    """
    target = row.get("target_subject")
    if isinstance(target, str) and f".cmd.tool.{check.target}." not in target:
        return {"kind": "not ours", "problems": []}
    # `ToolRows` replaces a larger column by a text with this end.
    if too_large := [name for name in ("parameters", "options") if str(row.get(name)).endswith(TOO_LARGE)]:
        why = f"{too_large[0]}: is too large; a definition may have at most {MAX_ROW_BYTES:,} bytes"
        return {"kind": "unusable", "problems": [why]}
    definition, problems = check.check(stored_record(row))
    if version and isinstance(target, str) and not target.startswith(f"cg.{version}."):
        why = f"target_subject: must begin with cg.{version}., or no executor of this kernel gets a call"
        return {"kind": "unusable", "problems": [why, *problems]}
    return {"kind": definition.built_in.name if definition else "unusable", "problems": problems}


def _masking() -> Callable[[Any], Any]:
    """Return a function that masks likely keys and known secrets, since others may read the terminal."""
    secrets = tool_secrets(load_settings(NO_DATABASE), os.environ).values()
    redactor = Redactor([*likely_secrets(os.environ), *secrets.values()])
    return lambda row: redactor.value(without_keys(row, MASK))
