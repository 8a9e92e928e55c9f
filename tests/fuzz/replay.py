"""Plays inputs again as they are played in production, without instrumentation, and says what each took.

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
from tests.fuzz.targets import PLAYED_AGAIN, TARGETS

MAX_S, MAX_BYTES = 0.05, 64_000_000
TRIES = 3
_STATUS, _FORGET_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes() -> int:
    """The most memory that this process has held since `forget_peak`; 0 where the system does not say."""
    if not _STATUS.exists():
        return 0
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def forget_peak() -> None:
    """Begin anew (proc(5), clear_refs)."""
    if _FORGET_PEAK.exists():
        _FORGET_PEAK.write_text("5")


def measured(
    check: Callable[[bytes], None],
    forget: Callable[[], None],
    spent_s: Callable[[], float],
    baseline: int,
    data: bytes,
) -> tuple[float, int]:
    """Least CPU time and least memory above `baseline` of some tries, each without what is kept of earlier ones."""
    taken: list[tuple[float, int]] = []
    for _ in range(TRIES):
        forget()
        gc.collect()
        forget_peak()
        check(data)
        taken.append((spent_s(), max(0, peak_bytes() - baseline)))
    return min(seconds for seconds, _ in taken), min(size for _, size in taken)


class Replayer:
    """Such a process, from outside."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, "-m", "tests.fuzz.replay", name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
        self._heard()

    def __del__(self) -> None:
        self._process.kill()

    def play(self, path: Path) -> tuple[float, int]:
        """CPU time in seconds and memory in bytes of an input in a file. Raises RuntimeError where it breaks."""
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
    """Play what the lines on standard input name."""
    name = sys.argv[1]
    check, (forget, spent_s) = TARGETS[name], PLAYED_AGAIN[name]
    for data in seeds(name):  # what is imported and compiled once is no input's doing
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
