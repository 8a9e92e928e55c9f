"""How much memory a piece of work took at its peak, allocations of Rust and C included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


@contextmanager
def peak_growth() -> Iterator[Callable[[], int]]:
    """What the block yields tells, during it and after, by how many bytes this process has grown at most."""
    _CLEAR.write_text(_RESET_PEAK)
    before = _bytes("VmRSS")
    yield lambda: _bytes("VmHWM") - before


def resident_bytes() -> int:
    """The resident size of this process."""
    return _bytes("VmRSS")


def _bytes(key: str) -> int:
    line = next(line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024
