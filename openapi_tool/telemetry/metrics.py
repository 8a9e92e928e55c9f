"""What Prometheus scrapes: bounded labels only, never a project, an address or a call."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_CALL_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120)
_LAG_BUCKETS = (0.005, 0.01, 0.05, 0.1, 0.5, 1, 5)

CALLS = Counter("openapi_tool_calls", "Calls that were answered.", ("status", "error_code"))
CALL_SECONDS = Histogram(
    "openapi_tool_call_seconds", "From delivery to committed result.", ("status",), buckets=_CALL_BUCKETS
)
RUNNING = Gauge("openapi_tool_calls_running", "Commands that are being worked on.")
REPEATED = Counter("openapi_tool_calls_repeated", "Commands whose call had a result already.")
POSTPONED = Counter("openapi_tool_calls_postponed", "Commands that are tried again, because a part was away.")
REDELIVERED = Counter("openapi_tool_redeliveries", "Commands that were delivered again.")
DEAD_LETTERS = Counter("openapi_tool_dead_letters", "Commands that were dead-lettered.", ("reason",))
UPSTREAM_RETRIES = Counter("openapi_tool_upstream_retries", "Requests that were asked again.", ("error_code",))
UPSTREAM_TOKENS = Counter("openapi_tool_upstream_tokens", "Tokens that the upstream charged.")
UPSTREAM_REQUESTS = Counter("openapi_tool_upstream_requests", "Requests that were sent to the upstream.")
CACHED = Counter("openapi_tool_cached_answers", "Answers for which nothing was asked: kept, or on their way already.")
CACHE_BYTES = Gauge("openapi_tool_cache_bytes", "Memory of the answers that are kept, some of them expired.")
MASKED = Counter("openapi_tool_masked_values", "Secrets that were taken out of a text.", ("where",))
LOOP_LAG = Histogram("openapi_tool_loop_lag_seconds", "How late the event loop wakes.", buckets=_LAG_BUCKETS)
PART_UP = Gauge("openapi_tool_part_up", "1 while a part that calls need is there.", ("part",))
TASKS = Gauge("openapi_tool_tasks", "Tasks of the event loop.")
