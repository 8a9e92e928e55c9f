"""What is wrong with the replicas now, and what was wrong in the last ten minutes, from their statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openapi_tool.tools.wording import counted

_SLOW_DATABASE_MS = 1_000  # p95 of loads or commits from which on the database counts as slow
_CLOCK_OFFSET_S = 2.0  # of the local clock, from which on a problem is shown
_RECENT_S = 60.0  # for which a warning counts as current
_LONG_S = 20.0  # most calls end earlier
_NAMES_SHOWN = 3  # of replicas, in one line

Replica = Mapping[str, Any]
Warned = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FoundProblems:
    """Lines, the most recent first: what is wrong now, and what is over or has not happened for a minute."""

    now: list[str]
    earlier: list[str]


@dataclass(frozen=True, slots=True)
class _Report:
    """What one replica reports. Reports with the same `about` are one problem, `text` of their combined amounts."""

    about: tuple[str, ...]
    replica: str
    text: Callable[[float], str]
    amount: float = 0.0
    combine: Callable[[Iterable[float]], float] = max


def found_problems(replicas: Sequence[Replica], expect: int = 0) -> FoundProblems:
    """Return the problems of all replicas, a lack of `expect` included; what several of them report is one problem."""
    states = [report for replica in replicas for report in _states(replica)]
    warned = [
        (str(replica.get("instance")), warning, _lasts(replica, warning))
        for replica in replicas
        for warning in replica.get("warnings") or ()
    ]
    warned.sort(key=lambda entry: _ago_s(entry[1]))
    present = [(name, warning) for name, warning, lasts in warned if lasts is None and _is_present(warning)]
    earlier = [(name, warning) for name, warning, lasts in warned if lasts is None and not _is_present(warning)]
    recovered = [(name, warning) for name, warning, lasts in warned if lasts is False]
    of = len(replicas)
    return FoundProblems(
        [*_missing(of, expect), *_lines(states, of), *_warning_lines(present, of)],
        [*(f"recovered: {line}" for line in _warning_lines(recovered, of)), *_warning_lines(earlier, of)],
    )


def but_noticed(replicas: Sequence[Replica]) -> str:
    """Return which calls failed or take long, though no problem is known, as the end of a sentence; empty if none."""
    calls = sum(replica.get("calls") or 0 for replica in replicas)
    failed = sum(replica.get("failed") or 0 for replica in replicas)
    noticed = []
    if failed:
        noticed.append(f"{failed} of {counted(calls, 'call')} of the last minute failed")
    held_s = max((replica.get("oldest_held_s") or 0.0 for replica in replicas), default=0.0)
    if held_s >= _LONG_S:
        noticed.append(f"a command is held for {_span(held_s)}")
    waits = [wait for replica in replicas for wait in replica.get("upstream_waits") or ()]
    if waits and (longest := max(waits, key=_oldest_s)) and _oldest_s(longest) >= _LONG_S:
        noticed.append(f"a request to {longest.get('host')} waits for {_span(_oldest_s(longest))}")
    return f", but {' and '.join(noticed)}" if noticed else ""


def _oldest_s(wait: Mapping[str, Any]) -> float:
    return float(wait.get("oldest_s") or 0.0)


def _missing(replicas: int, expect: int) -> Iterator[str]:
    if replicas < expect:
        yield f"{replicas} of {expect} replicas answer: the others are gone, hang or cannot reach NATS"


def _lines(reports: Sequence[_Report], replicas: int) -> Iterator[str]:
    for about in dict.fromkeys(report.about for report in reports):
        same = [report for report in reports if report.about == about]
        amount = same[0].combine(report.amount for report in same)
        yield _of_replicas([report.replica for report in same], replicas) + same[0].text(amount)


def _of_replicas(names: Sequence[str], replicas: int) -> str:
    """Return who reports something, as the beginning of a line: empty if it concerns no replica in particular."""
    known = sorted({name for name in names if name})
    if len(known) > _NAMES_SHOWN:
        if len(known) == replicas:
            return f"all {replicas} replicas: "
        return f"{', '.join(known[:_NAMES_SHOWN])} and {counted(len(known) - _NAMES_SHOWN, 'other')}: "
    return f"{', '.join(known)}: " if known else ""


def _states(replica: Replica) -> Iterator[_Report]:
    """Yield what the replica's present state shows."""
    name = str(replica.get("instance"))
    health = replica.get("health") or {}
    yield from _suspicious_replies(name, replica)
    for dependency, state in (health.get("dependencies") or {}).items():
        if not state.get("ok"):
            reason = f": {state['reason']}" if state.get("reason") else ""
            yield _state(name, f"{dependency} is unavailable{reason}")
    yield from _key_states(name, replica)
    yield from _host_states(name, replica)
    yield from _limit_states(name, replica)
    if why := health.get("budgets_by_last_known_state"):
        yield _state(name, f"budgets cannot be shared, so the last known use counts: {why}")
    yield from _load_states(name, replica)
    if abs(health.get("clock_offset_s") or 0) >= _CLOCK_OFFSET_S:
        off = f"the local clock is {health['clock_offset_s']:+.1f} s off that of NATS"
        yield _state(name, f"{off}: synchronize it, see clock.offset in the log")
    if replica.get("log_lines_dropped"):
        lines = counted(replica["log_lines_dropped"], "log line")
        yield _state(name, f"since its start {lines} were dropped: nobody reads them, or its disk is full")


def _state(replica: str, text: str) -> _Report:
    return _Report((text,), replica, lambda _: text)


def _suspicious_replies(name: str, replica: Replica) -> Iterator[_Report]:
    answers, unreadable = replica.get("answers", 1), replica.get("unreadable")
    if answers > 1:
        yield _state(name, f"{answers} answers have this name: two replicas share it, or one is forged")
    if unreadable:
        yield _state(name, f"its answer is not readable (another version, or forged): {unreadable}")


def _key_states(name: str, replica: Replica) -> Iterator[_Report]:
    for key in replica.get("upstream_keys") or ():
        about = f"{key.get('endpoint')} requests with the key of {key.get('variable')} ({key.get('state')})"
        yield _state(name, f"the upstream refuses {about}: see openapi-tool limits")


def _host_states(name: str, replica: Replica) -> Iterator[_Report]:
    for wait in replica.get("upstream_waits") or ():
        if (wait.get("silent_s") or 0.0) >= _LONG_S:
            host = str(wait.get("host"))
            yield _Report(("silent", host), name, _is_silent(host), wait["silent_s"])


def _is_silent(host: str) -> Callable[[float], str]:
    return lambda seconds: (
        f"requests to {host} have had no answer for {_span(seconds)}: openapi-tool check --upstream tries it from here"
    )


def _limit_states(name: str, replica: Replica) -> Iterator[_Report]:
    for limit in replica.get("upstream_limits") or ():
        endpoint, variable = str(limit.get("endpoint")), str(limit.get("variable"))
        about = f"the {endpoint} limit of {variable}"
        if limit.get("offline"):
            yield _state(name, f"{about} cannot be shared: see limits.not_shared in the log")
        if limit.get("paused_s"):
            requests = f"the upstream answered 429: {endpoint} requests with {variable} pause"
            yield _Report((requests,), name, _pause_of(requests), limit["paused_s"])
        if limit.get("waiting"):
            yield _Report(("waiting", about), name, _waits_for(about), limit["waiting"], sum)


def _pause_of(requests: str) -> Callable[[float], str]:
    return lambda seconds: f"{requests} for {seconds:g} s"


def _waits_for(limit: str) -> Callable[[float], str]:
    def text(calls: float) -> str:
        wait = "waits" if calls == 1 else "wait"
        return f"{counted(round(calls), 'call')} {wait} for {limit}: see openapi-tool limits"

    return text


def _load_states(name: str, replica: Replica) -> Iterator[_Report]:
    if replica.get("waiting"):
        yield _state(name, f"{replica['waiting']:g} commands wait for one of {replica.get('slots'):g} slots")
    if replica.get("waiting_for_memory"):
        responses = f"{replica['waiting_for_memory']:g} responses wait for memory"
        yield _state(name, f"{responses}: raise egress.body_budget_bytes")
    if _is_full(replica):
        about = f"the durable has {replica['unacknowledged']} unsettled commands"
        yield _state("", f"{about}, its maximum: see durable.full in the log")
    phases = replica.get("phases_p95_ms") or {}
    for phase in ("load", "commit"):
        if (phases.get(phase) or 0) >= _SLOW_DATABASE_MS:
            about = f"the database is slow: {phase} takes"
            yield _Report((about,), name, _percentile(about), phases[phase])


def _percentile(about: str) -> Callable[[float], str]:
    return lambda ms: f"{about} {ms:g} ms (95th percentile)"


def _is_full(replica: Replica) -> bool:
    return 0 < int(replica.get("max_unacknowledged", 0)) <= int(replica.get("unacknowledged", 0))


def _is_down(dependency: str) -> Callable[[Replica, Warned], bool]:
    def is_down(replica: Replica, _: Warned) -> bool:
        dependencies = (replica.get("health") or {}).get("dependencies") or {}
        return dependency in dependencies and not dependencies[dependency].get("ok")

    return is_down


def _has_limit(field: str) -> Callable[[Replica, Warned], bool]:
    def has_limit(replica: Replica, warning: Warned) -> bool:
        limits = replica.get("upstream_limits") or ()
        return any(limit.get(field) and limit.get("variable") == warning.get("variable") for limit in limits)

    return has_limit


_LASTING: Mapping[str, Callable[[Replica, Warned], bool]] = {
    "budgets.not_shared": lambda replica, _: bool((replica.get("health") or {}).get("budgets_by_last_known_state")),
    "clock.offset": lambda replica, _: abs((replica.get("health") or {}).get("clock_offset_s") or 0) >= _CLOCK_OFFSET_S,
    "consumer.lost": _is_down("consumer"),
    "durable.full": lambda replica, _: _is_full(replica),
    "health.changed": lambda replica, warning: _is_down(str(warning.get("dependency")))(replica, warning),
    "key.blocked": lambda replica, warning: any(
        key.get("variable") == warning.get("variable") for key in replica.get("upstream_keys") or ()
    ),
    "limits.not_shared": _has_limit("offline"),
    "limits.paused": _has_limit("paused_s"),
    "nats.disconnected": _is_down("nats"),
    "nats.silent": _is_down("nats"),
    "tool.enabled": lambda _, __: False,
}
"""Warnings about a state that `_states` shows, too, while it lasts; and whether it lasts."""

_BY_OUTAGE = ("nats.error", "switches.not_read", "key.not_shared", "heartbeat.failed")
"""Warnings that an outage of NATS may cause, but also something else."""


_ADVICE = {
    "call.dead_lettered": "; see openapi-tool deadletters list",
    "tool.disabled": "; see openapi-tool tools disabled",
    "tool.enabled": "; see openapi-tool tools disabled",
}


def _lasts(replica: Replica, warning: Warned) -> bool | None:
    """Return whether `_states` shows what a warning is about; False if that is over, None if it is not known."""
    if warning.get("lasts") is not None:
        return None if warning["lasts"] else False
    if warning["action"] in _BY_OUTAGE:
        return False if _was_before_recovery(replica, warning) else None
    lasts = _LASTING.get(warning["action"])
    return None if lasts is None else lasts(replica, warning)


def _was_before_recovery(replica: Replica, warning: Warned) -> bool:
    """Return whether NATS became available after a warning, and is so since."""
    dependencies = (replica.get("health") or {}).get("dependencies") or {}
    nats = dependencies.get("nats") or {}
    return bool(nats.get("ok")) and (nats.get("for_s") or 0) < _ago_s(warning)


def _is_present(warning: Warned) -> bool:
    """Return whether a warning counts as present, if nothing else says so."""
    return bool(warning.get("lasts")) or _ago_s(warning) < _RECENT_S


def _ago_s(warning: Warned) -> float:
    return float(warning.get("ago_s") or 0.0)


def _warning_lines(warned: Sequence[tuple[str, Warned]], replicas: int) -> Iterator[str]:
    """Yield a line for the warnings of each action, key and dependency, with the newest message."""
    groups: dict[tuple[str, ...], list[tuple[str, Warned]]] = {}
    for name, warning in warned:
        about = tuple(str(warning.get(field, "")) for field in ("action", "variable", "dependency"))
        groups.setdefault(about, []).append((name, warning))
    for same in groups.values():
        _, newest = same[0]
        often = counted(sum(warning["count"] for _, warning in same), "time")
        if newest.get("ago_s") is not None:
            often += f", last {_span(newest['ago_s'])} ago"
        names = _of_replicas([name for name, _ in same], replicas)
        often += _projects(same)
        yield f"{names}{newest['action']}, {often}: {newest['message']}{_ADVICE.get(newest['action'], '')}"


def _projects(warned: Iterable[tuple[str, Warned]]) -> str:
    names = list(dict.fromkeys(str(warning["project_id"]) for _, warning in warned if warning.get("project_id")))
    more = f" and {counted(len(names) - _NAMES_SHOWN, 'other')}" if len(names) > _NAMES_SHOWN else ""
    noun = "project" if len(names) == 1 else "projects"
    return f" ({noun} {', '.join(names[:_NAMES_SHOWN])}{more})" if names else ""


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 2 * _RECENT_S else f"{seconds / 60:.0f} min"
