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
    from tests.fuzz.targets import TARGETS

MOST_S = 1.0


def timed(check: Callable[[bytes], None], figures: Path) -> Callable[[bytes], None]:
    """`check`, which fails where it takes more than MOST_S."""
    slowest = 0.0

    def one_input(data: bytes) -> None:
        nonlocal slowest
        began = time.process_time()
        check(data)
        took = time.process_time() - began
        if took > slowest:
            slowest = took
            figures.write_text(json.dumps(round(took * 1000, 1)), encoding="utf-8")
        if took > MOST_S:
            raise TimeoutError(f"took {took:.2f} s")

    return one_input


def main() -> None:
    """Never returns: libFuzzer ends the process."""
    name, figures, *arguments = sys.argv[1:]
    again = shlex.join([sys.executable, "-m", "tests.fuzz.one", name, figures])  # how a merge starts its parts
    atheris.Setup([again, *arguments], timed(TARGETS[name], Path(figures)))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
