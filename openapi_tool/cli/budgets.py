"""`openapi-tool budgets`: accounts of sessions, agents and projects, as the replicas know them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from openapi_tool.bootstrap import Bootstrap
from openapi_tool.bus.connection import BusClient
from openapi_tool.bus.stats import gather_stats
from openapi_tool.cli.common import fail, print_json, print_status
from openapi_tool.cli.nats_connection import with_nats
from openapi_tool.cli.tables import Rows, output

_NO_REPLICA = 1
_REPLIES_S = 1.0
_ACCOUNT = ("project", "scope", "who", "tool", "period")
_HEADS = ("project", "scope", "agent or session", "tool", "period", "requests", "tokens", "used", "renews")


def budgets(
    *,
    project: Annotated[str | None, typer.Option(help="Project of the accounts; by default all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the accounts that the replicas have used since their start: used, left, when they renew.

    Each replica reports at most 100 accounts: those of projects, then the most used. Exit codes: 0, 1 no replica
    answers, 2 invalid settings, or NATS cannot be reached.
    """

    async def work(bootstrap: Bootstrap, client: BusClient) -> None:
        del bootstrap
        replicas = await gather_stats(client, _REPLIES_S)
        if not replicas:
            fail("no replica answers on openapi_tool.stats: none runs, or its user lacks permission", _NO_REPLICA)
        accounts = combined(replicas, project)
        if as_json:
            print_json({"budgets": accounts})
        elif accounts:
            output().print(_table(accounts))
        else:
            print_status("no account was used since the replicas started")

    # Budgets are part of the statistics that `top` reads.
    with_nats(work, permissions_command="openapi-tool nats permissions --for top")


def combined(replicas: Sequence[Mapping[str, Any]], project: str | None = None) -> list[dict[str, Any]]:
    """Return each account once, with the highest use that a replica reports; with `project` only those of it."""
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


def _table(accounts: Sequence[Mapping[str, Any]]) -> Rows:
    table = Rows(*_HEADS, title="budgets")
    for account in accounts:
        used = f"{_used(account):.0%}" + (" (last known)" if account.get("offline") else "")
        amounts = (_left(account, "requests"), _left(account, "tokens"), used, account.get("renews_at") or "-")
        table.add(*(account.get(name) for name in _ACCOUNT), *amounts)
    return table


def _left(account: Mapping[str, Any], kind: str) -> str:
    """Return `LEFT of LIMIT left`, or `N used` without a limit."""
    if account.get(kind) is None:
        return f"{account.get(f'{kind}_used')} used"
    return f"{account.get(f'{kind}_left')} of {account.get(kind)} left"
