"""State of a key and endpoint for `openapi-tool limits` and /readyz."""

from __future__ import annotations

from typing import Any

from openapi_tool.limits.flow import Flow
from openapi_tool.limits.ledger import REQUESTS, TOKENS

_MAX_PROJECTS = 20


def shown(flow: Flow) -> dict[str, Any]:
    """Return the state as a JSON object."""
    allowance, line, now = flow.allowance, flow.shown_line, flow.keys.now()
    rates, record = allowance.in_force(now), allowance.record
    return {
        "variable": flow.variable,
        "endpoint": flow.endpoint,
        "requests_per_minute": rates.requests,
        "tokens_per_minute": rates.tokens,
        "concurrent": rates.concurrent,
        "found_by_429": allowance.rates.requests is None and rates.requests is not None,
        "used": record.counted(REQUESTS, now),
        "used_tokens": record.counted(TOKENS, now),
        "paused_s": round(allowance.paused_s(now), 1),
        "at_hand": allowance.at_hand[REQUESTS],
        "sent": allowance.sent_in_window(now),
        "running": allowance.running,
        "alone": bool(allowance.alone),
        "waiting": len(line),
        "waiting_by_project": dict(sorted(line.by_project().items(), key=lambda item: -item[1])[:_MAX_PROJECTS]),
        "refused": flow.refusals,
    }
