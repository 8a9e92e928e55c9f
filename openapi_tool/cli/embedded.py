"""The embedded stack that `demo` and `dev` start, with an executor."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openapi_tool.cli.options import UpstreamChoice
from openapi_tool.cli.output import fail, print_status
from openapi_tool.environment import DEFAULT_AUTH_ENV

if TYPE_CHECKING:
    from openapi_tool.local.executor import ExecutorProcess
    from openapi_tool.local.stack import EmbeddedStack


@contextmanager
def extra_needed(command: str) -> Iterator[None]:
    """Exit with a hint if an import needs the extra [local]."""
    try:
        yield
    except ModuleNotFoundError as missing:
        fail(f"{command} needs the embedded stack ({missing.name} is missing): pip install 'openapi-tool[local]'")


def this_program() -> list[str]:
    """Return the words by which a shell in this folder runs this program again."""
    program = Path(sys.argv[0])
    if program.name != "openapi-tool":
        return [sys.executable, "-m", "openapi_tool"]
    is_on_path = shutil.which(program.name) is not None
    return [program.name if is_on_path else str(program.absolute())]


def executor_settings(upstream: UpstreamChoice) -> dict[str, str]:
    """Return variables of an executor that logs every call. Exits if the key for the real upstream is missing.

    They name `DEFAULT_AUTH_ENV` only for the real upstream: the stack itself gives the executor the double's keys.
    """
    settings = {"OPENAPI_TOOL__TELEMETRY__LOG_LEVEL": "debug"}
    if upstream is UpstreamChoice.DOUBLE:
        # A definition may name this key in place of the default one; the double has both.
        settings["OPENAPI_TOOL__SECRETS__ALLOWED_ENV"] = "SEARCH_API_KEY"
        return settings
    key = os.environ.get(DEFAULT_AUTH_ENV)
    if not key:
        fail(f"--upstream real needs a key of Jina in {DEFAULT_AUTH_ENV}")
    settings[DEFAULT_AUTH_ENV] = key
    return settings


@contextmanager
def running(
    stack: EmbeddedStack,
    database: str,
    prepare: Callable[[EmbeddedStack], Coroutine[Any, Any, None]],
    settings: Mapping[str, str],
    *,
    quiet: bool = False,
) -> Iterator[ExecutorProcess]:
    """Run the stack, prepared by `prepare`, with an executor on `database`. Raises ServerFailed."""
    real_upstream = DEFAULT_AUTH_ENV in settings  # see `executor_settings`
    print_status("Starting PostgreSQL, NATS and the upstream …", quiet=quiet)
    with stack:
        asyncio.run(prepare(stack))
        executor = stack.executor("executor", database, settings, real_upstream=real_upstream)
        print_status("Starting the executor …", quiet=quiet)
        executor.start()
        yield executor
        executor.stop()  # after an error, the stack stops it
