"""Groups `sql` and `nats`: what the program must be permitted in the kernel's servers, and the durable consumer."""

from __future__ import annotations

from typing import Annotated

import typer

from openapi_tool.cli.commands.program_command import Commands
from openapi_tool.cli.options import Format, JsonOption, OneObjectOption, RoleUser
from openapi_tool.nats_client.users import NatsUser

_FOR = typer.Option("--for", help="`serve`, or the command that it is for.")

sql = Commands(
    name="sql",
    no_args_is_help=True,
    help="Print the database privileges that the service needs.",
    short_help="Print the database privileges that the service needs.",
)


@sql.callback()
def _sql() -> None:
    """Make `grants` a subcommand: typer merges a single command into its group."""


@sql.command(short_help="Print the GRANT statements for a role.")
def grants(
    *,
    role: Annotated[
        str | None,
        typer.Option(
            help="Database role of the executor; by default the user in PG_DSN, or of `dev`.", show_default=False
        ),
    ] = None,
    registration: Annotated[
        bool, typer.Option("--registration", help="Include the privileges to register tools.")
    ] = False,
    user: Annotated[RoleUser, _FOR] = RoleUser.EXECUTOR,
    as_json: OneObjectOption = False,
) -> None:
    """Print the GRANT statements for a role: the least privileges for `serve` and `deadletters`.

    Changes nothing; the operator of the database runs them. They are the same for every protocol version. Exit codes:
    0, 2 a role name that is empty, longer than 63 bytes, not printable, `public` or `none`, no role is known, or
    `--registration` with a command that only reads.
    """
    from openapi_tool.cli import permissions as work

    work.grants(role=role, registration=registration, user=user, as_json=as_json)


nats = Commands(
    name="nats",
    no_args_is_help=True,
    help="Print NATS permissions; show or restore the durable.",
    short_help="Print NATS permissions; show or restore the durable.",
)


@nats.command(short_help="Print the subjects that a user must be permitted.")
def permissions(
    *,
    user: Annotated[NatsUser, _FOR] = NatsUser.EXECUTOR,
    form: Annotated[Format | None, typer.Option("--format", help="Output format.", show_default="text")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
    stream: Annotated[
        str | None, typer.Option(help="Name of the command stream if it is not the kernel's default.")
    ] = None,
) -> None:
    """Print the subjects that a NATS user must be permitted, for the current settings.

    With --for quotas those of the login in `quotas.nats`. Makes no connection, and does not need PG_DSN. Exit codes: 0,
    2 invalid settings, or --json with another --format.
    """
    from openapi_tool.cli import permissions as work

    work.permissions(user=user, form=form, as_json=as_json, stream=stream)


@nats.command(short_help="Show the durable, or restore it for the kernel.")
def durable(
    *,
    restore: Annotated[
        bool, typer.Option("--restore", help="Set what the kernel's own executor needs; stop every replica first.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the durable consumer, or restore it for the kernel's own executor.

    With PG_DSN --restore also acknowledges the commands that already have a result, on which the kernel's executor
    would fail. Exit codes: 0, 1 refused while an executor still consumes, 2 a server cannot be reached or there is no
    durable.
    """
    from openapi_tool.cli import durable as work

    work.durable(restore=restore, as_json=as_json)
