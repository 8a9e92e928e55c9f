"""The circuit breaker's races, on both event loops, without a database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import uvloop

from openapi_tool.assembly import DatabaseMonitor
from openapi_tool.bus.held import FetchMode
from openapi_tool.kernel.breaker import MAX_PROBE_INTERVAL_S, CircuitBreaker, GuardedStore, Operation
from openapi_tool.kernel.failures import Contended, located
from openapi_tool.protocol.errors import NeedsOperator, Unavailable
from openapi_tool.telemetry.health import Health
from tests.requirements import requirement

if TYPE_CHECKING:
    from openapi_tool.kernel.store import KernelStore

OUTAGE = Unavailable("unavailable")
DENIED = NeedsOperator("denied", "grant it")
SLOW = Contended("statement timeout")
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
        operation: Operation = "commit",
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
        operation: Operation = "commit",
        error: Exception = OUTAGE,
        *,
        project: str = "proj",
        retry: bool = False,
    ) -> None:
        with pytest.raises(type(error)):
            await self.attempt(operation, error, project=project, retry=retry)


def on(new_loop: Callable[[], asyncio.AbstractEventLoop], test: Test) -> None:
    async def limited() -> None:
        async with asyncio.timeout(10):
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
        watch = DatabaseMonitor(Health())
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
    """Without the same form of both reasons (the check's names host and database) one fault would be two lines."""

    async def test(_: BreakerHarness) -> None:
        watch = DatabaseMonitor(Health(), "db.example:5432 (database kernel)")
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
    """Their retries neither open it again, nor put the probe off."""

    async def test(harness: BreakerHarness) -> None:
        await harness.fail(error=SLOW)
        await harness.fail(error=SLOW, project="other")
        assert harness.breaker.reason == "statement timeout"
        harness.now += 0.2
        waiting = asyncio.Event()
        retried = asyncio.create_task(harness.attempt(error=SLOW, until=waiting, retry=True))
        await asyncio.sleep(0)
        assert harness.breaker.may_probe  # a result that waits is no probe of anything but its own rows
        waiting.set()
        with pytest.raises(Contended):
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
        assert not harness.breaker.may_probe  # that of an outage is one
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
    """In place of a KernelStore: what a commit says next."""

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
        given: Any = (None, SimpleNamespace(project_id="proj"))
        store = GuardedStore(cast("KernelStore", _Store([OUTAGE, False, True, True])), harness.breaker)
        with pytest.raises(Unavailable):
            await store.commit(*given)
        assert not await store.commit(*given)
        assert harness.breaker.reason == "unavailable"
        assert await store.report(*given)
        assert harness.breaker.reason == "unavailable"
        assert await store.commit(*given)
        assert harness.breaker.reason == ""

    on(new_loop, test)


@requirement("start.reasons")
def test_an_outage_names_the_settings_of_its_kernel_and_a_requeued_command_none() -> None:
    own = "dialects.v1r3.postgres.dsn (OPENAPI_TOOL__DIALECTS__V1R3__POSTGRES__DSN)"
    outage = Unavailable("PostgreSQL: connection refused; check postgres.dsn (PG_DSN)")
    text = located(str(outage), "db:5432 (database older)", own)
    assert text == f"PostgreSQL at db:5432 (database older): connection refused; check {own}"
    assert located(text, "db:5432 (database older)", own) == text
    pooled = located("PostgreSQL: x. set postgres.prepared_statements = false", "db", own)
    assert pooled.endswith("set dialects.v1r3.postgres.prepared_statements = false")
    assert outage.problem == "PostgreSQL: connection refused"
    assert NeedsOperator("PostgreSQL: missing", "Grant it").problem == "PostgreSQL: missing"
