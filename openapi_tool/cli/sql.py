"""`openapi-tool sql`: print database privileges."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from openapi_tool.cli.common import fail
from openapi_tool.cli.kernels import ProtocolOption, ProtocolVersion
from openapi_tool.kernel.inspection import INSPECT, USAGE, grant_statements, reader_grants
from openapi_tool.settings import SettingsError, load_settings

app = typer.Typer(no_args_is_help=True, help="Print the database privileges that the service needs.")


class User(StrEnum):
    """Purpose of a database role."""

    EXECUTOR = "executor"
    INSPECT = "inspect"
    USAGE = "usage"


_READS = {User.INSPECT: INSPECT, User.USAGE: USAGE}


def _own_role(protocol: ProtocolVersion | None) -> str | None:
    try:
        return load_settings().of_version(protocol).postgres.parsed.user
    except SettingsError:
        return None


@app.callback()
def _group() -> None:
    """Make `grants` a subcommand: typer merges a single command into its group."""


@app.command(short_help="Print the GRANT statements for a role.")
def grants(
    *,
    role: Annotated[
        str | None,
        typer.Option(help="Database role of the executor; by default the user in PG_DSN.", show_default=False),
    ] = None,
    registration: Annotated[
        bool, typer.Option("--registration", help="Include the privileges to register tools.")
    ] = False,
    user: Annotated[User, typer.Option("--for", help="`serve`, or the command that it is for.")] = User.EXECUTOR,
    protocol: ProtocolOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Print the GRANT statements for a role: the least privileges for `serve` and `deadletters`.

    Changes nothing; the operator of the database runs them. They are the same for every protocol version. Exit codes:
    0, 2 invalid role name.
    """
    if role is None:
        role = _own_role(protocol) or fail("--role: name the database role; the settings have no user in PG_DSN")
    try:
        reads = _READS.get(user)
        statements = reader_grants(role, reads) if reads else grant_statements(role, registration=registration)
    except ValueError as error:
        fail(f"--role: {error}")
    if as_json:
        typer.echo(json.dumps({"role": role, "statements": statements}))
        return
    for statement in statements:
        typer.echo(f"{statement};")
