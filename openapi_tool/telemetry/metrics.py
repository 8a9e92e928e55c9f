"""All metrics: instruments of prometheus-client, from which /metrics, OTLP and docs/operations.md are made.

Labels are bounded: never a URL or a call; a project only if the operator lists it; a tool only by its built-in tool.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics import MetricWrapperBase

from openapi_tool import __version__
from openapi_tool.telemetry import logs, redact

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]
Instrument = Counter | Gauge | Histogram
InstrumentT = TypeVar("InstrumentT", Counter, Gauge, Histogram)


@dataclass(frozen=True)
class Described:
    """Instrument with what documents it; `name` is without the suffix of its samples, such as `_total`."""

    instrument: Instrument
    kind: Kind
    name: str
    text: str
    labels: Labels


ALL: list[Described] = []
"""All instruments, in the order of their definition."""

disable_created_metrics()  # type: ignore[no-untyped-call]


def _described(
    kind: Kind, made: InstrumentT, name: str, text: str, labels: Labels, present: Iterable[Labels]
) -> InstrumentT:
    """Add an instrument to ALL.

    The label values in `present` exist from the start, at 0: Prometheus sees no increase in a series that starts at 1,
    so an alert would miss it.
    """
    for values in present:
        made.labels(*values)
    ALL.append(Described(made, kind, name, text, labels))
    return made


def _counter(name: str, text: str, labels: Labels = (), present: Iterable[Labels] = ()) -> Counter:
    name = f"openapi_tool_{name}"
    return _described("counter", Counter(name, text, labels), name, text, labels, present)


def _gauge(name: str, text: str, labels: Labels = (), present: Iterable[Labels] = ()) -> Gauge:
    name = f"openapi_tool_{name}"
    return _described("gauge", Gauge(name, text, labels), name, text, labels, present)


def _histogram(
    name: str, text: str, labels: Labels = (), present: Iterable[Labels] = (), *, bounds: tuple[float, ...]
) -> Histogram:
    name = f"openapi_tool_{name}"
    return _described("histogram", Histogram(name, text, labels, buckets=bounds), name, text, labels, present)


class Sample(NamedTuple):
    """Value of one combination of label values, without empty ones: Prometheus treats these as absent."""

    name: str
    labels: Mapping[str, str]
    value: float


def samples(instrument: MetricWrapperBase) -> Iterator[Sample]:
    """Yield the current values of an instrument."""
    for family in instrument.collect():
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if value}
            yield Sample(sample.name, labels, sample.value)


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
_OPERATIONS = [("read",), ("write",), ("conflict",)]
_PRESENT_CODES = ("", "internal_error", "tool_misconfigured")  # success, and errors that need an operator at once

BUILD_INFO = _gauge(
    "build_info", "Always 1; version of the executor and of Python.", ("version", "python"),
    [(__version__, platform.python_version())],
)  # fmt: skip
BUILD_INFO.labels(__version__, platform.python_version()).set(1)

CALLS = _counter(
    "calls", "Calls with a committed result. `tool` is the built-in tool, `project` only one of `telemetry.projects`.",
    ("tool", "status", "error_code", "project"),
    [("", "success" if not code else "failed", code, "") for code in _PRESENT_CODES],
)  # fmt: skip
CALL_SECONDS = _histogram(
    "call_seconds", "From the arrival of the command in the stream to the end of its doorbell.", ("tool",),
    bounds=_SECONDS,
)  # fmt: skip
PHASES = ("queue", "load", "permit", "upstream", "turn", "commit")
PHASE_SECONDS = _histogram(
    "phase_seconds",
    "Parts of a call. queue: from the arrival in the stream to a slot; load: reading the call's rows; permit: the "
    "longest wait for a permit of `limits`, if there was one; upstream: from the first request to the last response, "
    "waits in between included; turn: the finished result's wait until the worker has suspended the turn and has read "
    "the turn's other results; commit: writing the result, with retries.",
    ("phase",),
    [(phase,) for phase in PHASES],
    bounds=_SECONDS,
)
UPSTREAM_SECONDS = _histogram(
    "upstream_request_seconds", "One upstream request, from sending to the parsed response.", ("host", "error_code"),
    bounds=_SECONDS,
)  # fmt: skip

RUNNING = _gauge("calls_running", "Commands being processed.")
HELD = _gauge("commands_held", "Received commands that are not settled: running and waiting ones.")
WAITING = _gauge("commands_waiting", "Received commands waiting for a slot.")
OLDEST_HELD = _gauge("oldest_held_command_seconds", "Time since the arrival in the stream of the oldest held command.")
SLOTS = _gauge("slots", "executor.concurrency: most concurrent calls of this process.")
PENDING = _gauge("durable_pending", "Commands in the stream that the durable has not delivered to any replica.")
UNACKNOWLEDGED = _gauge("durable_unacknowledged", "Commands delivered to any replica and not settled.")
MAX_UNACKNOWLEDGED = _gauge("durable_max_unacknowledged", "The durable's max_ack_pending; delivery stops at it.")
EVICTED = _counter("commands_evicted", "Commands evicted: handed back unrun, as executor.max_held was reached.")
DEDUPLICATED = _counter("calls_deduplicated", "Commands whose call already had a result.")
REQUEUED = _counter("commands_requeued", "Commands requeued because a dependency was unavailable.")
REDELIVERED = _counter("redeliveries", "Redelivered commands.")
DEAD_LETTERS = _counter(
    "dead_letters", "Commands dead-lettered.", ("reason",),
    [(reason,) for reason in (
        "already_reported", "attempts_exhausted", "bad_subject", "defect", "depth_mismatch", "id_collision",
        "no_identity", "no_request_edge", "recursion_depth", "stale_turn", "turn_headers",
    )],
)  # fmt: skip
DEAD_LETTERS_DISCARDED = _counter(
    "dead_letters_discarded", "Dead letters discarded because storing them failed.", ("cause",),
    [("denied",), ("full",), ("too_large",), ("unavailable",)],
)  # fmt: skip
DOORBELLS_MISSED = _counter(
    "doorbells_missed", "Results without a doorbell; the kernel's scan of the inbox finds them."
)

SEMAPHORE_USED = _gauge(
    "permits_used", "Permits of a semaphore in use: connections to database or upstream, TLS handshakes.", ("of",)
)
SEMAPHORE_WAITING = _gauge("permits_waiting", "Calls that wait for a permit of a semaphore.", ("of",))
RESPONSE_BYTES = _gauge(
    "response_memory_free_bytes", "Free part of the memory for responses, egress.body_budget_bytes."
)
RESPONSE_WAITING = _gauge("response_memory_waiting", "Responses that wait for memory of egress.body_budget_bytes.")
KEYS_REFUSED = _counter("keys_refused", "Requests whose key the upstream refused (401, 402).", ("variable", "endpoint"))
KEY_UNUSABLE = _gauge(
    "key_unusable",
    "1 while a key is blocked at an endpoint as `invalid` or `exhausted`: calls use another key of its pool, or fail.",
    ("variable", "endpoint", "state"),
)  # fmt: skip
LIMIT_USED = _gauge(
    "limit_used",
    "Requests that count against a limit of `limits`, including permits that replicas hold and have not used.",
    ("variable", "endpoint"),
)  # fmt: skip
LIMIT_WAITING = _gauge("limit_waiting", "Calls that wait for a permit of `limits`.", ("variable", "endpoint"))
LIMIT_PAUSED = _gauge("limit_paused_seconds", "Seconds until a pause after a 429 ends.", ("variable", "endpoint"))
LIMIT_NOT_SHARED = _gauge(
    "limit_not_shared", "1 while a limit cannot be shared and this replica uses its part of it, else 0.",
    ("variable", "endpoint"),
)  # fmt: skip
LIMIT_OPERATIONS = _counter(
    "limit_operations", "Operations on the shared records of `limits` in NATS.", ("operation",), _OPERATIONS
)
RATE_LIMITED = _counter(
    "rate_limited", "Requests not sent, because no permit of `limits` could come before the deadline.", ("endpoint",)
)
_SCOPES = [("session",), ("agent_day",), ("project_day",), ("project_month",)]
BUDGET_OPERATIONS = _counter(
    "budget_operations", "Operations on the shared accounts of `budgets` in NATS.", ("operation",), _OPERATIONS
)
BUDGET_REFUSALS = _counter("budget_refusals", "Requests not sent, because of a budget.", ("scope",), _SCOPES)
BUDGET_WARNINGS = _counter("budget_warnings", "Budgets of which 80 % were used.", ("scope",), _SCOPES)
BUDGET_USED = _gauge(
    "budget_used_ratio", "Used share of the most used budget of a scope that this replica knows; 1 is all.", ("scope",),
    _SCOPES,
)  # fmt: skip
BUDGETS_NOT_SHARED = _gauge(
    "budgets_not_shared",
    "1 while the accounts are unavailable and calls are checked against the last known use, else 0.",
)
UPSTREAM_REQUESTS = _counter("upstream_requests", "Upstream requests sent.", ("tool",))
UPSTREAM_RETRIES = _counter("upstream_retries", "Upstream requests retried.", ("error_code",))
UPSTREAM_TOKENS = _counter("upstream_tokens", "Tokens charged by the upstream.", ("tool", "project"))
CACHE_HITS = _counter("cache_hits", "Lookups answered by a cached response or a request in flight.")
CACHE_MISSES = _counter("cache_misses", "Lookups that started an upstream request.")
CACHE_BYTES = _gauge("cache_bytes", "Memory of cached responses in bytes, expired ones included.")

ISOLATION_TASKS = _counter(
    "isolation_tasks",
    "Tasks for worker processes. `outcome` is done, killed (or refused, as earlier ones of the same definition were "
    "killed), late (no answer in time), cancelled or broken (a defect).",
    ("task", "outcome"),
)
ISOLATION_SECONDS = _histogram(
    "isolation_task_seconds", "From the request for a task to its result, the wait for a worker included.", ("task",),
    bounds=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)  # fmt: skip
ISOLATION_WAITING = _gauge("isolation_tasks_waiting", "Tasks that wait for a worker process.")

DEPENDENCY_UP = _gauge("dependency_up", "1 while the dependency is available, else 0.", ("dependency",))
CLOCK_OFFSET = _gauge(
    "clock_offset_seconds", "Seconds by which the local clock is ahead of the clock of NATS, which the executor uses."
)
EVENT_LOOP_LAG = _histogram(
    "event_loop_lag_seconds", "Delay of a timer of the event loop in seconds.",
    bounds=(0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0),
)  # fmt: skip
EVENT_LOOP_TASKS = _gauge("event_loop_tasks", "Tasks of the event loop.")
MASKED = _counter("masked_values", "Secrets that were masked; `where` is the kind of text.", ("where",))
# `redact` must not import this module, so it sets the hook there.
redact.on_masked = lambda where, number: MASKED.labels(where).inc(number)
LOG_LINES_LIMITED = _counter(
    "log_lines_limited", "Log lines dropped because their project caused too many of an action, or a library too many."
)
LOG_LINES_DROPPED = _counter(
    "log_lines_dropped", "Log lines dropped: standard error could not be written, or its reader was too slow."
)
# Nor must `logs`.
logs.on_limited = LOG_LINES_LIMITED.inc
logs.on_dropped = LOG_LINES_DROPPED.inc
SPANS_DROPPED = _counter("spans_dropped", "Spans that were not exported: the queue was full, or export failed.")

_listed: set[str] = set()


def list_projects(project_ids: Iterable[str]) -> None:
    """Set the projects that get a label."""
    _listed.clear()
    _listed.update(project_ids)


def project_label(project_id: str) -> str:
    """Return the id of a listed project, else an empty label."""
    return project_id if project_id in _listed else ""
