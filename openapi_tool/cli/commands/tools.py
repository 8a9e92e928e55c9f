"""Group `tools`: check, register, list and export definitions of tools, and disable tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from openapi_tool.cli.commands.program_command import Commands
from openapi_tool.cli.options import ExportFormat, GatewayStateOption, JsonOption

Files = Annotated[list[Path], typer.Argument(help="YAML files with definitions, folders of them, or - for stdin.")]
ApiOption = Annotated[str | None, typer.Option("--api", help="URL of the kernel's management API.", show_default=False)]
DatabaseOption = Annotated[
    bool,
    typer.Option(
        "--db",
        help="Use the kernel's database (PG_DSN). Without it and --api: a running `dev`, if no settings name servers.",
    ),
]
ProjectOption = Annotated[str, typer.Option(help="Project.", show_default=False)]
ProjectOrDevOption = Annotated[
    str | None, typer.Option("--project", help="Project; by default that of the running `dev`.", show_default=False)
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]

# Options of `disable` and `enable`.
NameArgument = Annotated[str | None, typer.Argument(help="Tool, by its name in the project; without it all of them.")]
SwitchProjectOption = Annotated[str | None, typer.Option(help="Project of the tool.")]
EverywhereOption = Annotated[bool, typer.Option("--all-projects", help="All projects instead of one.")]
ReasonOption = Annotated[str, typer.Option(help="Why; models and the log of every replica get it.")]
ByOption = Annotated[str | None, typer.Option(help="Who; by default the user of this machine.")]

tools = Commands(
    name="tools",
    no_args_is_help=True,
    help="Lint, apply, list, export, disable … tool definitions.",
    short_help="Lint, apply, list and export tool definitions.",
)


@tools.command(short_help="Print every problem of definitions as FILE:LINE:COLUMN.")
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
    from openapi_tool.cli import tools as work

    work.lint(files, strict=strict, config=config, as_json=as_json)


@tools.command(short_help="Print what is stored, and what a model is shown.")
def render(
    file: Annotated[Path, typer.Argument(help="YAML file with a definition, or - for stdin.")],
    *,
    project: ProjectOption,
    as_json: JsonOption = False,
) -> None:
    """Print the row that will be stored for a project, and the schema that a model will see.

    Exit codes: 0, 1 the definition has errors, 2 the file cannot be read.
    """
    from openapi_tool.cli import tools as work

    work.render(file, project=project, as_json=as_json)


@tools.command(short_help="Print tools in the form of a model provider.")
def export(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="YAML files, folders or -; default: the built-in tools."),
    ] = None,
    *,
    form: Annotated[ExportFormat, typer.Option("--format", help="Output format.")] = "openai",
    output_dir: Annotated[
        Path | None,
        typer.Option(
            help="With --format kernel: write a file per tool, as the kernel's API takes them.", show_default=False
        ),
    ] = None,
) -> None:
    """Print tools for OpenAI (Chat Completions, Responses), Anthropic, MCP, LobeHub, or as YAML for the kernel.

    Leaves out `fixed` and `envs` arguments, shows defaults. The kernel's API takes one definition per file, so it
    refuses the output for several tools: use --output-dir. Exit codes: 0, 1 a definition has errors, 2 wrong usage or
    a file cannot be written.
    """
    from openapi_tool.cli import tools as work

    work.export(files, form=form, output_dir=output_dir)


@tools.command(short_help="Register definitions; show differences first.")
def apply(
    files: Files,
    *,
    project: Annotated[list[str] | None, typer.Option(help="Project; repeatable.", show_default=False)] = None,
    projects_file: Annotated[
        Path | None, typer.Option(help="File with one project per line; # for comments.", dir_okay=False, exists=True)
    ] = None,
    api: ApiOption = None,
    db: DatabaseOption = False,
    yes: YesOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Compare and show; change nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Register definitions: lint, compare with the stored ones, show differences, confirm, write.

    Subjects are stored in the kernel's protocol version; with --api name it if it is not that of the files. A failure
    in one project does not affect the others. Exit codes: 0 projects match the files (or differences shown, with
    --dry-run), 1 a failure, an error in a file, or not confirmed, 2 usage or settings, or the kernel cannot be reached.
    """
    from openapi_tool.cli import tools_apply as work

    work.apply(
        files,
        project=project,
        projects_file=projects_file,
        api=api,
        db=db,
        yes=yes,
        dry_run=dry_run,
        as_json=as_json,
    )


@tools.command("list", short_help="List a project's definitions and their mistakes.")
def list_tools(
    *,
    project: ProjectOrDevOption = None,
    api: ApiOption = None,
    db: DatabaseOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the definitions of a project, and their mistakes as an executor with these settings sees them.

    Exit codes: 0, 2 there is no such project, usage or settings, or the kernel cannot be reached.
    """
    from openapi_tool.cli import tools_registry as work

    work.list_(project=project, api=api, db=db, as_json=as_json)


@tools.command("show", short_help="Print one definition as YAML.")
def show_tool(
    tool: Annotated[str, typer.Argument(help="Name of a tool.")],
    *,
    project: ProjectOrDevOption = None,
    api: ApiOption = None,
    db: DatabaseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print one definition as YAML; keys pasted into it are masked.

    Exit codes: 0, 2 there is no such tool, usage or settings, or the kernel cannot be reached.
    """
    from openapi_tool.cli import tools_registry as work

    work.show(tool, project=project, api=api, db=db, as_json=as_json)


@tools.command("delete", short_help="Delete definitions; running calls finish.")
def delete_tools(
    tools: Annotated[list[str], typer.Argument(help="Names of tools.")],
    *,
    project: ProjectOption,
    api: ApiOption = None,
    db: DatabaseOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete definitions; running calls finish.

    Exit codes: 0, 1 one could not be deleted, or not confirmed, 2 there is no such tool (nothing is deleted then),
    usage or settings, or the kernel cannot be reached.
    """
    from openapi_tool.cli import tools_registry as work

    work.delete(tools, project=project, api=api, db=db, yes=yes, as_json=as_json)


@tools.command(short_help="Disable a tool, a project or all tools at once.")
def disable(
    name: NameArgument = None,
    *,
    project: SwitchProjectOption = None,
    all_projects: EverywhereOption = False,
    reason: ReasonOption,
    by: ByOption = None,
    as_json: JsonOption = False,
    state: GatewayStateOption = None,
) -> None:
    """Disable a tool within two seconds on all replicas: its calls fail with tool_not_available and the reason.

    Nothing is sent upstream for them. Running calls are finished. It applies to every kernel on these NATS servers.
    Exit codes: 0, 2 invalid options or settings, or NATS cannot be reached.
    """
    from openapi_tool.cli import switches as work

    work.disable(
        name,
        project=project,
        all_projects=all_projects,
        reason=reason,
        by=by,
        as_json=as_json,
        state=state,
    )


@tools.command(short_help="Enable again what was disabled.")
def enable(
    name: NameArgument = None,
    *,
    project: SwitchProjectOption = None,
    all_projects: EverywhereOption = False,
    reason: ReasonOption,
    by: ByOption = None,
    as_json: JsonOption = False,
    state: GatewayStateOption = None,
) -> None:
    """Enable again exactly what was disabled, within two seconds on all replicas.

    Exit codes: 0, 1 it is not disabled, 2 invalid options or settings, or NATS cannot be reached.
    """
    from openapi_tool.cli import switches as work

    work.enable(
        name,
        project=project,
        all_projects=all_projects,
        reason=reason,
        by=by,
        as_json=as_json,
        state=state,
    )


@tools.command(short_help="List what is disabled, by whom and why.")
def disabled(
    *,
    as_json: JsonOption = False,
    state: GatewayStateOption = None,
) -> None:
    """List what is disabled, since when, by whom and why. Exit codes: 0, 2 invalid settings, NATS cannot be reached."""
    from openapi_tool.cli import switches as work

    work.disabled(as_json=as_json, state=state)
