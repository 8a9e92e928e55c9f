"""`openapi-tool limits`: the rate limits of each key at each endpoint, who uses them, and keys that are refused.

An *endpoint* is Jina's search or its reader. Each replica reports what it sends. What replicas share, such as the
requests of the last minute, is in a common record, so each of them reports nearly the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from openapi_tool.cli.output import or_dash
from openapi_tool.cli.statistics import Statistics, show_statistics
from openapi_tool.cli.tables import Rows

_UPDATE_S = 2.0

# Fields of the JSON output that are copied from the reports of replicas.
_LIMIT_FIELDS = ("pool", "not_set", "requests_per_minute", "tokens_per_minute", "concurrent", "found_by_429", "dry_run")
_CONFIGURED_FIELDS = ("variable", "endpoint", "requests_per_minute", "tokens_per_minute", "concurrent", "dry_run")
_KEY_FIELDS = ("variable", "endpoint", "state", "status", "for_s", "tried_again_s")

_LIMIT_HEADS = (
    "key",
    "endpoint",
    "requests/min",
    "used",
    "tokens/min",
    "tokens used",
    "tokens each",
    "at once",
    "running",
    "paused s",
    "waiting",
)
_DRY_RUN_HEAD = "dry run: would have waited"
_NO_LIMIT = """\
no limit is set, and the upstream has answered no request with 429: requests are sent at once
Set those of your plan in the settings, and restart or reload all processes (docs/tools.md#rate-limits):
[limits]
search_requests_per_minute = 100"""


def limits(*, watch: bool, as_json: bool, state: Path | None = None) -> None:
    """Print limits by key and endpoint, and refused keys."""
    show_statistics(
        state,
        draw=shown,
        as_object=lambda replicas: {
            "limits": limits_in_use(replicas),
            "configured": configured_limits(replicas),
            "keys": refused_keys(replicas),
        },
        as_json=as_json,
        every_s=_UPDATE_S if watch else None,
    )


def limits_in_use(replicas: Statistics) -> list[dict[str, Any]]:
    """Return an entry per key and endpoint: the highest of shared figures, the sum of a replica's own."""
    reports: dict[tuple[str, str], list[_LimitReport]] = defaultdict(list)
    for replica in replicas:
        for limit in replica.get("upstream_limits") or ():
            key_and_endpoint = str(limit.get("variable")), str(limit.get("endpoint"))
            reports[key_and_endpoint].append(_LimitReport(str(replica.get("instance")), limit))
    return [_combined(*key_and_endpoint, reports[key_and_endpoint]) for key_and_endpoint in sorted(reports)]


class _LimitReport(NamedTuple):
    replica: str
    limit: Mapping[str, Any]


def _combined(variable: str, endpoint: str, reports: Sequence[_LimitReport]) -> dict[str, Any]:
    limits = [report.limit for report in reports]

    def highest(name: str) -> Any:
        return max(limit.get(name) or 0 for limit in limits)

    def total(name: str) -> Any:
        return sum(limit.get(name) or 0 for limit in limits)

    waiting_by_project: Counter[str] = Counter()
    for limit in limits:
        waiting_by_project.update(limit.get("waiting_by_project") or {})
    return {
        "variable": variable,
        "endpoint": endpoint,
        **{name: limits[0].get(name) for name in _LIMIT_FIELDS},
        "used": highest("used"),
        "used_tokens": highest("used_tokens"),
        "paused_s": highest("paused_s"),
        "estimated_tokens": highest("estimated_tokens") or None,
        "running": total("running"),
        "refused": total("refused"),
        "would_have_waited": total("would_have_waited"),
        "replicas": {
            report.replica: {"sent_per_minute": report.limit.get("sent"), "offline": report.limit.get("offline")}
            for report in reports
        },
        "waiting": total("waiting"),
        "waiting_by_project": dict(waiting_by_project.most_common()),
    }


def configured_limits(replicas: Statistics) -> list[dict[str, Any]]:
    """Return the limits of the settings that the replicas run with, each once; `variable` None is each other key."""
    found: list[dict[str, Any]] = []
    for replica in replicas:
        for limit in replica.get("configured_limits") or ():
            entry = {name: limit.get(name) for name in _CONFIGURED_FIELDS}
            if entry not in found:
                found.append(entry)
    return found


def refused_keys(replicas: Statistics) -> list[dict[str, Any]]:
    """Return the keys that an endpoint refuses, each as reported by the replica that will retry it last."""
    reports = [report for replica in replicas for report in replica.get("upstream_keys") or ()]
    reports.sort(key=lambda report: report.get("tried_again_s") or 0)
    last_reports = {}
    for report in reports:
        key_and_endpoint = str(report.get("variable")), str(report.get("endpoint"))
        last_reports[key_and_endpoint] = {name: report.get(name) for name in _KEY_FIELDS}
    return [last_reports[key_and_endpoint] for key_and_endpoint in sorted(last_reports)]


def shown(replicas: Statistics) -> Group:
    """Return tables of refused keys, limits, replicas, and waiting calls by project."""
    tables: list[RenderableType] = []
    keys = refused_keys(replicas)
    if keys:
        tables.append(_refused_table(keys))
    entries = limits_in_use(replicas)
    if not entries:
        return Group(*tables, _without_use(configured_limits(replicas)))
    tables += [_limit_table(entries), _share_table(entries)]
    waiting = _waiting_table(entries)
    if len(waiting):
        tables.append(waiting)
    return Group(*tables)


def _refused_table(keys: Iterable[Mapping[str, Any]]) -> Rows:
    table = Rows("key", "endpoint", "state", "status", "for s", "tried again in s", title="refused keys")
    for entry in keys:
        table.add(*(entry[name] for name in _KEY_FIELDS))
    return table


def _limit_table(entries: Sequence[Mapping[str, Any]]) -> Rows:
    any_dry_run = any(entry["dry_run"] for entry in entries)
    heads = (*_LIMIT_HEADS, _DRY_RUN_HEAD) if any_dry_run else _LIMIT_HEADS
    table = Rows(*heads, title="limits")
    for entry in entries:
        limit = or_dash(entry["requests_per_minute"]) + (" (found by 429)" if entry["found_by_429"] else "")
        used_tokens = None if entry["tokens_per_minute"] is None else entry["used_tokens"]
        cells = [
            _key(entry),
            entry["endpoint"],
            limit,
            entry["used"],
            or_dash(entry["tokens_per_minute"]),
            or_dash(used_tokens),
            or_dash(entry["estimated_tokens"]),
            or_dash(entry["concurrent"]),
            entry["running"],
            entry["paused_s"],
            entry["waiting"],
        ]
        if any_dry_run:
            cells.append(entry["would_have_waited"] if entry["dry_run"] else "-")
        table.add(*cells)
    return table


def _share_table(entries: Iterable[Mapping[str, Any]]) -> Rows:
    table = Rows("key", "endpoint", "replica", "requests/min", "not shared")
    for entry in entries:
        for name, share in entry["replicas"].items():
            offline = "yes" if share["offline"] else ""
            table.add(_key(entry), entry["endpoint"], name, share["sent_per_minute"], offline)
    return table


def _waiting_table(entries: Iterable[Mapping[str, Any]]) -> Rows:
    table = Rows("key", "endpoint", "project", "waiting")
    for entry in entries:
        for project, number in entry["waiting_by_project"].items():
            table.add(_key(entry), entry["endpoint"], project, number)
    return table


def _key(entry: Mapping[str, Any]) -> str:
    pool = f" (pool {entry['pool']})" if entry["pool"] else ""
    not_set = " (not set)" if entry["not_set"] else ""
    return f"{entry['variable']}{pool}{not_set}"


def _without_use(limits_set: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return what is shown while no key with a limit was used."""
    if not limits_set:
        return Text(_NO_LIMIT)
    table = Rows("key", "endpoint", "requests/min", "tokens/min", "at once", "dry run", title="configured limits")
    for limit in limits_set:
        table.add(
            limit["variable"] or "each",
            limit["endpoint"],
            or_dash(limit["requests_per_minute"]),
            or_dash(limit["tokens_per_minute"]),
            or_dash(limit["concurrent"]),
            "yes" if limit["dry_run"] else "",
        )
    return Group(Text("no key with a limit was used since the processes started; these limits are set"), table)
