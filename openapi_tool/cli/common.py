"""What commands share: talking to a person, and the embedded stack with an executor on it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from openapi_tool.tools.definition import DEFAULT_AUTH_ENV

if TYPE_CHECKING:
    from openapi_tool.local.executor import ExecutorProcess
    from openapi_tool.local.stack import EmbeddedStack

USAGE = 2
INTERRUPTED = 130


class Upstream(StrEnum):
    """Who answers the calls."""

    DOUBLE = "double"
    REAL = "real"


UpstreamOption = Annotated[
    Upstream, typer.Option(help=f"The double needs nothing; the real upstream needs {DEFAULT_AUTH_ENV}.")
]


def say(text: str, *, quiet: bool = False) -> None:
    """Tell a person, apart from what the command prints."""
    if not quiet:
        typer.echo(text, err=True)


def fail(text: str, code: int = USAGE) -> NoReturn:
    """Say why, and exit."""
    say(f"openapi-tool: {text}")
    raise typer.Exit(code)


def plain(value: object) -> str:
    """For JSON: what it has no form for."""
    return value.isoformat() if isinstance(value, datetime) else str(value)


@contextmanager
def extra_needed(command: str) -> Iterator[None]:
    """Around imports that only the extra [local] makes possible."""
    try:
        yield
    except ModuleNotFoundError as missing:
        fail(f"{command} needs the embedded stack ({missing.name} is missing): pip install 'openapi-tool[local]'")


def executor_settings(upstream: Upstream) -> dict[str, str]:
    """Environment variables of an executor whose log shows every call, with the key if the upstream is real.

    Exits where the key is missing.
    """
    level = {"OPENAPI_TOOL__TELEMETRY__LOG_LEVEL": "debug"}
    if upstream is Upstream.DOUBLE:
        return {**level, "OPENAPI_TOOL__SECRETS__ALLOWED_ENV": "SEARCH_API_KEY"}
    key = os.environ.get(DEFAULT_AUTH_ENV)
    if not key:
        fail(f"--upstream real needs a key of Jina in {DEFAULT_AUTH_ENV}")
    return {**level, DEFAULT_AUTH_ENV: key}


@contextmanager
def running(
    stack: EmbeddedStack,
    database: str,
    prepare: Callable[[EmbeddedStack], Coroutine[Any, Any, None]],
    settings: Mapping[str, str],
    *,
    quiet: bool = False,
) -> Iterator[ExecutorProcess]:
    """The stack, prepared, with an executor on `database`. Raises ServerFailed."""
    real = DEFAULT_AUTH_ENV in settings
    say("Starting PostgreSQL, NATS and the upstream …", quiet=quiet)
    with stack:
        asyncio.run(prepare(stack))
        executor = stack.executor("executor", database, settings, real_upstream=real)
        say("Starting the executor …", quiet=quiet)
        executor.start()
        yield executor
        executor.stop()
