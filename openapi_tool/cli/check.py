"""`openapi-tool check`: test settings, connections and keys of `serve`, without running calls."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated

import typer

from openapi_tool.bootstrap import Bootstrap, build_bootstrap
from openapi_tool.bus.connection import connected, outage_as_unavailable
from openapi_tool.bus.streams import command_stream_of
from openapi_tool.cli.common import say, tell, tell_json
from openapi_tool.cli.tools_files import settings_failed
from openapi_tool.kernel.failures import located
from openapi_tool.kernel.store import KernelStore
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.settings import SettingsError, load_settings

_CHECK_S = 10.0
_FAILED = 1


def check(*, as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False) -> None:
    """Check settings, PostgreSQL, NATS and keys as `serve` would use them; change nothing.

    Exit codes: 0 all usable, 1 a dependency is unusable or a key is missing, 2 invalid settings.
    """
    try:
        bootstrap = build_bootstrap(load_settings({}), os.environ)
    except SettingsError as error:
        settings_failed(error)
    found = {"settings": "", **asyncio.run(_found(bootstrap))}
    if as_json:
        tell_json({"ok": not any(found.values()), "checks": found, "remarks": bootstrap.settings.remarks})
    else:
        for remark in bootstrap.settings.remarks:
            say(f"openapi-tool: {remark}")
        for name, problem in found.items():
            tell(f"{name}: {problem or 'ok'}")
    if any(found.values()):
        raise typer.Exit(_FAILED)


async def _found(bootstrap: Bootstrap) -> dict[str, str]:
    """Return the problem of each dependency and key, empty if there is none."""
    checks: dict[str, Callable[[Bootstrap], Awaitable[None]]] = {"postgres": _postgres, "nats": _nats}
    problems = await asyncio.gather(*(_problem(check(bootstrap), bootstrap.pool.where) for check in checks.values()))
    missing = bootstrap.secrets.missing()
    keys = {variable: "is not set" if variable in missing else "" for variable in sorted(bootstrap.secrets.allowed)}
    redacted = map(bootstrap.redactor.text, problems)
    return {**dict(zip(checks, redacted, strict=True)), **keys}


async def _problem(work: Awaitable[None], where: str) -> str:
    try:
        async with asyncio.timeout(_CHECK_S):
            await work
    except TimeoutError:
        return f"no answer within {_CHECK_S:.0f} s"
    except Unavailable as error:
        return located(str(error), where)
    return ""


async def _postgres(bootstrap: Bootstrap) -> None:
    """Connect and look for tables, columns, grants and indexes. Raises Unavailable."""
    async with aclosing(await KernelStore.open(bootstrap.pool)):
        pass


async def _nats(bootstrap: Bootstrap) -> None:
    """Connect and look for the command stream. Raises Unavailable."""
    with outage_as_unavailable(bootstrap.bus.where):
        async with connected(replace(bootstrap.bus, once=True)) as client:
            await command_stream_of(client, bootstrap.durable)
