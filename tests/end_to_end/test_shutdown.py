"""The end of a `serve` process is bounded by its drain, whatever blocks: name resolution, a lock, a silent server."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import asyncpg
import psutil
import pytest

from openapi_tool.local.caller import Caller
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.local.stack import EmbeddedStack
from tests.conftest import AGENT, PROJECT, StartExecutor, search_tool
from tests.hostile.schemas import PRODUCTS
from tests.requirements import requirement
from tests.support import dsn_of
from tests.waiting import WAIT_S, until

DRAIN_S = 2.0
MARGIN_S = 1.5
"""For a busy machine; the last log lines get at most a second of it."""


# A resolver that swallows queries: nothing reads from the socket at port 53, in a network of its own.
RESOLVER = """
import fcntl, os, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
swallow = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
swallow.bind(("127.0.0.1", 53))
swallow.set_inheritable(True)
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
"""
ISOLATED = ("unshare", "--user", "--map-root-user", "--mount", "--net", "--")
SERVE = "from openapi_tool.__main__ import main; main()"
WITHOUT_UVLOOP = f"import sys; sys.modules['uvloop'] = None; {SERVE}"


@cache
def may_isolate() -> bool:
    if not shutil.which("unshare"):
        return False
    mounted = ["sh", "-c", "mount --bind /dev/null /etc/resolv.conf"]
    return not subprocess.run([*ISOLATED, *mounted], capture_output=True, check=False).returncode  # noqa: S603 - fixed


@pytest.mark.skipif(not may_isolate(), reason="user namespaces are not permitted here")
@pytest.mark.parametrize("program", [SERVE, WITHOUT_UVLOOP], ids=["uvloop", "asyncio"])
@requirement("run.stop")
def test_threads_that_resolve_names_do_not_delay_the_exit(program: str, tmp_path: Path) -> None:
    """Each loop resolves names in threads, which cannot be cancelled and wait for minutes for a resolver."""
    resolv_conf, log = tmp_path / "resolv.conf", tmp_path / "log"
    resolv_conf.write_text("nameserver 127.0.0.1\noptions timeout:30 attempts:3\n", encoding="utf-8")
    script = 'mount --bind "$1" /etc/resolv.conf && shift && exec "$@"'
    environment = {
        "PATH": os.environ["PATH"],
        "PG_DSN": "postgresql://postgres.example.org/kernel",
        "NATS_SERVERS": "nats://nats.example.org:4222",
        "OPENAPI_TOOL__EXECUTOR__DRAIN_TIMEOUT_S": str(DRAIN_S),
    }
    command = [*ISOLATED, "sh", "-c", script, "sh", str(resolv_conf), sys.executable, "-c", RESOLVER, program, "serve"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)  # noqa: S603 - our own
    try:
        give_up = time.monotonic() + WAIT_S
        while not swallowed(process.pid):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < give_up, log.read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DRAIN_S + MARGIN_S) == 0
    finally:
        process.kill()
        process.wait()
    assert '"service.stopped"' in log.read_text()


def swallowed(pid: int) -> bool:
    """Return whether queries of a process wait at port 53 of its network."""
    sockets = [line.split() for line in Path(f"/proc/{pid}/net/udp").read_text(encoding="utf-8").splitlines()[1:]]
    return any(fields[1].endswith(":0035") and int(fields[4].partition(":")[2], 16) for fields in sockets)


@pytest.mark.alone
@requirement("run.stop", "cancel.once")
async def test_commits_that_wait_for_a_lock_do_not_delay_the_exit_and_nothing_is_lost(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor, database: str
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    executor = start_executor({"OPENAPI_TOOL__EXECUTOR__DRAIN_TIMEOUT_S": str(DRAIN_S)})
    arguments = [{"query": "hello world", "count": count} for count in (1, 2, 3)]
    calls = [await caller.place(PROJECT, AGENT, "jina_search", wanted, publish=False) for wanted in arguments]
    locking = await asyncpg.connect(stack.postgres.dsn(database))
    async with locking.transaction():
        await locking.execute("lock table state.agent_inbox in exclusive mode")  # which permits reads
        for call in calls:
            await caller.publish(call)
        async with asyncio.timeout(WAIT_S):
            while await waiting_statements(locking) < len(calls):  # noqa: ASYNC110 - a table has no event
                await asyncio.sleep(0.05)
        began = time.monotonic()
        executor.signal(signal.SIGTERM)
        assert await asyncio.to_thread(executor.process.wait, WAIT_S) == 0
        assert time.monotonic() - began < DRAIN_S + MARGIN_S
    await locking.close()
    start_executor()
    for call in calls:
        await caller.result(call, WAIT_S)
    results = await caller.database.fetch(
        "select count(*) as number from cards where metadata->>'type' = 'tool.result' group by tool_call_id"
    )
    assert [row["number"] for row in results] == [1] * len(calls)
    assert len(stack.upstream.requests()) == len(calls)  # paid results were parked


async def waiting_statements(connection: asyncpg.Connection) -> int:
    return int(await connection.fetchval("select count(*) from pg_locks where not granted"))


@pytest.mark.alone
@requirement("run.stop")
async def test_what_a_silent_nats_cuts_off_is_logged(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    stack.upstream.rules({"hang": True})
    executor = start_executor({"OPENAPI_TOOL__EXECUTOR__DRAIN_TIMEOUT_S": str(DRAIN_S)})
    call = await caller.place(PROJECT, AGENT, "jina_search", {"query": "hello world", "count": 3})
    await asyncio.to_thread(stack.upstream.requests, at_least=1)
    assert stack.nats.process is not None
    stack.nats.process.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        executor.signal(signal.SIGTERM)
        assert await asyncio.to_thread(executor.process.wait, WAIT_S) == 0
        assert time.monotonic() - began < DRAIN_S + MARGIN_S
    finally:
        stack.nats.process.signal(signal.SIGCONT)
    lines = map(json.loads, executor.log_text().splitlines())
    [cut_off] = [line for line in lines if line["action"] == "service.cut_off"]  # the loop may log a line after it
    assert (cut_off["steps"], cut_off["running"]) == (["drain"], 1)
    stack.upstream.rules()
    start_executor()
    assert (await caller.result(call, WAIT_S)).card["content"]["status"] == "success"


@requirement("run.side_tasks")
async def test_a_part_that_fails_ends_the_process_with_an_error_and_every_step_is_logged(
    stack: EmbeddedStack, caller: Caller, database: str
) -> None:
    del caller  # the fixture makes the streams
    executor = stack.executor(
        "broken", database, {"PG_DSN": dsn_of(stack, database)}, module="tests.end_to_end.broken_monitor"
    )
    executor.process.start(lambda: True)
    assert await asyncio.to_thread(executor.process.wait, WAIT_S) == 1
    actions = [json.loads(line)["action"] for line in executor.log_text().splitlines()]
    begun = actions.index("service.stopping")
    assert [action for action in actions[begun:] if action.startswith(("service.", "drain.", "process."))] == [
        "service.stopping",
        "drain.started",
        "drain.finished",
        *["service.step_done"] * 3,
        "process.crashed",
    ]


def workers_of(pid: int) -> list[psutil.Process]:
    """Return the worker processes of an executor, and their children."""
    return psutil.Process(pid).children(recursive=True)


async def ended(processes: list[psutil.Process]) -> None:
    """Wait until processes have ended; a zombie of a killed executor belongs to init, which this test may be."""
    async with asyncio.timeout(WAIT_S):
        while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def costly_call(caller: Caller) -> PlacedCall:
    """Store a definition whose arguments take a worker its whole CPU limit to check; return an unpublished call."""
    rule, value = PRODUCTS["small fractions"]
    schema = {"type": "object", "properties": {"query": rule}}
    await caller.add_tool(PROJECT, search_tool() | {"tool_name": "costly", "parameters": schema})
    return await caller.place(PROJECT, AGENT, "costly", {"query": value}, publish=False)


async def running_task(pid: int) -> None:
    """Wait until a worker of an executor has a child: a running task."""
    await until(lambda: any(worker.children() for worker in psutil.Process(pid).children()))


@requirement("run.stop", "isolation.limits")
async def test_end_with_a_task_in_a_worker_answers_the_call_or_hands_it_back(
    caller: Caller, start_executor: StartExecutor
) -> None:
    call = await costly_call(caller)
    executor = start_executor({"OPENAPI_TOOL__EXECUTOR__DRAIN_TIMEOUT_S": "1"})  # running calls get half of it
    await caller.publish(call)
    await running_task(executor.process.pid)
    workers = workers_of(executor.process.pid)
    executor.signal(signal.SIGTERM)
    assert await asyncio.to_thread(executor.process.wait, WAIT_S) == 0
    await ended(workers)
    start_executor()
    answer = await caller.result(call, WAIT_S)
    assert answer.card["content"]["error"]["code"] == "tool_misconfigured"


@requirement("run.stop", "isolation.limits")
async def test_workers_end_with_an_executor_that_is_killed(caller: Caller, start_executor: StartExecutor) -> None:
    call = await costly_call(caller)
    executor = start_executor()
    await caller.publish(call)
    await running_task(executor.process.pid)
    workers = workers_of(executor.process.pid)
    executor.process.kill()
    await ended(workers)
