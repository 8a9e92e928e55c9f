"""`serve` with fail points: places in the path of a call where the process kills itself on request.

The request is a file in the folder that `FOLDER_VARIABLE` names; its name is the point. The first process that reaches
the point deletes the file and kills itself by SIGKILL. A call whose arguments contain `KILLER` kills every executor
that runs it. `BUDGET_MARGIN_VARIABLE` sets the seconds after a call's deadline until its reservation counts as used.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from openapi_tool.jina.backend import JinaBackend
from openapi_tool.kernel.jetstream.doorbell_publisher import DoorbellPublisher
from openapi_tool.kernel.postgres.store import KernelStore
from openapi_tool.local.executor import main as serve
from openapi_tool.quotas import shared_record

FOLDER_VARIABLE = "CHAOS_FAIL_POINTS"
BUDGET_MARGIN_VARIABLE = "CHAOS_BUDGET_MARGIN_S"
KILLER = "kills its executor"
DEATHS = "deaths"
POINTS = ("before_upstream", "after_upstream", "after_commit", "after_doorbell")


def main() -> None:
    """Serve against the double, with fail points in the folder that the environment names."""
    install(Path(os.environ[FOLDER_VARIABLE]))
    if margin_s := float(os.environ.get(BUDGET_MARGIN_VARIABLE, "0")):
        shared_record.END_MARGIN_S = margin_s
    serve()


def install(folder: Path) -> None:
    """Wrap the methods on the path of a call with fail points that look for requests in `folder`."""
    patched: Mapping[tuple[type, str], tuple[str | None, str]] = {
        (JinaBackend, "run"): ("before_upstream", "after_upstream"),
        (KernelStore, "commit"): (None, "after_commit"),
        (DoorbellPublisher, "publish"): (None, "after_doorbell"),
    }
    for (owner, name), (before, after) in patched.items():
        setattr(owner, name, _with_fail_points(folder, getattr(owner, name), before, after))
    JinaBackend.run = _with_killer(folder, JinaBackend.run)  # type: ignore[assignment,method-assign]


def _with_fail_points(
    folder: Path, method: Callable[..., Awaitable[Any]], before: str | None, after: str | None
) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(method)
    async def wrapped(*arguments: Any, **named: Any) -> Any:
        _die_if_requested(folder, before)
        result = await method(*arguments, **named)
        _die_if_requested(folder, after)
        return result

    return wrapped


def _with_killer(folder: Path, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(method)
    async def wrapped(self: Any, definition: Any, arguments: Any, *more: Any) -> Any:
        if KILLER in str(arguments):
            _die(folder, "killer")
        return await method(self, definition, arguments, *more)

    return wrapped


def _die_if_requested(folder: Path, point: str | None) -> None:
    if point is None:
        return
    try:
        (folder / point).unlink()
    except FileNotFoundError:
        return
    _die(folder, point)


def _die(folder: Path, point: str) -> None:
    with (folder / DEATHS).open("a") as deaths:
        deaths.write(f"{time.time()} {point}\n")
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
