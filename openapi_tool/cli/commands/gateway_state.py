"""Groups `state` and `tokens`: what a gateway has stored, and who may use it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from openapi_tool.cli.commands.program_command import Commands
from openapi_tool.cli.options import JsonOption, OneObjectOption, StateFileOption, StateOption

state_file = Commands(
    name="state",
    no_args_is_help=True,
    help="Delete what a gateway has stored.",
    short_help="Delete what a gateway has stored.",
)


@state_file.callback()
def _state() -> None:
    """Make `purge` a subcommand: typer merges a single command into its group."""


@state_file.command(short_help="Delete everything from a gateway's state file.")
def purge(
    *,
    state: StateFileOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it nothing is changed.")] = False,
) -> None:
    """Delete everything from a gateway's state file, also its tokens, and from its free pages.

    Running processes of the gateway go on with empty budgets. Exit codes: 0, 1 not confirmed, 2 the file is unusable.
    """
    from openapi_tool.cli import gateway_state as work

    work.purge(state, yes=yes)


_TOKENS_FILE = typer.Option("--file", help="File of tokens (JSON) instead of the state file.", show_default=False)

tokens = Commands(
    name="tokens",
    no_args_is_help=True,
    help="Create, list and revoke the tokens of a gateway.",
    short_help="Create, list and revoke the tokens of a gateway.",
)


@tokens.command("create", short_help="Create a token and print it, once.")
def create_token(
    *,
    project: Annotated[str, typer.Option(help="Project whose budgets and policy apply.", show_default=False)],
    agent: Annotated[str, typer.Option(help="Agent in the project, with budgets and cursors of its own.")] = "default",
    tool: Annotated[
        list[str] | None,
        typer.Option("--tools", help="Names of tools, or patterns such as jina_*; repeatable.", show_default=False),
    ] = None,
    any_agent: Annotated[
        bool, typer.Option("--any-agent", help="Let the caller name another agent of the project in X-Agent-Id.")
    ] = False,
    expires: Annotated[
        str | None, typer.Option(help="30d, 12h, or a date or time in ISO 8601 (UTC).", show_default="never")
    ] = None,
    state: StateOption = None,
    file: Annotated[Path | None, _TOKENS_FILE] = None,
    as_json: OneObjectOption = False,
) -> None:
    """Create a token and print it, once: only a hash is stored. Warns of --tools that match no built-in tool.

    Exit codes: 0, 2 invalid options, or an unusable file.
    """
    from openapi_tool.cli import tokens as work

    work.create(
        project=project,
        agent=agent,
        tools=tool or [],
        any_agent=any_agent,
        expires=expires,
        state=state,
        file=file,
        as_json=as_json,
    )


@tokens.command("list", short_help="List tokens, without their secrets.")
def list_tokens(
    *,
    state: StateOption = None,
    file: Annotated[Path | None, _TOKENS_FILE] = None,
    as_json: JsonOption = False,
) -> None:
    """List tokens, without their secrets, the oldest first. Exit codes: 0, 2 an unusable file."""
    from openapi_tool.cli import tokens as work

    work.list_(state=state, file=file, as_json=as_json)


@tokens.command("revoke", short_help="Revoke a token, within two seconds.")
def revoke_token(
    token: Annotated[str, typer.Argument(help="Id from `list`, or the token itself.", show_default=False)],
    *,
    state: StateOption = None,
    file: Annotated[Path | None, _TOKENS_FILE] = None,
) -> None:
    """Revoke a token; all running processes refuse it within two seconds.

    Exit codes: 0, 1 there is no such token, 2 TOKEN is neither an id nor a token, or an unusable file.
    """
    from openapi_tool.cli import tokens as work

    work.revoke(token, state=state, file=file)
