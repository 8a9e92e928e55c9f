"""Worker processes: their limits, their end, and what each leads to for the callers."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import pytest

from openapi_tool.isolation import limits
from openapi_tool.isolation.frames import ANSWER, DONE
from openapi_tool.isolation.pool import MAX_KILLS, PoolBusy, TaskKilled, WorkerPool
from openapi_tool.isolation.process import Killed, Lost, WorkerProcess, _Exchange
from openapi_tool.isolation.service import CHECK_ARGUMENTS, Isolation
from openapi_tool.jina.response import Expected, Received
from openapi_tool.jina.response_task import READ_RESPONSE, response_result, response_task
from openapi_tool.options.budgets import BUDGETS, BudgetLimits
from openapi_tool.protocol.errors import ToolMisconfigured, ToolTimeout
from openapi_tool.protocol.payload import pack, unpack
from openapi_tool.protocol.records import DefinitionRecord
from openapi_tool.tools.argument_check import ArgumentCheck, CheckedArguments, check_arguments
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.output import ToolOutput
from tests.answering import MAX_BYTES
from tests.hostile.schemas import PRODUCTS
from tests.requirements import requirement
from tests.support import each
from tests.waiting import WAIT_S, until

OPTIONS: Any = {"jina": {"mode": "search"}}


def check(rule: Any, value: Any) -> ArgumentCheck:
    return ArgumentCheck({"type": "object", "properties": {"query": rule}}, {"query": value}, {}, {})


SLOW = check(*PRODUCTS["allOf"])
"""Takes 0.1 s of CPU."""
ENDLESS = check(*PRODUCTS["small fractions"])
"""Takes several times the limit."""
QUICK = check({"anyOf": [{"type": "string"}, {"type": "null"}]}, "x")


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    before, made = {*psutil.Process().children()}, WorkerPool(2, MAX_BYTES)
    yield made
    await made.aclose()
    assert {*psutil.Process().children()} <= before


async def run(pool: WorkerPool, wanted: ArgumentCheck, project: str = "a", wait_s: float = WAIT_S) -> CheckedArguments:
    task = pack({}, [wanted.as_text()])
    answer = await pool.run(CHECK_ARGUMENTS, [task], project=project, subject=b"definition", wait_s=wait_s)
    return CheckedArguments.of_text(answer.blobs[0])


async def child_of(pool: WorkerPool) -> psutil.Process:
    """Return the process that runs a task, once there is one."""
    async with asyncio.timeout(WAIT_S):
        while True:
            for pid in pool.pids:
                with suppress(psutil.Error):
                    for child in psutil.Process(pid).children():
                        return child
            await asyncio.sleep(0.001)


def of_action(caplog: pytest.LogCaptureFixture, action: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "action", "") == action]


def of_process(pid: int) -> dict[str, str]:
    folder = Path("/proc") / str(pid)
    opened = "\n".join(str(path.readlink()) for path in (folder / "fd").iterdir())
    return {"fd": opened, **{name: (folder / name).read_text() for name in ("environ", "maps")}}


def sockets_of(pid: int) -> list[str]:
    return [path for path in of_process(pid)["fd"].splitlines() if path.startswith("socket:")]


@requirement("isolation.limits")
async def test_worker_has_no_environment_no_files_and_limits(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JINA_API_KEY", "a-key-that-no-worker-may-have")
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)  # noqa: FBT003
        await run(pool, QUICK)
        running = asyncio.create_task(run(pool, SLOW))
        child = await child_of(pool)
        async with asyncio.timeout(WAIT_S):
            while len(sockets_of(child.pid)) > 1:  # noqa: ASYNC110 - it closes its worker's socket first of all
                await asyncio.sleep(0.001)
        for pid in (*pool.pids, child.pid):
            process, files = psutil.Process(pid), of_process(pid)
            assert files["environ"] == ""
            opened = files["fd"].splitlines()
            assert {path for path in opened if not path.startswith("socket:")} == {"/dev/null"}
            # Two sockets of a worker for the moment in which it hands one to its child.
            assert len(sockets_of(pid)) in ((1, 2) if pid in pool.pids else (1,))
            assert process.rlimit(psutil.RLIMIT_AS) == (limits.memory_bytes(MAX_BYTES),) * 2
            assert process.rlimit(psutil.RLIMIT_FSIZE) == process.rlimit(psutil.RLIMIT_CORE) == (0, 0)
            assert os.getpgid(pid) != os.getpgid(0)
            assert not [name for name in ("pydantic", "asyncpg", "aiohttp", "uvloop", "ssl") if name in files["maps"]]
        await running


@requirement("isolation.limits")
async def test_idle_workers_take_at_most_120_megabytes_together(pool: WorkerPool) -> None:
    await asyncio.gather(run(pool, QUICK, "a"), run(pool, QUICK, "b"))
    assert sum(psutil.Process(pid).memory_info().rss for pid in pool.pids) < 120e6


@requirement("isolation.limits")
async def test_task_over_its_cpu_limit_fails_its_own_call_and_no_other(
    pool: WorkerPool, caplog: pytest.LogCaptureFixture
) -> None:
    await run(pool, QUICK)
    attack = asyncio.create_task(run(pool, ENDLESS, "attacker"))
    await child_of(pool)
    assert await run(pool, QUICK, "victim") == CheckedArguments()
    assert not attack.done()
    with pytest.raises(TaskKilled):
        await attack
    assert [record.__dict__["project_id"] for record in of_action(caplog, "isolation.task_killed")] == ["attacker"]
    assert await run(pool, QUICK, "victim") == CheckedArguments()


@requirement("isolation.limits")
async def test_definition_killed_twice_is_refused_without_a_try_until_it_changes(
    pool: WorkerPool, caplog: pytest.LogCaptureFixture
) -> None:
    isolation = Isolation(pool)
    definition = await isolation.parse_definition(record({"enum": [[1], [2]]}), "a", WAIT_S)
    for _ in range(MAX_KILLS):
        running = asyncio.create_task(isolation.check_arguments(definition, SLOW, "a", WAIT_S))
        (await child_of(pool)).kill()  # as the kernel does without memory
        with pytest.raises(ToolMisconfigured, match="parameters"):
            await running
    with pytest.raises(ToolMisconfigured):
        await isolation.check_arguments(definition, QUICK, "a", WAIT_S)
    assert len(of_action(caplog, "isolation.task_killed")) == MAX_KILLS
    # The same definition in another project, and a changed one in this.
    assert await isolation.check_arguments(definition, QUICK, "b", WAIT_S) == CheckedArguments()
    changed = await isolation.parse_definition(record({"enum": [[1], [3]]}), "a", WAIT_S)
    assert await isolation.check_arguments(changed, QUICK, "a", WAIT_S) == CheckedArguments()


def record(rule: Any) -> DefinitionRecord:
    return DefinitionRecord("t", None, {"type": "object", "properties": {"query": rule}}, OPTIONS)


@requirement("isolation.limits")
async def test_worker_that_was_killed_is_replaced_and_leaves_no_zombie(pool: WorkerPool) -> None:
    await asyncio.gather(run(pool, QUICK, "a"), run(pool, QUICK, "b"))
    old = pool.pids
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    assert await run(pool, QUICK) == CheckedArguments()
    async with asyncio.timeout(WAIT_S):
        while any(map(psutil.pid_exists, old)):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)


@requirement("isolation.limits")
async def test_task_is_tried_again_if_its_worker_was_killed(pool: WorkerPool) -> None:
    await run(pool, QUICK)
    running = asyncio.create_task(run(pool, SLOW))
    child = await child_of(pool)
    os.killpg(os.getpgid(child.pid), signal.SIGKILL)
    assert (await running).problems


@requirement("isolation.limits")
async def test_worker_that_never_answers_is_killed(
    pool: WorkerPool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.gather(run(pool, QUICK, "a"), run(pool, QUICK, "b"))
    for pid in pool.pids:
        os.kill(pid, signal.SIGSTOP)
    isolation = Isolation(pool)
    definition = ToolDefinition("t", next(iter(_tools())), "POST", "/")
    with pytest.raises(ToolTimeout):
        await isolation.check_arguments(definition, QUICK, "a", 0.2)
    assert of_action(caplog, "isolation.worker_stuck")
    monkeypatch.setattr("openapi_tool.isolation.pool.wall_s", lambda _: 0.2)
    for _ in range(2):  # the other one is stopped, too
        with suppress(ToolTimeout):
            await isolation.check_arguments(definition, QUICK, "a", WAIT_S)
    monkeypatch.undo()
    assert await isolation.check_arguments(definition, QUICK, "a", WAIT_S) == CheckedArguments()


@requirement("isolation.limits")
async def test_worker_is_started_again_once_a_thread_can_be_started(
    pool: WorkerPool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        running = asyncio.create_task(run(pool, QUICK))
        await until(lambda: of_action(caplog, "isolation.unavailable") or running.done())
    assert await running == CheckedArguments()


@requirement("isolation.limits")
async def test_worker_that_cannot_run_is_started_ever_more_seldom(
    pool: WorkerPool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openapi_tool.isolation.process._TASKS_MODULE", "no_such_module")
    pool.start()
    await asyncio.sleep(2)
    assert 1 <= len(of_action(caplog, "isolation.worker_lost")) <= 12  # of 80 without a wait
    monkeypatch.undo()
    assert await run(pool, QUICK) == CheckedArguments()


@requirement("isolation.limits")
async def test_end_does_not_wait_for_the_next_start() -> None:
    worker = WorkerProcess(MAX_BYTES)
    worker._failures = 100  # noqa: SLF001
    worker.start()
    await asyncio.sleep(0)
    async with asyncio.timeout(4):
        await worker.aclose()


@requirement("isolation.limits")
async def test_task_waits_for_a_free_file_and_keeps_its_worker(pool: WorkerPool) -> None:
    await asyncio.gather(run(pool, QUICK, "a"), run(pool, QUICK, "b"))
    before, limit = pool.pids, resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limit[1]))
    try:
        running = asyncio.create_task(run(pool, QUICK))
        await asyncio.sleep(0.3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert await running == CheckedArguments()
    assert pool.pids == before


@requirement("isolation.fairness")
async def test_queue_of_one_projects_batches_refuses_no_other_project(pool: WorkerPool) -> None:
    await run(pool, QUICK)
    batches = [asyncio.create_task(run(pool, SLOW, "attacker")) for _ in range(1_100)]
    await asyncio.sleep(0)
    try:
        assert await run(pool, QUICK, "victim") == CheckedArguments()
    finally:
        for task in batches:
            task.cancel()
        await asyncio.gather(*batches, return_exceptions=True)


@pytest.mark.parametrize(
    "head",
    [
        b'{"value":{},"lengths":[' + b"0," * 2_000_000 + b"0]}",
        b'{"value":{"a":[' + b"[]," * 2_000_000 + b'0]},"lengths":[]}',
        b'{"value":{"a":["\\ud800",' + b"[]," * 300_000 + b'0]},"lengths":[]}',
    ],
    ids=["lengths", "lists", "lists for the slow parser"],
)
@requirement("isolation.limits")
async def test_answer_that_takes_long_to_parse_is_refused_unparsed(head: bytes) -> None:
    packed = len(head).to_bytes(4) + head
    exchange = _Exchange((), 7, len(packed))
    exchange.data_received(ANSWER.pack(7, DONE, len(packed)) + packed)
    exchange.connection_lost(None)
    with pytest.raises(Lost):
        exchange.result()


def test_answer_of_too_many_parts_is_no_payload() -> None:
    with pytest.raises(ValueError, match="parts"):
        unpack(pack({}, [b""] * 2_000))


def test_answer_with_a_negative_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="usage"):
        response_result(unpack(pack({"state": {}, "usage": [-1_000_000, 0]})))


@pytest.mark.long
@requirement("isolation.limits")
async def test_task_of_a_larger_response_gets_more_cpu_time() -> None:
    assert limits.cpu_s(MAX_BYTES) == 2
    assert limits.cpu_s(100_000_000) == 20
    pool, body = WorkerPool(2, 60_000_000), bytearray(b'{"data":{"content":"' + b"\\ud83d" * 9_900_000 + b'"}}')
    try:
        task = response_task(body, Expected("reader"), Received(200))
        answer = await pool.run(READ_RESPONSE, task, project="a", wait_s=60)
        assert isinstance(response_result(answer), ToolOutput)
    finally:
        await pool.aclose()


def _tools() -> Any:
    from openapi_tool.tools.catalogue import CATALOGUE  # noqa: PLC0415

    return CATALOGUE.values()


@requirement("isolation.limits")
async def test_cancelled_caller_frees_its_worker(pool: WorkerPool) -> None:
    await run(pool, QUICK)
    running = asyncio.create_task(run(pool, ENDLESS))
    child = await child_of(pool)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await run(pool, QUICK) == CheckedArguments()
    async with asyncio.timeout(WAIT_S):
        while psutil.pid_exists(child.pid):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)


@requirement("isolation.limits")
async def test_a_task_whose_workers_are_lost_again_and_again_is_done_in_the_end(pool: WorkerPool) -> None:
    """What it reads may be paid; the time of its call is the only limit."""
    await run(pool, QUICK)
    running = asyncio.create_task(run(pool, SLOW))
    lost: set[int] = set()
    async with asyncio.timeout(WAIT_S):
        while len(lost) < 4:
            for pid in {*pool.pids} - lost:
                lost.add(pid)
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.02)
        await running


@requirement("isolation.limits")
async def test_end_with_tasks_running_leaves_no_caller_waiting() -> None:
    pool = WorkerPool(2, MAX_BYTES)
    running = [asyncio.create_task(run(pool, ENDLESS, str(number))) for number in range(6)]
    await child_of(pool)
    await pool.aclose()
    async with asyncio.timeout(WAIT_S):
        outcomes = await asyncio.gather(*running, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {PoolBusy}
    assert pool.pids == []


@requirement("isolation.fairness")
async def test_projects_take_turns_and_one_of_slow_tasks_has_one_worker(pool: WorkerPool) -> None:
    await run(pool, QUICK)
    finished: list[str] = []

    async def call(project: str, wanted: ArgumentCheck) -> None:
        await run(pool, wanted, project)
        finished.append(project)

    async with asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(call("attacker", SLOW))
        await child_of(pool)
        assert sum(len(psutil.Process(pid).children()) for pid in pool.pids) == 1
        for _ in range(3):
            group.create_task(call("victim", QUICK))
    assert finished.index("victim") <= 1
    assert finished[-3:] == ["attacker"] * 3


@requirement("isolation.fairness")
async def test_a_project_of_few_short_tasks_waits_for_one_worker_however_many_send_slow_ones(pool: WorkerPool) -> None:
    await run(pool, QUICK)
    finished: list[str] = []
    half_done = asyncio.Event()

    async def call(project: str, wanted: ArgumentCheck) -> None:
        await run(pool, wanted, project)
        finished.append(project)
        if len(finished) == 5:
            half_done.set()

    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            for number in range(5):
                group.create_task(call(f"attacker {number}", SLOW))
        await half_done.wait()
        before = len(finished)
        await call("victim", QUICK)
    assert finished.index("victim") <= before + 2, "both workers may become free before"


@requirement("isolation.fairness")
async def test_wait_for_a_worker_ends_in_time(pool: WorkerPool) -> None:
    await run(pool, QUICK)
    first = asyncio.create_task(run(pool, SLOW))
    await child_of(pool)
    began = time.monotonic()
    with pytest.raises(PoolBusy):
        await run(pool, QUICK, wait_s=0.01)
    assert time.monotonic() - began < WAIT_S
    await first


@pytest.mark.parametrize(
    ("sent", "refusal"),
    [
        (b"", Killed),
        (ANSWER.pack(7, DONE, 2) + b"{", Killed),
        (ANSWER.pack(8, DONE, 2) + b"{}", Lost),
        (ANSWER.pack(7, DONE, 2) + b"{}" + ANSWER.pack(9, DONE, 2) + b"{}", Lost),
        (ANSWER.pack(7, DONE, 2**32 - 1) + b"{}", Lost),
        (bytes(3_000_000), Lost),
    ],
    ids=["nothing", "half an answer", "that of another task", "two answers", "too long by its length", "too long"],
)
@requirement("isolation.limits")
async def test_answer_that_is_not_this_tasks_is_refused(sent: bytes, refusal: type[Exception]) -> None:
    exchange = _Exchange((), 7, 2_000_000)
    exchange.data_received(sent)
    exchange.connection_lost(None)
    with pytest.raises(refusal):
        exchange.result()


@requirement("isolation.limits")
async def test_what_a_worker_cannot_read_ends_only_that_task(pool: WorkerPool) -> None:
    with pytest.raises(TaskKilled):
        await pool.run(CHECK_ARGUMENTS, [bytes(19 * 2**20)], project="a", subject=b"", wait_s=WAIT_S)
    assert await run(pool, QUICK) == CheckedArguments()


def test_budgets_are_those_of_the_settings() -> None:
    assert tuple(limit.name for limit in fields(BudgetLimits)) == BUDGETS


@each("number", ["1e400", "-1e400", str(2**64), str(-(2**70)), "1e-400", "0.1"])
@requirement("isolation.limits")
async def test_a_number_is_the_same_for_a_worker(number: str, pool: WorkerPool) -> None:
    for rule in ({"type": "integer"}, {"type": "number", "maximum": 9}, {"enum": [1, [2]]}):
        wanted = check(rule, json.loads(number))
        assert await run(pool, wanted) == check_arguments(wanted)


_HIDDEN = """
import ctypes, os, subprocess
from openapi_tool.isolation.privacy import hide_memory
os.setgid(65534)
os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # readable, as any program is after its start
hide_memory()
done = subprocess.run(["cat", f"/proc/{os.getpid()}/environ"], capture_output=True, text=True)
print("Permission denied" in done.stderr, "a-key" in done.stdout)
print(len(os.listdir("/proc/self/fd")) > 0)
print(all(open(f"/proc/self/{name}").read() for name in ("stat", "statm", "limits")))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@requirement("isolation.limits")
def test_a_process_of_the_same_user_cannot_read_the_keys_of_the_service() -> None:
    environment = {"PATH": os.environ["PATH"], "JINA_API_KEY": "a-key", "PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, "-c", _HIDDEN]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    assert done.stdout.split() == ["True", "False", "True", "True"], done.stderr
