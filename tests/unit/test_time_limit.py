from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from openapi_tool.executor.time_limit import TimeLimits
from openapi_tool.protocol.errors import ToolTimeout
from tests.promises import requirement

LIMITS = TimeLimits(worker_default_s=30, margin_s=3, maximum_s=120)


def left_s(age_s: float, suspend_s: float | None, limits: TimeLimits = LIMITS, timeout_s: float | None = None) -> float:
    return limits.deadline(datetime.now(UTC) - timedelta(seconds=age_s), suspend_s, timeout_s).remaining()


@pytest.mark.parametrize(
    ("age_s", "suspend_s", "expected"),
    [(0, None, 27), (0, 10, 27), (0, 60, 57), (20, 60, 37), (0, 500, 120), (100, 500, 20), (-5, None, 27)],
)
@requirement("answer.time")
def test_a_call_has_what_the_worker_waits_less_the_margin_and_the_age(
    age_s: float, suspend_s: float | None, expected: float
) -> None:
    assert left_s(age_s, suspend_s) == pytest.approx(expected, abs=0.5)


@pytest.mark.parametrize(("age_s", "suspend_s"), [(27, None), (28, 10), (57, 60), (120, 500)])
@requirement("answer.time")
def test_a_call_that_cannot_end_in_time_is_not_begun(age_s: float, suspend_s: float | None) -> None:
    with pytest.raises(ToolTimeout, match="too late"):
        left_s(age_s, suspend_s)
