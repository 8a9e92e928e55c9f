"""`openapi-tool inspect`: the timeline of one call, and why it has no result if it has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from openapi_tool.bootstrap import Bootstrap
from openapi_tool.cli.call_history import CallHistory, stored_history
from openapi_tool.cli.call_timeline import Event, timeline
from openapi_tool.cli.call_verdict import verdict_on
from openapi_tool.cli.gateway_inspect import inspect_in_gateway
from openapi_tool.cli.given_names import check_given
from openapi_tool.cli.nats_connection import with_nats
from openapi_tool.cli.output import fail, json_default, print_json, print_line
from openapi_tool.cli.selection import other_project, selected_project
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.tools.wording import short


def inspect(tool_call_id: str, *, project: str | None, as_json: bool, state: Path | None = None) -> None:
    """Print the timeline of one call, and why it has no result if it has none."""
    check_given("TOOL_CALL_ID", tool_call_id, "tool call id")
    selected = selected_project(state, project)
    remedy = other_project(project)
    if selected.state is None:
        _inspect_in_kernel(tool_call_id, selected.project, remedy, as_json=as_json)
    else:
        inspect_in_gateway(selected.state, tool_call_id, selected.project, remedy, as_json=as_json)


def _inspect_in_kernel(tool_call_id: str, project: str, remedy: str, *, as_json: bool) -> None:
    """Print the timeline of a call of a kernel; `remedy` ends the message that there is none."""

    async def read(bootstrap: Bootstrap, client: BusClient) -> CallHistory:
        return await stored_history(bootstrap, client, project, tool_call_id)

    history = with_nats(read, user=NatsUser.INSPECT, database=True)
    if history.is_empty:
        fail(
            f"project {short(project)!r} has no call {short(tool_call_id)!r}, or its command and rows are gone{remedy}"
        )
    events = timeline(history)
    verdict = verdict_on(history)
    if as_json:
        ids = {"tool_call_id": tool_call_id, "project_id": project}
        print_json({**ids, "verdict": verdict, **_as_json(history, events)})
    else:
        _print_timeline(tool_call_id, events, verdict)


def _as_json(history: CallHistory, events: Sequence[Event]) -> dict[str, Any]:
    shown = {"events": [asdict(event) for event in events], **asdict(history)}
    for card in shown["rows"]["cards"]:
        card["attempts"] = orjson.loads(card["attempts"] or "null")
    return orjson.loads(orjson.dumps(shown, default=json_default))  # type: ignore[no-any-return]


def _print_timeline(tool_call_id: str, events: Sequence[Event], verdict: str) -> None:
    print_line(f"call {tool_call_id}")
    for number, event in enumerate(events):
        sign = "├"
        if number == len(events) - 1:
            sign = "└"
        elif number == 0:
            sign = "┌"
        offset_s = (event.at - events[0].at).total_seconds()
        print_line(f"  {sign} {offset_s:+10.3f} s  {event.what:<15} {event.about}".rstrip())
    print_line(f"=> {verdict}")
