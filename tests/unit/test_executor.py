"""The executor's parts: pipeline, delay of results, deadlines and clocks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openapi_tool.engine.call import Call, CallMemory
from openapi_tool.engine.runner import ToolRunner
from openapi_tool.jina.byte_semaphore import ByteSemaphore
from openapi_tool.jina.endpoints import ENDPOINTS
from openapi_tool.jina.timeouts import RESERVE_S
from openapi_tool.kernel.pipeline import turn_deadline as turn
from openapi_tool.kernel.pipeline.commit import ResultCommitter
from openapi_tool.kernel.pipeline.parked_results import MAX_BYTES, MAX_PROJECT_BYTES, ParkedResults
from openapi_tool.kernel.pipeline.ports import Kernel
from openapi_tool.kernel.pipeline.result_order import ResultOrder
from openapi_tool.kernel.pipeline.result_to_commit import ResultToCommit
from openapi_tool.nats_client.server_clock import ServerClock
from openapi_tool.options.executor import ExecutorOptions
from openapi_tool.options.tools import ToolOptions
from openapi_tool.protocol.cards import ToolCall, artifact_card
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.errors import ToolMisconfigured, TurnBusy, Unavailable
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.records import Artifact, WaitingTurnRecord
from openapi_tool.protocol.report import TurnCondition
from openapi_tool.quotas.permits import NoSlot
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.output import Item, ToolOutput, Usage
from openapi_tool.tools.policy import Authorizer, Policy
from openapi_tool.tools.result import ResultFields, RunResult
from openapi_tool.tools.stored_text import stored_text
from openapi_tool.tools.time_limits import TimeLimits
from tests.races.conftest import FakeResultStore, run_virtually, runner
from tests.requirements import requirement
from tests.support import call_card, definition, delivery, framed_items, identity, waiting_turn

OWNER = CallIdentity("proj", "agent")
READ = {"tool": "jina.read"}
PARAMETERS = {"type": "object", "properties": {"url": {"type": "string"}}}


def spent_call(one: ToolRunner, owner: CallIdentity = OWNER, budget: Any = None) -> Call:
    """Return a call that has cost something already."""
    call = one.new_call(owner)
    call.spent, call.accounts = Usage(tokens=7, requests=1), budget
    return call


class SlowJournal:
    """Accounts of a call whose cost is written once `written` is set."""

    note = ""

    def __init__(self) -> None:
        self.waits, self.written = asyncio.Event(), asyncio.Event()

    def left(self) -> dict[str, Any]:
        return {}

    async def wait_until_written(self) -> None:
        self.waits.set()
        await self.written.wait()


class Tools:
    """Fake backend of tools: returns or raises `outcome`, and records the calls that reached it."""

    def __init__(self, outcome: ToolOutput | BaseException) -> None:
        self.outcome = outcome
        self.calls: list[dict[str, Any]] = []
        self.agents: list[str] = []

    def call_memory(self, project: str) -> CallMemory:
        return ByteSemaphore(0).for_call(project)

    def without_unknown(self, definition: Any, arguments: Any) -> Any:
        del definition
        return arguments

    def known_budget(self, definition: Any, arguments: Any, call: Call) -> None:
        del definition, arguments, call

    async def run(self, definition: Any, arguments: Any, deadline: Any, call: Call) -> ToolOutput:
        del definition, deadline
        self.agents.append(call.identity.agent_id)
        self.calls.append(dict(arguments.values))
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


class FakeArtifactStore:
    """Artifact store that has one text of 60,000 characters, of agent `agent` in `proj`."""

    async def artifact(self, project_id: str, agent_id: str, card_id: str, start: int, chars: int) -> Artifact | None:
        assert (project_id, agent_id) == ("proj", "agent")
        text = "x" * 60_000
        return Artifact(card_id, len(text), "sha", text[start : start + chars])


Request = tuple[ToolDefinition, ToolCall, Deadline]


def request(left_s: float = 60, **arguments: Any) -> Request:
    given = arguments or {"url": "https://site.example/"}
    return definition(READ, parameters=PARAMETERS), ToolCall(given), Deadline.after(left_s)


async def run(backend: Tools, wanted: Request, owner: CallIdentity = OWNER, **options: Any) -> RunResult:
    one = runner(FakeArtifactStore(), backend, **options)
    return await one.run(spent_call(one, owner), *wanted)


@requirement("runner.alone")
async def test_requests_are_counted_for_the_agent_of_the_call() -> None:
    """Budgets and the queue for permits read it; without it all agents of a door would share one budget."""
    backend = Tools(ToolOutput((Item("the page"),)))
    for agent in ("one", "two"):
        await run(backend, request(), replace(OWNER, agent_id=agent))
    assert backend.agents == ["one", "two"]


@requirement("runner.alone")
@pytest.mark.parametrize("outcome", [ToolOutput((Item("the page"),)), RuntimeError("defect")])
async def test_a_front_end_gets_no_result_before_its_cost_is_written(outcome: ToolOutput | Exception) -> None:
    one, journal = runner(FakeArtifactStore(), Tools(outcome)), SlowJournal()
    running = asyncio.create_task(one.run(spent_call(one, budget=journal), *request()))
    await journal.waits.wait()
    await asyncio.sleep(0)
    assert not running.done()
    journal.written.set()
    assert (await running).fields.status == ("success" if isinstance(outcome, ToolOutput) else "failed")


@requirement("runner.alone")
async def test_a_call_cancelled_while_its_cost_is_written_keeps_its_paid_result() -> None:
    one, journal = runner(FakeArtifactStore(), Tools(ToolOutput((Item("the page"),)))), SlowJournal()
    results: list[ResultFields] = []

    async def front_end() -> None:
        results.append((await one.run(spent_call(one, budget=journal), *request())).fields)
        await asyncio.sleep(0)  # raises the cancellation

    running = asyncio.create_task(front_end())
    await journal.waits.wait()
    running.cancel()
    await asyncio.sleep(0)
    journal.written.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [each.status for each in results] == ["success"]


@requirement("runner.alone")
async def test_a_call_needs_no_turn_no_card_and_no_inbox() -> None:
    backend = Tools(ToolOutput((Item("the page"),), {"url": "x"}, Usage(3, 1)))
    result = await run(backend, request())
    fields, stored = result.fields, result.full_text
    assert (fields.status, framed_items(str(fields.result)), stored) == ("success", ["the page"], None)
    assert backend.calls == [{"url": "https://site.example/"}]


@requirement("runner.alone")
async def test_truncated_result_returns_the_whole_text_and_continues_for_its_owner() -> None:
    backend = Tools(ToolOutput((Item("x" * 60_000),)))
    result = await run(backend, request())
    fields, stored = result.fields, result.full_text
    assert stored is not None
    assert fields.tool_output is not None
    about = fields.tool_output
    assert about["artifact_ref"] is not None
    assert about["artifact_ref"]["card_id"] == stored.card_id
    again = (await run(backend, request(cursor=about["next_cursor"]))).fields
    assert again.status == "success"
    assert len(backend.calls) == 1


@requirement("runner.alone")
async def test_a_hook_of_a_call_without_turn_sees_empty_ids() -> None:
    seen = []

    async def hook(call: Any) -> None:
        seen.append((call.project_id, call.agent_id, call.channel_id, call.agent_turn_id, call.tool_call_id))

    await run(Tools(ToolOutput((Item("x"),))), request(), authorizer=Authorizer(hooks={"seen": hook}))
    assert seen == [("proj", "agent", "", "", "")]


@pytest.mark.parametrize(
    ("arguments", "options", "code"),
    [
        ({"url": {"a": 1}}, {}, "bad_request"),
        ({}, {"authorizer": Authorizer(Policy(deny=("*",)))}, "tool_not_available"),
        ({"left_s": 0}, {}, "tool_timeout"),
        ({"left_s": 0, "url": {"a": 1}}, {}, "bad_request"),
        ({"cursor": "unknown"}, {}, "not_found"),
    ],
    ids=["arguments", "policy", "deadline", "arguments before deadline", "cursor"],
)
@requirement("runner.alone")
async def test_refused_call_reaches_no_tool(arguments: dict[str, Any], options: dict[str, Any], code: str) -> None:
    backend = Tools(ToolOutput((Item("x"),)))
    fields = (await run(backend, request(**arguments), **options)).fields
    assert (fields.error_code, backend.calls) == (code, [])


@requirement("runner.alone")
async def test_defect_becomes_a_failure_with_its_cost_and_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fields = (await run(Tools(ValueError("of the page")), request())).fields
    assert fields.error_code == "internal_error"
    assert "of the page" not in str(fields)
    assert fields.tool_output is not None
    assert fields.tool_output["usage"] == {"tokens": 7, "requests": 1}
    assert [(record.levelno, record.exc_info is None) for record in caplog.records] == [(logging.ERROR, False)]


@requirement("runner.alone")
async def test_outage_and_cancellation_are_raised() -> None:
    with pytest.raises(Unavailable):
        await run(Tools(Unavailable("connection refused")), request())
    with pytest.raises(asyncio.CancelledError):
        await run(Tools(asyncio.CancelledError()), request())


@requirement("runner.alone")
async def test_error_in_a_front_end_becomes_a_result_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    backend = Tools(ToolOutput((Item("x"),)))
    one = runner(None, backend)
    fields = one.failure_result(one.new_call(OWNER), "a_tool", ToolMisconfigured("no host"), 0.0)
    assert fields.error_code == "tool_misconfigured"
    assert [vars(record)["action"] for record in caplog.records] == ["tool.misconfigured"]


# Parked results: who may find them, what is stored, and an unavailable store.


KEY = b"k" * 32
FIELDS = ResultFields("success", "what the model reads: ü", None, {"usage": {"tokens": 7, "requests": 1}})


class UnavailableResultStore(FakeResultStore):
    """Result store whose server does not answer."""

    async def put(self, name: str, record: bytes) -> None:
        del name, record
        raise Unavailable("NATS: connection refused")

    async def get(self, name: str) -> bytes | None:
        del name
        raise Unavailable("NATS: connection refused")

    async def delete(self, name: str) -> None:
        del name
        raise Unavailable("NATS: connection refused")


@requirement("answer.parked")
async def test_parked_result_is_found_complete_and_then_deleted() -> None:
    store = FakeResultStore()
    parked = ParkedResults(store, KEY)
    text = stored_text([Item("the whole text")], [])
    artifact = artifact_card("tool.openapi", identity(), call_card(), text, 60)
    await parked.park(identity(), ResultToCommit(FIELDS, artifact))
    found = await ParkedResults(store, KEY).find(identity())
    assert found is not None
    assert (found.fields, found.was_parked) == (FIELDS, True)
    assert found.artifact == artifact
    await parked.delete(identity())
    assert await parked.find(identity()) is None
    assert store.records == {}


@pytest.mark.parametrize(
    "other",
    [{"project_id": "another"}, {"agent_id": "another"}, {"agent_turn_id": "another"}, {"tool_call_id": "another"}],
    ids=lambda other: next(iter(other)),
)
@requirement("answer.parked", "tenant.scoped")
async def test_parked_result_is_not_found_by_another_project_agent_or_turn(other: dict[str, str]) -> None:
    store = FakeResultStore()
    parked = ParkedResults(store, KEY)
    await parked.park(identity(), ResultToCommit(FIELDS))
    assert await parked.find(identity(**other)) is None
    mine, foreign = parked._name(identity()), parked._name(identity(**other))  # noqa: SLF001 - as another writer of the bucket could
    store.records[foreign] = store.records[mine]
    assert await parked.find(identity(**other)) is None


@requirement("answer.parked")
async def test_parked_record_with_a_wrong_seal_is_ignored() -> None:
    store = FakeResultStore()
    parked = ParkedResults(store, KEY)
    await parked.park(identity(), ResultToCommit(FIELDS))
    name, record = store.records.popitem()
    assert "what the model reads" not in name  # only ids of the call are in the name, as an HMAC
    for forged in (record.replace(b"model", b"forger"), record[:40], b"", bytes(32) + record[32:]):
        store.records[name] = forged
        assert await parked.find(identity()) is None
    store.records[name] = record
    assert await ParkedResults(store, b"another key").find(identity()) is None


@requirement("answer.parked")
async def test_too_large_result_is_not_parked_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    store = FakeResultStore()
    await ParkedResults(store, KEY).park(
        identity(), ResultToCommit(ResultFields("success", "x" * MAX_BYTES, None, None))
    )
    assert store.records == {}
    assert "too large to be parked" in caplog.text


LARGE = ResultToCommit(ResultFields("success", "x" * (MAX_BYTES - 1_000), None, None))


@requirement("answer.parked", "hostile.neighbour")
async def test_parked_results_of_a_project_leave_space_for_others(caplog: pytest.LogCaptureFixture) -> None:
    store = FakeResultStore()
    parked, large = (
        ParkedResults(store, KEY),
        ResultToCommit(ResultFields("success", "x" * (MAX_BYTES - 1_000), None, None)),
    )
    calls = [identity(tool_call_id=f"tc_{number}") for number in range(MAX_PROJECT_BYTES // MAX_BYTES + 9)]
    stored = [await parked.park(call, large) for call in calls]
    assert sum(stored) * MAX_BYTES == MAX_PROJECT_BYTES
    assert not any(stored[sum(stored) :])
    assert "too many results of this project" in caplog.text
    assert await parked.park(calls[0], large), "the same record again"
    assert await parked.park(identity(project_id="another"), large)
    await parked.delete(calls[0])
    assert await parked.park(calls[-1], large)


@requirement("answer.parked")
async def test_a_result_that_was_not_stored_takes_no_share_of_its_project() -> None:
    parked = ParkedResults(UnavailableResultStore(), KEY)
    for number in range(MAX_PROJECT_BYTES // MAX_BYTES + 9):
        await parked.park(identity(tool_call_id=f"tc_{number}"), LARGE)
    assert not any(parked._sizes.values())  # noqa: SLF001 - otherwise later calls would be refused


@requirement("answer.parked")
async def test_unavailable_result_store_does_not_fail_the_call(caplog: pytest.LogCaptureFixture) -> None:
    parked = ParkedResults(UnavailableResultStore(), KEY)
    await parked.park(identity(), ResultToCommit(FIELDS))
    assert await parked.find(identity()) is None
    await parked.delete(identity())
    assert "cannot park" in caplog.text


START = datetime(2026, 1, 1, tzinfo=UTC)


class LoopClock:
    """Server clock that follows the event loop's time."""

    behind_s = 0.0

    def time(self) -> float:
        return START.timestamp() + asyncio.get_running_loop().time() - self.behind_s


@dataclass
class FakeSlot(NoSlot):
    """Records whether it was released."""

    requests: int = 1
    released: bool = False

    def release(self) -> None:
        self.released = True


@dataclass
class Scene:
    """A delay of 60 ms, waits of at most a second; times are in ms since START.

    The worker reads a result `reads_s` seconds after it was written; `written` has the condition of each call's write.
    """

    min_result_delay_s: float = 0.06
    reads_s: float = 0.03
    clock: LoopClock = field(default_factory=LoopClock)
    slot: FakeSlot = field(default_factory=FakeSlot)
    written: list[tuple[str, TurnCondition | None, int]] = field(default_factory=list)
    writes: Counter[str] = field(default_factory=Counter)
    looks: Counter[str] = field(default_factory=Counter)
    read_at: float = 0.0

    def __post_init__(self) -> None:
        self.order = ResultOrder(self.min_result_delay_s, 1.5, self.clock.time)

    async def answered(self, command: Delivery, waiting: WaitingTurnRecord | None = None, **ids: Any) -> int:
        """Return when the delay of a command's result has ended."""
        result = self.order.begin(command, identity(**ids), waiting or waiting_turn(), self.slot)
        await self.order.wait_for_suspension(result)
        return round(asyncio.get_running_loop().time() * 1000)

    async def written_in_order(self, call: str, waiting: WaitingTurnRecord | None = None, **ids: Any) -> FakeSlot:
        """Write the result of a call whose step has other calls; return its slot."""
        now, slot = asyncio.get_running_loop().time, FakeSlot()

        async def write(condition: TurnCondition | None) -> bool:
            self.writes[call] += 1
            if condition and (condition.quiet_s is None or now() < self.read_at):
                raise TurnBusy
            self.read_at = now() + self.reads_s
            self.written.append((call, condition, round(now() * 1000)))
            return True

        async def is_busy(_: float) -> bool:
            self.looks[call] += 1
            return now() < self.read_at

        result = self.order.begin(sent(), identity(tool_call_id=call, **ids), waiting or waiting_turn(), slot)
        assert await self.order.write(result, write, is_busy)
        return slot


IN_TURN = TurnCondition.others_older_than(0.06)


def sent(after_ms: float = 0) -> Delivery:
    return replace(delivery(), published_at=START + timedelta(milliseconds=after_ms))


@requirement("result.delay")
def test_early_result_waits_without_a_slot_until_the_worker_has_suspended() -> None:
    async def check() -> None:
        scene = Scene()
        assert await scene.answered(sent()) == 60
        assert scene.slot.released

    run_virtually(check())


@requirement("result.delay")
def test_late_result_neither_waits_nor_releases_its_slot() -> None:
    async def check() -> None:
        scene = Scene()
        await asyncio.sleep(0.08)
        assert await scene.answered(sent()) == 80
        assert not scene.slot.released

    run_virtually(check())


@requirement("result.delay")
@pytest.mark.parametrize(
    "waiting", [waiting_turn(message_type="ui_action"), waiting_turn(turn_epoch=0)], ids=["ui", "epoch 0"]
)
def test_result_is_not_held_for_ui_actions_and_epoch_0(waiting: WaitingTurnRecord) -> None:
    async def check() -> None:
        scene = Scene()
        assert await scene.answered(sent(), waiting) == 0
        assert not scene.slot.released

    run_virtually(check())


def test_zero_disables_the_delay() -> None:
    async def check() -> None:
        assert await Scene(min_result_delay_s=0).answered(sent()) == 0

    run_virtually(check())


@requirement("result.delay")
def test_wrong_clock_delays_a_result_by_a_second_at_most() -> None:
    async def check() -> None:
        scene = Scene()
        scene.clock.behind_s = 28.0
        assert await scene.answered(sent()) == 1_000

    run_virtually(check())


@requirement("result.order")
def test_results_of_a_turn_are_written_one_after_the_other_and_only_the_next_one_tries() -> None:
    async def check() -> None:
        scene = Scene()
        slots = await asyncio.gather(*(scene.written_in_order(call) for call in "abc"))
        assert scene.written == [("a", IN_TURN, 0), ("b", IN_TURN, 30), ("c", IN_TURN, 60)]
        assert scene.writes["c"] == 2  # once alone, which may be large; then once it is free
        assert scene.looks["c"] == 4  # every 10 ms from the moment b is written
        assert all(slot.released for slot in slots)

    run_virtually(check())


@requirement("result.order")
def test_results_of_other_turns_do_not_wait() -> None:
    async def check() -> None:
        scene = Scene(reads_s=10)
        await scene.written_in_order("a")
        others: list[dict[str, Any]] = [{"agent_turn_id": "other"}, {"agent_id": "other"}, {"project_id": "other"}]
        for ids in others:
            scene.read_at = 0
            await scene.written_in_order("b", **ids)
        assert [(order, at) for _, order, at in scene.written] == [(IN_TURN, 0)] * 4

    run_virtually(check())


@requirement("result.order")
@pytest.mark.parametrize("results", [2, 40])
def test_a_row_that_is_never_read_delays_all_results_of_its_turn_by_a_second(results: int) -> None:
    async def check() -> None:
        scene = Scene(reads_s=3_600)
        await asyncio.gather(*(scene.written_in_order(str(number)) for number in range(results)))
        assert scene.written[0][1:] == (IN_TURN, 0)
        assert {(order, at) for _, order, at in scene.written[1:]} == {(None, 1_000)}

    run_virtually(check())


@requirement("result.order")
def test_a_worker_that_reads_on_is_waited_for_up_to_the_limit_of_all_waits() -> None:
    async def check() -> None:
        scene = Scene(reads_s=0.2)
        await asyncio.gather(*(scene.written_in_order(str(number)) for number in range(12)))
        expected = [*range(0, 1_500, 200), *[1_500] * 4]
        assert [at for _, _, at in scene.written] == [pytest.approx(at, abs=20) for at in expected]
        assert [condition for _, condition, _ in scene.written] == [IN_TURN] * 8 + [None] * 4

    run_virtually(check())


@requirement("result.order")
def test_the_delay_until_the_turn_is_suspended_and_the_wait_for_a_dead_worker_last_a_second_together() -> None:
    async def check() -> None:
        scene = Scene(min_result_delay_s=0.76)
        result = scene.order.begin(sent(), identity(), waiting_turn(), scene.slot)
        await scene.order.wait_for_suspension(result)
        assert round(asyncio.get_running_loop().time() * 1000) == 760

        async def busy(condition: TurnCondition | None) -> bool:
            if condition:
                raise TurnBusy
            return True

        async def is_busy(_: float) -> bool:
            return True

        assert await scene.order.write(result, busy, is_busy)
        assert round(asyncio.get_running_loop().time() * 1000) == 1_000
        assert result.waited_s == pytest.approx(1.0)

    run_virtually(check())


class _StalledKernel:
    """Database that answers no commit for `stall_s` seconds; a worker reads a result 30 ms after its commit."""

    def __init__(self, stall_s: float) -> None:
        self.stall_s, self.read_at = stall_s, 0.0
        self.conditions: list[TurnCondition | None] = []

    async def commit(self, *given: Any, retry: bool = False) -> bool:
        del retry
        condition, now = given[3], asyncio.get_running_loop().time
        if now() < self.stall_s:
            await asyncio.sleep(self.stall_s - now())
            raise Unavailable("no answer in time")
        if condition and (condition.quiet_s is None or now() < self.read_at):
            raise TurnBusy
        self.read_at = now() + 0.03
        self.conditions.append(condition)
        return True

    async def is_turn_busy(self, *_: Any) -> bool:
        return asyncio.get_running_loop().time() < self.read_at


@requirement("result.order")
def test_results_are_written_one_by_one_also_after_a_stall_of_the_database() -> None:
    """The time of the stall is none in which they could have been written."""

    async def check() -> None:
        scene, kernel = Scene(), _StalledKernel(3.0)
        parked = ParkedResults(FakeResultStore(), KEY)
        committer = ResultCommitter(cast("Kernel", kernel), parked, scene.order, 8.0)
        waits = [
            scene.order.begin(sent(), identity(tool_call_id=str(number)), waiting_turn(), FakeSlot())
            for number in range(8)
        ]
        rows = cast("Any", None)
        assert all(
            await asyncio.gather(*(committer.store_or_park(wait, ResultToCommit(FIELDS), rows, rows) for wait in waits))
        )
        assert kernel.conditions == [IN_TURN] * 8

    run_virtually(check())


@requirement("result.order")
def test_a_commit_that_hangs_delays_the_other_results_of_its_turn_by_a_second() -> None:
    """It may wait for a lock of the database for as long as a statement may take."""

    async def check() -> None:
        scene = Scene()
        hangs = asyncio.Event()

        async def hang(condition: TurnCondition | None) -> bool:
            if condition == IN_TURN:
                await hangs.wait()
            raise TurnBusy

        async def is_free(_: float) -> bool:
            return False

        first = scene.order.begin(sent(), identity(), waiting_turn(), FakeSlot())
        hanging = asyncio.create_task(scene.order.write(first, hang, is_free))
        await asyncio.sleep(0.01)
        await asyncio.gather(*(scene.written_in_order(str(number)) for number in range(3)))
        assert [(condition, at) for _, condition, at in scene.written] == [(None, 1_010)] * 3
        hanging.cancel()

    run_virtually(check())


@requirement("result.order")
def test_a_result_whose_waits_are_over_is_written_at_once() -> None:
    async def check() -> None:
        scene = Scene(reads_s=3_600)
        await scene.written_in_order("a")
        result = scene.order.begin(sent(), identity(), waiting_turn(), FakeSlot())
        await asyncio.sleep(1.1)
        conditions: list[TurnCondition | None] = []

        async def write(condition: TurnCondition | None) -> bool:
            conditions.append(condition)
            return True

        async def is_busy(_: float) -> bool:
            return True

        assert await scene.order.write(result, write, is_busy)
        assert conditions == [None]

    run_virtually(check())


@requirement("result.order")
def test_a_cancelled_result_lets_the_next_one_through() -> None:
    async def check() -> None:
        scene = Scene(reads_s=0.5)
        await scene.written_in_order("a")
        cancelled, following = (asyncio.create_task(scene.written_in_order(call)) for call in "bc")
        await asyncio.sleep(0.1)
        cancelled.cancel()
        await following
        assert scene.written == [("a", IN_TURN, 0), ("c", IN_TURN, 500)]
        assert cancelled.cancelled()

    run_virtually(check())


@requirement("result.order")
@pytest.mark.parametrize(
    "waiting", [waiting_turn(message_type="ui_action"), waiting_turn(turn_epoch=0)], ids=["ui", "epoch 0"]
)
def test_results_of_a_turn_that_no_worker_suspends_have_no_order(waiting: WaitingTurnRecord) -> None:
    async def check() -> None:
        scene = Scene(reads_s=3_600)
        await asyncio.gather(*(scene.written_in_order(call, waiting) for call in "ab"))
        assert scene.written == [("a", None, 0), ("b", None, 0)]

    run_virtually(check())


LIMITS = TimeLimits(ExecutorOptions(), ToolOptions())


def left_s(age_s: float, suspend_s: float | None, limits: TimeLimits = LIMITS, timeout_s: float | None = None) -> float:
    return limits.deadline(age_s, suspend_s, timeout_s).remaining()


@pytest.mark.parametrize(
    ("age_s", "suspend_s", "expected"),
    [(0, None, 27), (0, 10, 27), (0, 60, 57), (20, 60, 37), (0, 500, 120), (100, 500, 20), (-5, None, 27)],
)
@requirement("answer.time")
def test_time_of_a_call_is_the_workers_wait_minus_margin_and_age(
    age_s: float, suspend_s: float | None, expected: float
) -> None:
    assert left_s(age_s, suspend_s) == pytest.approx(expected, abs=0.5)


@pytest.mark.parametrize(("age_s", "suspend_s"), [(27, None), (28, 10), (57, 60), (120, 500)])
@requirement("answer.time")
def test_a_call_that_cannot_end_in_time_has_none_left(age_s: float, suspend_s: float | None) -> None:
    assert left_s(age_s, suspend_s) == 0


# The turn's deadline, which a result of another call of the step resets.


@dataclass
class OtherCall:
    """A kernel in which another call of the step gets its result at this second; the first `unknown` queries fail."""

    answered_at: float
    unknown: int = 0
    looks: list[int] = field(default_factory=list)

    async def last_result_age_s(self, *_: str) -> float | None:
        now = asyncio.get_running_loop().time()
        self.looks.append(round(now))
        if len(self.looks) <= self.unknown:
            raise Unavailable("PostgreSQL: connection refused")
        return None if now < self.answered_at else now - self.answered_at


@pytest.mark.parametrize(
    ("other", "ends_at", "looks"),
    [
        (OtherCall(10), 10 + 27, [27]),
        (OtherCall(28), 28 + 27, [27, 54]),
        (OtherCall(53), 53 + 27, [27, 54]),
        (OtherCall(55), 55 + 27, [27, 54, 81]),
        (OtherCall(1_000), 87, [27, 54, 81]),
        (OtherCall(10, unknown=1), 54, [27, 54]),
    ],
    ids=["early", "just after the look", "later", "much later", "never", "unknown at first"],
)
@requirement("run.turn_deadline")
def test_call_ends_before_a_deadline_set_by_another_result(
    other: OtherCall, ends_at: int, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        now = asyncio.get_running_loop().time
        monkeypatch.setattr(turn, "time", SimpleNamespace(monotonic=now))
        async with turn.turn_deadline(cast("Kernel", other), LIMITS, identity(), 27) as limit:
            with suppress(TimeoutError):
                async with Deadline(87, limit).limit():
                    await asyncio.sleep(1_000)
        assert (round(now()), other.looks) == (ends_at, looks)

    run_virtually(check())


# The upstream's `timeout`, computed from the remaining time of a call.


IDLE = {"respondTiming": "resource-idle"}


def sent_parameters(mode: str, left_s: float, **parameters: Any) -> dict[str, Any]:
    return dict(ENDPOINTS[mode].timeouts.within(parameters, left_s, has_own_limit=True))


@requirement("upstream.request")
@pytest.mark.parametrize(
    ("mode", "left_s", "given_parameters", "added"),
    [
        ("reader", 27, {}, {"timeout": 13}),
        ("reader", 26.9, {}, {"timeout": 12.875}),
        ("reader", 6, {}, {"timeout": 2.5}),
        ("reader", 2, {}, {"timeout": 1}),
        ("reader", 40.9, {}, {"timeout": 19.875}),
        ("reader", 41, {}, {"timeout": 20, **IDLE}),
        ("reader", 1_000, {}, {"timeout": 180, **IDLE}),
        ("reader", 27, {"engine": "browser"}, {"timeout": 26, **IDLE}),
        ("reader", 27, {"engine": "auto"}, {"timeout": 13}),
        ("reader", 61, {"respondWith": "pageshot"}, {"timeout": 30, "respondTiming": "media-idle"}),
        ("reader", 61, {"withIframe": True}, {"timeout": 30}),
        ("reader", 61, {"respondTiming": "html"}, {"timeout": 30}),
        ("reader", 63, {"timeout": 5}, {"timeout": 5}),
        ("reader", 63, {"timeout": 25}, {"timeout": 25}),
        ("reader", 11, {"timeout": 25}, {"timeout": 5}),
        ("search", 27, {}, {"timeout": 26}),
        ("search", 63, {"respondWith": "markdown"}, {"timeout": 62}),
        ("search", 63, {"respondWith": "no-content"}, {}),
    ],
)
def test_a_stage_gets_its_share_of_what_is_left(
    mode: str, left_s: float, given_parameters: dict[str, Any], added: dict[str, Any]
) -> None:
    assert sent_parameters(mode, left_s, **given_parameters) == given_parameters | added


@requirement("upstream.request")
@given(left_s=st.floats(0, 5_000), engine=st.sampled_from(["auto", "curl"]), own=st.none() | st.integers(1, 180))
def test_the_upstream_is_done_before_the_call_is(left_s: float, engine: str, own: int | None) -> None:
    parameters = {"engine": engine} | ({"timeout": own} if own else {})
    timed = sent_parameters("reader", left_s, **parameters)
    assert 1 <= timed["timeout"] <= 180
    assert own is None or timed["timeout"] <= own
    stages_s = (1 if engine == "curl" else 2) * timed["timeout"]
    assert stages_s <= max(left_s - RESERVE_S, 2)


# The server's clock is right even if the local wall clock or single replies are wrong.


SERVER_S = 1_800_000_000.0


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Both local clocks, set by the test; the wall clock is 28 s ahead."""
    clocks = {"monotonic": 1000.0, "time": SERVER_S + 28}
    for name in ("monotonic", "time"):
        monkeypatch.setattr(time, name, lambda name=name: clocks[name])
    return clocks


def move(local: dict[str, float], seconds: float) -> None:
    for name in local:
        local[name] += seconds


@requirement("answer.time")
def test_local_clock_is_used_until_the_first_reply_and_logged_once(
    local: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    clock = ServerClock()
    assert [clock.time(), clock.time()] == [local["time"]] * 2
    assert clock.local_offset_s is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@requirement("answer.time")
def test_the_answer_with_the_shortest_round_trip_counts(local: dict[str, float]) -> None:
    clock = ServerClock()
    clock.observe(SERVER_S, 999.99, 1000.01)
    clock.observe(SERVER_S + 0.5, 1000.0, 1001.4)  # half the round trip was not half of it
    assert clock.time() == pytest.approx(SERVER_S)
    move(local, 20)
    assert clock.time() == pytest.approx(SERVER_S + 20)
    assert clock.local_offset_s == pytest.approx(28)


@requirement("answer.time")
def test_a_jump_of_the_local_wall_clock_changes_nothing_and_is_logged_once(
    local: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    clock = ServerClock()
    local["time"] = SERVER_S
    clock.observe(SERVER_S, 1000.0, 1000.0)
    assert not caplog.records
    local["time"] += 3600
    assert clock.time() == pytest.approx(SERVER_S)
    for _ in range(3):
        move(local, 1)
        clock.observe(SERVER_S + local["monotonic"] - 1000, local["monotonic"], local["monotonic"])
    assert [getattr(record, "action", "") for record in caplog.records] == ["clock.offset"]
    assert "3600.0 s ahead of that of NATS" in caplog.text


@requirement("answer.time")
def test_reply_of_the_server_expires_after_half_a_minute(local: dict[str, float]) -> None:
    clock = ServerClock()
    clock.observe(SERVER_S, 1000.0, 1000.0)
    move(local, 31)
    clock.observe(SERVER_S + 31.02, 1030.9, 1031.0)  # this clock drifts
    assert clock.time() == pytest.approx(SERVER_S + 31.07)


@requirement("answer.time")
def test_a_monotonic_clock_that_stood_still_is_noticed_with_the_next_answer(local: dict[str, float]) -> None:
    clock = ServerClock()
    clock.observe(SERVER_S, 1000.0, 1000.0)
    move(local, 1)
    clock.observe(SERVER_S + 600, 1000.9, 1001.0)  # the machine was suspended
    assert clock.time() == pytest.approx(SERVER_S + 600.05)
