"""A call that is cancelled at any await is either acknowledged with a result or handed back."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import suppress
from typing import cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.concurrency.cancellation import cancel_until_ended, shielded
from openapi_tool.engine.call import Call
from openapi_tool.jina.backend import JinaBackend, JinaBackendOptions
from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.memory_estimates import max_call_memory
from openapi_tool.jina.options import CacheOptions, EgressOptions, RetryOptions
from openapi_tool.jina.url_policy import UrlPolicy
from openapi_tool.kernel.jetstream.consumer import BackgroundTaskEnded, CommandConsumer
from openapi_tool.options.executor import ExecutorOptions
from openapi_tool.options.tools import ToolOptions
from openapi_tool.protocol.command import Command, Delivery
from openapi_tool.protocol.errors import BadRequest, Unavailable
from openapi_tool.protocol.records import CallRecords, DefinitionRecord
from openapi_tool.protocol.settlement import Acknowledge, Settlement
from openapi_tool.quotas.budgets import CallAccounts
from openapi_tool.service.kernel_parts import consumer_options
from openapi_tool.settings import Settings
from openapi_tool.telemetry.spans import WireTracer, shut_down
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.output import Item, ToolOutput
from openapi_tool.tools.policy import Authorizer, Policy
from openapi_tool.tools.time_limits import TimeLimits, longest_call_s
from tests.races.conftest import FakeTools, Run, Scene, Schedule, iterate_loop, run_virtually
from tests.requirements import requirement
from tests.support import SentByMock
from tests.waiting import WAIT_S


async def _refused(_: Schedule) -> ToolOutput:
    raise BadRequest("Correct the query and call again.")


async def _batch_with_a_defect(schedule: Schedule) -> ToolOutput:
    """Run two items, one of which raises an error when it is cancelled, like a defect in a `finally`."""

    async def item() -> None:
        await schedule.step("item")

    async def broken() -> None:
        try:
            await schedule.step("broken item")
        except asyncio.CancelledError:
            raise RuntimeError("a defect") from None

    async with asyncio.TaskGroup() as group:
        group.create_task(item())
        group.create_task(broken())
    return ToolOutput((Item("text"),))


RESULTS = {"success": None, "failure": _refused, "batch": _batch_with_a_defect}
PATHS = {"first": 1, "redelivered": 2}


async def _outcome(answer: str, attempt: int, cancels: tuple[int, ...]) -> list[str]:
    """Run a call, cancel it at these awaits, check its outcome, and return the names of its awaits."""
    schedule = Schedule()
    scene = Scene(schedule, tools=FakeTools(schedule, RESULTS[answer]))

    def cancel() -> None:
        task.cancel()

    schedule.acts = dict.fromkeys(cancels, cancel)
    task = scene.deliver(attempt=attempt)
    await scene.ended(task)
    where = f"cancelled at {[schedule.seen[number - 1] for number in cancels if number <= len(schedule.seen)]}"
    acknowledged, handed_back = scene.bus.sent(b""), scene.bus.sent(b"-NAK")
    assert (len(acknowledged), len(handed_back)) in {(1, 0), (0, 1)}, where
    assert len(scene.kernel.committed) == len(scene.publisher.published) == len(acknowledged), where
    statuses = {card.content["status"] for card in scene.kernel.committed}
    assert statuses <= {"failed" if answer == "failure" else "success"}, where
    if handed_back:
        assert scene.bus.lost(1) == attempt - 1, where  # a run that is handed back is not lost
    assert task.cancelled() == any(number <= len(schedule.seen) for number in cancels), where
    return schedule.seen


@pytest.mark.parametrize("attempt", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("answer", RESULTS)
@requirement("cancel.once")
def test_a_call_cancelled_at_any_await_is_acknowledged_or_handed_back(answer: str, attempt: int, run: Run) -> None:
    async def check() -> None:
        awaits = len(await _outcome(answer, attempt, ()))
        for number in range(1, awaits + 1):
            await _outcome(answer, attempt, (number,))

    run(check())


@pytest.mark.parametrize("attempt", PATHS.values(), ids=PATHS)
@requirement("cancel.once")
def test_a_call_in_an_outage_cancelled_at_any_await_is_handed_back_once(attempt: int, run: Run) -> None:
    async def play(at: int) -> int:
        schedule = Schedule()
        scene = Scene(schedule)

        def cancel() -> None:
            task.cancel()

        async def load(command: Command) -> CallRecords:
            del command
            await schedule.step("load")
            raise Unavailable("connection refused")

        schedule.acts, scene.kernel.load = {at: cancel}, load  # type: ignore[method-assign]
        task = scene.deliver(attempt=attempt)
        await scene.ended(task)
        sent = [data.partition(b" ")[0] for data in scene.bus.sent()]
        assert sent == [b"-NAK"], f"cancelled at {schedule.seen[at - 1 : at]}"
        return len(schedule.seen)

    async def check() -> None:
        for at in range(1, await play(0) + 1):
            await play(at)

    run(check())


@pytest.mark.parametrize("attempt", PATHS.values(), ids=PATHS)
@requirement("cancel.once")
def test_a_second_cancellation_changes_nothing(attempt: int, run: Run) -> None:
    async def check() -> None:
        awaits = len(await _outcome("success", attempt, ()))
        for first in range(1, awaits + 1):
            for second in range(first + 1, awaits + 8):
                await _outcome("success", attempt, (first, second))

    run(check())


class Pages(JinaBackend):
    """Jina tools over an upstream with two awaits per page: large pages, and one that is refused."""

    def __init__(self, schedule: Schedule) -> None:
        async def answer(request: httpx.Request) -> httpx.Response:
            await schedule.step("upstream started")
            page = json.loads(request.content)["url"].rpartition("/")[2]
            await schedule.step("upstream finished")
            if page == "refused":
                return httpx.Response(501)
            return httpx.Response(
                200, json={"code": 200, "data": {"content": "x" * 100_000, "url": "https://a.example"}}
            )

        options = JinaBackendOptions(
            RetryOptions(0, 0.01, 0.01),
            CacheOptions(60, 10_000),
            ToolOptions(),
            UrlPolicy(),
            EgressOptions(max_response_bytes=700_000, body_budget_bytes=max_call_memory(1_000_000) + 700_000),
        )
        super().__init__(JinaClient(SentByMock(answer), 1_000_000), options)


PAGES = {"urls": [f"https://a.example/{page}" for page in ("one", "two", "refused", "one")]}
MANY = DefinitionRecord("jina_search", None, {}, {"jina": {"mode": "reader", "tool": "jina.read_many"}})


@pytest.mark.parametrize("calls", [1, 2])
@requirement("cancel.once", "memory.limit")
def test_a_batch_cancelled_at_any_await_gives_all_memory_back_and_is_no_defect(calls: int, run: Run) -> None:
    """As in a drain without grace. Two calls with the same pages share requests and wait for memory."""

    async def play(at: int) -> int:
        schedule = Schedule()
        tools = Pages(schedule)
        whole = tools.semaphore.free_bytes
        scene = Scene(schedule, tools=tools)
        scene.kernel.tool, scene.kernel.arguments = MANY, PAGES
        scene.consumer.start()
        drains = list[asyncio.Task[None]]()
        schedule.acts = {at: lambda: drains.append(asyncio.create_task(scene.consumer.stop(0)))}
        await asyncio.wait([scene.deliver(number + 1) for number in range(calls)])
        await (drains[0] if drains else scene.consumer.stop(0))
        acknowledged, handed_back = scene.bus.sent(b""), scene.bus.sent(b"-NAK")
        assert len(acknowledged) + len(handed_back) == calls
        assert len(scene.kernel.committed) == len(acknowledged)
        assert {card.content["status"] for card in scene.kernel.committed} <= {"success"}
        assert tools.semaphore.free_bytes == whole
        return len(schedule.seen)

    async def check() -> None:
        for at in range(1, await play(0) + 1):
            await play(at)

    run(check())


@requirement("cancel.once")
def test_a_cancelled_call_whose_result_waits_for_the_database_is_handed_back(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExecutorOptions, "hand_back_s", 0.0)

    async def check() -> None:
        scene, waiting = Scene(), asyncio.Event()

        async def wait_forever() -> None:
            waiting.set()
            await asyncio.Event().wait()

        scene.kernel.before_commit = wait_forever
        task = scene.deliver()
        await waiting.wait()
        task.cancel()
        await scene.ended(task)
        assert (scene.bus.sent(), scene.kernel.committed, scene.bus.lost(1)) == ([b"-NAK"], [], 0)

    run(check())


# The drain.


@requirement("cancel.once")
def test_a_command_that_arrives_just_before_the_drain_cancels_is_handed_back(run: Run) -> None:
    async def check() -> None:
        scene = Scene()
        scene.deliver()
        await scene.consumer._running.cancel_all(10)  # noqa: SLF001 - one step of the drain
        assert scene.bus.sent() == [b"-NAK"]

    run(check())


@requirement("run.stop")
def test_a_call_that_ignores_cancellation_does_not_block_the_drain(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        end = asyncio.Event()

        async def ignore_cancellation(_: Delivery) -> Settlement:
            while not end.is_set():
                with suppress(asyncio.CancelledError):
                    await end.wait()
            return Acknowledge()

        scene = Scene(handle=ignore_cancellation)
        scene.consumer.start()
        task = scene.deliver()
        await iterate_loop()
        try:
            async with asyncio.timeout(WAIT_S):
                await scene.consumer.stop(0, hand_back_s=0)
            assert not task.done()
            stuck = [record.__dict__ for record in caplog.records if getattr(record, "action", "") == "call.stuck"]
            assert [line["project_id"] for line in stuck] == ["proj"]
        finally:
            end.set()
            await asyncio.wait([task])

    run(check())


@pytest.mark.parametrize("name", ["pull", "heartbeat"])
@pytest.mark.parametrize("error", [RuntimeError("a defect"), asyncio.CancelledError(), None])
@requirement("run.side_tasks")
def test_a_background_task_that_ends_in_any_way_ends_the_process(
    name: str, error: BaseException | None, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end(_: object) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(CommandConsumer, {"pull": "_keep_pulling", "heartbeat": "_send_heartbeats"}[name], end)

    async def check() -> None:
        scene = Scene()
        scene.consumer.start()
        with pytest.raises(BackgroundTaskEnded, match=name):
            await scene.consumer.wait_for_failure()

    run(check())


@requirement("run.side_tasks")
def test_a_heartbeat_task_that_fails_in_the_drain_ends_its_grace_and_the_process(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without heartbeats the commands would be redelivered to other replicas and run twice."""
    fail = asyncio.Event()

    async def heartbeats_that_fail(_: object) -> None:
        await fail.wait()
        raise RuntimeError("a defect")

    async def hang(_: Delivery) -> Settlement:
        await asyncio.Event().wait()
        return Acknowledge()

    monkeypatch.setattr(CommandConsumer, "_send_heartbeats", heartbeats_that_fail)

    async def check() -> None:
        scene = Scene(handle=hang)
        scene.consumer.start()
        scene.deliver()
        drain = asyncio.create_task(scene.consumer.stop(3600))
        await iterate_loop()
        assert not drain.done()
        fail.set()
        with pytest.raises(BackgroundTaskEnded, match="heartbeat"):
            await drain
        assert scene.bus.sent() == [b"-NAK"]

    run(check())


# Shielded work ends before its caller, its result is not lost, and no cancellation of the caller is swallowed.


class Work:
    """Work that waits for `go`, and records whether it ended or was cancelled."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go, self.error = asyncio.Event(), error
        self.was_cancelled = self.ended = False

    async def run(self) -> str:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        self.ended = True
        if self.error is not None:
            raise self.error
        return "settled"


@pytest.mark.parametrize("cancels", [1, 2, 5])
@requirement("cancel.once")
def test_shielded_work_returns_its_result_before_the_caller_is_cancelled(cancels: int, run: Run) -> None:
    async def check() -> None:
        work, recorded = Work(), list[str]()

        async def call() -> None:
            recorded.append(await shielded(work.run(), 60))
            await asyncio.sleep(0)
            recorded.append("continued")

        task = asyncio.create_task(call())
        for _ in range(cancels):
            await iterate_loop(3)
            task.cancel()
        await iterate_loop(3)
        assert not task.done()
        work.go.set()
        await asyncio.wait([task])
        assert (recorded, task.cancelled(), work.was_cancelled) == (["settled"], True, False)

    run(check())


@requirement("cancel.once")
def test_shielded_work_raises_its_error_and_the_caller_still_ends_as_cancelled(run: Run) -> None:
    async def check() -> None:
        work, recorded = Work(LookupError("why")), list[str]()

        async def call() -> None:
            try:
                await shielded(work.run(), 60)
            except LookupError as error:
                recorded.append(str(error))

        task = asyncio.create_task(call())
        for _ in range(2):
            await iterate_loop(3)
            task.cancel()
        work.go.set()
        await asyncio.wait([task])
        assert (recorded, task.cancelled()) == (["why"], True)

    run(check())


@pytest.mark.parametrize("cancels", [1, 2])
@requirement("cancel.once")
def test_shielded_work_is_cancelled_after_its_grace_and_has_ended_before_the_caller(cancels: int, run: Run) -> None:
    async def check() -> None:
        work = Work()
        task = asyncio.create_task(shielded(work.run(), 0))
        for _ in range(cancels):
            await iterate_loop(1)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert work.was_cancelled
        assert not work.ended

    run(check())


@requirement("cancel.once")
def test_a_cancellation_as_shielded_work_ends_is_not_lost(run: Run) -> None:
    async def check() -> None:
        work, recorded = Work(), list[str]()

        async def call() -> None:
            recorded.append(await shielded(work.run(), 60))

        task = asyncio.create_task(call())
        await iterate_loop(3)
        work.go.set()
        for _ in range(6):
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([task])
        assert (recorded, task.cancelled()) == (["settled"], True)

    run(check())


# Time limits of calls and of the end of the process.


@given(
    maximum_s=st.floats(1, 3_600),
    statement_s=st.floats(0.1, 600),
    commit_retry_timeout_s=st.floats(0.1, 3_600),
)
@requirement("answer.time")
def test_a_call_is_not_cancelled_as_overdue_before_the_sum_of_its_limits(
    maximum_s: float, statement_s: float, commit_retry_timeout_s: float
) -> None:
    settings = Settings(
        postgres={"dsn": "postgresql://127.0.0.1/unused", "timeout_s": statement_s},
        tools={"max_timeout_s": maximum_s},
        executor={"commit_retry_timeout_s": commit_retry_timeout_s},
    )
    max_run_s = consumer_options(build_bootstrap(settings, {}), 1).max_run_s
    load_s = commit_s = last_commit_s = reload_s = 2 * statement_s  # connection and statement
    assert max_run_s > load_s + maximum_s + commit_s + commit_retry_timeout_s + last_commit_s + reload_s


@requirement("answer.time")
def test_the_time_limit_of_a_call_includes_its_hooks() -> None:
    async def hook(_: object) -> None:
        """Allow everything."""

    limits = TimeLimits(ExecutorOptions(), ToolOptions())
    without = longest_call_s(limits, Authorizer(), 5)
    assert longest_call_s(limits, Authorizer(Policy(hook_timeout_s=30), {"one": hook, "two": hook}), 5) == without + 60


class _Stuck:
    """Tracer whose shutdown waits for `go`, like a collector that does not answer."""

    def __init__(self) -> None:
        self.go, self.ended = threading.Event(), threading.Event()

    def shutdown(self) -> None:
        self.go.wait(60)
        self.ended.set()


@requirement("run.stop")
def test_a_task_whose_library_drops_a_cancellation_does_not_delay_the_end_of_the_process(run: Run) -> None:
    """Otherwise the drain would take all of its time, and its last steps would be cut off."""

    async def work() -> None:
        answered = asyncio.get_running_loop().create_future()

        async def check_servers() -> None:
            while True:
                await asyncio.wait_for(answered, 60)  # drops a cancellation that arrives with the answer
                await asyncio.sleep(0.01)

        task = asyncio.create_task(check_servers())
        await iterate_loop()
        answered.set_result(None)
        await cancel_until_ended(task)
        assert task.cancelled()

    run(work())


@requirement("run.stop")
def test_the_last_spans_block_neither_the_event_loop_nor_the_end_of_the_process(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    tracer = _Stuck()
    began = time.monotonic()
    run(shut_down(tracer.shutdown, lambda: 0.02))  # the loop is closed, too
    assert time.monotonic() - began < 30, "the collector takes 60 s"
    assert [getattr(record, "action", "") for record in caplog.records] == ["traces.dropped"]
    tracer.go.set()
    assert tracer.ended.wait(20)


@requirement("run.stop")
def test_the_end_of_the_process_needs_no_further_thread(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may have no process id left for one."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    run(shut_down(WireTracer().shutdown))
    assert [getattr(record, "action", "") for record in caplog.records] == ["traces.dropped"]


@requirement("run.stop")
def test_a_cancelled_export_of_the_last_spans_does_not_block_the_end_of_the_process(run: Run) -> None:
    tracer = _Stuck()

    async def work() -> None:
        export = asyncio.create_task(shut_down(tracer.shutdown))
        await asyncio.sleep(0.01)
        export.cancel()
        await asyncio.wait([export])

    began = time.monotonic()
    run(work())  # the loop is closed, too
    assert time.monotonic() - began < 30
    tracer.go.set()
    assert tracer.ended.wait(20)


@requirement("run.stop")
def test_remaining_spans_are_exported_before_the_process_ends(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    tracer = _Stuck()
    tracer.go.set()
    run(shut_down(tracer.shutdown))
    assert tracer.ended.is_set()
    run(shut_down(WireTracer().shutdown))
    assert caplog.records == []


class _SlowJournal:
    """Accounts of a call whose cost is written after `write_s` seconds."""

    note = ""

    def __init__(self, write_s: float) -> None:
        self.write_s = write_s
        self.waits = asyncio.Event()

    def left(self) -> dict[str, object]:
        return {}

    async def wait_until_written(self) -> None:
        self.waits.set()
        await asyncio.sleep(self.write_s)


class _ChargedTools(FakeTools):
    """Tools that take `upstream_s` seconds, and whose calls are charged to `journal`."""

    upstream_s = 0.0
    journal: _SlowJournal

    async def run(self, _: ToolDefinition, __: Arguments, ___: Deadline, call: Call) -> ToolOutput:
        call.accounts = cast("CallAccounts", self.journal)
        await asyncio.sleep(self.upstream_s)
        return ToolOutput((Item("text"),))


@pytest.mark.parametrize("write_s", [0.05, 1.5])
@pytest.mark.parametrize("upstream_s", [1, 40], ids=["short", "after the turn was checked"])
@requirement("cancel.once")
def test_a_paid_result_is_committed_if_the_call_is_cancelled_while_its_cost_is_written(
    upstream_s: float, write_s: float
) -> None:
    """Handed back, the call would be paid again."""
    schedule = Schedule()
    tools = _ChargedTools(schedule)
    tools.upstream_s, tools.journal = upstream_s, _SlowJournal(write_s)

    async def check() -> None:
        scene = Scene(schedule, tools=tools)
        scene.kernel.tool = DefinitionRecord(
            "jina_search", None, {}, {"jina": {"mode": "search"}, "suspend_timeout_seconds": 120}
        )
        task = scene.deliver()
        await tools.journal.waits.wait()
        await asyncio.sleep(0.01)
        task.cancel()
        await scene.ended(task)
        assert (len(scene.kernel.committed), len(scene.bus.sent(b"")), scene.bus.sent(b"-NAK")) == (1, 1, [])

    run_virtually(check())


@pytest.mark.parametrize("project", ["a\u00a0b", "a*b", "a>b", "a\u2003b"])
@requirement("cancel.once")
def test_a_project_with_any_id_that_a_subject_can_have_gets_its_result(project: str) -> None:
    """NATS publishes to such subjects, although this service would not."""

    async def check() -> None:
        scene = Scene()
        scene.offer(scene.bus.message(project=project))
        await scene.ended(next(iter(scene.consumer._running.held_by_task)))  # noqa: SLF001 - for the test
        assert (len(scene.kernel.committed), len(scene.bus.sent(b""))) == (1, 1)

    run_virtually(check())
