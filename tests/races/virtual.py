"""Event loop with virtual time: waits of minutes take milliseconds, and the order of events is deterministic."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from openapi_tool.tools import deadline


class _JumpingSelector(selectors.DefaultSelector):
    """Selector that does not wait: the clock jumps to the end of the wait."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError("deadlock: no event is scheduled")
        if not ready:
            self.now += max(0.0, timeout or 0.0)
        return ready


class VirtualTime(asyncio.SelectorEventLoop):
    """Event loop whose clock starts at 0 and moves only while nothing is ready."""

    def __init__(self) -> None:
        self._selector = _JumpingSelector()
        super().__init__(self._selector)

    def time(self) -> float:
        return self._selector.now


@contextmanager
def virtual_time() -> Iterator[asyncio.Runner]:
    """Yield a runner on such a loop, whose clock is also that of deadlines."""
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=VirtualTime) as runner:
        patch.setattr(deadline, "time", SimpleNamespace(monotonic=runner.get_loop().time))
        yield runner


def run_virtually(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in virtual time."""
    with virtual_time() as runner:
        runner.run(work)
