"""`openapi-tool budgets`: what projects, agents and sessions have used of their budgets.

The record of what one of them has used in a day or month is an *account*. Each replica reports the accounts that it has
used since its start.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import typer

from openapi_tool.cli.given_names import check_given
from openapi_tool.cli.output import print_status
from openapi_tool.cli.statistics import Statistics, show_statistics
from openapi_tool.cli.tables import Rows
from openapi_tool.tools.wording import first_of, short

_ACCOUNT_FIELDS = ("project", "scope", "who", "tool", "period")
_HEADS = ("project", "scope", "agent or session", "tool", "period", "requests", "tokens", "used", "renews")
_MAX_PROJECTS = 10  # that are named if the wanted one has no account
_NO_BUDGET = """\
no account was used since the processes started: no budget is set, or no call came under one
Set one in the settings, and restart all processes (docs/tools.md#budgets):
[budgets]
project_day_requests = 2_000"""


def budgets(*, project: str | None, as_json: bool, state: Path | None = None) -> None:
    """Print the accounts that the replicas have used since their start."""
    check_given("--project", project, "project id")
    show_statistics(
        state,
        draw=lambda replicas: shown(replicas, project),
        as_object=lambda replicas: {"budgets": used_accounts(replicas, project)},
        as_json=as_json,
    )


def used_accounts(replicas: Statistics, project: str | None = None) -> list[dict[str, Any]]:
    """Return each account, of one project or all, with the highest use that a replica reports."""
    accounts: dict[tuple[str, ...], dict[str, Any]] = {}
    for replica in replicas:
        for account in replica.get("budgets") or ():
            if project is not None and account.get("project") != project:
                continue
            key = tuple(str(account.get(name)) for name in _ACCOUNT_FIELDS)
            known = accounts.get(key)
            if known is None or _used_share(known) < _used_share(account):
                accounts[key] = dict(account)
    return [accounts[key] for key in sorted(accounts)]


def _used_share(account: Mapping[str, Any]) -> float:
    """Return how much of the budget is used: 0.5 is the half."""
    return float(account.get("share") or 0)


def shown(replicas: Statistics, project: str | None = None) -> Rows:
    """Return a table of the accounts; if there is none, print of which projects there are some, and exit.

    If there are none at all, print how to set a budget.
    """
    accounts = used_accounts(replicas, project)
    if not accounts:
        projects = {str(account.get("project")) for account in used_accounts(replicas)}
        print_status(_no_account_of(project, projects) if project is not None and projects else _NO_BUDGET)
        raise typer.Exit
    table = Rows(*_HEADS, title="budgets")
    for account in accounts:
        used = f"{_used_share(account):.0%}"
        if account.get("offline"):  # the replica cannot reach the shared record
            used += " (last known)"
        table.add(
            *(account.get(name) for name in _ACCOUNT_FIELDS),
            _left(account, "requests"),
            _left(account, "tokens"),
            used,
            account.get("renews_at") or "-",
        )
    return table


def _no_account_of(project: str, others: Collection[str]) -> str:
    return (
        f"no account of project {short(project)!r} was used since the processes started; there are accounts of the "
        f"projects: {first_of(sorted(others), _MAX_PROJECTS)}"
    )


def _left(account: Mapping[str, Any], kind: str) -> str:
    if account.get(kind) is None:
        return f"{account.get(f'{kind}_used')} used"
    return f"{account.get(f'{kind}_left')} of {account.get(kind)} left"
