"""The upstream's own time limit, from what is left of a call."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openapi_tool.jina.plan import Plan
from openapi_tool.jina.stages import MARGIN_S, longest_s, within
from openapi_tool.tools.catalogue import Mode
from tests.promises import requirement

IDLE = {"respondTiming": "resource-idle"}


def asked(mode: Mode, left_s: float, **parameters: Any) -> dict[str, Any]:
    return dict(within(Plan(parameters, {}, None), mode, left_s).parameters)


@requirement("upstream.stages")
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
    mode: Mode, left_s: float, given_parameters: dict[str, Any], added: dict[str, Any]
) -> None:
    assert asked(mode, left_s, **given_parameters) == given_parameters | added


@requirement("upstream.stages")
@given(left_s=st.floats(0, 5_000), engine=st.sampled_from(["auto", "curl"]), own=st.none() | st.integers(1, 180))
def test_the_upstream_is_done_before_the_call_is(left_s: float, engine: str, own: int | None) -> None:
    parameters = {"engine": engine} | ({"timeout": own} if own else {})
    plan = within(Plan(parameters, {}, None), "reader", left_s)
    assert 1 <= plan.parameters["timeout"] <= 180
    assert own is None or plan.parameters["timeout"] <= own
    done_s = longest_s(plan, "reader")
    assert done_s is not None
    assert done_s <= max(left_s, 2 + MARGIN_S)
