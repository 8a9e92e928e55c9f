"""What the demos of the gateway's doors have in common: the calls that they show, and how a door is started."""

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
from typing import Any

from openapi_tool.environment import DEFAULT_AUTH_ENV, PREFIX
from openapi_tool.local.dev import FALLBACKS
from openapi_tool.local.guard import Guard
from openapi_tool.local.recordings import RECORDED_HOSTS
from openapi_tool.local.stack import MAX_RESULT_CHARS, UpstreamDouble, make_certificates

CALL_TIMEOUT_S = 60.0
_CURSOR = 'with only cursor "'


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
    return text.rpartition(_CURSOR)[2].partition('"')[0] if _CURSOR in text else ""


def serve(upstream: str, command: str, *options: str) -> int:
    """Run a door for a client of the user's own, with this process's standard streams; return its exit code.

    Raises ServerFailed.
    """
    with door_process(upstream, command, *options) as (arguments, environment):
        door = subprocess.Popen(arguments, env=os.environ | environment)
        signal.signal(signal.SIGTERM, lambda number, _: door.send_signal(number))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the door, too
        return door.wait()


@contextmanager
def door_process(upstream: str, command: str, *options: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield command line and environment of a door, with nothing stored; the double, if one is needed, runs meanwhile.

    `command` is `mcp` or `gateway`.
    """
    settings = {f"{PREFIX}TOOLS__MAX_RESULT_CHARS": str(MAX_RESULT_CHARS), "PATH": os.environ.get("PATH", "")}
    given = ["--state", ":memory:", *options]
    if upstream == "real":
        key = {DEFAULT_AUTH_ENV: os.environ[DEFAULT_AUTH_ENV]}
        yield [sys.executable, "-m", "openapi_tool", command, *given], settings | key
        return
    guard = Guard(())
    folder = Path(tempfile.mkdtemp(prefix="openapi-tool-"))
    guard.delete_at_end(folder)
    certificates = make_certificates(folder)
    double = UpstreamDouble(folder, certificates, guard, (DEFAULT_AUTH_ENV,))
    try:
        double.start()
        double.fallbacks(*FALLBACKS)  # for requests that are not recorded, as of a user's own client
        settings |= {**double.keys, "SSL_CERT_FILE": str(certificates.ca)}
        settings[f"{PREFIX}URL_POLICY__ALLOW"] = RECORDED_HOSTS
        module = ["-m", "openapi_tool.local.door_server", command, "--upstream-port", str(double.port)]
        yield [sys.executable, *module, *given], settings
    finally:
        double.stop()
        guard.close()
