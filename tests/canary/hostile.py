"""Executor that fails on demand: exceptions with secrets at every fault point, verbose libraries, leaks, a crash.

The file `raise` in the folder CANARY_FOLDER names the next failure; the executor deletes it and fails once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import warnings
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.transport import AiohttpTransport
from openapi_tool.kernel.jetstream.dead_letters import DeadLetters
from openapi_tool.kernel.jetstream.doorbell_publisher import DoorbellPublisher
from openapi_tool.kernel.postgres.store import KernelStore
from openapi_tool.local.executor import main
from openapi_tool.protocol.v1r4 import V1r4
from openapi_tool.service import process
from openapi_tool.telemetry.logs import configure_logging
from openapi_tool.tools.arguments import ArgumentSources

FOLDER_VARIABLE = "CANARY_FOLDER"
SECRETS_VARIABLE = "CANARY_NAMES"
LIBRARIES = ("aiohttp", "asyncio", "asyncpg", "httpcore", "httpx", "nats", "opentelemetry", "requests", "urllib3")
DEMANDED = "raise"

log = logging.getLogger("openapi_tool.hostile")


def values() -> list[str]:
    """Return every secret of this process."""
    return [os.environ[name] for name in os.environ[SECRETS_VARIABLE].split(",")]


def demanded(what: str) -> bool:
    """Return whether the run demands this failure now, and delete the demand."""
    file = Path(os.environ[FOLDER_VARIABLE]) / DEMANDED
    if not file.is_file() or file.read_text() != what:
        return False
    file.unlink()
    return True


def fail() -> None:
    """Raise an exception that contains every secret, caused by another one that contains a secret."""
    try:
        int(values()[0])
    except ValueError as error:
        raise RuntimeError(f"{values()}", values(), {"k": values()}) from error


def log_secrets() -> None:
    """Log every secret as message, argument, field, exception and warning."""
    for value in values():
        log.warning("the value %s %r", value, [value], extra={"action": value, "field": {"k": [value.encode()]}})
        log.warning("%s", b64encode(f"user:{value}".encode()).decode(), extra={value: value})
        logging.getLogger("third.party").error("failed: %s", ValueError(value))
        logging.getLogger("third.party").warning("%d", value)
        warnings.warn(value, stacklevel=1)


class _Unraisable:
    def __del__(self) -> None:
        fail()


def fail_uncaught() -> None:
    """Raise where nothing catches: in a thread, a finalizer, a callback of the loop, a task."""
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    _Unraisable()
    asyncio.get_running_loop().call_soon(fail)
    asyncio.get_running_loop().create_task(_fail_later())
    gc.collect()


async def _fail_later() -> None:
    fail()


FAULT_POINTS: dict[str, tuple[Any, str]] = {
    "protocol": (V1r4, "decode"),
    "tools": (ArgumentSources, "prepare"),
    "report": (V1r4, "report"),
    "jina": (JinaClient, "fetch"),
    "transport": (AiohttpTransport, "handle_async_request"),
    "kernel.load": (KernelStore, "load"),
    "kernel.commit": (KernelStore, "commit"),
    "bus.doorbell": (DoorbellPublisher, "publish"),
    "bus.dead_letters": (DeadLetters, "record"),
}
WAYS: dict[str, Callable[[], None]] = {
    "log": log_secrets,
    "uncaught": fail_uncaught,
    "leak": lambda: print(values()[0], flush=True),  # noqa: T201
}


def _trap(point: str, owner: Any, name: str) -> None:
    original = getattr(owner, name)

    def trapped(*arguments: Any, **named: Any) -> Any:
        for way, act in WAYS.items():
            if demanded(way):
                act()
        if demanded(point):
            fail()
        return original(*arguments, **named)

    setattr(owner, name, trapped)


async def _monitor_database(*_: Any) -> None:
    while not demanded("crash"):  # noqa: ASYNC110 - a file has no event
        await asyncio.sleep(0.05)
    fail()


def _configure(*arguments: Any, **options: Any) -> None:
    configure_logging(*arguments, **options)
    for library in LIBRARIES:
        logging.getLogger(library).setLevel(logging.DEBUG)


if __name__ == "__main__":
    for point, (owner, name) in FAULT_POINTS.items():
        _trap(point, owner, name)
    process._monitor_database = _monitor_database  # type: ignore[assignment]  # noqa: SLF001
    process.configure_logging = _configure  # type: ignore[attr-defined]
    main()
