"""The upstream's `timeout` parameter, computed from the call's remaining time (jina-api 2.2, 6.2).

For a reader request it applies to each of its stages: two, or one if an engine is named. For a search it
applies to all result pages together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MARGIN_S = 3.0
MAX_STAGE_S = 180  # the upstream's limit
MIN_S = 5.0
_ONE_STAGE_ENGINES = ("browser", "curl", "direct", "cf-browser-rendering")
_NETWORK_IDLE_FROM_S = 20

Parameters = Mapping[str, Any]
"""Upstream parameters of one request, by body name."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Use of the parameter `timeout` by an operation.

    `stages` returns the number of stages of a request, `timing` the extra parameters for a stage of the given seconds.
    A request gets a `timeout` if `needs_timeout`, by default at most `default_stage_s`.
    """

    stages: Callable[[Parameters], int]
    timing: Callable[[Parameters, int], Parameters]
    needs_timeout: Callable[[Parameters], bool]
    default_stage_s: int

    def min_s(self, parameters: Parameters) -> float:
        """Return the least time for a retry: with less it would time out and hide why the first request failed."""
        return MIN_S if self.needs_timeout(parameters) else 0.0

    def longest_s(self, parameters: Parameters) -> float | None:
        """Return the maximum seconds of the upstream with the operator's `timeout`; None without one."""
        stage_s = parameters.get("timeout")
        return None if stage_s is None else self.stages(parameters) * float(stage_s) + MARGIN_S

    def within(self, parameters: Parameters, left_s: float, *, has_own_limit: bool = False) -> Parameters:
        """Return the parameters with a `timeout` that makes the upstream answer within `left_s` seconds.

        A stage gets at most `default_stage_s`, unless the operator sets `timeout` or the call `has_own_limit`.
        """
        if not self.needs_timeout(parameters):
            return parameters
        stage_s = max(1, min(int((left_s - MARGIN_S) / self.stages(parameters)), MAX_STAGE_S))
        stage_s = min(stage_s, parameters.get("timeout") or (MAX_STAGE_S if has_own_limit else self.default_stage_s))
        return {**self.timing(parameters, stage_s), **parameters, "timeout": stage_s}


def _stages_of_reader(parameters: Parameters) -> int:
    return 1 if parameters.get("engine") in _ONE_STAGE_ENGINES else 2


def _timing_of_reader(parameters: Parameters, stage_s: int) -> Parameters:
    """Return `respondTiming`: with a `timeout` of 20 s or more a reader would wait until the network is idle."""
    if stage_s < _NETWORK_IDLE_FROM_S or "timeout" in parameters or parameters.get("withIframe"):
        return {}
    shot = "shot" in str(parameters.get("respondWith"))
    return {"respondTiming": "media-idle" if shot else "resource-idle"}


READER_TIMEOUTS = Timeouts(_stages_of_reader, _timing_of_reader, needs_timeout=lambda _: True, default_stage_s=15)

SEARCH_TIMEOUTS = Timeouts(
    stages=lambda _: 1,
    timing=lambda _, __: {},
    needs_timeout=lambda parameters: parameters.get("respondWith") != "no-content",  # only page texts take time
    default_stage_s=25,
)
