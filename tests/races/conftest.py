from __future__ import annotations

import pytest

from openapi_tool.bus import consumer
from openapi_tool.bus.streams import Durable
from tests.races.fakes import LOOPS, FakePull, Run, run_on


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine on each of the two event loops."""
    return run_on(request.param)


@pytest.fixture(autouse=True)
def _in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ensure_durable(*_: object) -> Durable:
        return Durable("stream", "durable")

    async def observe(*_: object) -> None:
        """Leave the clock alone."""

    monkeypatch.setattr(consumer, "ensure_durable", ensure_durable)
    monkeypatch.setattr(consumer, "observe", observe)
    monkeypatch.setattr(consumer, "PullConsumer", FakePull)
    monkeypatch.setattr(consumer, "LookAhead", FakePull)
