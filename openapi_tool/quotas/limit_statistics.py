"""Limits as statistics show them, for example `openapi-tool limits` and the status page."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

from openapi_tool.quotas.key_limit import KeyLimit
from openapi_tool.quotas.keys import Keys
from openapi_tool.quotas.options import LimitOptions
from openapi_tool.quotas.rates import Rates, rates_of
from openapi_tool.tools.operations import OPERATIONS

_MAX_PROJECTS = 20  # that wait for a key
_MAX_CONFIGURED = 50  # keys with limits of their own


def state_of(limit: KeyLimit, options: LimitOptions, keys: Keys) -> dict[str, Any]:
    """Return the state of one key and endpoint: its limits in force, what is used of them, and what waits."""
    rates = limit.in_force
    record = limit.record
    waiting = limit.counted_queue
    now = limit.now()
    return {
        "variable": limit.variable,
        "endpoint": limit.endpoint,
        **_shown(rates),
        "found_by_429": limit.rates.requests is None and rates.requests is not None,
        "dry_run": limit.dry_run,
        "used": record.requests.total(now),
        "used_tokens": record.tokens.total(now),
        "estimated_tokens": None if rates.tokens is None else limit.tokens_each,
        "paused_s": round(limit.paused_s, 1),
        "sent": limit.sent_in_window(),
        "running": limit.running,
        "offline": bool(limit.outage),
        "waiting": len(waiting),
        "waiting_by_project": dict(Counter(waiting.counts()).most_common(_MAX_PROJECTS)),
        "refused": limit.calls_refused,
        "would_have_waited": limit.would_have_waited,
        "pool": options.pool_name(limit.variable),
        "not_set": limit.group.pooled and keys.get(limit.variable) is None,
    }


def configured_limits(options: LimitOptions) -> list[dict[str, Any]]:
    """Return the limits of the settings by key and endpoint.

    Those with the `variable` None apply to each key that has no limits of its own.
    """
    found = []
    for variable in islice((None, *options.keys), _MAX_CONFIGURED):
        for operation in OPERATIONS:
            rates = rates_of(options, variable or "", operation.name)
            if rates.limited:
                limits = _shown(rates)
                found.append({"variable": variable, "endpoint": operation.name, **limits, "dry_run": options.dry_run})
    return found


def _shown(rates: Rates) -> dict[str, int | None]:
    return {
        "requests_per_minute": rates.requests,
        "tokens_per_minute": rates.tokens,
        "concurrent": rates.concurrent,
    }
