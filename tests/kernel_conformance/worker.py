"""Agent worker of the kernel according to protocol sections 4, 7 and 12: deferral, deadline, watchdog, forks.

Written from the protocol only, independently of the executor, to test its rows and doorbells. As in the kernel, a
doorbell makes the worker claim all due rows of an agent at once, several tasks handle them concurrently, and the last
result of a step resumes the turn by a compare-and-set of its state: a task that loses it defers its row.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from nats.aio.msg import Msg

from openapi_tool.local.caller import Caller
from openapi_tool.local.placed_call import VERSION, PlacedCall, new_call
from tests.wire.conftest import World

DEFERRAL_S = 1.0
MAX_DEFERRALS = 3
MAX_DEPTH = 20
_TICK_S = 0.02
_CONCURRENCY = 5  # tasks that handle claimed rows
_CLAIM_ROWS = 50
_BEFORE_APPLIED_S = 0.012  # of a result's handling: reads of state and card
_AFTER_APPLIED_S = 0.012  # until the turn is resumed: lists of pending calls and of the step's results

Row = Mapping[str, Any]


@dataclass(slots=True)
class Turn:
    """Turn of an agent with one step: its calls, their results, and its state. A forked turn has a parent.

    `head` is running while calls are sent, then suspended; it ends as resumed, terminated, timed out or failed.
    `deferrals` are the reasons why rows were deferred, `order` the calls in the order of their results.
    """

    project_id: str
    agent_id: str
    turn_id: str
    step_id: str
    parent: Turn | None = None
    depth: int = 0
    trace_id: str = field(default_factory=lambda: secrets.token_hex(16))
    epoch: int = 1
    head: str = "running"
    deadline: float = 0.0
    calls: list[PlacedCall] = field(default_factory=list)
    waiting: dict[str, str] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    deferrals: list[str] = field(default_factory=list)
    ended_at: float = 0.0

    def lineage(self) -> dict[str, str]:
        """Return the headers with ids, depth and parent of the turn."""
        topology = {"CG-Turn-Id": self.turn_id, "CG-Step-Id": self.step_id, "CG-Recursion-Depth": str(self.depth)}
        if self.parent is None:
            return topology
        parent = {
            "CG-Parent-Agent-Id": self.parent.agent_id,
            "CG-Parent-Turn-Id": self.parent.turn_id,
            "CG-Parent-Step-Id": self.parent.step_id,
        }
        return {**topology, **parent}


def _effective(content: Mapping[str, Any]) -> str:
    """Return the effective after_execution: that in the result's `__cg_control` if it is valid, else the card's."""
    result = content["result"]
    control = result.get("__cg_control") if isinstance(result, dict) else None
    value = control.get("after_execution") if isinstance(control, dict) else None
    stripped = value.strip() if isinstance(value, str) else ""
    return stripped if stripped in ("suspend", "terminate") else str(content["after_execution"])


class Worker:
    """Suspends a turn until its results are in the inbox; fails it at its deadline, as the watchdog does."""

    def __init__(
        self, caller: Caller, inbox: Caller, default_s: float, suspend_s: float, max_deferrals: int = MAX_DEFERRALS
    ) -> None:
        self._caller = caller
        self._inbox = inbox.database
        self._database = asyncio.Lock()  # a connection runs one statement at a time
        self._default_s = default_s
        self._suspend_s = suspend_s
        self._max_deferrals = max_deferrals
        self._claimed: asyncio.Queue[tuple[Turn, Row]] = asyncio.Queue()
        self._defects: list[Exception] = []
        self.turns: dict[tuple[str, str], Turn] = {}

    @classmethod
    @asynccontextmanager
    async def running(
        cls, world: World, default_s: float = 30.0, suspend_s: float = 0.04, max_deferrals: int = MAX_DEFERRALS
    ) -> AsyncIterator[Worker]:
        """Receive doorbells, scan for deferred rows and check deadlines; turns are suspended after `suspend_s`."""
        dsn = world.stack.postgres.dsn(world.database)
        async with Caller.open(dsn, servers=world.stack.nats.url) as inbox:
            worker = cls(world.caller, inbox, default_s, suspend_s, max_deferrals)
            await inbox.client.subscribe(f"cg.{VERSION}.*.*.cmd.agent.worker_generic.wakeup", cb=worker._on_doorbell)
            await inbox.client.flush()
            tasks = [asyncio.create_task(worker._handle_rows()) for _ in range(_CONCURRENCY)]
            tasks.append(asyncio.create_task(worker._tick()))
            try:
                yield worker
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    async def step(
        self, project_id: str, agent_id: str, calls: Sequence[tuple[str, Any]], suspend_timeout_s: float = 0.0
    ) -> Turn:
        """Send the calls of a step one after another, then suspend the turn on them."""
        turn = Turn(project_id, agent_id, f"turn_{uuid.uuid4().hex}", f"step_{uuid.uuid4().hex}")
        return await self._run(turn, calls, suspend_timeout_s)

    async def fork(self, parent: Turn, agent_id: str, calls: Sequence[tuple[str, Any]]) -> Turn:
        """Run a step of a child agent: one level deeper than the parent's, in the same trace."""
        ids = f"turn_{uuid.uuid4().hex}", f"step_{uuid.uuid4().hex}"
        child = Turn(parent.project_id, agent_id, *ids, parent, parent.depth + 1, parent.trace_id)
        return await self._run(child, calls)

    async def _run(self, turn: Turn, calls: Sequence[tuple[str, Any]], suspend_timeout_s: float = 0.0) -> Turn:
        self.turns[turn.project_id, turn.agent_id] = turn
        for tool, arguments in calls:
            turn.calls.append(await self._send(turn, tool, arguments))
        await asyncio.sleep(self._suspend_s)
        if turn.head == "running":
            turn.waiting = dict.fromkeys((call.tool_call_id for call in turn.calls), "waiting")
            turn.deadline = time.monotonic() + max(self._default_s, suspend_timeout_s)
            turn.head = "suspended"
        return turn

    async def ended(self, turn: Turn, within_s: float = 60.0) -> Turn:
        """Wait until a turn has ended, and no row of it is left. Raises TimeoutError, and what a result violates."""
        async with asyncio.timeout(within_s):
            while not self._defects and (turn.head in ("running", "suspended") or await self._unread(turn)):  # noqa: ASYNC110 - there is no single event
                await asyncio.sleep(_TICK_S)
        if self._defects:
            raise self._defects[0]
        return turn

    async def _unread(self, turn: Turn) -> int:
        async with self._database:
            unread: int = await self._inbox.fetchval(
                "select count(*) from state.agent_inbox where project_id = $1 and agent_turn_id = $2 "
                "and message_type = 'tool_result' and status <> 'consumed'",
                turn.project_id,
                turn.turn_id,
            )
        return unread

    async def _send(self, turn: Turn, tool: str, arguments: Any) -> PlacedCall:
        subject = f"cg.{VERSION}.{turn.project_id}.public.cmd.tool.jina.call"
        body = {"tool_name": tool, "after_execution": "suspend"}
        call = new_call(turn.project_id, "public", turn.agent_id, subject, body)
        traceparent = f"00-{turn.trace_id}-{secrets.token_hex(8)}-01"
        headers = {**call.headers, **turn.lineage(), "traceparent": traceparent}
        call = replace(call, agent_turn_id=turn.turn_id, step_id=turn.step_id, trace_id=turn.trace_id, headers=headers)
        await self._caller.save(call, arguments, {"parent_step_id": turn.parent.step_id} if turn.parent else {})
        await self._caller.publish(call)
        return call

    async def _on_doorbell(self, message: Msg) -> None:
        headers = message.headers or {}
        turn = self.turns.get((headers.get("CG-Project-Id", ""), headers.get("CG-Agent-Id", "")))
        if turn is not None:
            await self._claim(turn)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            for turn in list(self.turns.values()):
                if turn.deferrals:
                    await self._claim(turn)
                if turn.head == "suspended" and time.monotonic() > turn.deadline:
                    await self._give_up(turn)

    async def _claim(self, turn: Turn) -> None:
        """Claim all due rows of an agent for the tasks that handle them."""
        async with self._database:
            rows = await self._inbox.fetch(
                "with due as (select inbox_id from state.agent_inbox where project_id = $1 and agent_id = $2 "
                "and status in ('pending', 'deferred') and next_retry_at <= now() "
                "order by next_retry_at, created_at limit $3 for update skip locked) "
                "update state.agent_inbox set status = 'processing' where inbox_id in (select inbox_id from due) "
                "returning *",
                turn.project_id,
                turn.agent_id,
                _CLAIM_ROWS,
            )
        for row in rows:
            self._claimed.put_nowait((turn, row))

    async def _handle_rows(self) -> None:
        while True:
            turn, row = await self._claimed.get()
            try:
                deferred = await self._handle(turn, row)
            except Exception as defect:  # noqa: BLE001 - raised by `ended`
                self._defects.append(defect)
                return
            if deferred is None:
                await self._finish(row, "consumed")
            elif row["retry_count"] + 1 > self._max_deferrals:
                turn.deferrals.append(deferred)
                turn.head = "failed"
                await self._finish(row, "consumed")
            else:
                turn.deferrals.append(deferred)
                await self._defer(row, deferred)

    async def _handle(self, turn: Turn, row: Row) -> str | None:
        """Apply a result, and resume the turn after the last one; return why the row must be deferred, if it must."""
        call_id = row["correlation_id"]
        if row["agent_turn_id"] != turn.turn_id or row["turn_epoch"] != turn.epoch:
            return None  # a row of another turn is ignored
        if turn.head == "running":
            return "turn_running_not_suspended"
        if turn.head != "suspended" or turn.waiting.get(call_id) != "waiting":
            return None
        turn.waiting[call_id] = "received"
        card = await self._read_result(turn, row)
        await asyncio.sleep(_BEFORE_APPLIED_S)
        turn.waiting[call_id] = "applied"
        turn.results[call_id] = card
        turn.order.append(call_id)
        await asyncio.sleep(_AFTER_APPLIED_S)
        if any(status in ("waiting", "received") for status in turn.waiting.values()):
            turn.deadline = time.monotonic() + self._default_s
            return None
        if turn.head != "suspended" or row["turn_epoch"] != turn.epoch:  # compare-and-set
            return "resume_cas_failed_running"
        effective = {result["content"]["after_execution"] for result in turn.results.values()}
        turn.head = "terminated" if "terminate" in effective else "resumed"
        turn.epoch += 1
        turn.ended_at = time.monotonic()
        return None

    async def _finish(self, row: Row, status: str) -> None:
        async with self._database:
            await self._inbox.execute(
                "update state.agent_inbox set status = $2 where inbox_id = $1 and status = 'processing'",
                row["inbox_id"],
                status,
            )

    async def _defer(self, row: Row, reason: str) -> None:
        async with self._database:
            await self._inbox.execute(
                "update state.agent_inbox set status = 'deferred', retry_count = retry_count + 1, "
                "defer_reason = $3, next_retry_at = now() + make_interval(secs => $2) where inbox_id = $1",
                row["inbox_id"],
                DEFERRAL_S,
                reason,
            )

    async def _read_result(self, turn: Turn, row: Row) -> dict[str, Any]:
        """Read a result, and check the invariants of row and card as a worker must."""
        call_id = row["correlation_id"]
        async with self._database:
            card = await self._inbox.fetchrow(
                "select card_id, content, metadata from cards where tenant_id = $1 and tool_call_id = $2 "
                "and metadata ->> 'type' = 'tool.result'",
                turn.project_id,
                call_id,
            )
        content, metadata, headers = card["content"], card["metadata"], row["context_headers"]
        sent = next(call for call in turn.calls if call.tool_call_id == call_id)
        assert row["payload"]["tool_result_card_id"] == card["card_id"]
        assert content.keys() == {"__type__", "status", "after_execution", "result", "error"}
        assert (content["error"] is None) == (content["status"] == "success")
        assert content["after_execution"] == row["payload"]["after_execution"] == _effective(content)
        assert metadata["step_id"] == turn.step_id
        assert metadata.get("parent_step_id") == (turn.parent and turn.parent.step_id)
        assert metadata["function_name"] == sent.body["tool_name"]
        assert headers["traceparent"].split("-")[1] == turn.trace_id
        assert {name: headers.get(name) for name in turn.lineage()} == turn.lineage()
        assert turn.depth < MAX_DEPTH
        return dict(card)

    async def _give_up(self, turn: Turn) -> None:
        """Write timeout results of the watchdog for calls without a result."""
        for call in turn.calls:
            if turn.waiting[call.tool_call_id] == "waiting":
                turn.waiting[call.tool_call_id] = "expired"
                async with self._database:
                    await self._write_timeout(turn, call)
        turn.head = "timed out"

    async def _write_timeout(self, turn: Turn, call: PlacedCall) -> None:
        """Save the watchdog's card and its row, whose type is `timeout`, not `tool_result`."""
        content = {
            "__type__": "ToolResultContent",
            "status": "timeout",
            "after_execution": "suspend",
            "result": None,
            "error": {"code": "tool_timeout", "message": "the tool did not answer in time"},
        }
        metadata = {
            "type": "tool.result",
            "author_id": "worker.watchdog",
            "tool_call_id": call.tool_call_id,
            "agent_turn_id": turn.turn_id,
            "step_id": turn.step_id,
            "function_name": call.body["tool_name"],
            "role": "tool",
        }
        async with self._inbox.transaction():
            written = await self._inbox.fetchval(
                "insert into cards (card_id, tenant_id, content, tool_call_id, metadata) values ($1, $2, $3, $4, $5) "
                "on conflict do nothing returning card_id",
                uuid.uuid4().hex,
                turn.project_id,
                content,
                call.tool_call_id,
                metadata,
            )
            if written:
                await self._inbox.execute(
                    "insert into state.agent_inbox (inbox_id, project_id, agent_id, message_type, correlation_id, "
                    "agent_turn_id, turn_epoch, payload, status) "
                    "values ($1, $2, $3, 'timeout', $4, $5, $6, '{}', 'consumed')",
                    f"inbox_{uuid.uuid4().hex}",
                    turn.project_id,
                    turn.agent_id,
                    call.tool_call_id,
                    turn.turn_id,
                    turn.epoch,
                )
