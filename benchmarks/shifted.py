"""Run an executor, the module in `BENCH_MODULE`, with its wall clock shifted by `BENCH_CLOCK_SHIFT_S` seconds."""

from __future__ import annotations

import os
import runpy
import time

SHIFT_VARIABLE, MODULE_VARIABLE = "BENCH_CLOCK_SHIFT_S", "BENCH_MODULE"


def main() -> None:
    """Shift the clock and run the module."""
    shift_s, real = float(os.environ.get(SHIFT_VARIABLE, "0")), time.time
    time.time = lambda: real() + shift_s
    runpy.run_module(os.environ[MODULE_VARIABLE], run_name="__main__")


if __name__ == "__main__":
    main()
