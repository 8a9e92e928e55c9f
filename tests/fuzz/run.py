"""Fuzz each target for a time, from its saved corpus: `make fuzz FUZZ="--seconds 60 --only address"`.

Ends with one JSON line, {target: {executions, seconds, crashes, slowest_ms, …}}; exit code 1 if a failure was found.
An input that fails is left in `build/fuzz/<target>/`. With `--keep`, inputs that reached new code are merged
into the saved corpus: as few and as small ones as reach all of it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from tests.fuzz.corpora import save, saved, seeds
from tests.fuzz.targets import MAX_BYTES, TARGETS

FOUND = Path("build") / "fuzz"
_HANG_S = {"whole": 60}  # wall-clock limit for hangs; `one` limits CPU time per input
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
    """Merge the inputs found into the saved corpus."""
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


def main() -> int:
    """Fuzz the chosen targets; return 1 if a failure was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--only", choices=sorted(TARGETS), action="append")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    figures = {}
    for name in options.only or TARGETS:
        figures[name] = fuzz(name, options.seconds)
        if options.keep and not figures[name]["crashes"]:
            merge(name)
    sys.stdout.write(json.dumps(figures) + "\n")
    return int(any(figure["crashes"] or not figure["executions"] for figure in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
