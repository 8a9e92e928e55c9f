"""`openapi-tool nats` and `sql`: permissions in NATS, privileges in the database, and the durable's hand-over."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from typing import Annotated

import typer

from openapi_tool.bootstrap import Bootstrap, durable_options
from openapi_tool.bus.client import BusClient
from openapi_tool.bus.durable import DurableMissing
from openapi_tool.bus.handover import HandOver, StillPulled, durable_shown, hand_to_kernel
from openapi_tool.bus.options import NatsUser
from openapi_tool.bus.permissions import (
    SWITCH_PERMISSIONS,
    TOP_PERMISSIONS,
    Permissions,
    dead_letter_permissions,
    executor_permissions,
    handover_permissions,
    inspect_permissions,
)
from openapi_tool.cli.common import NO_DATABASE, USAGE, JsonOption, fail, print_json, print_line, print_status
from openapi_tool.cli.kernels import ProtocolOption, names_database, result_lookup, with_nats
from openapi_tool.kernel import inspection
from openapi_tool.kernel.inspection import grant_statements, reader_grants
from openapi_tool.protocol.identity import command_stream
from openapi_tool.settings import Settings, SettingsError, load_settings
from openapi_tool.settings.model import but
from openapi_tool.telemetry.logs import printable_lines

nats_app = typer.Typer(no_args_is_help=True, help="Print NATS permissions; show or restore the durable.")

_STREAM = re.compile(r"[^\s.*>/\\\x00-\x20\x7f]+")
_REFUSED = 1
_FOR = typer.Option("--for", help="`serve`, or the command that it is for.")


class Format(StrEnum):
    """Output format."""

    TEXT = "text"
    JSON = "json"
    SERVER_CONFIG = "server-config"


@nats_app.command(short_help="Print the subjects that a user must be permitted.")
def permissions(
    *,
    user: Annotated[NatsUser, _FOR] = NatsUser.EXECUTOR,
    form: Annotated[Format, typer.Option("--format", help="Output format.")] = Format.TEXT,
    as_json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
    stream: Annotated[
        str | None, typer.Option(help="Name of the command stream if it is not the kernel's default.")
    ] = None,
    protocol: ProtocolOption = None,
) -> None:
    """Print the subjects that a NATS user must be permitted, for the current settings.

    Without --protocol they cover every kernel that `serve` reaches over the main NATS servers. Makes no connection, and
    does not need PG_DSN. Exit codes: 0, 2 invalid settings.
    """
    if stream is not None and not _STREAM.fullmatch(stream):
        fail(f"--stream: {stream!r} cannot be a stream's name")
    settings = load_settings(NO_DATABASE).of_version(protocol)
    kernel, *others = _on_one_server(settings)
    needed = _needed(user, kernel, stream)
    for other in others:
        needed = needed.union(_needed(user, other, None))
    needed = needed.over(kernel.nats.jetstream_domain, user.inbox_prefix(kernel.nats.inbox_prefix))
    typer.echo(printable_lines(_shown(needed, Format.JSON if as_json else form)))


def _on_one_server(settings: Settings) -> list[Settings]:
    """Return the settings of the kernels that share the login of section `nats`."""
    own = but(settings.nats, durable=None)
    return [kernel for kernel in settings.kernels if but(kernel.nats, durable=None) == own]


def _needed(user: NatsUser, settings: Settings, stream: str | None) -> Permissions:
    options = durable_options(settings)
    stream = stream or command_stream(options.version)[0]
    match user:
        case NatsUser.EXECUTOR:
            return executor_permissions(options, stream, session_key=settings.session.key is not None)
        case NatsUser.DEADLETTERS:
            return dead_letter_permissions(options, stream)
        case NatsUser.INSPECT:
            return inspect_permissions(options, stream)
        case NatsUser.DURABLE:
            return handover_permissions(options, stream)
        case NatsUser.TOP:
            return TOP_PERMISSIONS
        case NatsUser.SWITCHES:
            return SWITCH_PERMISSIONS


@nats_app.command(short_help="Show the durable, or restore it for the kernel.")
def durable(
    *,
    restore: Annotated[
        bool, typer.Option("--restore", help="Set what the kernel's own executor needs; stop every replica first.")
    ] = False,
    protocol: ProtocolOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the durable consumer, or restore it for the kernel's own executor.

    With PG_DSN --restore also acknowledges the commands that already have a result, on which the kernel's executor
    would fail. Exit codes: 0, 1 refused while an executor still consumes, 2 a server cannot be reached or there is no
    durable.
    """
    done = with_nats(partial(_durable, restore=restore), protocol, user=NatsUser.DURABLE)
    if done.acknowledged is None and restore and done.before.unacknowledged:
        print_status(
            f"openapi-tool: PG_DSN is not set, so none of {done.before.unacknowledged} unacknowledged commands was "
            "checked: the kernel's executor fails on those that have a result already, up to three times for 30 s each"
        )
    if as_json:
        shown = {name: asdict(state) for name, state in (("before", done.before), ("after", done.after))}
        print_json({**shown, "acknowledged": done.acknowledged} if restore else shown["after"])
        return
    for (name, old), new in zip(asdict(done.before).items(), asdict(done.after).values(), strict=True):
        print_line(f"{name}: {new}" + (f" (was {old})" if old != new else ""))
    if done.acknowledged is not None:
        print_line(f"acknowledged, as they have a result: {done.acknowledged}")


async def _durable(bootstrap: Bootstrap, client: BusClient, *, restore: bool) -> HandOver:
    try:
        if restore:
            return await _restore(bootstrap, client)
        state = await durable_shown(client, bootstrap.durable)
    except StillPulled as refusal:
        fail(f"{refusal}: stop every replica of the executor first, then try again", _REFUSED)
    except DurableMissing as missing:
        fail(f"{missing}: no executor has used it yet, or nats.durable names another", USAGE)
    return HandOver(state, state, None)


async def _restore(bootstrap: Bootstrap, client: BusClient) -> HandOver:
    if not names_database(bootstrap):
        return await hand_to_kernel(client, bootstrap.durable, None)
    async with result_lookup(bootstrap) as has_result:
        return await hand_to_kernel(client, bootstrap.durable, has_result)


def _shown(needed: Permissions, form: Format) -> str:
    if form is Format.JSON:
        return json.dumps(needed.as_object())
    if form is Format.SERVER_CONFIG:
        return needed.server_config()
    return "\n".join(f"{action:<9} {subject}" for action, subjects in asdict(needed).items() for subject in subjects)


sql_app = typer.Typer(no_args_is_help=True, help="Print the database privileges that the service needs.")


class RoleUser(StrEnum):
    """Purpose of a database role."""

    EXECUTOR = "executor"
    INSPECT = "inspect"
    USAGE = "usage"


_READS = {RoleUser.INSPECT: inspection.INSPECT, RoleUser.USAGE: inspection.USAGE}


@sql_app.callback()
def _group() -> None:
    """Make `grants` a subcommand: typer merges a single command into its group."""


@sql_app.command(short_help="Print the GRANT statements for a role.")
def grants(
    *,
    role: Annotated[
        str | None,
        typer.Option(help="Database role of the executor; by default the user in PG_DSN.", show_default=False),
    ] = None,
    registration: Annotated[
        bool, typer.Option("--registration", help="Include the privileges to register tools.")
    ] = False,
    user: Annotated[RoleUser, _FOR] = RoleUser.EXECUTOR,
    protocol: ProtocolOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Print the GRANT statements for a role: the least privileges for `serve` and `deadletters`.

    Changes nothing; the operator of the database runs them. They are the same for every protocol version. Exit codes:
    0, 2 invalid role name, or `--registration` with a command that only reads.
    """
    reads = _READS.get(user)
    if registration and reads:
        fail(f"--registration: {user} registers no tools; leave out --registration or --for")
    if role is None:
        with suppress(SettingsError):
            role = load_settings().of_version(protocol).postgres.parsed.user
        role = role or fail("--role: name the database role; the settings have no user in PG_DSN")
    try:
        statements = reader_grants(role, reads) if reads else grant_statements(role, registration=registration)
    except ValueError as error:
        fail(f"--role: {error}")
    if as_json:
        typer.echo(json.dumps({"role": role, "statements": statements}))
        return
    for statement in statements:
        typer.echo(f"{statement};")
