"""How long the upstream may work on a request: the parameter `timeout`, for search and reader.

The upstream works on a request in *stages*, and `timeout` limits each of them, not the whole request. A read has two
stages: if the first way to load a page fails, the upstream tries a second one. It has one stage if the parameter
`engine` names the way. A search has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from openapi_tool.jina.parameters import MAX_TIMEOUT_S

RESERVE_S = 1.0  # of a call's remaining time, kept for the way of request and response
_OVERHEAD_S = 3.0  # that a request may take beside its stages
_MIN_RETRY_S = 5.0  # least time for a retry (`Timeouts.min_retry_s`)
_ONE_STAGE_ENGINES = ("browser", "curl", "direct", "cf-browser-rendering")
"""Values of `engine` that name one way to load a page."""
_NETWORK_IDLE_FROM_S = 20  # from this `timeout` on the upstream waits until a page loads nothing more

Parameters = Mapping[str, Any]
"""Upstream parameters of one request, by the parameter's name in a JSON body."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How an operation uses the parameter `timeout`.

    - `default_stage_s`: seconds of a stage if neither operator nor call sets a limit.
    - `stages`: returns the number of stages of a request.
    - `timing`: returns further parameters of a request whose stages take at most the given seconds.
    - `needs_timeout`: returns whether a request may take long enough to need a `timeout`.
    """

    default_stage_s: int
    stages: Callable[[Parameters], int] = lambda _: 1
    timing: Callable[[Parameters, float], Parameters] = lambda _, __: {}
    needs_timeout: Callable[[Parameters], bool] = lambda _: True

    def min_retry_s(self, parameters: Parameters) -> float:
        """Return the seconds that must be left for a retry.

        With less the retry would time out, and its error would hide why the first request failed.
        """
        return _MIN_RETRY_S if self.needs_timeout(parameters) else 0.0

    def longest_s(self, parameters: Parameters) -> float | None:
        """Return the most seconds that a request may take by the operator's `timeout`; None without one."""
        stage_s = parameters.get("timeout")
        return None if stage_s is None else self.stages(parameters) * float(stage_s) + _OVERHEAD_S

    def within(self, parameters: Parameters, left_s: float, *, has_own_limit: bool = False) -> Parameters:
        """Return the parameters with a `timeout` that makes the upstream answer within `left_s` seconds.

        A stage gets at most `default_stage_s`, unless the operator sets `timeout`, or the call `has_own_limit`: a time
        limit that definition or model set for it.
        """
        if not self.needs_timeout(parameters):
            return parameters
        each_s = _eighths((left_s - RESERVE_S) / self.stages(parameters))
        possible_s = max(1, min(each_s, MAX_TIMEOUT_S))
        usual_s = MAX_TIMEOUT_S if has_own_limit else self.default_stage_s
        stage_s = min(possible_s, parameters.get("timeout") or usual_s)
        return {**self.timing(parameters, stage_s), **parameters, "timeout": stage_s}


def _eighths(seconds: float) -> float:
    """Round down to an eighth of a second: 0.125 s is a whole number of milliseconds, and exact as a float."""
    rounded = math.floor(8 * seconds) / 8
    return int(rounded) if rounded.is_integer() else rounded


def _stages_of_reader(parameters: Parameters) -> int:
    return 1 if parameters.get("engine") in _ONE_STAGE_ENGINES else 2


def _timing_of_reader(parameters: Parameters, stage_s: float) -> Parameters:
    """Return what keeps the reader from waiting until a page loads nothing more.

    With a `timeout` of 20 s or more it does wait for that, unless `respondTiming` asks for another moment. It shall
    wait in two cases: if the operator sets `timeout`, and for pages with frames.
    """
    if stage_s < _NETWORK_IDLE_FROM_S or "timeout" in parameters or parameters.get("withIframe"):
        return {}
    is_screenshot = "shot" in str(parameters.get("respondWith"))  # `screenshot` or `pageshot`
    return {"respondTiming": "media-idle" if is_screenshot else "resource-idle"}


def _has_pages(parameters: Parameters) -> bool:
    """Return whether a search asks for page texts; only these take time."""
    return parameters.get("respondWith") != "no-content"


SEARCH_TIMEOUTS = Timeouts(default_stage_s=25, needs_timeout=_has_pages)
READER_TIMEOUTS = Timeouts(default_stage_s=15, stages=_stages_of_reader, timing=_timing_of_reader)
