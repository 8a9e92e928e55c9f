"""Shares of projects over several replicas, in virtual time with the executor's scheduler (`benchmarks.simulator`)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.simulator import Scene, figures
from tests.requirements import requirement

OVERLOADED = Scene(2, 8, max_held=128, projects=50, greedy_every=1, greed=3.0, seconds=120.0, warm_s=20.0)


@pytest.mark.parametrize(
    "scene", [OVERLOADED, replace(OVERLOADED, projects=3, weighted=1, seconds=60.0)], ids=["equal", "weights 1:2:4"]
)
@requirement("fair.weights")
def test_projects_that_demand_three_times_the_capacity_get_their_shares(scene: Scene) -> None:
    found = figures(scene)
    assert found["of_capacity"] > 0.99
    assert 0.85 < found["greedy_share"]["p0"] <= found["greedy_share"]["p100"] < 1.15


@requirement("fair.weights")
def test_projects_that_demand_half_of_their_share_hardly_wait_beside_greedy_ones() -> None:
    found = figures(Scene(20, 16, max_held=128, projects=100, seconds=20.0, warm_s=10.0))
    assert found["of_capacity"] > 0.99
    assert found["modest_unserved"] == 0
    assert found["modest_wait_s"]["p95"] < 2.0
    assert found["greedy_share_deviation"] < 0.05
