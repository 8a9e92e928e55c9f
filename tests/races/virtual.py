"""An event loop whose clock jumps: what would take minutes takes milliseconds, in the same order each time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from openapi_tool.tools import deadline


class _Jumping(selectors.DefaultSelector):
    """Waits for nothing: the loop's clock jumps to the moment until which it would have waited."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError("nothing would ever happen again")
        if not ready:
            self.now += max(0.0, timeout or 0.0)
        return ready


class VirtualTime(asyncio.SelectorEventLoop):
    """Its clock begins at 0 and moves only while nothing is ready."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


@contextmanager
def virtual_time() -> Iterator[asyncio.Runner]:
    """A runner on such a loop, whose clock deadlines go by, too."""
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=VirtualTime) as runner:
        patch.setattr(deadline, "time", SimpleNamespace(monotonic=runner.get_loop().time))
        yield runner


def run_virtually(work: Coroutine[Any, Any, None]) -> None:
    """Run this without waiting for anything."""
    with virtual_time() as runner:
        runner.run(work)
