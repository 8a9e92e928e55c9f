"""Repeats inputs without instrumentation, as in production, and reports the time and memory of each.

`python -m tests.fuzz.replay NAME` reads the paths of inputs, a line each, and answers each with a JSON line: seconds of
CPU time, bytes of memory above what it held before.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from tests.fuzz.corpora import seeds
from tests.fuzz.targets import REPLAYED, TARGETS

MAX_S, MAX_BYTES = 0.05, 64_000_000
TRIES = 3
_STATUS, _FORGET_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes() -> int:
    """Return the peak memory of this process since `forget_peak`; 0 if the system does not report it."""
    if not _STATUS.exists():
        return 0
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def forget_peak() -> None:
    """Reset the peak (proc(5), clear_refs)."""
    if _FORGET_PEAK.exists():
        _FORGET_PEAK.write_text("5")


def measured(
    check: Callable[[bytes], None],
    forget: Callable[[], None],
    spent_s: Callable[[], float],
    baseline: int,
    data: bytes,
) -> tuple[float, int]:
    """Return minimum CPU time and minimum memory above `baseline` of several tries, each without cached data."""
    taken: list[tuple[float, int]] = []
    for _ in range(TRIES):
        forget()
        gc.collect()
        forget_peak()
        check(data)
        taken.append((spent_s(), max(0, peak_bytes() - baseline)))
    return min(seconds for seconds, _ in taken), min(size for _, size in taken)


class Replayer:
    """Client of such a process."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, "-m", "tests.fuzz.replay", name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
        self._heard()

    def __del__(self) -> None:
        self._process.kill()

    def play(self, path: Path) -> tuple[float, int]:
        """Return CPU time in seconds and memory in bytes of the input in a file. Raises RuntimeError if it fails."""
        stdin, _ = self._pipes()
        stdin.write(f"{path}\n")
        stdin.flush()
        seconds, size = self._heard()
        return seconds, size

    def _heard(self) -> Any:
        line = self._pipes()[1].readline()
        if not line:
            raise RuntimeError("the process that plays inputs again has ended")
        return json.loads(line)

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        if self._process.stdin is None or self._process.stdout is None:
            raise AssertionError("it was started with pipes")
        return self._process.stdin, self._process.stdout


def main() -> None:
    """Replay the files that standard input names, one per line."""
    name = sys.argv[1]
    check, (forget, spent_s) = TARGETS[name], REPLAYED[name]
    for data in seeds(name):  # so that no input is charged for imports and compilation
        check(data)
    forget_peak()
    baseline = peak_bytes()
    _tell(baseline)
    for line in sys.stdin:
        _tell(measured(check, forget, spent_s, baseline, Path(line.strip()).read_bytes()))


def _tell(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
