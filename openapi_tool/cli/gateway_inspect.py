"""`openapi-tool inspect` of a call that a gateway ran: the row that its state has of the call."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from openapi_tool.cli.gateway_state import with_state
from openapi_tool.cli.output import fail, print_json, print_line, print_status
from openapi_tool.tools.wording import short


def inspect_in_gateway(path: Path, tool_call_id: str, project: str, remedy: str, *, as_json: bool) -> None:
    """Print what a gateway has stored of one call; `remedy` ends the message that there is none."""
    row = _row(path, tool_call_id, project, remedy)
    attempts = orjson.loads(row.pop("details"))["attempts"]
    began = datetime.fromtimestamp(row.pop("at"), UTC)
    row["at"] = began.isoformat(timespec="milliseconds")
    if as_json:
        print_json({**row, "attempts": attempts, "no_data": "commands, cards and doorbells: a gateway has none"})
        return
    print_line(f"{row['at']}  {row['tool']} called by agent {row['agent']} of project {row['project']}")
    for attempt in attempts:
        status = attempt.get("http_status") or attempt.get("error_code") or "not answered"
        print_line(f"  +{attempt['at_ms']} ms  upstream request: {status} after {attempt.get('ms', '?')} ms")
    remark = _remark_on(row)
    shown_remark = f" ({remark})" if remark else ""
    print_line(f"  +{row['latency_ms']} ms  {row['status']}{shown_remark}, {row['tokens']:,} tokens")
    print_status("no data for arguments, texts, commands, cards and doorbells: a gateway stores none of a call")


def _row(path: Path, tool_call_id: str, project: str, remedy: str) -> dict[str, Any]:
    """Return the row of the call; exit with 2 if there is none."""
    query = "SELECT * FROM calls WHERE project = ? AND tool_call_id = ?"

    def select(connection: sqlite3.Connection) -> dict[str, Any] | None:
        connection.row_factory = sqlite3.Row
        row = connection.execute(query, (project, tool_call_id)).fetchone()
        return dict(row) if row else None

    row = with_state(path, lambda state: state.run(select), lambda rows: rows.of_project(project, tool_call_id))
    if row is None:
        missing = f"project {short(project)!r} has no call {short(tool_call_id)!r} in {path}"
        fail(f"{missing}, or it is older than 90 days{remedy}")
    return row


def _remark_on(row: Mapping[str, Any]) -> str:
    """Return what the status of a call does not say about its end; may be empty."""
    if row["error"]:
        return str(row["error"]) if row["error"] != row["status"] else ""
    if row["truncated"]:
        return "truncated"
    return "from the cache" if row["cached"] else ""
