"""`openapi-tool nats permissions` and `sql grants`: what logins at NATS and roles of PostgreSQL must be permitted.

A *user* is what the login is for: the executor, another service, or an operator's command such as `inspect`.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import asdict

import typer

from openapi_tool.bootstrap import durable_options
from openapi_tool.cli.dev_choice import named_dev, say_dev_in_use, servers_of
from openapi_tool.cli.kernel import NO_DATABASE, kernel_settings
from openapi_tool.cli.options import Format, RoleUser
from openapi_tool.cli.output import fail, print_status
from openapi_tool.kernel.jetstream.operator_accounts import OPERATOR_DOMAIN, accounts_config
from openapi_tool.kernel.jetstream.permissions import (
    SWITCH_PERMISSIONS,
    TOP_PERMISSIONS,
    Permissions,
    dead_letter_permissions,
    executor_permissions,
    gateway_permissions,
    handover_permissions,
    inspect_permissions,
    quota_permissions,
)
from openapi_tool.kernel.postgres.privileges import INSPECT, USAGE, grant_statements, reader_grants
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.protocol.printable import printable_lines
from openapi_tool.protocol.subjects import command_stream
from openapi_tool.settings import Settings, SettingsError, load_settings
from openapi_tool.tools.wording import short

_STREAM = re.compile(r"[^\s.*>/\\\x00-\x20\x7f\ud800-\udfff]+")  # the names of streams that NATS accepts


def permissions(*, user: NatsUser, form: Format | None, as_json: bool, stream: str | None) -> None:
    """Print the subjects that a NATS user must be permitted, for the current settings."""
    if as_json and form not in (None, Format.JSON):
        fail(f"--json is --format json, and cannot be given with --format {form}; leave one of them out")
    form = Format.JSON if as_json else form or Format.TEXT
    if stream is not None and not _STREAM.fullmatch(stream):
        fail(f"--stream: {short(stream)!r} cannot be a stream's name")
    settings = load_settings({**NO_DATABASE, **servers_of(named_dev())})
    nats_of_quotas = settings.quotas.nats if user is NatsUser.QUOTAS else None
    nats = nats_of_quotas or settings.nats
    if form is Format.ACCOUNTS:
        if user in (NatsUser.QUOTAS, NatsUser.GATEWAY):
            fail(f"--format accounts: is for operators, and {user} is a login of a service; choose another format")
        typer.echo(printable_lines(_accounts(user, settings, stream)))
        print_status(
            f"openapi-tool: operators set nats.jetstream_domain = {OPERATOR_DOMAIN!r}; nats-server reads each password "
            "from the variable that its line names"
        )
        return
    needed = _needed(user, settings, stream).over(nats.jetstream_domain, user.inbox_prefix(nats.inbox_prefix))
    typer.echo(printable_lines(_formatted(needed, form)))
    if user is not NatsUser.TOP:
        print_status(_LOGIN_WARNING)


_LOGIN_WARNING = (
    "openapi-tool: NATS does not check reply subjects. In one account with the streams, whoever has this login is as "
    "powerful as an administrator of the account's JetStream: it can have answers published on $JS.API, $KV, commands "
    "and dead letters. Give operators accounts of their own: --format accounts"
)


def _accounts(user: NatsUser, settings: Settings, stream: str | None) -> str:
    """Return the accounts of all users; for an operator only the operator's account, with what it imports."""
    inboxes = {each: each.inbox_prefix(settings.nats.inbox_prefix) for each in NatsUser}
    if user is NatsUser.EXECUTOR:
        of_executor = _needed(user, settings, stream)
        operators = [each for each in NatsUser if each.is_operator]
    else:
        of_executor = None
        operators = [user] if user.is_operator else []
    return accounts_config(of_executor, {each: _needed(each, settings, stream) for each in operators}, inboxes)


def _needed(user: NatsUser, settings: Settings, stream: str | None) -> Permissions:  # noqa: PLR0911 - one per user
    options = durable_options(settings)
    stream = stream or command_stream(options.version)[0]
    match user:
        case NatsUser.EXECUTOR:
            return executor_permissions(
                options, stream, session_key=settings.session.key is not None, quotas=settings.quotas.nats is None
            )
        case NatsUser.QUOTAS:
            return quota_permissions()
        case NatsUser.GATEWAY:
            return _gateway(settings, stream)
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


def _gateway(settings: Settings, stream: str) -> Permissions:
    from openapi_tool.gateway import nats_rows, nats_state  # noqa: PLC0415 - no other user needs it

    # Buckets, and the pattern of their keys. A key of a text has its owner, its name and the number of its part.
    texts = {nats_state.text_bucket(name).name: "*.*.*" for name in nats_state.TEXT_BUCKETS}
    return gateway_permissions(
        {nats_state.TOKEN_BUCKET.name: "*", **texts},
        texts,
        stream=nats_rows.CALLS.name,
        stream_subjects=f"{nats_rows.CALLS.prefix}.*.*.*",
        command_stream=stream,
        session_key=settings.session.key is not None,
        quotas=settings.quotas.nats is None,
    )


def _formatted(needed: Permissions, form: Format) -> str:
    if form is Format.JSON:
        return json.dumps(needed.as_object())
    if form is Format.SERVER_CONFIG:
        return needed.server_config()
    lines = []
    for action, subjects in asdict(needed).items():
        lines += [f"{action:<9} {subject}" for subject in subjects]
    return "\n".join(lines)


_GRANT_OF_READER = {RoleUser.INSPECT: INSPECT, RoleUser.USAGE: USAGE}


def grants(*, role: str | None, registration: bool, user: RoleUser, as_json: bool) -> None:
    """Print the GRANT statements for a role."""
    reader_grant = _GRANT_OF_READER.get(user)
    if registration and reader_grant:
        fail(f"--registration: {user} registers no tools; leave out --registration or --for")
    if role is None:
        with suppress(SettingsError):
            say_dev_in_use("the role: --role")
            role = kernel_settings().postgres.parsed.user
        role = role or fail("--role: name the database role; the settings have no user in PG_DSN")
    try:
        if reader_grant:
            statements = reader_grants(role, reader_grant)
        else:
            statements = grant_statements(role, registration=registration)
    except ValueError as error:
        fail(f"--role: {error}")
    if as_json:
        typer.echo(json.dumps({"role": role, "statements": statements}))
        return
    for statement in statements:
        typer.echo(f"{statement};")
