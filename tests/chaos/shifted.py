"""`serve` with a wall clock that is off by `OFFSET_VARIABLE` seconds.

When the file that `JUMP_VARIABLE` names is created, the clock jumps forward by an hour. The monotonic clock is
unchanged.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

from tests.chaos.fail_points import main

OFFSET_VARIABLE, JUMP_VARIABLE = "CHAOS_CLOCK_OFFSET_S", "CHAOS_CLOCK_JUMP"
JUMP_S = 3600.0
_NANOSECONDS = 1_000_000_000
_time, _time_ns = time.time, time.time_ns


def _offset_s() -> float:
    jumped = Path(os.environ[JUMP_VARIABLE]).exists()
    return float(os.environ[OFFSET_VARIABLE]) + (JUMP_S if jumped else 0.0)


class _Datetime(type):
    """`datetime` with a shifted `now`. It creates instances of the real `datetime`, so that encoders accept them."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, datetime)

    def __getattr__(cls, name: str) -> Any:
        return getattr(datetime, name)

    def __call__(cls, *arguments: Any, **named: Any) -> datetime:
        return datetime(*arguments, **named)  # noqa: DTZ001 - the caller's own arguments

    def now(cls, zone: tzinfo | None = None) -> datetime:
        return datetime.now(zone) + timedelta(seconds=_offset_s())


class _Shifted(metaclass=_Datetime):
    """Replacement of `datetime` in the package's modules."""


def shift() -> None:
    """Shift the wall clock of this process and of the package's modules that are loaded."""
    time.time = lambda: _time() + _offset_s()
    time.time_ns = lambda: _time_ns() + round(_offset_s() * _NANOSECONDS)
    for name, module in list(sys.modules.items()):
        if name.startswith("openapi_tool") and getattr(module, "datetime", None) is datetime:
            module.datetime = _Shifted  # type: ignore[attr-defined]


if __name__ == "__main__":
    shift()
    main()
