"""Fuzz each target for a time, from its saved corpus: `make fuzz FUZZ="--seconds 60 --only address"`.

The last line is one JSON object, {target: {executions, seconds, crashes, slowest_ms, …}}; the exit code is 1 if a
failure was found. An input that fails is left in `build/fuzz/<target>/`. With `--keep`, the smallest set of inputs that
reaches all code reached so far becomes the saved corpus.

`python -m tests.fuzz.run --replay NAME` repeats inputs without instrumentation, as in production. It reads the path of
one input per line. For each it prints a JSON list: seconds of CPU time, and peak memory above the baseline in bytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from tests.fuzz.corpora import save, saved, seeds
from tests.fuzz.targets import MAX_BYTES, REPLAYED, TARGETS

FOUND = Path("build") / "fuzz"
_HANG_S = {"whole": 60}  # wall-clock limit; fuzz/one.py limits the CPU time of an input
_USUAL_HANG_S = 5
_EXECUTIONS = re.compile(r"stat::number_of_executed_units:\s+(\d+)")


def fuzz(name: str, seconds: int) -> dict[str, float]:
    """Fuzz one target; return its figures."""
    folder = FOUND / name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "new").mkdir(parents=True)
    _fill(folder / "seeds", seeds(name))
    _fill(folder / "saved", saved(name).values())
    began = time.monotonic()
    log = libfuzzer(
        name,
        f"-max_total_time={seconds}",
        f"-max_len={MAX_BYTES[name]}",
        f"-timeout={_HANG_S.get(name, _USUAL_HANG_S)}",
        f"-artifact_prefix={folder}/",
        "-print_final_stats=1",
        str(folder / "new"),
        str(folder / "seeds"),
        str(folder / "saved"),
    )
    executed = _EXECUTIONS.search(log)
    return {
        "executions": int(executed[1]) if executed else 0,
        "seconds": round(time.monotonic() - began),
        "crashes": sum(entry.is_file() and "-" in entry.name for entry in folder.iterdir()),
        **json.loads((folder / "figures").read_text(encoding="utf-8")),
    }


def _fill(folder: Path, inputs: Iterable[bytes]) -> None:
    folder.mkdir()
    for number, data in enumerate(inputs):
        (folder / str(number)).write_bytes(data)


def merge(name: str) -> None:
    """Merge new inputs, seeds and saved corpus into a minimal saved corpus."""
    merged = FOUND / name / "merged"
    shutil.rmtree(merged, ignore_errors=True)
    merged.mkdir()
    sources = [str(FOUND / name / part) for part in ("new", "seeds", "saved")]
    libfuzzer(name, "-merge=1", f"-max_len={MAX_BYTES[name]}", str(merged), *sources)
    inputs = [path.read_bytes() for path in merged.iterdir()]
    if not inputs:
        raise RuntimeError(f"libFuzzer merged nothing; see {FOUND / name / 'log'}")
    save(name, inputs)


def libfuzzer(name: str, *arguments: str) -> str:
    """Run libFuzzer on a target; return its output, which is also saved, and printed if it failed."""
    folder = FOUND / name
    command = [sys.executable, "-m", "tests.fuzz.one", name, str(folder / "figures"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)  # noqa: S603 - ourselves
    log = done.stdout + done.stderr
    (folder / "log").write_text(log, encoding="utf-8")
    if done.returncode:
        sys.stderr.write("\n".join(log.splitlines()[-60:]) + "\n")
    return log


MAX_S, MAX_REPLAY_BYTES = 0.05, 64_000_000
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
    """Client of a `--replay` process."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, "-m", "tests.fuzz.run", "--replay", name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
        self._heard()  # the baseline, once the process is ready

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


def replay(name: str) -> None:
    """Replay the files that standard input names, one per line."""
    check, (forget, spent_s) = TARGETS[name], REPLAYED[name]
    for data in seeds(name):  # first, so that no input is charged for imports and compilation
        check(data)
    forget_peak()
    baseline = peak_bytes()
    _tell(baseline)
    for line in sys.stdin:
        _tell(measured(check, forget, spent_s, baseline, Path(line.strip()).read_bytes()))


def _tell(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Fuzz the chosen targets; return 1 if a failure was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--only", choices=sorted(TARGETS), action="append")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--replay", choices=sorted(REPLAYED), help="repeat the inputs that standard input names")
    options = parser.parse_args()
    if options.replay:
        replay(options.replay)
        return 0
    figures = {}
    for name in options.only or TARGETS:
        figures[name] = fuzz(name, options.seconds)
        if options.keep and not figures[name]["crashes"]:
            merge(name)
    sys.stdout.write(json.dumps(figures) + "\n")
    return int(any(figure["crashes"] or not figure["executions"] for figure in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
