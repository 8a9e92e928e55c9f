"""What is wrong with the replicas, one line for each problem, for `openapi-tool top` and the status page.

It is found in the statistics of the replicas (JSON objects, made by `snapshots.py`), which have two kinds of news:

- the present state: what is unavailable, paused or waited for;
- the warnings in the log of the last ten minutes.

If a warning is about a state, such as an outage, only the state is shown while it lasts, and afterwards the warning as
recovered. Statistics may come from another version, so any field may be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from openapi_tool.tools.wording import counted

_SLOW_DATABASE_MS = 1_000  # p95 of loads or commits from which on the database counts as slow
_CLOCK_OFFSET_S = 2.0  # of the local clock, from which on a problem is shown
_RECENT_S = 60.0  # for which a warning counts as current
_LONG_S = 20.0  # most calls end earlier
_NAMES_SHOWN = 3  # of replicas or projects, in one line

Replica = Mapping[str, Any]
"""Statistics of one replica."""

Warned = Mapping[str, Any]
"""A warning in the statistics: `action`, newest `message`, and how often (`count`) and how long ago it was logged."""

CommandLine = Callable[[str], str]
"""Returns the command line of a command of this program, such as `openapi-tool --dev dev2 limits` for `limits`."""


@dataclass(frozen=True, slots=True)
class FoundProblems:
    """Lines, the most recent first: what is wrong now, and what is over or has not happened for a minute."""

    now: list[str]
    earlier: list[str]


def found_problems(
    replicas: Sequence[Replica], expect: int = 0, command: CommandLine = "openapi-tool {}".format
) -> FoundProblems:
    """Return the problems of all replicas; what several of them report is one problem.

    If fewer than `expect` replicas have answered, that is a problem, too. `command` returns a command line about the
    same replicas, for advice.
    """
    replica_count = len(replicas)
    reports = [report for replica in replicas for report in _reports(replica, command)]
    warnings = _warnings_by_kind(replicas)
    now = [
        *_missing(replica_count, expect),
        *_lines(reports, replica_count),
        *_warning_lines(warnings[_Kind.CURRENT], replica_count, command),
    ]
    recovered = [f"recovered: {line}" for line in _warning_lines(warnings[_Kind.RECOVERED], replica_count, command)]
    return FoundProblems(now, [*recovered, *_warning_lines(warnings[_Kind.EARLIER], replica_count, command)])


def but_noticed(replicas: Sequence[Replica]) -> str:
    """Return which calls failed or take long, though no problem is known, as the end of a sentence; empty if none."""
    noticed = []
    calls = sum(replica.get("calls") or 0 for replica in replicas)
    failed = sum(replica.get("failed") or 0 for replica in replicas)
    if failed:
        noticed.append(f"{failed} of {counted(calls, 'call')} of the last minute failed")
    held_s = max((replica.get("oldest_held_s") or 0.0 for replica in replicas), default=0.0)
    if held_s >= _LONG_S:
        noticed.append(f"a command is held for {_duration(held_s)}")
    waits = [wait for replica in replicas for wait in replica.get("upstream_waits") or ()]
    longest = max(waits, key=_oldest_s, default=None)
    if longest is not None and _oldest_s(longest) >= _LONG_S:
        noticed.append(f"a request to {longest.get('host')} waits for {_duration(_oldest_s(longest))}")
    return f", but {' and '.join(noticed)}" if noticed else ""


def _oldest_s(wait: Mapping[str, Any]) -> float:
    """Return how long the oldest open request to a host waits."""
    return float(wait.get("oldest_s") or 0.0)


def _missing(replica_count: int, expect: int) -> Iterator[str]:
    if replica_count < expect:
        yield f"{replica_count} of {expect} replicas answer: the others are gone, hang or cannot reach NATS"


# The present state.


@dataclass(frozen=True, slots=True)
class _Report:
    """What the state of one replica shows, as a sentence that may contain an amount: "a page waits for `12 s` already".

    Reports of several replicas that differ in the amount only are one problem, which shows their `combined` amount.
    `replica` is empty if the problem concerns no replica in particular.
    """

    replica: str
    before: str
    amount: float | None = None
    shown: Callable[[float], str] = str
    after: str = ""
    combined: Callable[[Iterable[float]], float] = max


def _lines(reports: Sequence[_Report], replica_count: int) -> Iterator[str]:
    """Yield a line for the reports of each problem."""
    problems: dict[tuple[str, str], list[_Report]] = {}
    for report in reports:
        problems.setdefault((report.before, report.after), []).append(report)
    for same in problems.values():
        first = same[0]
        amounts = [report.amount for report in same if report.amount is not None]
        amount = first.shown(first.combined(amounts)) if amounts else ""
        yield _who([report.replica for report in same], replica_count) + first.before + amount + first.after


def _who(names: Sequence[str], replica_count: int) -> str:
    """Return which replicas report something, as the beginning of a line; empty if no replica in particular does."""
    known = sorted({name for name in names if name})
    if not known:
        return ""
    if len(known) <= _NAMES_SHOWN:
        return f"{', '.join(known)}: "
    if len(known) == replica_count:
        return f"all {replica_count} replicas: "
    return f"{', '.join(known[:_NAMES_SHOWN])} and {counted(len(known) - _NAMES_SHOWN, 'other')}: "


def _reports(replica: Replica, command: CommandLine) -> Iterator[_Report]:
    """Yield what the replica's present state shows."""
    name = str(replica.get("instance"))
    health = replica.get("health") or {}
    yield from _suspicious_answers(name, replica)
    for dependency, state in (health.get("dependencies") or {}).items():
        if not state.get("ok"):
            reason = f": {state['reason']}" if state.get("reason") else ""
            yield _Report(name, f"{dependency} is unavailable{reason}")
    yield from _refused_keys(name, replica, command)
    yield from _silent_hosts(name, replica, command)
    yield from _limits(name, replica, command)
    outage = health.get("budgets_by_last_known_state")
    if outage:
        yield _Report(name, f"budgets cannot be shared, so the last known use counts: {outage}")
    yield from _load(name, replica)
    if _is_clock_off(replica):
        off = f"the local clock is {health['clock_offset_s']:+.1f} s off that of NATS"
        yield _Report(name, f"{off}: synchronize it, see clock.offset in the log")
    if replica.get("log_lines_dropped"):
        lines = counted(replica["log_lines_dropped"], "log line", "dropped")
        yield _Report(name, f"since its start {lines}: nobody reads them, or its disk is full")


def _suspicious_answers(name: str, replica: Replica) -> Iterator[_Report]:
    answers = replica.get("answers", 1)
    if answers > 1:
        yield _Report(name, f"{answers} answers have this name: two replicas share it, or one is forged")
    unreadable = replica.get("unreadable")
    if unreadable:
        yield _Report(name, f"its answer is not readable (another version, or forged): {unreadable}")


def _refused_keys(name: str, replica: Replica, command: CommandLine) -> Iterator[_Report]:
    for key in replica.get("upstream_keys") or ():
        about = f"{key.get('endpoint')} requests with the key of {key.get('variable')} ({key.get('state')})"
        yield _Report(name, f"the upstream refuses {about}: see {command('limits')}")


def _silent_hosts(name: str, replica: Replica, command: CommandLine) -> Iterator[_Report]:
    for wait in replica.get("upstream_waits") or ():
        silent_s = wait.get("silent_s") or 0.0
        if silent_s >= _LONG_S:
            host = wait.get("host")
            advice = f": {command('check --upstream')} tries it from here"
            if not replica.get("durable"):  # a gateway: `check` needs a kernel's database
                advice = f": see whether `curl https://{host}` connects from there; if it does, the host hangs"
            yield _Report(name, f"requests to {host} have had no answer for ", silent_s, _duration, advice)


def _limits(name: str, replica: Replica, command: CommandLine) -> Iterator[_Report]:
    for limit in replica.get("upstream_limits") or ():
        endpoint, variable = str(limit.get("endpoint")), str(limit.get("variable"))
        about = f"the {endpoint} limit of {variable}"
        if limit.get("offline"):
            yield _Report(name, f"{about} cannot be shared: see limits.not_shared in the log")
        if limit.get("paused_s"):
            paused = f"the upstream answered 429: {endpoint} requests with {variable} pause for "
            yield _Report(name, paused, limit["paused_s"], _exact_seconds)
        if limit.get("waiting"):
            yield _Report(
                name, "", limit["waiting"], _calls_wait, f" for {about}: see {command('limits')}", combined=sum
            )


def _exact_seconds(seconds: float) -> str:
    return f"{seconds:g} s"


def _calls_wait(calls: float) -> str:
    return f"{counted(round(calls), 'call')} {'waits' if calls == 1 else 'wait'}"


def _load(name: str, replica: Replica) -> Iterator[_Report]:
    if replica.get("waiting"):
        yield _Report(name, f"{replica['waiting']:g} commands wait for one of {replica.get('slots'):g} slots")
    if replica.get("waiting_for_memory"):
        responses = f"{replica['waiting_for_memory']:g} responses wait for memory"
        yield _Report(name, f"{responses}: raise egress.body_budget_bytes")
    if _is_durable_full(replica):
        about = f"the durable has {replica['unacknowledged']} unsettled commands"
        yield _Report("", f"{about}, its maximum: see durable.full in the log")  # all replicas share it
    phases = replica.get("phases_p95_ms") or {}
    for phase in ("load", "commit"):
        p95_ms = phases.get(phase) or 0
        if p95_ms >= _SLOW_DATABASE_MS:
            yield _Report(
                name, f"the database is slow: {phase} takes ", p95_ms, _exact_milliseconds, " (95th percentile)"
            )


def _exact_milliseconds(milliseconds: float) -> str:
    return f"{milliseconds:g} ms"


def _is_durable_full(replica: Replica) -> bool:
    return 0 < int(replica.get("max_unacknowledged", 0)) <= int(replica.get("unacknowledged", 0))


def _is_clock_off(replica: Replica) -> bool:
    health = replica.get("health") or {}
    offset_s = float(health.get("clock_offset_s") or 0)
    return abs(offset_s) >= _CLOCK_OFFSET_S


# Warnings.


class _Kind(Enum):
    """Where a warning is listed."""

    SHOWN_AS_STATE = auto()  # nowhere: `_reports` shows the state that it is about
    CURRENT = auto()
    RECOVERED = auto()
    EARLIER = auto()  # nothing says whether it is over; it was not logged for a minute


class _WarnedReplica(NamedTuple):
    name: str
    warning: Warned


_BY_OUTAGE = ("nats.error", "switches.not_read", "key.not_shared", "heartbeat.failed")
"""Warnings that an outage of NATS may cause, but also something else."""

_COMMANDS = {
    "call.dead_lettered": "deadletters list",
    "tool.disabled": "tools disabled",
    "tool.enabled": "tools disabled",
    "tool.switched": "tools disabled",
}
"""The command that tells more about a warning, by its action."""


def _warnings_by_kind(replicas: Sequence[Replica]) -> Mapping[_Kind, list[_WarnedReplica]]:
    """Return the warnings of all replicas, the newest first."""
    warnings: dict[_Kind, list[_WarnedReplica]] = {kind: [] for kind in _Kind}
    for replica in replicas:
        for warning in replica.get("warnings") or ():
            name = str(replica.get("instance"))
            warnings[_kind(replica, warning)].append(_WarnedReplica(name, warning))
    for of_kind in warnings.values():
        of_kind.sort(key=lambda warned: _ago_s(warned.warning))
    return warnings


def _kind(replica: Replica, warning: Warned) -> _Kind:
    if warning.get("lasts") is not None:  # the replica itself knows
        return _Kind.CURRENT if warning["lasts"] else _Kind.RECOVERED
    if warning["action"] in _BY_OUTAGE and _was_before_recovery(replica, warning):
        return _Kind.RECOVERED
    lasts = _state_lasts(replica, warning)
    if lasts is not None:
        return _Kind.SHOWN_AS_STATE if lasts else _Kind.RECOVERED
    return _Kind.CURRENT if _ago_s(warning) < _RECENT_S else _Kind.EARLIER


def _was_before_recovery(replica: Replica, warning: Warned) -> bool:
    """Return whether NATS became available after a warning, and is so since."""
    nats = _dependencies(replica).get("nats") or {}
    return bool(nats.get("ok")) and (nats.get("for_s") or 0) < _ago_s(warning)


def _state_lasts(replica: Replica, warning: Warned) -> bool | None:  # noqa: PLR0911, C901 - a line for each action
    """Return whether the state that a warning is about lasts; None if it is about none that `_reports` shows."""
    match warning["action"]:
        case "budgets.not_shared":
            return bool((replica.get("health") or {}).get("budgets_by_last_known_state"))
        case "clock.offset":
            return _is_clock_off(replica)
        case "consumer.lost":
            return _is_down(replica, "consumer")
        case "durable.full":
            return _is_durable_full(replica)
        case "health.changed":
            return _is_down(replica, str(warning.get("dependency")))
        case "key.blocked":
            refused = {key.get("variable") for key in replica.get("upstream_keys") or ()}
            return warning.get("variable") in refused
        case "limits.not_shared":
            return _has_limit(replica, warning, "offline")
        case "limits.paused":
            return _has_limit(replica, warning, "paused_s")
        case "nats.disconnected" | "nats.silent":
            return _is_down(replica, "nats")
        case "tool.enabled":  # the end of a state
            return False
    return None


def _is_down(replica: Replica, dependency: str) -> bool:
    dependencies = _dependencies(replica)
    return dependency in dependencies and not dependencies[dependency].get("ok")


def _dependencies(replica: Replica) -> Mapping[str, Any]:
    return (replica.get("health") or {}).get("dependencies") or {}


def _has_limit(replica: Replica, warning: Warned, field: str) -> bool:
    """Return whether a limit of the key that a warning names has this field set, such as that it is paused."""
    limits = replica.get("upstream_limits") or ()
    return any(limit.get(field) and limit.get("variable") == warning.get("variable") for limit in limits)


def _ago_s(warning: Warned) -> float:
    return float(warning.get("ago_s") or 0.0)


def _warning_lines(warned: Sequence[_WarnedReplica], replica_count: int, command: CommandLine) -> Iterator[str]:
    """Yield a line for the warnings of each action, key and dependency, with the newest message."""
    groups: dict[tuple[str, ...], list[_WarnedReplica]] = {}
    for each in warned:
        about = tuple(str(each.warning.get(field, "")) for field in ("action", "variable", "dependency"))
        groups.setdefault(about, []).append(each)
    for same in groups.values():
        newest = same[0].warning
        action = newest["action"]
        often = counted(sum(each.warning["count"] for each in same), "time")
        if newest.get("ago_s") is not None:
            often += f", last {_duration(newest['ago_s'])} ago"
        often += _projects(same)
        who = _who([each.name for each in same], replica_count)
        advice = f"; see {command(_COMMANDS[action])}" if action in _COMMANDS else ""
        yield f"{who}{action}, {often}: {newest['message']}{advice}"


def _projects(warned: Iterable[_WarnedReplica]) -> str:
    """Return the projects of warnings in parentheses; empty without any."""
    ids = [each.warning.get("project_id") for each in warned]
    names = list(dict.fromkeys(str(project_id) for project_id in ids if project_id))
    if not names:
        return ""
    noun = "project" if len(names) == 1 else "projects"
    more = f" and {counted(len(names) - _NAMES_SHOWN, 'other')}" if len(names) > _NAMES_SHOWN else ""
    return f" ({noun} {', '.join(names[:_NAMES_SHOWN])}{more})"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 2 * _RECENT_S else f"{seconds / 60:.0f} min"
