"""Nothing stays behind: a small process that outlives its parent just long enough to clean up.

The parent tells it over a pipe which processes and folders it made. When the pipe closes, because
the parent closed it or because the parent died in whatever way, the guard stops what still runs
and removes the folders.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import psutil

_STOP_S = 5.0


class Guard:
    """The parent's end of the pipe."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    def watch(self, pid: int, stop_signal: signal.Signals = signal.SIGTERM) -> None:
        """End this process with `stop_signal`, should it outlive us."""
        self._tell({"pid": pid, "signal": int(stop_signal)})

    def own(self, folder: Path) -> None:
        """Remove this folder in the end."""
        self._tell({"folder": str(folder)})

    def _tell(self, message: dict[str, object]) -> None:
        pipe = self._pipe()
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    def _pipe(self) -> IO[str]:
        if self._process.stdin is None:
            raise AssertionError("the guard was started with a pipe")
        return self._process.stdin

    def close(self) -> None:
        """Clean up now, and wait until that is done."""
        self._pipe().close()
        self._process.wait()


def main() -> None:
    """The guard itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    processes: list[tuple[psutil.Process, int]] = []
    folders: list[Path] = []
    for line in sys.stdin:
        message = json.loads(line)
        if "folder" in message:
            folders.append(Path(message["folder"]))
        else:
            with contextlib.suppress(psutil.NoSuchProcess):
                processes.append((psutil.Process(message["pid"]), message["signal"]))
    _end(processes)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _end(processes: list[tuple[psutil.Process, int]]) -> None:
    for process, stop_signal in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # psutil knows a reused pid from the one that it was given
            process.send_signal(stop_signal)
    _, alive = psutil.wait_procs([process for process, _ in processes], timeout=_STOP_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_STOP_S)


if __name__ == "__main__":
    main()
