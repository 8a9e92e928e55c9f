"""Time limits: deadlines, upstream timeouts, clocks."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openapi_tool.bus.durable import ServerClock
from openapi_tool.executor import waiting_turn
from openapi_tool.executor.ports import Kernel
from openapi_tool.jina.endpoints import ENDPOINTS, MARGIN_S
from openapi_tool.options import ExecutorOptions, ToolOptions
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.tools.deadline import Deadline, TimeLimits
from tests.races.virtual import run_virtually
from tests.requirements import requirement
from tests.support import identity

LIMITS = TimeLimits(ExecutorOptions(), ToolOptions())


def left_s(age_s: float, suspend_s: float | None, limits: TimeLimits = LIMITS, timeout_s: float | None = None) -> float:
    return limits.deadline(age_s, suspend_s, timeout_s).remaining()


@pytest.mark.parametrize(
    ("age_s", "suspend_s", "expected"),
    [(0, None, 27), (0, 10, 27), (0, 60, 57), (20, 60, 37), (0, 500, 120), (100, 500, 20), (-5, None, 27)],
)
@requirement("answer.time")
def test_time_of_a_call_is_the_workers_wait_minus_margin_and_age(
    age_s: float, suspend_s: float | None, expected: float
) -> None:
    assert left_s(age_s, suspend_s) == pytest.approx(expected, abs=0.5)


@pytest.mark.parametrize(("age_s", "suspend_s"), [(27, None), (28, 10), (57, 60), (120, 500)])
@requirement("answer.time")
def test_a_call_that_cannot_end_in_time_has_none_left(age_s: float, suspend_s: float | None) -> None:
    assert left_s(age_s, suspend_s) == 0


# The turn's deadline, which a result of another call of the step resets.


@dataclass
class OtherCall:
    """A kernel in which another call of the step gets its result at this second; the first `unknown` queries fail."""

    answered_at: float
    unknown: int = 0
    looks: list[int] = field(default_factory=list)

    async def last_result_age_s(self, *_: str) -> float | None:
        now = asyncio.get_running_loop().time()
        self.looks.append(round(now))
        if len(self.looks) <= self.unknown:
            raise Unavailable("PostgreSQL: connection refused")
        return None if now < self.answered_at else now - self.answered_at


@pytest.mark.parametrize(
    ("other", "ends_at", "looks"),
    [
        (OtherCall(10), 10 + 27, [27]),
        (OtherCall(28), 28 + 27, [27, 54]),
        (OtherCall(53), 53 + 27, [27, 54]),
        (OtherCall(55), 55 + 27, [27, 54, 81]),
        (OtherCall(1_000), 87, [27, 54, 81]),
        (OtherCall(10, unknown=1), 54, [27, 54]),
    ],
    ids=["early", "just after the look", "later", "much later", "never", "unknown at first"],
)
@requirement("run.turn_deadline")
def test_call_ends_before_a_deadline_set_by_another_result(
    other: OtherCall, ends_at: int, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        now = asyncio.get_running_loop().time
        monkeypatch.setattr(waiting_turn, "time", SimpleNamespace(monotonic=now))
        async with waiting_turn.TurnDeadline(cast("Kernel", other), LIMITS, identity(), 27) as turn:
            with suppress(TimeoutError):
                async with Deadline(87, turn.limit).limit():
                    await asyncio.sleep(1_000)
        assert (round(now()), other.looks) == (ends_at, looks)

    run_virtually(check())


# The upstream's `timeout`, computed from the remaining time of a call.


IDLE = {"respondTiming": "resource-idle"}


def sent_parameters(mode: str, left_s: float, **parameters: Any) -> dict[str, Any]:
    return dict(ENDPOINTS[mode].timeouts.within(parameters, left_s, has_own_limit=True))


@requirement("upstream.request")
@pytest.mark.parametrize(
    ("mode", "left_s", "given_parameters", "added"),
    [
        ("reader", 27, {}, {"timeout": 12}),
        ("reader", 26.9, {}, {"timeout": 11}),
        ("reader", 2, {}, {"timeout": 1}),
        ("reader", 42.9, {}, {"timeout": 19}),
        ("reader", 43, {}, {"timeout": 20, **IDLE}),
        ("reader", 1_000, {}, {"timeout": 180, **IDLE}),
        ("reader", 27, {"engine": "browser"}, {"timeout": 24, **IDLE}),
        ("reader", 27, {"engine": "auto"}, {"timeout": 12}),
        ("reader", 63, {"respondWith": "pageshot"}, {"timeout": 30, "respondTiming": "media-idle"}),
        ("reader", 63, {"withIframe": True}, {"timeout": 30}),
        ("reader", 63, {"respondTiming": "html"}, {"timeout": 30}),
        ("reader", 63, {"timeout": 5}, {"timeout": 5}),
        ("reader", 63, {"timeout": 25}, {"timeout": 25}),
        ("reader", 13, {"timeout": 25}, {"timeout": 5}),
        ("search", 27, {}, {"timeout": 24}),
        ("search", 63, {"respondWith": "markdown"}, {"timeout": 60}),
        ("search", 63, {"respondWith": "no-content"}, {}),
    ],
)
def test_a_stage_gets_its_share_of_what_is_left(
    mode: str, left_s: float, given_parameters: dict[str, Any], added: dict[str, Any]
) -> None:
    assert sent_parameters(mode, left_s, **given_parameters) == given_parameters | added


@requirement("upstream.request")
@given(left_s=st.floats(0, 5_000), engine=st.sampled_from(["auto", "curl"]), own=st.none() | st.integers(1, 180))
def test_the_upstream_is_done_before_the_call_is(left_s: float, engine: str, own: int | None) -> None:
    parameters = {"engine": engine} | ({"timeout": own} if own else {})
    timed = sent_parameters("reader", left_s, **parameters)
    assert 1 <= timed["timeout"] <= 180
    assert own is None or timed["timeout"] <= own
    done_s = ENDPOINTS["reader"].timeouts.longest_s(timed)
    assert done_s is not None
    assert done_s <= max(left_s, 2 + MARGIN_S)


# The server's clock: right whatever the local wall clock says, and whatever single answers say.


SERVER_S = 1_800_000_000.0


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Both local clocks, set by the test; the wall clock is 28 s ahead."""
    clocks = {"monotonic": 1000.0, "time": SERVER_S + 28}
    for name in ("monotonic", "time"):
        monkeypatch.setattr(time, name, lambda name=name: clocks[name])
    return clocks


def move(local: dict[str, float], seconds: float) -> None:
    for name in local:
        local[name] += seconds


@requirement("answer.time")
def test_local_clock_is_used_until_the_first_reply_and_logged_once(
    local: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    clock = ServerClock()
    assert [clock.time(), clock.time()] == [local["time"]] * 2
    assert clock.local_offset_s is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@requirement("answer.time")
def test_the_answer_with_the_shortest_round_trip_counts(local: dict[str, float]) -> None:
    clock = ServerClock()
    clock.observe(SERVER_S, 999.99, 1000.01)
    clock.observe(SERVER_S + 0.5, 1000.0, 1001.4)  # half the round trip was not half of it
    assert clock.time() == pytest.approx(SERVER_S)
    move(local, 20)
    assert clock.time() == pytest.approx(SERVER_S + 20)
    assert clock.local_offset_s == pytest.approx(28)


@requirement("answer.time")
def test_a_jump_of_the_local_wall_clock_changes_nothing_and_is_logged_once(
    local: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    clock = ServerClock()
    local["time"] = SERVER_S
    clock.observe(SERVER_S, 1000.0, 1000.0)
    assert not caplog.records
    local["time"] += 3600
    assert clock.time() == pytest.approx(SERVER_S)
    for _ in range(3):
        move(local, 1)
        clock.observe(SERVER_S + local["monotonic"] - 1000, local["monotonic"], local["monotonic"])
    assert [getattr(record, "action", "") for record in caplog.records] == ["clock.offset"]
    assert "3600.0 s ahead of that of NATS" in caplog.text


@requirement("answer.time")
def test_reply_of_the_server_expires_after_half_a_minute(local: dict[str, float]) -> None:
    clock = ServerClock()
    clock.observe(SERVER_S, 1000.0, 1000.0)
    move(local, 31)
    clock.observe(SERVER_S + 31.02, 1030.9, 1031.0)  # this clock drifts
    assert clock.time() == pytest.approx(SERVER_S + 31.07)


@requirement("answer.time")
def test_a_monotonic_clock_that_stood_still_is_noticed_with_the_next_answer(local: dict[str, float]) -> None:
    clock = ServerClock()
    clock.observe(SERVER_S, 1000.0, 1000.0)
    move(local, 1)
    clock.observe(SERVER_S + 600, 1000.9, 1001.0)  # the machine was suspended
    assert clock.time() == pytest.approx(SERVER_S + 600.05)
