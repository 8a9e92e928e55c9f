"""Pool of worker processes: whose task runs next, and what a killed task leads to.

A *task* is a call of one of the functions in `worker_tasks.py`, for a project. Its *subject* is what its cost depends
on, such as the content of a definition: if tasks of one subject are killed again and again, further ones are refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from cachetools import LRUCache

from openapi_tool.concurrency.fair_semaphore import FairSemaphore
from openapi_tool.isolation.limits import cpu_s, memory_bytes, task_bytes, wall_s
from openapi_tool.isolation.process import Broken, Killed, Lost, Stuck, WorkerProcess
from openapi_tool.protocol.payload import Parts, Payload, unpack
from openapi_tool.telemetry import metrics

log = logging.getLogger(__name__)

MAX_KILLS = 2
"""Kills of a subject's tasks after which further ones are refused without a try."""

_MAX_SUBJECTS = 4_096  # of which killed tasks are counted
# A task whose worker was lost is tried again: first at once, then after a pause that grows by this with each try.
_LOST_PAUSE_S = 0.1
_MAX_LOST_PAUSE_S = 1.0  # however many workers were lost in succession


class TaskKilled(Exception):
    """The task used too much CPU or memory, or was refused because earlier ones of its subject did."""


class PoolBusy(Exception):
    """No answer in time; the task itself may be innocent."""


class _Subject(NamedTuple):
    """What the cost of a project's tasks depends on; `content` is a hash, empty if kills are not counted."""

    project: str
    content: bytes


class WorkerPool:
    """Runs tasks in `size` worker processes, whose limits suit responses of `max_response_bytes`.

    The next task is one of the project that runs the fewest; among equal projects, of the one whose turn it is by the
    time that its tasks have taken. So, however many projects keep sending slow tasks, one that sends few waits only
    until a worker is free. A project runs at most one task fewer than there are workers, and at least one, so that a
    project which sends only slow tasks leaves a worker to the others. The queue has no limit of its own: it has at most
    one task for each running call, or for each item of a batch.
    """

    def __init__(self, size: int, max_response_bytes: int) -> None:
        self._max_response_bytes = max_response_bytes
        self._workers = [WorkerProcess(max_response_bytes) for _ in range(size)]
        self._idle = list(self._workers)
        self._permits = FairSemaphore(size, max_per_project=max(1, size - 1))  # one for each worker
        self._closed = False
        self._kills: LRUCache[_Subject, int] = LRUCache(_MAX_SUBJECTS)
        metrics.ISOLATION_WAITING.set_function(lambda: self._permits.waiting)

    def start(self) -> None:
        """Start all workers in the background, so that the first task need not wait for one."""
        for worker in self._workers:
            worker.start()

    @property
    def pids(self) -> list[int]:
        """Return the ids of the running workers."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    async def run(
        self,
        name: str,
        argument: Parts,
        *,
        project: str,
        wait_s: float,
        subject: bytes = b"",
    ) -> Payload:
        """Run a task of `worker_tasks.TASKS` for a project and return its result.

        The argument is a packed payload in one or more parts, which must not change meanwhile. `subject` is a hash of
        what the cost depends on, such as a definition; kills of tasks without it are not counted.

        Raises TaskKilled, PoolBusy after `wait_s` seconds, and Broken for a defect.
        """
        with _measured(name):
            return await self._run(name, argument, _Subject(project, subject), time.monotonic() + wait_s)

    async def _run(self, name: str, argument: Parts, subject: _Subject, give_up_at: float) -> Payload:
        """Run a task when it is its project's turn."""
        is_too_large = sum(map(len, argument)) > task_bytes(self._max_response_bytes)
        if is_too_large or self._kills.get(subject, 0) >= MAX_KILLS:
            raise TaskKilled
        try:
            async with asyncio.timeout(max(0.0, give_up_at - time.monotonic())):
                await self._permits.take(subject.project)
        except TimeoutError:
            raise PoolBusy from None
        began = time.monotonic()
        worker = self._idle.pop()  # there is one: each permit stands for a worker
        try:
            return await self._run_on(worker, name, argument, subject, give_up_at)
        finally:
            self._idle.append(worker)
            self._permits.give(subject.project, cost=time.monotonic() - began)

    async def _run_on(
        self, worker: WorkerProcess, name: str, argument: Parts, subject: _Subject, give_up_at: float
    ) -> Payload:
        """Run a task on a worker, again if the worker was lost; translate its errors."""
        pause_s = 0.0
        while True:
            left_s = give_up_at - time.monotonic()
            limit_s = max(0.0, min(wall_s(self._max_response_bytes), left_s))
            try:
                return unpack(await worker.run(name, argument, limit_s))
            except Killed:
                self._count_kill(name, subject)
                raise TaskKilled from None
            except Stuck:
                log.warning(
                    "a worker process did not answer in time and was killed",
                    extra={"action": "isolation.worker_stuck", "task": name, "project_id": subject.project},
                )
                break
            except Lost:
                # The worker may have ended before this task, or because its host is short of memory. What the task
                # reads may be a response that was paid for, so the task is tried again.
                if self._closed or left_s <= pause_s:
                    break
            except ValueError as error:
                raise Broken("the result is no payload") from error
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s + _LOST_PAUSE_S, _MAX_LOST_PAUSE_S)
        raise PoolBusy  # not within a handler: the handled error would keep the argument in memory

    def _count_kill(self, name: str, subject: _Subject) -> None:
        if subject.content:
            self._kills[subject] = self._kills.get(subject, 0) + 1
        log.warning(
            "a task was killed: it needed more than %s s of CPU or %s MB of memory",
            cpu_s(self._max_response_bytes, name),
            memory_bytes(self._max_response_bytes) // 2**20,
            extra={
                "action": "isolation.task_killed",
                "task": name,
                "project_id": subject.project,
                "kills": self._kills.get(subject, 1),
            },
        )

    async def aclose(self) -> None:
        """Kill all workers, and wait until they have ended."""
        self._closed = True
        async with asyncio.TaskGroup() as group:
            for worker in self._workers:
                group.create_task(worker.aclose())


_OUTCOMES = {TaskKilled: "killed", PoolBusy: "late", asyncio.CancelledError: "cancelled"}


@contextmanager
def _measured(name: str) -> Iterator[None]:
    """Count a task and its time in the metrics, by its outcome."""
    began = time.monotonic()
    outcome = "done"
    try:
        yield
    except BaseException as error:  # a cancelled task counts, too
        outcome = _OUTCOMES.get(type(error), "broken")
        raise
    finally:
        metrics.ISOLATION_TASKS.labels(name, outcome).inc()
        metrics.ISOLATION_SECONDS.labels(name).observe(time.monotonic() - began)
