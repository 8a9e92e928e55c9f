"""One target under libFuzzer: `python -m tests.fuzz.one NAME FIGURES [libFuzzer's arguments]`; needs atheris.

FIGURES is a file that gets the longest time that an input took, in milliseconds of this process's CPU time, which other
processes on the machine do not lengthen.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["openapi_tool"]):
    from tests.fuzz.run import MAX_REPLAY_BYTES, MAX_S, Replayer, peak_bytes
    from tests.fuzz.targets import MUTATORS, REPLAYED, TARGETS

MAX_INSTRUMENTED_S = 1.0
_GREW_BYTES = 8_000_000


def timed(check: Callable[[bytes], None], figures: Path) -> Callable[[bytes], None]:
    """Return `check` with a limit of MAX_INSTRUMENTED_S."""
    slowest = 0.0

    def one_input(data: bytes) -> None:
        nonlocal slowest
        began = time.process_time()
        check(data)
        took = time.process_time() - began
        if took > slowest:
            slowest = took
            figures.write_text(json.dumps({"slowest_ms": round(took * 1000, 1)}), encoding="utf-8")
        if took > MAX_INSTRUMENTED_S:
            raise TimeoutError(f"took {took:.2f} s")

    return one_input


def with_replay(name: str, figures: Path) -> Callable[[bytes], None]:
    """Return a check that repeats slow inputs, and those with a new peak of memory, in a process as in production."""
    check, worst = TARGETS[name], {"slowest_ms": 0.0, "largest_mb": 0.0, "replayed": 0}
    suspect, replayer = figures.with_name("suspect"), Replayer(name)
    peak_so_far = peak_bytes()

    def one_input(data: bytes) -> None:
        nonlocal peak_so_far
        began = time.process_time()
        check(data)
        took, peak = time.process_time() - began, peak_bytes()
        if took <= MAX_S and peak <= peak_so_far + _GREW_BYTES:
            return
        peak_so_far = max(peak_so_far, peak)
        suspect.write_bytes(data)
        seconds, size = replayer.play(suspect)
        if size > MAX_REPLAY_BYTES:  # may include memory of earlier inputs
            seconds, size = Replayer(name).play(suspect)
        worst["slowest_ms"] = max(worst["slowest_ms"], round(seconds * 1000, 1))
        worst["largest_mb"] = max(worst["largest_mb"], round(size / 1e6, 1))
        worst["replayed"] += 1
        figures.write_text(json.dumps(worst), encoding="utf-8")
        if seconds > MAX_S or size > MAX_REPLAY_BYTES:
            raise TimeoutError(f"took {seconds:.3f} s and {size / 1e6:.0f} MB")

    return one_input


def main() -> None:
    """Fuzz; never returns, since libFuzzer ends the process."""
    name, figures, *arguments = sys.argv[1:]
    command = shlex.join([sys.executable, "-m", "tests.fuzz.one", name, figures])  # libFuzzer runs it again for a merge
    check = with_replay(name, Path(figures)) if name in REPLAYED else timed(TARGETS[name], Path(figures))
    options = {}
    if mutate := MUTATORS.get(name):
        options["custom_mutator"] = lambda data, most, seed: mutate(data, most, seed, atheris.Mutate)
    atheris.Setup([command, *arguments], check, **options)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
