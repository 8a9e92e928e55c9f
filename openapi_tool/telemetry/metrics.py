"""All metrics, and their instruments; /metrics, OTLP and docs/operations.md are made from `ALL`.

prometheus_client's own instruments lock and validate on every use. Those here have no lock, since calls change them on
the event loop's thread only.

Labels are bounded: never a URL or a call; a project only if the operator lists it; a tool only by its built-in tool.
"""

from __future__ import annotations

import platform
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Literal, TypeVar

from openapi_tool import __version__
from openapi_tool.protocol.projects import bare_project
from openapi_tool.telemetry import redact

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]


@dataclass(slots=True, eq=False)
class Value:
    """Number of one combination of labels."""

    number: float = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add to the number."""
        self.number += amount

    def set(self, number: float) -> None:
        """Replace the number."""
        self.number = number


@dataclass(slots=True, eq=False)
class Distribution:
    """Observations of one combination of labels."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count an observation; a bucket includes its upper bound."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


ChildT = TypeVar("ChildT", Value, Distribution)


@dataclass(eq=False)
class Family(Generic[ChildT]):
    """One metric, with a child for each combination of label values.

    The combinations in `present` exist from the start, at 0: Prometheus sees no increase in a series that starts at 1,
    so an alert would miss it.
    """

    kind: ClassVar[Kind]
    name: str
    text: str
    label_names: Labels = ()
    present: Iterable[Labels] = ()
    _children: dict[Labels, ChildT] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.name = f"openapi_tool_{self.name}"
        for values in self.present if self.label_names else [()]:
            self.labels(*values)

    @abstractmethod
    def _child(self) -> ChildT:
        """Return a new child."""

    def labels(self, *values: str) -> ChildT:
        """Return the child of these label values."""
        try:
            return self._children[values]
        except KeyError:
            child = self._children[values] = self._child()
            return child

    def children(self) -> Iterator[tuple[dict[str, str], ChildT]]:
        """Yield each child and its labels, without empty ones: Prometheus treats these as absent."""
        for values, child in list(self._children.items()):
            yield {name: value for name, value in zip(self.label_names, values, strict=True) if value}, child


class Counter(Family[Value]):
    """Number that only grows."""

    kind = "counter"

    def _child(self) -> Value:
        return Value()

    def inc(self, amount: float = 1) -> None:
        """Add to the only child."""
        self._children[()].number += amount


@dataclass(eq=False)
class Gauge(Family[Value]):
    """Number that goes up and down; `combine` combines the sources of a child, such as kernels."""

    kind = "gauge"
    combine: Callable[[Iterable[float]], float] = field(default=sum, kw_only=True)
    _sources: dict[Labels, dict[str, Callable[[], float]]] = field(default_factory=dict, init=False)

    def _child(self) -> Value:
        return Value()

    def set(self, number: float) -> None:
        """Set the only child."""
        self._children[()].number = number

    def set_function(self, source: Callable[[], float], *values: str, part: str = "") -> None:
        """Read the gauge from a source at each export. `part` names it, such as a kernel; a later one replaces it."""
        self._sources.setdefault(values, {})[part] = source

    def children(self) -> Iterator[tuple[dict[str, str], Value]]:
        """Read the sources first."""
        for values, sources in self._sources.items():
            self.labels(*values).number = self.combine(source() for source in sources.values())
        return super().children()


@dataclass(eq=False)
class Histogram(Family[Distribution]):
    """Distribution over buckets, whose upper bounds are in the metric's unit."""

    kind = "histogram"
    bounds: tuple[float, ...] = field(kw_only=True)

    def _child(self) -> Distribution:
        return Distribution(self.bounds)

    def observe(self, value: float) -> None:
        """Count an observation of the only child."""
        self._children[()].observe(value)


Metric = Counter | Gauge | Histogram


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
_OPERATIONS = [("read",), ("write",), ("conflict",)]
_PRESENT_CODES = ("", "internal_error", "tool_misconfigured")  # success, and errors that need an operator at once

BUILD_INFO = Gauge(
    "build_info", "Always 1; version of the executor and of Python.", ("version", "python"),
    [(__version__, platform.python_version())],
)  # fmt: skip
BUILD_INFO.labels(__version__, platform.python_version()).set(1)

CALLS = Counter(
    "calls", "Calls with a committed result. `tool` is the built-in tool, `project` only one of `telemetry.projects`.",
    ("tool", "status", "error_code", "project"),
    [("", "success" if not code else "failed", code, "") for code in _PRESENT_CODES],
)  # fmt: skip
CALL_SECONDS = Histogram(
    "call_seconds", "From the arrival of the command in the stream to the end of its doorbell.", ("tool",),
    bounds=_SECONDS,
)  # fmt: skip
PHASES = ("queue", "load", "permit", "upstream", "turn", "commit")
PHASE_SECONDS = Histogram(
    "phase_seconds",
    "Parts of a call. queue: from the arrival in the stream to a slot; load: reading the call's rows; permit: the "
    "longest wait for a permit of `limits`, if there was one; upstream: from the first request to the last response, "
    "waits in between included; turn: the finished result's wait until the worker has suspended the turn and has read "
    "the turn's other results; commit: writing the result, with retries.",
    ("phase",),
    [(phase,) for phase in PHASES],
    bounds=_SECONDS,
)
UPSTREAM_SECONDS = Histogram(
    "upstream_request_seconds", "One upstream request, from sending to the parsed response.", ("host", "error_code"),
    bounds=_SECONDS,
)  # fmt: skip

RUNNING = Gauge("calls_running", "Commands being processed.")
HELD = Gauge("commands_held", "Received commands that are not settled: running and waiting ones.")
WAITING = Gauge("commands_waiting", "Received commands waiting for a slot.")
OLDEST_HELD = Gauge(
    "oldest_held_command_seconds", "Time since the arrival in the stream of the oldest held command.", combine=max
)
SLOTS = Gauge("slots", "executor.concurrency of each kernel: most concurrent calls of this process.")
PENDING = Gauge(
    "durable_pending",
    "Commands in the stream that the durable has not delivered to any replica. `version` is the kernel's protocol.",
    ("version",),
)
UNACKNOWLEDGED = Gauge("durable_unacknowledged", "Commands delivered to any replica and not settled.", ("version",))
MAX_UNACKNOWLEDGED = Gauge(
    "durable_max_unacknowledged", "The durable's max_ack_pending; delivery stops at it.", ("version",)
)
EVICTED = Counter("commands_evicted", "Commands evicted: handed back unrun, as executor.max_held was reached.")
DEDUPLICATED = Counter("calls_deduplicated", "Commands whose call already had a result.")
REQUEUED = Counter("commands_requeued", "Commands requeued because a dependency was unavailable.")
REDELIVERED = Counter("redeliveries", "Redelivered commands.")
DEAD_LETTERS = Counter(
    "dead_letters", "Commands dead-lettered.", ("reason",),
    [(reason,) for reason in (
        "already_reported", "attempts_exhausted", "bad_subject", "defect", "depth_mismatch", "id_collision",
        "no_identity", "no_request_edge", "recursion_depth", "stale_turn", "turn_headers",
    )],
)  # fmt: skip
DEAD_LETTERS_DISCARDED = Counter(
    "dead_letters_discarded", "Dead letters discarded because storing them failed.", ("cause",),
    [("denied",), ("full",), ("too_large",), ("unavailable",)],
)  # fmt: skip
WAKEUPS_MISSED = Counter("doorbells_missed", "Results without a doorbell; the kernel's scan of the inbox finds them.")

PERMITS_USED = Gauge(
    "permits_used", "Permits of a semaphore in use: connections to database or upstream, TLS handshakes.", ("of",)
)
PERMITS_WAITING = Gauge("permits_waiting", "Calls that wait for a permit of a semaphore.", ("of",))
RESPONSE_BYTES = Gauge("response_memory_free_bytes", "Free part of the memory for responses, egress.body_budget_bytes.")
RESPONSE_WAITING = Gauge("response_memory_waiting", "Responses that wait for memory of egress.body_budget_bytes.")
KEYS_REFUSED = Counter("keys_refused", "Requests whose key the upstream refused (401, 402).", ("variable",))
KEY_UNUSABLE = Gauge(
    "key_unusable",
    "1 while a key is blocked as `invalid` or `exhausted`: its calls use another key of its pool, or fail at once.",
    ("variable", "state"),
)  # fmt: skip
LIMIT_USED = Gauge(
    "limit_used",
    "Requests that count against a limit of `limits`, including permits that replicas hold and have not used.",
    ("variable", "endpoint"), combine=max,
)  # fmt: skip
LIMIT_WAITING = Gauge("limit_waiting", "Calls that wait for a permit of `limits`.", ("variable", "endpoint"))
LIMIT_PAUSED = Gauge(
    "limit_paused_seconds", "Seconds until a pause after a 429 ends.", ("variable", "endpoint"), combine=max
)
LIMIT_NOT_SHARED = Gauge(
    "limit_not_shared", "1 while a limit cannot be shared and this replica uses its part of it, else 0.",
    ("variable", "endpoint"), combine=max,
)  # fmt: skip
LIMIT_OPERATIONS = Counter(
    "limit_operations", "Operations on the shared records of `limits` in NATS.", ("operation",), _OPERATIONS
)
RATE_LIMITED = Counter(
    "rate_limited", "Requests not sent, because no permit of `limits` could come before the deadline.", ("endpoint",)
)
_SCOPES = [("session",), ("agent_day",), ("project_day",), ("project_month",)]
BUDGET_OPERATIONS = Counter(
    "budget_operations", "Operations on the shared accounts of `budgets` in NATS.", ("operation",), _OPERATIONS
)
BUDGET_REFUSALS = Counter("budget_refusals", "Requests not sent, because of a budget.", ("scope",), _SCOPES)
BUDGET_WARNINGS = Counter("budget_warnings", "Budgets of which 80 % were used.", ("scope",), _SCOPES)
BUDGET_USED = Gauge(
    "budget_used_ratio", "Used share of the most used budget of a scope that this replica knows; 1 is all.", ("scope",),
    _SCOPES,
)  # fmt: skip
BUDGETS_NOT_SHARED = Gauge(
    "budgets_not_shared",
    "1 while the accounts are unavailable and calls are checked against the last known use, else 0.",
)
UPSTREAM_REQUESTS = Counter("upstream_requests", "Upstream requests sent.", ("tool",))
UPSTREAM_RETRIES = Counter("upstream_retries", "Upstream requests retried.", ("error_code",))
UPSTREAM_TOKENS = Counter("upstream_tokens", "Tokens charged by the upstream.", ("tool", "project"))
CACHE_HITS = Counter("cache_hits", "Lookups answered by a cached response or a request in flight.")
CACHE_MISSES = Counter("cache_misses", "Lookups that started an upstream request.")
CACHE_BYTES = Gauge("cache_bytes", "Memory of cached responses in bytes, expired ones included.")

ISOLATION_TASKS = Counter(
    "isolation_tasks",
    "Tasks for worker processes. `outcome` is done, killed (or refused, as earlier ones of the same definition were "
    "killed), late (no answer in time), cancelled or broken (a defect).",
    ("task", "outcome"),
)
ISOLATION_SECONDS = Histogram(
    "isolation_task_seconds", "From the request for a task to its result, the wait for a worker included.", ("task",),
    bounds=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)  # fmt: skip
ISOLATION_WAITING = Gauge("isolation_tasks_waiting", "Tasks that wait for a worker process.")

DEPENDENCY_UP = Gauge("dependency_up", "1 while the dependency is available, else 0.", ("dependency",))
CLOCK_OFFSET = Gauge(
    "clock_offset_seconds", "Seconds by which the local clock is ahead of the clock of NATS, which the executor uses."
)
EVENT_LOOP_LAG = Histogram(
    "event_loop_lag_seconds", "Delay of a timer of the event loop in seconds.",
    bounds=(0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0),
)  # fmt: skip
EVENT_LOOP_TASKS = Gauge("event_loop_tasks", "Tasks of the event loop.")
MASKED = Counter("masked_values", "Secrets that were masked; `where` is the kind of text.", ("where",))
redact.on_masked = lambda where, number: MASKED.labels(where).inc(number)
LOG_LINES_LIMITED = Counter(
    "log_lines_limited", "Log lines dropped because their project caused too many of an action."
)
LOG_LINES_DROPPED = Counter(
    "log_lines_dropped", "Log lines dropped: standard error could not be written, or its reader was too slow."
)
SPANS_DROPPED = Counter("spans_dropped", "Calls whose spans were not exported: the queue was full, or export failed.")

_listed: set[str] = set()


def list_projects(project_ids: Iterable[str]) -> None:
    """Set the projects that get a label."""
    _listed.clear()
    _listed.update(project_ids)


def project_label(project_id: str | None) -> str:
    """Return the id of a listed project, else an empty label."""
    name = bare_project(project_id or "")
    return name if name in _listed else ""


ALL: tuple[Metric, ...] = tuple(metric for metric in list(globals().values()) if isinstance(metric, Metric))
