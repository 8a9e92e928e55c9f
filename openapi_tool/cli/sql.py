"""`openapi-tool sql`: what the database's operator needs to know."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from openapi_tool.cli.common import fail
from openapi_tool.kernel.grants import grant_statements

app = typer.Typer(no_args_is_help=True, help="What the database's operator needs: grants.")


@app.callback()
def _group() -> None:
    """Keep `grants` a command of its own."""


@app.command()
def grants(
    *,
    role: Annotated[str, typer.Option(help="The database role that the executor logs in as.")],
    registration: Annotated[bool, typer.Option("--registration", help="Also what registering tools needs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Print the GRANT statements for a role: all that `serve` and `deadletters` need, and nothing more.

    Nothing is changed; the kernel's operator runs them. Exit codes: 0, 2 no role can have that name.
    """
    try:
        statements = grant_statements(role, registration=registration)
    except ValueError as error:
        fail(f"--role: {error}")
    if as_json:
        typer.echo(json.dumps({"role": role, "statements": statements}))
        return
    for statement in statements:
        typer.echo(f"{statement};")
