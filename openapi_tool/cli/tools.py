"""`openapi-tool tools`: lint, render and export tool definitions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from openapi_tool.cli import tools_apply, tools_registry, tools_switches
from openapi_tool.cli.common import fail, print_json, print_line, print_status
from openapi_tool.cli.tools_files import LINT_FAILED, Files, file_count, lint_files, load_definitions
from openapi_tool.cli.tools_registry import JsonOption, ProjectOption
from openapi_tool.tools import exports
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.exports import DuplicateName, ShownTool, defined
from openapi_tool.tools.problems import counted

_MAX_SHOWN = 1_000  # problems

app = typer.Typer(no_args_is_help=True, help="Lint, apply, list, export, disable … tool definitions.")


class ExportFormat(StrEnum):
    """Format of an export."""

    OPENAI = "openai"
    OPENAI_RESPONSES = "openai-responses"
    ANTHROPIC = "anthropic"
    MCP = "mcp"
    LOBEHUB = "lobehub"
    KERNEL = "kernel"


@app.command(short_help="Print every problem of definitions as FILE:LINE:COLUMN.")
def lint(
    files: Files,
    *,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings, too.")] = False,
    config: Annotated[
        Path | None, typer.Option(help="The executor's TOML file: variables that it lacks are errors.", dir_okay=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print every problem of definitions as FILE:LINE:COLUMN.

    Limits (longest call, the worker's timeout, batch items, target, variables) come from --config, else from this
    machine's settings.
    Exit codes: 0 no errors, 1 errors, 2 a file cannot be read.
    """
    problems = lint_files(files, config)
    for located in problems[:_MAX_SHOWN]:
        if as_json:
            print_json(located.as_object())
        else:
            print_line(str(located))
    if len(problems) > _MAX_SHOWN:
        print_status(f"only the first {_MAX_SHOWN:,} are shown")
    errors = sum(not located.problem.warning for located in problems)
    counts = (file_count(files), "file"), (errors, "error"), (len(problems) - errors, "warning")
    print_status(", ".join(counted(*count) for count in counts), quiet=as_json)
    if errors or (strict and problems):
        raise typer.Exit(LINT_FAILED)


@app.command(short_help="Print what is stored, and what a model is shown.")
def render(
    file: Annotated[Path, typer.Argument(help="YAML file with a definition, or - for stdin.")],
    *,
    project: ProjectOption,
    as_json: JsonOption = False,
) -> None:
    """Print the row that will be stored for a project, and the schema that a model will see.

    Exit codes: 0, 1 the definition has errors, 2 the file cannot be read.
    """
    definition, *others = load_definitions([file])
    if others:
        fail(f"{file} holds {1 + len(others)} definitions; give a file with one", LINT_FAILED)
    shown = exports.openai_functions([defined(definition.row, definition.parsed)])[0]["function"]
    stored = {"project_id": project, **definition.row}
    if as_json:
        subject = definition.row["target_subject"].replace("{project_id}", project)
        built_in = definition.parsed.built_in.name
        _write({"stored": stored, "subject": subject, "built_in": built_in, "model_sees": shown}, as_json=True)
        return
    print_line(f"# stored in project {project}, a {definition.parsed.built_in.name}")
    sys.stdout.write(f"{exports.as_yaml(stored)}\n# a model sees\n{exports.as_yaml(shown)}")


@app.command(short_help="Print tools in the form of a model provider.")
def export(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="YAML files, folders or -; default: the built-in tools."),
    ] = None,
    *,
    form: Annotated[ExportFormat, typer.Option("--format", help="Output format.")] = ExportFormat.OPENAI,
) -> None:
    """Print tools for OpenAI (Chat Completions, Responses), Anthropic, MCP, LobeHub, or as YAML for the kernel.

    Leaves out `fixed` and `envs` arguments, shows defaults. Exit codes: 0, 1 a definition has errors.
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


app.command(short_help="Register definitions; show differences first.")(tools_apply.apply)
app.command("list", short_help="List a project's definitions and their mistakes.")(tools_registry.list_)
app.command(short_help="Print one definition as YAML.")(tools_registry.show)
app.command(short_help="Delete definitions; running calls finish.")(tools_registry.delete)
app.command(short_help="Disable a tool, a project or all tools at once.")(tools_switches.disable)
app.command(short_help="Enable again what was disabled.")(tools_switches.enable)
app.command(short_help="List what is disabled, by whom and why.")(tools_switches.disabled)


def _shown(files: Sequence[Path]) -> list[ShownTool]:
    return [defined(definition.row, definition.parsed) for definition in load_definitions(files)]


def _registrations() -> list[dict[str, Any]]:
    return [exports.registration(tool) for tool in CATALOGUE.values()]


def _write(value: Any, *, as_json: bool) -> None:
    print_json(value, None if as_json else 2)
