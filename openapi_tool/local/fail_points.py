"""Places in the path of a call where an executor dies on request, as if somebody had pulled the plug.

A file named like a point, in the folder that `FOLDER_VARIABLE` names, is the request; the first
process that gets there takes the file and dies. A call whose arguments hold `KILLER` takes along
every executor that is about to run it. Only `openapi_tool.local.executor` switches this on.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from openapi_tool.bus.doorbell import Doorbell
from openapi_tool.jina.tools import JinaTools
from openapi_tool.kernel.store import KernelStore

FOLDER_VARIABLE = "OPENAPI_TOOL_LOCAL_FAIL_POINTS"
KILLER = "kills its executor"
DEATHS = "deaths"
POINTS = ("before_upstream", "after_upstream", "after_commit", "after_doorbell")


def arm(folder: Path) -> None:
    """Make the methods that a call goes through look for requests in `folder`."""
    patched: Mapping[tuple[type, str], tuple[str | None, str]] = {
        (JinaTools, "run"): ("before_upstream", "after_upstream"),
        (KernelStore, "commit"): (None, "after_commit"),
        (Doorbell, "ring"): (None, "after_doorbell"),
    }
    for (owner, name), (before, after) in patched.items():
        setattr(owner, name, _dying_around(folder, getattr(owner, name), before, after))
    JinaTools.run = _killed(folder, JinaTools.run)  # type: ignore[assignment,method-assign]


def _dying_around(
    folder: Path, method: Callable[..., Awaitable[Any]], before: str | None, after: str | None
) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(method)
    async def dying(*arguments: Any, **named: Any) -> Any:
        _reach(folder, before)
        result = await method(*arguments, **named)
        _reach(folder, after)
        return result

    return dying


def _killed(folder: Path, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(method)
    async def killed(self: Any, definition: Any, arguments: Any, *more: Any) -> Any:
        if KILLER in str(arguments):
            _die(folder, "killer")
        return await method(self, definition, arguments, *more)

    return killed


def _reach(folder: Path, point: str | None) -> None:
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
