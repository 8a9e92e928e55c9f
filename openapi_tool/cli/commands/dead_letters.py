"""Group `deadletters`: the kernel's commands that nobody could answer, which are kept for an operator."""

from __future__ import annotations

from typing import Annotated

import typer

from openapi_tool.cli.commands.program_command import Commands
from openapi_tool.cli.options import JsonOption

deadletters = Commands(
    name="deadletters",
    no_args_is_help=True,
    help="List, show and replay commands that got no result.",
    short_help="List, show and replay commands that got no result.",
)


@deadletters.command("list", short_help="List dead letters, newest first.")
def list_dead_letters(
    *,
    project: Annotated[str | None, typer.Option(help="List this project only.", show_default=False)] = None,
    limit: Annotated[int | None, typer.Option(help="Newest N only [default: 100; with --json: all].", min=1)] = None,
    abandoned: Annotated[
        bool,
        typer.Option(
            "--abandoned", help="Include commands that were settled without a result and without a dead letter."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List dead letters, newest first; with --json and without --limit oldest first, as they are read.

    Exit codes: 0, or 2 if NATS cannot be reached or the settings are invalid.
    """
    from openapi_tool.cli import deadletters as work

    work.list_(project=project, limit=limit, abandoned=abandoned, as_json=as_json)


@deadletters.command("show", short_help="Show a dead letter in full.")
def show_dead_letter(
    letter: Annotated[str, typer.Argument(help="Id from `list`.")],
    *,
    as_json: JsonOption = False,
) -> None:
    """Show a dead letter in full. Exit codes: 0, 2 there is no such id."""
    from openapi_tool.cli import deadletters as work

    work.show(letter, as_json=as_json)


@deadletters.command(short_help="Publish commands again and delete their records.")
def replay(
    letters: Annotated[list[str], typer.Argument(help="Ids from `list`.")],
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Publish; without it nothing is changed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Publish commands again and delete their records.

    A command over 64 KiB is read from the command stream, where it may have expired. If its turn no longer waits, it
    becomes a dead letter again. Exit codes: 0 published (or shown, without --yes), 1 one could not be published, 2 an
    id does not exist.
    """
    from openapi_tool.cli import deadletters as work

    work.replay(letters, yes=yes, as_json=as_json)
