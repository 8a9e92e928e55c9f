"""The circuit breaker's races, on both event loops, without a database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pytest
import uvloop

from openapi_tool.bus.held import FetchMode
from openapi_tool.database_monitor import DatabaseMonitor
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
Test = Callable[["Bench"], Coroutine[Any, Any, None]]


@dataclass
class Bench:
    """A breaker with a clock that is moved by hand, and how often it reported a change."""

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
        retry: bool = False,
    ) -> None:
        """Try, end as said, and only when `until` is set."""
        with self.breaker.attempt(operation, retry=retry) as succeeded:
            if until is not None:
                await until.wait()
            if error is not None:
                raise error
            succeeded()

    async def fail(self, operation: Operation = "commit", error: Exception = OUTAGE, *, retry: bool = False) -> None:
        with pytest.raises(type(error)):
            await self.attempt(operation, error, retry=retry)


def on(new_loop: Callable[[], asyncio.AbstractEventLoop], test: Test) -> None:
    async def limited() -> None:
        async with asyncio.timeout(10):
            await test(Bench())

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(limited())


@both_loops
@requirement("breaker")
def test_a_failure_opens_it_with_its_reason_and_the_first_success_closes_it(new_loop: Any) -> None:
    async def test(bench: Bench) -> None:
        assert bench.breaker.reason == ""
        await bench.fail()
        await bench.fail()
        assert (bench.breaker.reason, bench.changes) == ("unavailable", 1)
        await bench.attempt()
        assert (bench.breaker.reason, bench.changes) == ("", 2)

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_a_defect_of_one_call_never_opens_it_and_never_closes_it(new_loop: Any) -> None:
    async def test(bench: Bench) -> None:
        await bench.fail(error=ValueError("22P02"))
        assert bench.breaker.reason == ""
        await bench.fail()
        await bench.fail(error=ValueError("22P02"))
        assert bench.breaker.reason == "unavailable"

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_loads_that_succeed_do_not_hide_commits_that_fail(new_loop: Any) -> None:
    async def test(bench: Bench) -> None:
        await bench.fail("commit")
        await bench.attempt("load")
        assert bench.breaker.reason == "unavailable"
        await bench.fail("load", DENIED)
        await bench.attempt("commit")
        assert bench.breaker.reason == "denied. grant it"
        await bench.attempt("load")
        assert bench.breaker.reason == ""

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_what_only_an_operator_can_mend_replaces_the_reason_and_another_outage_does_not(new_loop: Any) -> None:
    async def test(bench: Bench) -> None:
        await bench.fail()
        await bench.fail(error=Unavailable("away in other words"))
        assert bench.breaker.reason == "unavailable"
        await bench.fail(error=DENIED)
        assert bench.breaker.reason == "denied. grant it"

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_a_success_from_before_the_outage_does_not_close_it(new_loop: Any) -> None:
    async def test(bench: Bench) -> None:
        late = asyncio.Event()
        old = asyncio.create_task(bench.attempt(until=late))
        await asyncio.sleep(0)
        await bench.fail()
        late.set()
        await old
        assert bench.breaker.reason == "unavailable"

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_an_attempt_that_hung_in_the_outage_does_not_open_it_again(new_loop: Any) -> None:
    async def test(bench: Bench) -> None:
        late = asyncio.Event()
        hung = asyncio.create_task(bench.attempt(error=OUTAGE, until=late))
        await asyncio.sleep(0)
        await bench.fail()
        await bench.attempt()
        late.set()
        with pytest.raises(Unavailable):
            await hung
        assert bench.breaker.reason == ""

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_results_that_are_tried_again_are_the_probes_and_a_command_is_one_only_where_none_is(new_loop: Any) -> None:
    async def test(bench: Bench) -> None:
        await bench.fail()
        bench.now += MAX_PROBE_INTERVAL_S
        retried, waiting = asyncio.Event(), asyncio.Event()
        waiting_result = asyncio.create_task(bench.attempt(error=OUTAGE, until=retried))
        await asyncio.sleep(0)
        assert not bench.breaker.may_probe
        retried.set()
        with pytest.raises(Unavailable):
            await waiting_result
        assert not bench.breaker.may_probe
        bench.now += MAX_PROBE_INTERVAL_S
        assert bench.breaker.may_probe
        assert not waiting.is_set()

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_the_first_probe_comes_soon_and_later_ones_every_five_seconds(new_loop: Any) -> None:
    async def test(bench: Bench) -> None:
        pauses = []
        for _ in range(8):
            await bench.fail("load")
            began = bench.now
            while not bench.breaker.may_probe:
                bench.now += 0.1
            pauses.append(round(bench.now - began, 1))
        assert pauses[0] <= 0.3
        assert pauses == sorted(pauses)
        assert pauses[-2:] == pytest.approx([MAX_PROBE_INTERVAL_S] * 2, abs=0.2)

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_a_look_that_succeeds_again_brings_the_next_probe_forward(new_loop: Any) -> None:
    async def test(bench: Bench) -> None:
        watch = DatabaseMonitor(Health())
        watch.breaker = bench.breaker
        watch.mark_unavailable(OUTAGE)
        for _ in range(8):
            await bench.fail("load")
        bench.now += 1
        assert not bench.breaker.may_probe
        watch.mark_available()
        assert watch.fetch_mode() is FetchMode.PROBE

    on(new_loop, test)


@both_loops
@requirement("breaker", "health")
def test_one_fault_is_logged_once_whether_a_call_or_a_check_met_it(
    new_loop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The check's reason named host and database and the call's did not, so one fault was two lines."""

    async def test(_: Bench) -> None:
        watch = DatabaseMonitor(Health(), "db.example:5432 (database kernel)")
        watch.mark_available()
        with pytest.raises(NeedsOperator), watch.breaker.attempt("commit"):
            raise NeedsOperator("PostgreSQL: no such column", "migrate")
        watch.mark_unavailable(NeedsOperator("PostgreSQL: no such column", "migrate"))

    with caplog.at_level("WARNING"):
        on(new_loop, test)
    assert [record.getMessage() for record in caplog.records] == [
        "postgres is unavailable: PostgreSQL at db.example:5432 (database kernel): no such column. migrate"
    ]


@both_loops
@requirement("breaker")
def test_it_says_so_when_a_probe_is_due(new_loop: Any) -> None:
    async def test(bench: Bench) -> None:
        said = asyncio.Event()
        breaker = CircuitBreaker(lambda: said.set() if breaker.may_probe else None)
        with pytest.raises(Unavailable), breaker.attempt("load"):
            raise OUTAGE
        assert not said.is_set()
        await said.wait()

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_a_probe_that_proves_nothing_is_followed_by_the_next_one_at_once(new_loop: Any) -> None:
    """Commands whose calls are answered by now are loaded and never committed."""

    async def test(bench: Bench) -> None:
        await bench.fail("commit")
        bench.now += MAX_PROBE_INTERVAL_S
        await bench.attempt("load")
        assert bench.breaker.reason == "unavailable"
        assert bench.breaker.may_probe

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_it_is_forgotten_only_after_a_while_in_which_nothing_was_tried(new_loop: Any) -> None:
    async def test(bench: Bench) -> None:
        await bench.fail()
        bench.now += MAX_PROBE_INTERVAL_S
        bench.breaker.close_if_quiet()
        assert bench.breaker.reason == "unavailable"
        bench.now += MAX_PROBE_INTERVAL_S
        held = asyncio.Event()
        trying = asyncio.create_task(bench.attempt("load", until=held))
        await asyncio.sleep(0)
        bench.breaker.close_if_quiet()
        assert bench.breaker.reason == "unavailable"
        held.set()
        await trying
        bench.breaker.close_if_quiet()
        assert bench.breaker.reason == ""

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_an_attempt_that_is_cancelled_says_nothing(new_loop: Any) -> None:
    async def test(bench: Bench) -> None:
        for before in ("", "unavailable"):
            attempt = asyncio.create_task(bench.attempt(until=asyncio.Event()))
            await asyncio.sleep(0)
            attempt.cancel()
            await asyncio.wait([attempt])
            assert bench.breaker.reason == before
            await bench.fail()

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_one_call_whose_commit_is_slow_again_and_again_never_opens_it(new_loop: Any) -> None:
    async def test(bench: Bench) -> None:
        await bench.fail(error=SLOW)
        for _ in range(50):
            await bench.fail(error=SLOW, retry=True)
        assert (bench.breaker.reason, bench.changes) == ("", 0)
        await bench.attempt()
        await bench.fail(error=SLOW)  # another such call, later
        assert bench.breaker.reason == ""

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_two_calls_in_a_row_whose_commits_are_slow_open_it_and_another_call_closes_it_for_good(new_loop: Any) -> None:
    """Their retries neither open it again, nor put the probe off."""

    async def test(bench: Bench) -> None:
        await bench.fail(error=SLOW)
        await bench.fail(error=SLOW)
        assert bench.breaker.reason == "statement timeout"
        bench.now += 0.2
        waiting = asyncio.Event()
        retried = asyncio.create_task(bench.attempt(error=SLOW, until=waiting, retry=True))
        await asyncio.sleep(0)
        assert bench.breaker.may_probe  # a result that waits is no probe of anything but its own rows
        waiting.set()
        with pytest.raises(Contended):
            await retried
        assert bench.breaker.may_probe
        await bench.attempt()
        assert bench.breaker.reason == ""
        await bench.fail(error=SLOW, retry=True)
        assert bench.breaker.reason == ""

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_a_waiting_result_that_is_slow_no_more_closes_it(new_loop: Any) -> None:
    async def test(bench: Bench) -> None:
        await bench.fail(error=SLOW)
        await bench.fail(error=SLOW)
        await bench.attempt(retry=True)
        assert bench.breaker.reason == ""

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_a_slow_commit_neither_hides_an_outage_nor_ends_its_probes(new_loop: Any) -> None:
    async def test(bench: Bench) -> None:
        await bench.fail()
        await bench.fail(error=SLOW)
        assert bench.breaker.reason == "unavailable"
        bench.now += MAX_PROBE_INTERVAL_S
        held = asyncio.Event()
        waiting = asyncio.create_task(bench.attempt(until=held, retry=True))
        await asyncio.sleep(0)
        assert not bench.breaker.may_probe  # that of an outage is one
        held.set()
        await waiting
        assert bench.breaker.reason == ""

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_an_outage_takes_the_place_of_slow_commits_and_a_retry_finds_it_too(new_loop: Any) -> None:
    async def test(bench: Bench) -> None:
        await bench.fail(error=SLOW)
        await bench.fail(error=OUTAGE, retry=True)
        assert bench.breaker.reason == "unavailable"
        await bench.attempt()
        await bench.fail(error=SLOW)
        await bench.fail(error=SLOW)
        await bench.fail(error=DENIED)
        assert bench.breaker.reason == "denied. grant it"

    on(new_loop, test)


@both_loops
@requirement("breaker")
def test_commits_that_are_slow_say_nothing_of_loads(new_loop: Any) -> None:
    async def test(bench: Bench) -> None:
        await bench.fail("commit", SLOW)
        await bench.fail("load", SLOW)
        assert bench.breaker.reason == ""
        await bench.fail("load", SLOW)
        assert bench.breaker.reason == "statement timeout"

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
    async def test(bench: Bench) -> None:
        given: Any = (None, None)
        store = GuardedStore(cast("KernelStore", _Store([OUTAGE, False, True, True])), bench.breaker)
        with pytest.raises(Unavailable):
            await store.commit(*given)
        assert not await store.commit(*given)
        assert bench.breaker.reason == "unavailable"
        assert await store.report(*given)
        assert bench.breaker.reason == "unavailable"
        assert await store.commit(*given)
        assert bench.breaker.reason == ""

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
