"""`openapi-tool limits` and `budgets`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from openapi_tool.cli.output import or_dash, print_status
from openapi_tool.cli.statistics import show_statistics_of
from openapi_tool.cli.tables import Rows

_UPDATE_S = 2.0
_LIMITS = ("pool", "not_set", "requests_per_minute", "tokens_per_minute", "concurrent", "found_by_429", "dry_run")
_CONFIGURED = ("variable", "endpoint", "requests_per_minute", "tokens_per_minute", "concurrent", "dry_run")
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
_NO_BUDGET = """\
no account was used since the processes started: no budget is set, or no call came under one
Set one in the settings, and restart all processes (docs/tools.md#budgets):
[budgets]
project_day_requests = 2_000"""


def limits(*, watch: bool, as_json: bool, state: Path | None = None) -> None:
    """Print limits by key and endpoint, and refused keys."""
    show_statistics_of(
        state,
        shown,
        lambda replicas: {"limits": combined(replicas), "configured": configured(replicas), "keys": blocked(replicas)},
        as_json=as_json,
        every_s=_UPDATE_S if watch else None,
    )


def combined(replicas: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return an entry per key and endpoint: the highest of shared figures, the sum of a replica's own."""
    parts: dict[tuple[str, str], list[tuple[str, Mapping[str, Any]]]] = {}
    for replica in replicas:
        for limit in replica.get("upstream_limits") or ():
            key = str(limit.get("variable")), str(limit.get("endpoint"))
            parts.setdefault(key, []).append((str(replica.get("instance")), limit))
    return [_entry(key, parts[key]) for key in sorted(parts)]


def configured(replicas: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the limits of the settings that the replicas run with, each once; `variable` None is each other key."""
    found: list[dict[str, Any]] = []
    for replica in replicas:
        for limit in replica.get("configured_limits") or ():
            entry = {name: limit.get(name) for name in _CONFIGURED}
            if entry not in found:
                found.append(entry)
    return found


def _entry(key: tuple[str, str], parts: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    waiting: Counter[str] = Counter()
    for _, part in parts:
        waiting.update(part.get("waiting_by_project") or {})
    first = parts[0][1]
    return {
        "variable": key[0],
        "endpoint": key[1],
        **{name: first.get(name) for name in _LIMITS},
        **{name: max(part.get(name) or 0 for _, part in parts) for name in ("used", "used_tokens", "paused_s")},
        "estimated_tokens": max(part.get("estimated_tokens") or 0 for _, part in parts) or None,
        "running": sum(part.get("running") or 0 for _, part in parts),
        "refused": sum(part.get("refused") or 0 for _, part in parts),
        "would_have_waited": sum(part.get("would_have_waited") or 0 for _, part in parts),
        "replicas": {
            name: {"sent_per_minute": part.get("sent"), "offline": part.get("offline")} for name, part in parts
        },
        "waiting": sum(part.get("waiting") or 0 for _, part in parts),
        "waiting_by_project": dict(waiting.most_common()),
    }


def blocked(replicas: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the keys that an endpoint refuses, each as reported by the replica that will retry it last."""
    entries = [entry for replica in replicas for entry in replica.get("upstream_keys") or ()]
    entries.sort(key=lambda entry: entry.get("tried_again_s") or 0)
    keys = {
        (str(entry.get("variable")), str(entry.get("endpoint"))): {name: entry.get(name) for name in _KEY_FIELDS}
        for entry in entries
    }
    return [keys[use] for use in sorted(keys)]


def shown(replicas: Sequence[Mapping[str, Any]]) -> Group:
    """Return tables of refused keys, limits, replicas, and waiting calls by project."""
    keys, entries = blocked(replicas), combined(replicas)
    dry = [_DRY_RUN_HEAD] if any(entry["dry_run"] for entry in entries) else []
    table = Rows(*_LIMIT_HEADS, *dry, title="limits")
    shares = Rows("key", "endpoint", "replica", "requests/min", "not shared")
    waiting = Rows("key", "endpoint", "project", "waiting")
    for entry in entries:
        names = _key(entry), entry["endpoint"]
        limit = or_dash(entry["requests_per_minute"]) + (" (found by 429)" if entry["found_by_429"] else "")
        used_tokens = None if entry["tokens_per_minute"] is None else entry["used_tokens"]
        tokens = map(or_dash, (entry["tokens_per_minute"], used_tokens, entry["estimated_tokens"]))
        calls = (or_dash(entry["concurrent"]), entry["running"], entry["paused_s"], entry["waiting"])
        would_have_waited = entry["would_have_waited"] if entry["dry_run"] else "-"
        table.add(*names, limit, entry["used"], *tokens, *calls, *([would_have_waited] if dry else []))
        for name, part in entry["replicas"].items():
            offline = "yes" if part["offline"] else ""
            shares.add(*names, name, part["sent_per_minute"], offline)
        for project, number in entry["waiting_by_project"].items():
            waiting.add(*names, project, number)
    refused = Rows("key", "endpoint", "state", "status", "for s", "tried again in s", title="refused keys")
    for entry in keys:
        refused.add(*(entry[name] for name in _KEY_FIELDS))
    if not entries:
        return Group(*([refused] if keys else []), *_without_use(configured(replicas)))
    return Group(*([refused] if keys else []), table, shares, *([waiting] if len(waiting) else []))


def _without_use(limits_set: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    """Yield what is shown while no key was used."""
    if not limits_set:
        yield Text(_NO_LIMIT)
        return
    yield Text("no key was used since the processes started; these limits are set")
    table = Rows("key", "endpoint", "requests/min", "tokens/min", "at once", "dry run", title="configured limits")
    for limit in limits_set:
        rates = (or_dash(limit[name]) for name in ("requests_per_minute", "tokens_per_minute", "concurrent"))
        table.add(limit["variable"] or "each", limit["endpoint"], *rates, "yes" if limit["dry_run"] else "")
    yield table


def _key(entry: Mapping[str, Any]) -> str:
    pool = f" (pool {entry['pool']})" if entry["pool"] else ""
    not_set = " (not set)" if entry["not_set"] else ""
    return f"{entry['variable']}{pool}{not_set}"


_ACCOUNT = ("project", "scope", "who", "tool", "period")
_BUDGET_HEADS = ("project", "scope", "agent or session", "tool", "period", "requests", "tokens", "used", "renews")


def budgets(*, project: str | None, as_json: bool, state: Path | None = None) -> None:
    """Print the accounts that the replicas have used since their start."""
    show_statistics_of(
        state,
        lambda replicas: budgets_shown(replicas, project),
        lambda replicas: {"budgets": combined_budgets(replicas, project)},
        as_json=as_json,
    )


def combined_budgets(replicas: Sequence[Mapping[str, Any]], project: str | None = None) -> list[dict[str, Any]]:
    """Return each account, of one project or all, with the highest use that a replica reports."""
    accounts: dict[tuple[str, ...], dict[str, Any]] = {}
    for replica in replicas:
        for account in replica.get("budgets") or ():
            key = tuple(str(account.get(name)) for name in _ACCOUNT)
            known = accounts.get(key)
            if project in (None, account.get("project")) and (known is None or _used(known) < _used(account)):
                accounts[key] = dict(account)
    return [accounts[key] for key in sorted(accounts)]


def _used(account: Mapping[str, Any]) -> float:
    return float(account.get("share") or 0)


def budgets_shown(replicas: Sequence[Mapping[str, Any]], project: str | None = None) -> Rows:
    """Return a table of the accounts; if there is none, print how to set a budget, and exit."""
    accounts = combined_budgets(replicas, project)
    if not accounts:
        print_status(_NO_BUDGET)
        raise typer.Exit
    table = Rows(*_BUDGET_HEADS, title="budgets")
    for account in accounts:
        used = f"{_used(account):.0%}" + (" (last known)" if account.get("offline") else "")
        amounts = (_left(account, "requests"), _left(account, "tokens"), used, account.get("renews_at") or "-")
        table.add(*(account.get(name) for name in _ACCOUNT), *amounts)
    return table


def _left(account: Mapping[str, Any], kind: str) -> str:
    if account.get(kind) is None:
        return f"{account.get(f'{kind}_used')} used"
    return f"{account.get(f'{kind}_left')} of {account.get(kind)} left"
