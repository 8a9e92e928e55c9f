"""The benchmark of limits, in small: replicas share a limit, more is demanded, and the double refuses nothing."""

from __future__ import annotations

import pytest

from benchmarks.tenants import Size, run
from tests.requirements import requirement

LIMIT = 300


@pytest.mark.alone
@requirement("limits.shared", "limits.window")
async def test_replicas_with_wrong_clocks_share_a_limit_without_a_429() -> None:
    found = (await run(["clocks"], Size(seconds=5, limit=LIMIT, sharing=2, projects=10)))["clocks"]
    assert found["answered_429"] == 0
    assert LIMIT / 10 < found["served"] <= found["most_in_60_s"] <= LIMIT
    assert found["least_of_share"] > 0
    assert found["could_have_been_served"] < 1
