"""Floods of log lines that a project can cause, as a process writes them; another project's lines are all there."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nats.js.errors import NotFoundError
from typer.testing import CliRunner

from openapi_tool.cli import app
from openapi_tool.local.caller import STREAM, Caller
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.protocol.subjects import default_durable
from openapi_tool.telemetry.logs import MAX_LINES
from tests.conftest import AGENT, reader_tool, search_tool
from tests.requirements import requirement
from tests.support import dsn_of
from tests.waiting import WAIT_S

NOISY, QUIET = 60, 3
"""Calls of a project that floods, and of another one."""
_WHO = {"noisy": NOISY, "quiet": QUIET}

_LINE_BYTES = 1_000
_DURABLE = default_durable("v1r4", "jina")
_FOUND = {"query": "hello world", "count": 3}

Placing = Callable[["Scene", str, int], Any]


@dataclass(frozen=True, slots=True)
class Flood:
    """A way to cause lines.

    `lines` are the lines that each call causes, by action, beside the final one. The definition may differ from call to
    call. `repeats` commands are sent for one call, else one for each of many.
    """

    lines: Mapping[str, int]
    definition: Callable[[int], Mapping[str, Any]] = lambda _: search_tool()
    arguments: Callable[[int], Any] = lambda _: _FOUND
    placed: Mapping[str, Any] = field(default_factory=dict)
    data: bytes | None = None
    repeats: bool = False

    @property
    def final(self) -> bool:
        """Return whether each call gets a result."""
        return self.data is None


def _with_unusable_headers(number: int) -> dict[str, Any]:
    headers = {f"X-{number}-{header}-{'y' * 100}": "1" for header in range(30)}
    return search_tool(jina={"mode": "search", "headers": headers})


_UNKNOWN = {f"unknown_{number}_{'z' * 60}": 1 for number in range(40)}
FLOODS: Mapping[str, Flood] = {
    "definitions": Flood({"tool.misconfigured": 1}, _with_unusable_headers),
    "schemas": Flood({"tool.misconfigured": 1}, lambda number: {**search_tool(), "parameters": {"type": f"x{number}"}}),
    "parameters": Flood(
        {"parameter.ignored": 1},
        lambda number: search_tool(jina={"mode": "search", "params": {**_UNKNOWN, f"n{number}": 1}}),
    ),
    "keys": Flood({"tool.key_passed_over": 1}, lambda number: search_tool(envs={"api_key": f"NOT_LISTED_{number}"})),
    "sessions": Flood(
        {"budget.exceeded": 1},
        lambda _: search_tool(budget={"session_requests": 0}),
        lambda number: {**_FOUND, "session_id": f"session {number}"},
    ),
    "retries": Flood(
        {"upstream.retry": 2, "upstream.unreachable": 4, "upstream.cost_estimated": 4},
        lambda _: reader_tool(jina={"mode": "reader", "tool": "jina.read_many"}),
        lambda number: {"urls": [f"https://gone.example/{number}/{item}" for item in range(2)]},
    ),
    "names": Flood({}, arguments=lambda number: {f"name_{number}": 1}),
    "values": Flood({}, arguments=lambda number: {"query": "x", "count": f"no number {number}"}),
    "cursors": Flood({}, lambda _: reader_tool(), lambda number: {"cursor": f"{number:044}"}),
    "disabled": Flood({}),
    "denied": Flood({"call.denied": 1}),
    "effects": Flood({"after_execution.differs": 1}, placed={"after_execution": "terminate"}),
    "letters": Flood({"call.dead_lettered": 1}, data=b"{}"),
    "repeats": Flood({"call.deduplicated": 1}, repeats=True),
}


@dataclass(slots=True)
class Scene:
    """The kernel's side of these calls."""

    caller: Caller
    calls: list[PlacedCall] = field(default_factory=list)

    async def prepare(self, name: str, number: int) -> None:
        """Add a project, its agent, and the tools of its calls."""
        flood, project = FLOODS[name.partition("_")[2]], name
        tools = [{**flood.definition(each), "tool_name": f"tool_{each}"} for each in range(number)]
        await self.caller.set_up_project(project, AGENT, tools)

    async def run(self, project: str, number: int) -> None:
        """Send the calls of a project, and wait for their results."""
        flood = FLOODS[project.partition("_")[2]]
        places = [
            self.caller.place(project, AGENT, f"tool_{each}", flood.arguments(each), publish=False, **flood.placed)
            for each in range(1 if flood.repeats else number)
        ]
        calls = await asyncio.gather(*places)
        for call in calls:
            headers = None if flood.final else {"CG-Tool-Call-Id": "x"}
            await self.caller.publish(call, headers=headers, data=flood.data)
        if flood.final:
            await asyncio.gather(*(self.caller.result(call, WAIT_S) for call in calls))
        if flood.repeats:
            for _ in range(number):
                await self.caller.publish(calls[0])

    async def settled(self) -> None:
        """Wait until every command is settled."""
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    info = await self.caller.client.jetstream().consumer_info(STREAM, _DURABLE)
                except NotFoundError:  # not created yet
                    info = None
                if info and info.ack_floor and info.ack_floor.stream_seq >= self.caller.last_sequence:
                    return
                await asyncio.sleep(0.05)


def _by_project(log: str) -> Mapping[str, Sequence[str]]:
    lines = defaultdict(list)
    for line in log.splitlines():
        fields = json.loads(line)
        if "project_id" in fields and fields["action"] not in ("tool.disabled", "tool.enabled"):
            lines[fields["project_id"]].append(line)
    return lines


def _actions(lines: Sequence[str]) -> Counter[str]:
    return Counter(json.loads(line)["action"] for line in lines)


def _problems(name: str, flood: Flood, noisy: Sequence[str], quiet: Sequence[str]) -> list[str]:
    """Return what is wrong with the lines of a flood and of another project's calls of the same kind."""
    found, actions, others = [], _actions(noisy), _actions(quiet)
    finals = 0 if not flood.final else 1 if flood.repeats else NOISY
    if actions.pop("call.finished", 0) != finals:
        found.append(f"{name}: final lines are missing")
    # The calls may fall into two periods of the limit.
    found += [f"{name}: {lines} lines {action}" for action, lines in actions.items() if lines > 2 * MAX_LINES]
    found += [f"{name}: a line of {len(line)} bytes" for line in noisy if len(line) > _LINE_BYTES][:1]
    if missing := flood.lines.keys() - actions.keys():
        found.append(f"{name}: no line {missing}")
    expected = Counter({action: QUIET * lines for action, lines in flood.lines.items()})
    expected["call.finished"] = 0 if not flood.final else 1 if flood.repeats else QUIET
    if others != expected:
        found.append(f"{name}: the other project has {others} instead of {expected}")
    return found


@requirement("hostile.neighbour", "logs.limits")
async def test_no_project_can_flood_the_log_and_no_other_loses_a_line(
    stack: EmbeddedStack, caller: Caller, database: str
) -> None:
    stack.upstream.rules({"match": "gone.example", "drop": "before"})
    scene, projects = Scene(caller), {f"{who}_{name}": number for name in FLOODS for who, number in _WHO.items()}
    for project, number in projects.items():
        await scene.prepare(project, number)
        if project.endswith("_disabled"):
            words = ["tools", "disable", "--project", project, "--reason", "it costs too much"]
            done = await asyncio.to_thread(CliRunner().invoke, app, words, env={"NATS_SERVERS": stack.nats.url})
            assert done.exit_code == 0, done.output
    denied = {project: {"deny": ["jina.*"]} for project in projects if project.endswith("_denied")}
    settings = {
        "PG_DSN": dsn_of(stack, database),
        "OPENAPI_TOOL__CACHE__TTL_S": "0",
        "OPENAPI_TOOL__RETRY__MAX_RETRIES": "1",
        "OPENAPI_TOOL__RETRY__INITIAL_BACKOFF_S": "0.01",
        "OPENAPI_TOOL__POLICY__PROJECTS": json.dumps(denied),
        "OPENAPI_TOOL__LIMITS__SEARCH_REQUESTS_PER_MINUTE": "100000",
        "OPENAPI_TOOL__LIMITS__READER_REQUESTS_PER_MINUTE": "100000",
    }
    executor = stack.executor("flooded", database, settings)
    await asyncio.to_thread(executor.start)
    try:
        for name in FLOODS:
            await asyncio.gather(*(scene.run(f"{who}_{name}", number) for who, number in _WHO.items()))
        await scene.settled()
    finally:
        await asyncio.to_thread(executor.stop)
    lines = _by_project(executor.log_text())
    problems = [
        problem
        for name, flood in FLOODS.items()
        for problem in _problems(name, flood, lines.get(f"noisy_{name}", ()), lines.get(f"quiet_{name}", ()))
    ]
    assert problems == []
