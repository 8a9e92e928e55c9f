"""Shares of a limit of concurrent requests: equal for all replicas that want more than theirs, and none unused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Demand(NamedTuple):
    """Requests that a replica would have open, and its permits so far; those with the fewest come first."""

    requests: int
    served: int


def shares(limit: int, demands: Mapping[str, Demand]) -> dict[str, int]:
    """Divide `limit` by max-min fairness: no replica gets more than it wants, and the others get what it leaves."""
    found: dict[str, int] = {}
    left = limit
    ascending = sorted(demands, key=lambda name: demands[name].requests)
    while ascending and demands[ascending[0]].requests <= left // len(ascending):
        name = ascending.pop(0)
        found[name] = demands[name].requests
        left -= found[name]
    equal, remainder = divmod(left, len(ascending)) if ascending else (0, 0)
    for place, name in enumerate(sorted(ascending, key=lambda name: (demands[name].served, name))):
        found[name] = equal + (place < remainder)
    return found
