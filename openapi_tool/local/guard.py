"""Guard process: it stops processes and deletes folders and files when its parent has ended.

So no server stays behind if `dev`, `demo` or a test is killed. The parent writes to a pipe what there is to stop and to
delete. However the parent dies, the pipe closes, and the guard cleans up.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast

import psutil

_STOP_S = 5.0
_POLL_S = 0.01


class Guard:
    """The parent's side of the guard.

    The guard process inherits the file descriptors `hold`: locks on these files last until it has cleaned up.
    """

    def __init__(self, hold: Sequence[int] = ()) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
            pass_fds=hold,
        )
        self._pipe = cast("IO[str]", self._process.stdin)
        self._children: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()

    def stop_at_end(self, child: subprocess.Popen[bytes], stop_signal: signal.Signals = signal.SIGTERM) -> None:
        """Stop this process at the end."""
        with self._lock:  # servers start in threads: without the lock, one of two concurrent calls would lose its child
            running = [known for known in self._children if known.poll() is None]
            self._children = [*running, child]
        self._tell({"pid": child.pid, "signal": int(stop_signal)})

    def delete_at_end(self, path: Path) -> None:
        """Delete this folder or file at the end."""
        self._tell({"path": str(path)})

    def _tell(self, message: dict[str, object]) -> None:
        with self._lock:
            self._pipe.write(json.dumps(message) + "\n")
            self._pipe.flush()

    def close(self) -> None:
        """Clean up now, and wait until it is done."""
        self._pipe.close()
        self._process.wait()
        for child in self._children:
            child.wait()


def main() -> None:
    """Wait for the parent's end, then clean up."""
    # Clean up when the pipe closes, not when a signal to the whole process group or pod arrives first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    processes: list[tuple[psutil.Process, int]] = []
    paths: list[Path] = []
    for line in sys.stdin:
        message = json.loads(line)
        if "path" in message:
            paths.append(Path(message["path"]))
        else:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
                processes.append((psutil.Process(message["pid"]), message["signal"]))
    _stop_all(processes)
    for path in paths:
        _remove(path)


def _stop_all(processes: list[tuple[psutil.Process, int]]) -> None:
    """Send each process its signal; kill those that have not ended after `_STOP_S`."""
    for process, stop_signal in processes:
        _signal(process, stop_signal)
    give_up = time.monotonic() + _STOP_S
    while any(_runs(process) for process, _ in processes) and time.monotonic() < give_up:
        time.sleep(_POLL_S)
    for process, _ in processes:
        _signal(process, signal.SIGKILL)


def _signal(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # raised also if its pid belongs to another process by now
        process.send_signal(number)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _remove(path: Path) -> None:
    # More than once if needed: a process that was just stopped may still have written a file into a folder.
    give_up = time.monotonic() + _STOP_S
    while path.exists():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        if time.monotonic() > give_up:
            return
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
