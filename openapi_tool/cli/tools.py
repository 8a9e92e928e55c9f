"""`openapi-tool tools`: definitions of tools, from the file to the project and to what a model sees."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from openapi_tool.cli import tools_apply, tools_registry
from openapi_tool.cli.common import fail, say
from openapi_tool.cli.tools_files import LINT_FAILED, lint_files, load_definitions
from openapi_tool.cli.tools_registry import JsonOption, ProjectOption
from openapi_tool.tools import exports
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.exports import DuplicateName, ShownTool, defined

app = typer.Typer(no_args_is_help=True, help="Definitions of tools: lint, render, apply, list, show, delete, export.")

Files = Annotated[list[Path], typer.Argument(help="Definitions, one YAML file each.", dir_okay=False, exists=True)]


class ExportFormat(StrEnum):
    """Whose form an export has."""

    OPENAI = "openai"
    MCP = "mcp"
    LOBEHUB = "lobehub"
    KERNEL = "kernel"


@app.command()
def lint(
    files: Files,
    *,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail, too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Name everything that is wrong with definitions, as FILE:LINE:COLUMN.

    Limits (the longest call, the worker's patience, batch items, target) are those of this machine's settings.
    Exit codes: 0 nothing wrong, 1 something is, 2 a file cannot be read.
    """
    problems = lint_files(files)
    for found in problems:
        sys.stdout.write((json.dumps(found.as_object()) if as_json else str(found)) + "\n")
    errors = sum(not found.problem.warning for found in problems)
    say(f"{len(files)} files, {errors} errors, {len(problems) - errors} warnings", quiet=as_json)
    if errors or (strict and problems):
        raise typer.Exit(LINT_FAILED)


@app.command()
def render(
    file: Annotated[Path, typer.Argument(help="A definition.", dir_okay=False, exists=True)],
    *,
    project: ProjectOption,
    as_json: JsonOption = False,
) -> None:
    """Show what will be stored for a project, and what a model will see of it.

    Exit codes: 0, 1 the definition has errors, 2 the file cannot be read.
    """
    (definition,) = load_definitions([file])
    shown = exports.openai_functions([defined(definition.row, definition.parsed)])[0]["function"]
    stored = {"project_id": project, **definition.row}
    if as_json:
        subject = definition.row["target_subject"].replace("{project_id}", project)
        built_in = definition.parsed.tool.name
        _write({"stored": stored, "subject": subject, "built_in": built_in, "model_sees": shown}, as_json=True)
        return
    sys.stdout.write(f"# stored in project {project}, a {definition.parsed.tool.name}\n{exports.as_yaml(stored)}")
    sys.stdout.write(f"\n# a model sees\n{exports.as_yaml(shown)}")


@app.command()
def export(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Definitions; without any, the built-in tools.", exists=True)
    ] = None,
    *,
    form: Annotated[ExportFormat, typer.Option("--format", help="Whose form.")] = ExportFormat.OPENAI,
) -> None:
    """Write what a model, or the kernel, is given: OpenAI functions, MCP tools/list, a LobeHub manifest, YAML.

    `fixed` and `envs` arguments are left out, defaults shown. Exit codes: 0, 1 a definition has errors.
    """
    if form is ExportFormat.KERNEL:
        rows = [definition.row for definition in load_definitions(files)] if files else _registrations()
        sys.stdout.write("---\n".join(exports.as_yaml(row) for row in rows))
        return
    try:
        tools = exports.without_duplicates(_shown(files) if files else exports.all_built_in())
    except DuplicateName as duplicate:
        fail(str(duplicate), LINT_FAILED)
    _write(exports.FORMATS[form.value](tools), as_json=False)


app.command()(tools_apply.apply)
app.command("list")(tools_registry.list_)
app.command()(tools_registry.show)
app.command()(tools_registry.delete)


def _shown(files: Sequence[Path]) -> list[ShownTool]:
    return [defined(definition.row, definition.parsed) for definition in load_definitions(files)]


def _registrations() -> list[dict[str, Any]]:
    return [exports.registration(tool) for tool in CATALOGUE.values()]


def _write(value: Any, *, as_json: bool) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=None if as_json else 2) + "\n")
