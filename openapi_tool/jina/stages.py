"""How long the upstream may work on a request, from what is left of the call (jina-api 2.2, 6.2).

A reader's `timeout` holds for each of its stages, of which it goes through two unless an engine is
named; a search's for all result pages together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from openapi_tool.jina.plan import Plan
from openapi_tool.tools.catalogue import Mode

MARGIN_S = 3.0
LONGEST_S = 180
_ONE_STAGE = ("browser", "curl", "direct", "cf-browser-rendering")
_WAITS_FOR_SILENCE_S = 20


def longest_s(plan: Plan, mode: Mode) -> float | None:
    """Seconds after which an upstream with a `timeout` by the operator must have answered; None without one."""
    stage_s = plan.parameters.get("timeout")
    return None if stage_s is None else _stages(plan, mode) * float(stage_s) + MARGIN_S


def within(plan: Plan, mode: Mode, left_s: float) -> Plan:
    """The plan with the `timeout` that lets the upstream answer within `left_s` seconds.

    A search without page texts waits for nothing, so it gets none.
    """
    if mode == "search" and plan.parameters.get("respondWith") == "no-content":
        return plan
    stage_s = max(1, min(int((left_s - MARGIN_S) / _stages(plan, mode)), LONGEST_S))
    stage_s = min(stage_s, plan.parameters.get("timeout") or LONGEST_S)
    return replace(plan, parameters={**_timing(plan, mode, stage_s), **plan.parameters, "timeout": stage_s})


def _stages(plan: Plan, mode: Mode) -> int:
    return 1 if mode == "search" or plan.parameters.get("engine") in _ONE_STAGE else 2


def _timing(plan: Plan, mode: Mode, stage_s: int) -> dict[str, Any]:
    """From 20 s on a reader would wait until the page's network is silent, which was not asked for."""
    if mode == "search" or stage_s < _WAITS_FOR_SILENCE_S or "timeout" in plan.parameters:
        return {}
    if plan.parameters.get("withIframe"):
        return {}
    shot = "shot" in str(plan.parameters.get("respondWith"))
    return {"respondTiming": "media-idle" if shot else "resource-idle"}
