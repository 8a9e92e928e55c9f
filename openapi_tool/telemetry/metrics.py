"""Prometheus metrics. Labels are bounded: never a project, a URL or a call."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_CALL_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120)
_LAG_BUCKETS = (0.005, 0.01, 0.05, 0.1, 0.5, 1, 5)

CALLS = Counter("openapi_tool_calls", "Calls answered.", ("status", "error_code"))
CALL_SECONDS = Histogram(
    "openapi_tool_call_seconds", "From delivery to committed result.", ("status",), buckets=_CALL_BUCKETS
)
RUNNING = Gauge("openapi_tool_calls_running", "Commands being processed.")
WAITING = Gauge("openapi_tool_commands_waiting", "Received commands waiting for a slot.")
RETURNED = Counter("openapi_tool_commands_returned", "Commands handed back unrun: executor.max_held was reached.")
DEDUPLICATED = Counter("openapi_tool_calls_deduplicated", "Commands whose call already had a result.")
REQUEUED = Counter("openapi_tool_commands_requeued", "Commands requeued because a dependency was unavailable.")
KEYS_REFUSED = Counter(
    "openapi_tool_keys_refused",
    "Requests whose key the upstream refused (401, 402).",
    ("variable",),
)
REDELIVERED = Counter("openapi_tool_redeliveries", "Redelivered commands.")
DEAD_LETTERS = Counter("openapi_tool_dead_letters", "Commands dead-lettered.", ("reason",))
for _reason in (  # all possible values
    "already_reported",
    "attempts_exhausted",
    "bad_subject",
    "defect",
    "depth_mismatch",
    "id_collision",
    "no_identity",
    "no_request_edge",
    "recursion_depth",
    "stale_turn",
    "turn_headers",
):
    DEAD_LETTERS.labels(_reason)  # start at 0: Prometheus sees no increase in a series that starts at 1, so no alert
DEAD_LETTERS_DISCARDED = Counter(
    "openapi_tool_dead_letters_discarded", "Dead letters discarded because storing them failed.", ("cause",)
)
for _cause in ("denied", "full", "too_large", "unavailable"):
    DEAD_LETTERS_DISCARDED.labels(_cause)
DOORBELLS_MISSED = Counter(
    "openapi_tool_doorbells_missed", "Results without a doorbell; the kernel's scan of the inbox finds them."
)
UPSTREAM_RETRIES = Counter("openapi_tool_upstream_retries", "Upstream requests retried.", ("error_code",))
UPSTREAM_TOKENS = Counter("openapi_tool_upstream_tokens", "Tokens charged by the upstream.")
UPSTREAM_REQUESTS = Counter("openapi_tool_upstream_requests", "Upstream requests sent.")
CACHE_HITS = Counter("openapi_tool_cache_hits", "Lookups answered by a cached response or a request in flight.")
CACHE_MISSES = Counter("openapi_tool_cache_misses", "Lookups that started an upstream request.")
CACHE_BYTES = Gauge("openapi_tool_cache_bytes", "Memory of cached responses in bytes, expired ones included.")
MASKED = Counter("openapi_tool_masked_values", "Secrets masked in a text.", ("where",))
EVENT_LOOP_LAG = Histogram(
    "openapi_tool_event_loop_lag_seconds", "Delay of a timer of the event loop in seconds.", buckets=_LAG_BUCKETS
)
DEPENDENCY_UP = Gauge("openapi_tool_dependency_up", "1 while the dependency is available, else 0.", ("dependency",))
EVENT_LOOP_TASKS = Gauge("openapi_tool_event_loop_tasks", "Tasks of the event loop.")
