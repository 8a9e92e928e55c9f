"""The circuit breaker, and helpers for asyncio."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest
import uvloop
from pydantic import SecretStr
from tenacity import stop_after_attempt, wait_none

from openapi_tool.concurrency import retries
from openapi_tool.concurrency.fair_semaphore import FairSemaphore
from openapi_tool.concurrency.keyed_lock import KeyedLock
from openapi_tool.concurrency.retries import retried
from openapi_tool.jina.body_reader import LARGE_READS
from openapi_tool.jina.byte_semaphore import ByteSemaphore
from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.connections import MAX_HANDSHAKES
from openapi_tool.jina.egress import tls_context
from openapi_tool.jina.options import EgressOptions
from openapi_tool.jina.request import UpstreamRequest
from openapi_tool.jina.response import Expected
from openapi_tool.jina.transport import PROJECT, AiohttpTransport
from openapi_tool.kernel.jetstream.fetch_mode import FetchMode
from openapi_tool.kernel.postgres.breaker import MAX_PROBE_INTERVAL_S, CircuitBreaker, StoreOperation
from openapi_tool.kernel.postgres.failures import StatementContended, located
from openapi_tool.kernel.postgres.guarded_store import GuardedStore
from openapi_tool.local.executor import LoopbackResolver
from openapi_tool.options.postgres import PoolOptions, PostgresOptions
from openapi_tool.protocol.errors import NeedsOperator, ToolError, Unavailable
from openapi_tool.protocol.report import TurnCondition
from openapi_tool.service.database_monitor import DatabaseMonitor
from openapi_tool.telemetry.health import Health
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.inline_bounds import SMALL
from openapi_tool.tools.secret_variables import Secret
from tests.answering import for_request
from tests.races.conftest import LOOPS, Run, iterate_loop, run_on
from tests.requirements import requirement
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from openapi_tool.kernel.postgres.store import KernelStore


OUTAGE = Unavailable("unavailable")
POOL = PoolOptions("v1r4", PostgresOptions(Secret("postgresql://db.example/kernel")))
DENIED = NeedsOperator("denied", "grant it")
SLOW = StatementContended("statement timeout")
both_loops = pytest.mark.parametrize(
    "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
Test = Callable[["BreakerHarness"], Coroutine[Any, Any, None]]


@dataclass
class BreakerHarness:
    """Breaker with a clock that the test sets, and how often it reported a change."""

    now: float = 1000.0
    changes: int = 0
    breaker: CircuitBreaker = field(init=False)

    def __post_init__(self) -> None:
        self.breaker = CircuitBreaker(self._changed, lambda: self.now)

    def _changed(self) -> None:
        self.changes += 1

    async def attempt(
        self,
        operation: StoreOperation = "commit",
        error: Exception | None = None,
        until: asyncio.Event | None = None,
        *,
        project: str = "proj",
        retry: bool = False,
    ) -> None:
        """Attempt an operation that ends when `until` is set, if given, with `error` or successfully."""
        with self.breaker.attempt(operation, project, retry=retry) as succeeded:
            if until is not None:
                await until.wait()
            if error is not None:
                raise error
            succeeded()

    async def fail(
        self,
        operation: StoreOperation = "commit",
        error: Exception = OUTAGE,
        *,
        project: str = "proj",
        retry: bool = False,
    ) -> None:
        with pytest.raises(type(error)):
            await self.attempt(operation, error, project=project, retry=retry)


def on(new_loop: Callable[[], asyncio.AbstractEventLoop], test: Test) -> None:
    async def limited() -> None:
        async with asyncio.timeout(WAIT_S):
            await test(BreakerHarness())

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(limited())


@both_loops
@requirement("breaker")
def test_a_failure_opens_it_with_its_reason_and_the_first_success_closes_it(new_loop: Any) -> None:
    async def test(harness: BreakerHarness) -> None:
        assert harness.breaker.reason == ""
        await harness.fail()
        await harness.fail()
        assert (harness.breaker.reason, harness.changes) == ("unavailable", 1)
        await harness.attempt()
        assert (harness.breaker.reason, harness.changes) == ("", 2)

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_a_defect_of_one_call_never_opens_it_and_never_closes_it(new_loop: Any) -> None:
    async def test(harness: BreakerHarness) -> None:
        await harness.fail(error=ValueError("22P02"))
        assert harness.breaker.reason == ""
        await harness.fail()
        await harness.fail(error=ValueError("22P02"))
        assert harness.breaker.reason == "unavailable"

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_loads_that_succeed_do_not_hide_commits_that_fail(new_loop: Any) -> None:
    async def test(harness: BreakerHarness) -> None:
        await harness.fail("commit")
        await harness.attempt("load")
        assert harness.breaker.reason == "unavailable"
        await harness.fail("load", DENIED)
        await harness.attempt("commit")
        assert harness.breaker.reason == "denied. grant it"
        await harness.attempt("load")
        assert harness.breaker.reason == ""

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_an_error_for_the_operator_replaces_the_reason_and_another_outage_does_not(new_loop: Any) -> None:
    async def test(harness: BreakerHarness) -> None:
        await harness.fail()
        await harness.fail(error=Unavailable("unavailable in other words"))
        assert harness.breaker.reason == "unavailable"
        await harness.fail(error=DENIED)
        assert harness.breaker.reason == "denied. grant it"

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_a_success_from_before_the_outage_does_not_close_it(new_loop: Any) -> None:
    async def test(harness: BreakerHarness) -> None:
        late = asyncio.Event()
        old = asyncio.create_task(harness.attempt(until=late))
        await asyncio.sleep(0)
        await harness.fail()
        late.set()
        await old
        assert harness.breaker.reason == "unavailable"

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_an_attempt_that_hung_in_the_outage_does_not_open_it_again(new_loop: Any) -> None:
    async def test(harness: BreakerHarness) -> None:
        late = asyncio.Event()
        hung = asyncio.create_task(harness.attempt(error=OUTAGE, until=late))
        await asyncio.sleep(0)
        await harness.fail()
        await harness.attempt()
        late.set()
        with pytest.raises(Unavailable):
            await hung
        assert harness.breaker.reason == ""

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_retried_commits_are_probes_and_a_command_is_one_only_without_them(new_loop: Any) -> None:
    async def test(harness: BreakerHarness) -> None:
        await harness.fail()
        harness.now += MAX_PROBE_INTERVAL_S
        retried = asyncio.Event()
        waiting_result = asyncio.create_task(harness.attempt(error=OUTAGE, until=retried))
        await asyncio.sleep(0)
        assert not harness.breaker.may_probe
        retried.set()
        with pytest.raises(Unavailable):
            await waiting_result
        assert not harness.breaker.may_probe
        harness.now += MAX_PROBE_INTERVAL_S
        assert harness.breaker.may_probe

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_the_first_probe_comes_soon_and_later_ones_every_five_seconds(new_loop: Any) -> None:
    async def test(harness: BreakerHarness) -> None:
        pauses = []
        for _ in range(8):
            await harness.fail("load")
            began = harness.now
            while not harness.breaker.may_probe:
                harness.now += 0.1
            pauses.append(round(harness.now - began, 1))
        assert pauses[0] <= 0.3
        assert pauses == sorted(pauses)
        assert pauses[-2:] == pytest.approx([MAX_PROBE_INTERVAL_S] * 2, abs=0.2)

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_a_health_check_that_succeeds_again_brings_the_next_probe_forward(new_loop: Any) -> None:
    async def test(harness: BreakerHarness) -> None:
        watch = DatabaseMonitor(Health(), POOL)
        watch.breaker = harness.breaker
        watch.mark_unavailable(OUTAGE)
        for _ in range(8):
            await harness.fail("load")
        harness.now += 1
        assert not harness.breaker.may_probe
        watch.mark_available()
        assert watch.fetch_mode() is FetchMode.PROBE

    on(new_loop, test)


@both_loops
@requirement("breaker", "health")
def test_one_fault_is_logged_once_whether_a_call_or_a_check_met_it(
    new_loop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Both reasons have the same form, although the check's names host and database; else one fault gets two lines."""

    async def test(_: BreakerHarness) -> None:
        watch = DatabaseMonitor(Health(), POOL)
        watch.mark_available()
        with pytest.raises(NeedsOperator), watch.breaker.attempt("commit", "proj"):
            raise NeedsOperator("PostgreSQL: no such column", "migrate")
        watch.mark_unavailable(NeedsOperator("PostgreSQL: no such column", "migrate"))

    with caplog.at_level("WARNING"):
        on(new_loop, test)
    assert [record.getMessage() for record in caplog.records] == [
        "postgres is unavailable: PostgreSQL at db.example:5432 (database kernel): no such column. migrate"
    ]


@both_loops
@requirement("breaker")
def test_it_reports_a_change_when_a_probe_is_due(new_loop: Any) -> None:
    async def test(harness: BreakerHarness) -> None:
        due = asyncio.Event()
        breaker = CircuitBreaker(lambda: due.set() if breaker.may_probe else None)
        with pytest.raises(Unavailable), breaker.attempt("load", "proj"):
            raise OUTAGE
        assert not due.is_set()
        await due.wait()

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_a_probe_that_proves_nothing_is_followed_by_the_next_one_at_once(new_loop: Any) -> None:
    """A command whose call already has a result is loaded and not committed."""

    async def test(harness: BreakerHarness) -> None:
        await harness.fail("commit")
        harness.now += MAX_PROBE_INTERVAL_S
        await harness.attempt("load")
        assert harness.breaker.reason == "unavailable"
        assert harness.breaker.may_probe

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_without_attempts_it_closes_only_after_a_while(new_loop: Any) -> None:
    async def test(harness: BreakerHarness) -> None:
        await harness.fail()
        harness.now += MAX_PROBE_INTERVAL_S
        harness.breaker.close_if_quiet()
        assert harness.breaker.reason == "unavailable"
        harness.now += MAX_PROBE_INTERVAL_S
        held = asyncio.Event()
        trying = asyncio.create_task(harness.attempt("load", until=held))
        await asyncio.sleep(0)
        harness.breaker.close_if_quiet()
        assert harness.breaker.reason == "unavailable"
        held.set()
        await trying
        harness.breaker.close_if_quiet()
        assert harness.breaker.reason == ""

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_an_attempt_that_is_cancelled_changes_nothing(new_loop: Any) -> None:
    async def test(harness: BreakerHarness) -> None:
        for before in ("", "unavailable"):
            attempt = asyncio.create_task(harness.attempt(until=asyncio.Event()))
            await asyncio.sleep(0)
            attempt.cancel()
            await asyncio.wait([attempt])
            assert harness.breaker.reason == before
            await harness.fail()

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_one_project_whose_commits_are_slow_repeatedly_never_opens_it(new_loop: Any) -> None:
    async def test(harness: BreakerHarness) -> None:
        for number in range(50):
            await harness.fail(error=SLOW, retry=bool(number % 2))
        assert (harness.breaker.reason, harness.changes) == ("", 0)
        await harness.attempt()
        await harness.fail(error=SLOW)  # another such call, later
        assert harness.breaker.reason == ""

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_calls_of_two_projects_in_a_row_whose_commits_are_slow_open_it_and_another_call_closes_it_for_good(
    new_loop: Any,
) -> None:
    """Retries of these calls neither open the breaker again nor delay the probe."""

    async def test(harness: BreakerHarness) -> None:
        await harness.fail(error=SLOW)
        await harness.fail(error=SLOW, project="other")
        assert harness.breaker.reason == "statement timeout"
        harness.now += 0.2
        waiting = asyncio.Event()
        retried = asyncio.create_task(harness.attempt(error=SLOW, until=waiting, retry=True))
        await asyncio.sleep(0)
        assert harness.breaker.may_probe  # the retry of a waiting result probes only its own rows
        waiting.set()
        with pytest.raises(StatementContended):
            await retried
        assert harness.breaker.may_probe
        await harness.attempt()
        assert harness.breaker.reason == ""
        await harness.fail(error=SLOW, retry=True)
        assert harness.breaker.reason == ""

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_a_waiting_result_that_is_slow_no_more_closes_it(new_loop: Any) -> None:
    async def test(harness: BreakerHarness) -> None:
        await harness.fail(error=SLOW)
        await harness.fail(error=SLOW, project="other")
        await harness.attempt(retry=True)
        assert harness.breaker.reason == ""

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_a_slow_commit_neither_hides_an_outage_nor_ends_its_probes(new_loop: Any) -> None:
    async def test(harness: BreakerHarness) -> None:
        await harness.fail()
        await harness.fail(error=SLOW)
        assert harness.breaker.reason == "unavailable"
        harness.now += MAX_PROBE_INTERVAL_S
        held = asyncio.Event()
        waiting = asyncio.create_task(harness.attempt(until=held, retry=True))
        await asyncio.sleep(0)
        assert not harness.breaker.may_probe  # a retry in an outage is a probe
        held.set()
        await waiting
        assert harness.breaker.reason == ""

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_an_outage_takes_the_place_of_slow_commits_and_a_retry_finds_it_too(new_loop: Any) -> None:
    async def test(harness: BreakerHarness) -> None:
        await harness.fail(error=SLOW)
        await harness.fail(error=OUTAGE, retry=True)
        assert harness.breaker.reason == "unavailable"
        await harness.attempt()
        await harness.fail(error=SLOW)
        await harness.fail(error=SLOW, project="other")
        await harness.fail(error=DENIED)
        assert harness.breaker.reason == "denied. grant it"

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_commits_that_are_slow_say_nothing_of_loads(new_loop: Any) -> None:
    async def test(harness: BreakerHarness) -> None:
        await harness.fail("commit", SLOW)
        await harness.fail("load", SLOW)
        assert harness.breaker.reason == ""
        await harness.fail("load", SLOW, project="other")
        assert harness.breaker.reason == "statement timeout"

    on(new_loop, test)


class _Store:
    """KernelStore whose commits return or raise the values of `says` in turn."""

    def __init__(self, says: list[bool | Exception]) -> None:
        self._says = says

    async def commit(self, *_: object) -> bool:
        said = self._says.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    report = commit


@both_loops
@requirement("breaker")
def test_a_commit_that_wrote_nothing_proves_nothing(new_loop: Any) -> None:
    async def test(harness: BreakerHarness) -> None:
        condition = TurnCondition.no_other_command()
        report: Any = SimpleNamespace(project_id="proj")
        card: Any = None
        given = card, report, None, condition
        store = GuardedStore(cast("KernelStore", _Store([OUTAGE, False, True, True])), harness.breaker)
        with pytest.raises(Unavailable):
            await store.commit(*given)
        assert not await store.commit(*given)
        assert harness.breaker.reason == "unavailable"
        assert await store.report("card", report, condition)
        assert harness.breaker.reason == "unavailable"
        assert await store.commit(*given)
        assert harness.breaker.reason == ""

    on(new_loop, test)


@requirement("start.reasons")
def test_an_outage_names_its_server_and_a_requeued_command_none() -> None:
    outage = Unavailable("PostgreSQL: connection refused; check postgres.dsn (PG_DSN)")
    text = located(str(outage), POOL)
    assert text == "PostgreSQL at db.example:5432 (database kernel): connection refused; check postgres.dsn (PG_DSN)"
    assert located(text, POOL) == text
    assert outage.problem == "PostgreSQL: connection refused"
    assert NeedsOperator("PostgreSQL: missing", "Grant it").problem == "PostgreSQL: missing"


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    return run_on(request.param)


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
            request = UpstreamRequest("POST", "r.jina.ai", "/", {}, b"{}", Expected("reader"))
            with memory.for_call() as reservation, pytest.raises(ToolError):
                await client.fetch(request, SecretStr("a-key"), Deadline.after(20), for_request(reservation))

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(fetch() for _ in range(calls)))
        watching.cancel()
        assert 0 < most <= 2 * LARGE_READS  # as many may end as others begin

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
        assert "".join(projects.began) == "abcabca"
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
        transport = AiohttpTransport(
            tls_context(None), EgressOptions(100), LoopbackResolver(server.sockets[0].getsockname()[1])
        )

        async def ask(project: str) -> None:
            request = httpx.Request("GET", "https://r.jina.ai/", extensions={PROJECT: project})
            await transport.handle_async_request(request)

        tasks = [asyncio.create_task(ask("large")) for _ in range(40)]
        writers = [await accepted.get() for _ in range(MAX_HANDSHAKES * 7 // 8)]
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
    monkeypatch.setattr(retries, "AsyncRetrying", None)
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


# Locks by key.


@requirement("usage.exact")
async def test_the_lock_of_a_key_is_held_by_one_task_in_order_of_arrival() -> None:
    lock, events = KeyedLock(), list[str]()

    async def run(name: str, key: str) -> None:
        async with lock.hold(key) as waited:
            events.append(f"{name} {waited}")
            await asyncio.sleep(0)

    await asyncio.gather(run("one", "a"), run("two", "a"), run("other", "b"), run("three", "a"))
    assert events == ["one False", "other False", "two True", "three True"]
    assert not lock._waiting  # noqa: SLF001 - it must not grow


@pytest.mark.parametrize("granted", [False, True], ids=["while it waits", "when it is its turn"])
@requirement("usage.exact")
async def test_a_cancelled_task_passes_the_lock_on(*, granted: bool) -> None:
    lock, release = KeyedLock(), asyncio.Event()

    async def hold_first() -> None:
        async with lock.hold("a"):
            await release.wait()

    async def hold() -> None:
        async with lock.hold("a"):
            pass

    first = asyncio.create_task(hold_first())
    await asyncio.sleep(0)
    cancelled, last = asyncio.create_task(hold()), asyncio.create_task(hold())
    await asyncio.sleep(0)
    if granted:
        release.set()
        await asyncio.sleep(0)  # the first has passed the lock on; the second task has not run since
    cancelled.cancel()
    release.set()
    await asyncio.wait_for(asyncio.gather(first, last), WAIT_S)
    await asyncio.wait([cancelled])
    assert cancelled.cancelled()
    assert not lock._waiting  # noqa: SLF001 - it must not grow
