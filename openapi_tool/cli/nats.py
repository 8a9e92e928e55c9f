"""`openapi-tool nats`: what the operator of NATS needs to know."""

from __future__ import annotations

import json
import re
from enum import StrEnum
from typing import Annotated

import typer

from openapi_tool.bus.permissions import Permissions, dead_letter_permissions, executor_permissions
from openapi_tool.cli.common import USAGE, fail, say
from openapi_tool.prepared import durable_options
from openapi_tool.settings import SettingsError, load_settings

app = typer.Typer(no_args_is_help=True, help="What the operator of NATS needs: permissions.")

_STREAM = re.compile(r"[^\s.*>/\\\x00-\x20\x7f]+")
_NO_DATABASE = {"postgres": {"dsn": "postgresql://unused"}}


class Format(StrEnum):
    """How to print."""

    TEXT = "text"
    JSON = "json"
    SERVER_CONFIG = "server-config"


class User(StrEnum):
    """Who logs in to NATS."""

    EXECUTOR = "executor"
    DEADLETTERS = "deadletters"


@app.callback()
def _group() -> None:
    """Keep `permissions` a command of its own."""


@app.command()
def permissions(
    *,
    user: Annotated[User, typer.Option("--for", help="`serve`, or the command `deadletters`.")] = User.EXECUTOR,
    form: Annotated[Format, typer.Option("--format", help="How to print them.")] = Format.TEXT,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    stream: Annotated[
        str | None, typer.Option(help="The command stream, where it has not the kernel's usual name.")
    ] = None,
) -> None:
    """Print the subjects that a NATS user must be able to use, by the settings in effect; PG_DSN is not needed.

    No connection is made. Exit codes: 0, 2 the configuration is wrong.
    """
    if stream is not None and not _STREAM.fullmatch(stream):
        fail(f"--stream: {stream!r} cannot be a stream's name")
    try:
        settings = load_settings(_NO_DATABASE)
    except SettingsError as error:
        for problem in error.problems:
            say(f"openapi-tool: {problem}")
        raise typer.Exit(USAGE) from None
    options = durable_options(settings)
    needed = (
        executor_permissions(options, stream=stream, session_key=settings.session.key is not None)
        if user is User.EXECUTOR
        else dead_letter_permissions(options, stream=stream)
    )
    typer.echo(_shown(needed, Format.JSON if as_json else form))


def _shown(needed: Permissions, form: Format) -> str:
    if form is Format.JSON:
        return json.dumps(needed.as_object())
    if form is Format.SERVER_CONFIG:
        return needed.server_config()
    return "\n".join(
        f"{action:<9} {subject}"
        for action, subjects in (("publish", needed.publish), ("subscribe", needed.subscribe))
        for subject in subjects
    )
