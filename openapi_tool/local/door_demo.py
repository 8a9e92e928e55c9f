"""What the demos of the doors without a kernel have in common: the calls that they show, and how a door is started.

A *door* is a program through which calls come in: `openapi-tool mcp` or `openapi-tool gateway`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from openapi_tool.environment import DEFAULT_AUTH_ENV, PREFIX
from openapi_tool.local.dev import FALLBACKS
from openapi_tool.local.guard import Guard
from openapi_tool.local.recordings import RECORDED_HOSTS
from openapi_tool.local.sample_arguments import MAX_RESULT_CHARS
from openapi_tool.local.stack import UpstreamDouble, make_certificates

CALL_TIMEOUT_S = 60.0
_BEFORE_CURSOR = 'with only cursor "'  # … call this tool with only cursor "3:2000"


@dataclass(frozen=True, slots=True)
class ShownCall:
    """One call of a demo, and what the model would read."""

    tool: str
    arguments: Mapping[str, Any]
    failed: bool
    text: str


@dataclass(frozen=True, slots=True)
class DoorDemo:
    """What the client has seen; `door` says how it was connected."""

    door: str
    tools: list[str]
    calls: list[ShownCall]


def cursor_in(text: str) -> str:
    """Return the cursor that a result names at its end, empty if it is complete."""
    _, found, end = text.rpartition(_BEFORE_CURSOR)
    return end.partition('"')[0] if found else ""


def serve(upstream: str, door: str, *options: str) -> int:
    """Run a door for a client of the user's own, with this process's standard streams; return its exit code.

    Raises ServerFailed.
    """
    with door_command(upstream, door, *options) as command:
        process = subprocess.Popen(command.words, env=os.environ | command.environment)
        signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the door, too
        return process.wait()


class DoorCommand(NamedTuple):
    """How to start a door: the words of its command line, and its environment."""

    words: list[str]
    environment: dict[str, str]


@contextmanager
def door_command(upstream: str, door: str, *options: str) -> Iterator[DoorCommand]:
    """Yield the command of a door that stores nothing; the double runs meanwhile, unless `upstream` is `real`.

    `door` is `mcp` or `gateway`. Raises ServerFailed.
    """
    environment = {f"{PREFIX}TOOLS__MAX_RESULT_CHARS": str(MAX_RESULT_CHARS), "PATH": os.environ.get("PATH", "")}
    words = [door, "--state", ":memory:", *options]
    if upstream == "real":
        environment[DEFAULT_AUTH_ENV] = os.environ[DEFAULT_AUTH_ENV]
        yield DoorCommand([sys.executable, "-m", "openapi_tool", *words], environment)
        return
    guard = Guard()
    folder = Path(tempfile.mkdtemp(prefix="openapi-tool-"))
    guard.delete_at_end(folder)
    certificates = make_certificates(folder)
    double = UpstreamDouble(folder, certificates, guard, (DEFAULT_AUTH_ENV,))
    try:
        double.start()
        double.fallbacks(*FALLBACKS)  # for requests that are not recorded, as of a user's own client
        environment |= {**double.keys, "SSL_CERT_FILE": str(certificates.ca)}
        environment[f"{PREFIX}URL_POLICY__ALLOW"] = RECORDED_HOSTS
        words += ["--upstream-port", str(double.port)]
        yield DoorCommand([sys.executable, "-m", "openapi_tool.local.door_server", *words], environment)
    finally:
        double.stop()
        guard.close()
