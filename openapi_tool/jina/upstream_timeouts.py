"""The upstream's `timeout` parameter, computed from the call's remaining time (jina-api 2.2, 6.2).

For a reader request it applies to each of its stages: two, or one if an engine is named. For a search it
applies to all result pages together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MARGIN_S = 3.0
LONGEST_S = 180
MIN_S = 5.0
_ONE_STAGE = ("browser", "curl", "direct", "cf-browser-rendering")
_WAITS_FOR_SILENCE_S = 20

Parameters = Mapping[str, Any]
"""Upstream parameters of one request, by body name."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Use of the parameter `timeout` by an operation.

    `stages` returns the number of stages of a request, `timing` the extra parameters for a stage of the given seconds.
    A request for which `waits` returns False needs no `timeout`.
    """

    stages: Callable[[Parameters], int]
    timing: Callable[[Parameters, int], Parameters]
    waits: Callable[[Parameters], bool]
    usual_s: int

    def min_s(self, parameters: Parameters) -> float:
        """Return the seconds without which a repeated request cannot succeed, but hides why the first one failed."""
        return MIN_S if self.waits(parameters) else 0.0

    def longest_s(self, parameters: Parameters) -> float | None:
        """Return the most seconds that the upstream takes with the operator's `timeout`; None without one."""
        stage_s = parameters.get("timeout")
        return None if stage_s is None else self.stages(parameters) * float(stage_s) + MARGIN_S

    def within(self, parameters: Parameters, left_s: float, *, patient: bool = False) -> Parameters:
        """Return the parameters with a `timeout` that makes the upstream answer within `left_s` seconds.

        A stage gets no more than `usual_s`, unless the operator's `timeout` asks for it, or the call is `patient`.
        """
        if not self.waits(parameters):
            return parameters
        stage_s = max(1, min(int((left_s - MARGIN_S) / self.stages(parameters)), LONGEST_S))
        stage_s = min(stage_s, parameters.get("timeout") or (LONGEST_S if patient else self.usual_s))
        return {**self.timing(parameters, stage_s), **parameters, "timeout": stage_s}


def _stages_of_reader(parameters: Parameters) -> int:
    return 1 if parameters.get("engine") in _ONE_STAGE else 2


def _timing_of_reader(parameters: Parameters, stage_s: int) -> Parameters:
    """Return `respondTiming`: with a `timeout` of 20 s or more a reader would wait until the network is idle."""
    if stage_s < _WAITS_FOR_SILENCE_S or "timeout" in parameters or parameters.get("withIframe"):
        return {}
    shot = "shot" in str(parameters.get("respondWith"))
    return {"respondTiming": "media-idle" if shot else "resource-idle"}


READER_TIMEOUTS = Timeouts(_stages_of_reader, _timing_of_reader, waits=lambda _: True, usual_s=15)

SEARCH_TIMEOUTS = Timeouts(
    stages=lambda _: 1,
    timing=lambda _, __: {},
    waits=lambda parameters: parameters.get("respondWith") != "no-content",  # only page texts take time
    usual_s=25,
)
