"""Cooperative computations, fair semaphores and retries."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Callable

import httpx
import pytest
from pydantic import SecretStr
from tenacity import stop_after_attempt, wait_none

from openapi_tool import concurrency
from openapi_tool.concurrency import SMALL, FairSemaphore, Steps, TimeSlicer, retried
from openapi_tool.jina.byte_semaphore import ByteSemaphore
from openapi_tool.jina.client import _LARGE_READS, JinaClient
from openapi_tool.jina.egress import tls_context
from openapi_tool.jina.request import UpstreamRequest
from openapi_tool.jina.transport import HANDSHAKES, PROJECT, AiohttpTransport
from openapi_tool.local.executor import LoopbackResolver
from openapi_tool.protocol.errors import ToolError, Unavailable
from openapi_tool.tools.deadline import Deadline
from tests.races.fakes import LOOPS, Run, iterate_loop, run_on
from tests.requirements import requirement


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    return run_on(request.param)


@requirement("loop.answers")
def test_a_timer_that_is_due_runs_before_the_next_slice(run: Run) -> None:
    """Sockets, too: an event due after one slice must not wait for two."""

    async def check() -> None:
        loop = asyncio.get_running_loop()
        seen: list[str] = []

        def steps() -> Steps[None]:
            for number in range(5):
                loop.call_later(0.001, seen.append, f"timer {number}")
                until = time.perf_counter() + 0.01  # longer than a slice
                while time.perf_counter() < until:
                    pass
                seen.append(f"step {number}")
                yield

        await TimeSlicer().run(steps(), SMALL + 1)
        assert seen == [f"{what} {number}" for number in range(5) for what in ("step", "timer")]

    run(check())


@requirement("loop.answers")
def test_chunks_of_many_large_responses_are_not_read_in_one_iteration(run: Run) -> None:
    async def check() -> None:
        chunks, most, calls = 0, 0, 40

        class Body(httpx.AsyncByteStream):
            async def __aiter__(self):  # type: ignore[no-untyped-def]  # noqa: ANN204 - an async generator
                nonlocal chunks
                for number in range(6):
                    chunks += number > 1  # the first two are read before the body exceeds SMALL: without a wait
                    yield b"x" * SMALL

        async def watch() -> None:
            nonlocal chunks, most
            while True:
                most, chunks = max(most, chunks), 0
                await asyncio.sleep(0)

        client = JinaClient(httpx.MockTransport(lambda _: httpx.Response(200, stream=Body())), 10_000_000)
        memory = ByteSemaphore(1_000_000_000)

        async def fetch() -> None:
            request = UpstreamRequest("POST", "r.jina.ai", "/", {}, b"{}")
            with memory.for_call() as reservation, pytest.raises(ToolError):
                await client.fetch(request, SecretStr("a-key"), Deadline.after(20), reservation.for_request())

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(fetch() for _ in range(calls)))
        watching.cancel()
        assert 0 < most <= 2 * _LARGE_READS  # as many may end as others begin

    run(check())


# Permits that projects share: order, and no lost permit.


class Projects:
    """Work of projects under one semaphore; `began` lists the projects in the order of their starts."""

    def __init__(self, permits: int) -> None:
        self.semaphore = FairSemaphore(permits)
        self.began: list[str] = []
        self._ends: dict[str, list[asyncio.Event]] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def begin(self, project: str, number: int = 1) -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(self._work(project)) for _ in range(number)]
        self.tasks += tasks
        await iterate_loop()
        return tasks

    async def _work(self, project: str) -> None:
        async with self.semaphore.permit(project):
            self.began.append(project)
            end = asyncio.Event()
            self._ends.setdefault(project, []).append(end)
            await end.wait()

    async def end(self, project: str) -> None:
        """End the oldest work of a project."""
        self._ends[project].pop(0).set()
        await iterate_loop()

    async def end_all(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@requirement("fair.projects")
def test_the_next_permit_goes_to_the_project_that_holds_fewest(run: Run) -> None:
    async def check() -> None:
        projects = Projects(4)
        await projects.begin("large", 10)
        await projects.begin("small", 2)
        assert projects.began == ["large"] * 4
        await projects.end("large")
        await projects.end("large")
        assert projects.began[4:] == ["small", "small"]
        await projects.end("large")
        assert projects.began[6:] == ["large"]
        await projects.end_all()

    run(check())


@requirement("fair.projects")
def test_projects_that_hold_equally_many_take_turns(run: Run) -> None:
    async def check() -> None:
        projects = Projects(1)
        await projects.begin("a", 3)
        await projects.begin("b", 3)
        await projects.begin("c", 3)
        for _ in range(6):
            await projects.end(projects.began[-1])
        assert "".join(projects.began) == "aabcabc"  # the second of `a` waited before the others
        await projects.end_all()

    run(check())


@requirement("fair.projects")
def test_a_later_project_does_not_wait_for_one_that_holds_its_maximum(run: Run) -> None:
    async def check() -> None:
        projects = Projects(16)
        await projects.begin("large", 30)
        assert len(projects.began) == 14  # an eighth stays reserved for other projects
        await projects.begin("small")
        assert projects.began[14:] == ["small"]
        await projects.end("small")
        assert len(projects.began) == 15  # its permit stays reserved for the next project
        await projects.end_all()

    run(check())


@requirement("fair.projects")
@pytest.mark.parametrize("order", ["give first", "cancel first"])
def test_a_wait_cancelled_while_its_permit_is_granted_loses_no_permit(run: Run, order: str) -> None:
    async def check() -> None:
        projects = Projects(1)
        await projects.begin("a")
        [waiting] = await projects.begin("b")
        steps: list[Callable[[], object]] = [projects._ends["a"][0].set, waiting.cancel]  # noqa: SLF001
        for step in steps if order == "give first" else reversed(steps):
            step()
        await iterate_loop()
        await projects.begin("c")
        assert projects.began[-1] == "c"
        await projects.end_all()

    run(check())


@requirement("fair.projects")
def test_cancellations_neither_lose_nor_double_permits(run: Run) -> None:
    async def check() -> None:
        rng, at_once, most = random.Random(7), 0, 0  # noqa: S311 - not for secrets
        semaphore = FairSemaphore(5)

        async def work(project: str) -> None:
            nonlocal at_once, most
            async with semaphore.permit(project):
                at_once += 1
                most = max(most, at_once)
                try:
                    for _ in range(rng.randrange(4)):
                        await asyncio.sleep(0)
                finally:
                    at_once -= 1

        tasks: list[asyncio.Task[None]] = []
        for _ in range(600):
            tasks.append(asyncio.create_task(work(rng.choice("abcdef"))))
            if rng.random() < 0.5:
                rng.choice(tasks).cancel()
            if rng.random() < 0.5:
                await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (at_once, most) == (0, 5)
        barrier = asyncio.Barrier(5)

        async def meet(project: str) -> None:
            async with semaphore.permit(project):
                await barrier.wait()

        await asyncio.gather(*map(meet, "abcde"))  # all five are there again

    run(check())


@requirement("fair.projects")
def test_handshakes_of_one_project_leave_some_for_another(run: Run) -> None:
    """The server accepts and never responds: without shares the first project would block all others."""

    async def check() -> None:
        accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
        server = await asyncio.start_server(
            lambda _, writer: accepted.put_nowait(writer), socket.gethostbyname("localhost"), 0
        )
        transport = AiohttpTransport(tls_context(None), 100, LoopbackResolver(server.sockets[0].getsockname()[1]))

        async def ask(project: str) -> None:
            request = httpx.Request("GET", "https://r.jina.ai/", extensions={PROJECT: project})
            await transport.handle_async_request(request)

        tasks = [asyncio.create_task(ask("large")) for _ in range(40)]
        writers = [await accepted.get() for _ in range(HANDSHAKES * 7 // 8)]
        await asyncio.sleep(0.1)
        assert accepted.empty()
        tasks.append(asyncio.create_task(ask("small")))
        writers.append(await accepted.get())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await transport.aclose()
        server.close()
        for writer in writers:
            writer.close()
        await iterate_loop()

    run(check())


# Retries: number, kinds of failures, cost of a first success.


class Attempts:
    """Coroutine function that raises these exceptions in turn, then succeeds."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.made = 0

    async def __call__(self) -> int:
        self.made += 1
        if self.failures:
            raise self.failures.pop(0)
        return self.made


@requirement("answer.parked")
async def test_the_first_success_needs_no_tenacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "AsyncRetrying", None)
    assert await retried(Attempts(), on=Unavailable, wait=wait_none()) == 1


@requirement("answer.parked")
async def test_failures_are_retried_until_the_stop_and_the_last_is_raised() -> None:
    one, two, three = Unavailable("one"), Unavailable("two"), Unavailable("three")
    waits: list[int] = []
    attempts = Attempts(one, two)
    assert (
        await retried(attempts, on=Unavailable, wait=wait_none(), before_sleep=lambda s: waits.append(s.attempt_number))
        == 3
    )
    assert waits == [1, 2]
    attempts = Attempts(one, two, three)
    with pytest.raises(Unavailable, match="two"):
        await retried(attempts, on=Unavailable, wait=wait_none(), stop=stop_after_attempt(2))
    assert attempts.made == 2


@requirement("answer.parked")
async def test_an_exception_of_another_type_ends_the_retries() -> None:
    for attempts, made in (
        (Attempts(ValueError("first")), 1),
        (Attempts(Unavailable("connection refused"), ValueError("then")), 2),
    ):
        with pytest.raises(ValueError, match=r"first|then"):
            await retried(attempts, on=Unavailable, wait=wait_none())
        assert attempts.made == made
