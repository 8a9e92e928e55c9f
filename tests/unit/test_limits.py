"""Limits and refused keys of several replicas in one process."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count

import orjson
import pytest

from openapi_tool.cli.limits import limits_in_use, refused_keys
from openapi_tool.jina.failures import key_failure, upstream_failure
from openapi_tool.protocol.errors import AuthFailed, BudgetExceeded, ToolError, Unavailable
from openapi_tool.protocol.projects import AgentKey
from openapi_tool.quotas import key_record
from openapi_tool.quotas.key_record import RETRIES_S, STATES, KeyRecord
from openapi_tool.quotas.limiter import Limiter
from openapi_tool.quotas.options import KeyLimits, KeyPool, LimitOptions
from openapi_tool.quotas.permits import Permit, PermitRequest
from openapi_tool.state.port import OnChange, Stored
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.secret_variables import Secrets
from tests.requirements import requirement

RETRY_S = RETRIES_S[0]


@requirement("cli.limits")
def test_waiting_calls_of_all_projects_are_counted_although_few_are_named() -> None:
    limit = {"variable": "A", "endpoint": "search", "waiting": 40, "waiting_by_project": {"p": 2, "q": 1}}
    [entry] = limits_in_use([{"instance": name, "upstream_limits": [limit]} for name in ("one", "two")])
    assert (entry["waiting"], entry["waiting_by_project"]) == (80, {"p": 4, "q": 2})


ENVIRONMENT = {"A": "first value", "B": "second value"}
POOL = {"P": KeyPool(("A", "B"))}
NUMBERS = count()
NO_LIMITS = LimitOptions()


@dataclass
class Replicas:
    """Limiters of several replicas with one clock (`now`) and one store in memory.

    The store is unavailable while `down`, and can only be read while `full`.
    """

    options: LimitOptions = NO_LIMITS
    now: float = 1_000_000.0
    down: bool = False
    full: bool = False
    records: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    limiters: list[Limiter] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    secrets: Secrets = field(init=False)

    def start(self) -> Limiter:
        limiter = Limiter(f"r{len(self.limiters)}", self.options, self, lambda: self.now, key_failure)
        self.limiters.append(limiter)
        self.use(ENVIRONMENT)
        return limiter

    def use(self, environment: dict[str, str]) -> None:
        """Give all replicas these values."""
        self.secrets = Secrets(environment, {"A", "B", "P"}, self.options.pool_of)
        for limiter in self.limiters:
            limiter.keys.set_secrets(self.secrets)

    async def read(self, key: str) -> Stored:
        await asyncio.sleep(0)
        if self.down:
            raise Unavailable("the store is down")
        revision, value = self.records.get(key, (0, None))
        return Stored(value, revision)

    async def write(self, key: str, value: bytes, revision: int) -> int | None:
        await asyncio.sleep(0)
        if self.down or self.full:
            raise Unavailable("the store is down or full")
        if self.records.get(key, (0, b""))[0] != revision:
            return None
        self.put(key, value)
        return revision + 1

    def watch(self, on_change: OnChange) -> AbstractAsyncContextManager[None]:  # noqa: ARG002
        return nullcontext()  # the port lets a store report no change

    def put(self, key: str, value: bytes) -> None:
        """Store a record, and notify all replicas."""
        revision = self.records.get(key, (0, b""))[0] + 1
        self.records[key] = revision, value
        for limiter in self.limiters:
            limiter.on_change(key, Stored(value, revision))

    async def settled(self) -> None:
        for limiter in self.limiters:
            await limiter.keys.aclose()

    async def permit(
        self,
        limiter: Limiter,
        variable: str = "A",
        call: int | None = None,
        wait_s: float = 5,
        endpoint: str = "search",
    ) -> Permit:
        number = next(NUMBERS) if call is None else call
        key = self.secrets(variable)
        permit = await limiter.acquire(
            PermitRequest(variable, endpoint, AgentKey("p", "a"), Deadline.after(wait_s), key, call=number)
        )
        self.sent[permit.key.get_secret_value()] += 1
        return permit

    async def done(self, limiter: Limiter, variable: str = "A") -> str:
        """Send a request that succeeds; return the key."""
        permit = await self.permit(limiter, variable)
        permit.done(1)
        await self.settled()
        return permit.key.get_secret_value()

    async def refused(self, limiter: Limiter, status: int, variable: str = "A", call: int | None = None) -> int:
        """Send a request whose key is refused; return the number of retries with other keys."""
        permit = await self.permit(limiter, variable, call)
        retries = permit.failed(refusal(status))
        await self.settled()
        return retries

    async def fails_as_blocked(self, limiter: Limiter, endpoint: str) -> None:
        with pytest.raises(ToolError) as refused:
            await self.permit(limiter, endpoint=endpoint)
        assert f"refuses {endpoint} requests with this tool's key" in refused.value.message


def refusal(status: int) -> ToolError:
    return upstream_failure(status // 100, {"status": status}, None)


@asynccontextmanager
async def replicas(number: int = 2, options: LimitOptions = NO_LIMITS) -> AsyncIterator[Replicas]:
    world = Replicas(options)
    for _ in range(number):
        world.start()
    try:
        yield world
    finally:
        for limiter in world.limiters:
            await limiter.aclose()


_BEGINS = "The service refuses search requests with this tool's key, which"
_ENDS = "; the next call after 10 s tries it again."
_EXHAUSTED = f"{_BEGINS} has no balance left, so an operator must top it up or set another one{_ENDS}"
MESSAGES = {
    40102: f"{_BEGINS} is not valid, so an operator must set another one{_ENDS}",
    40201: _EXHAUSTED,
    40203: _EXHAUSTED,
}


@pytest.mark.parametrize(("status", "error"), [(40102, AuthFailed), (40201, BudgetExceeded), (40203, BudgetExceeded)])
@requirement("keys.blocked")
async def test_a_key_that_two_calls_find_refused_is_blocked_for_all_replicas(
    status: int, error: type[ToolError]
) -> None:
    async with replicas() as world:
        one, two = world.limiters
        await world.refused(one, status)
        await world.refused(two, status)
        for limiter in (one, two):
            with pytest.raises(error) as refused:
                await world.permit(limiter)
            assert refused.value.message == MESSAGES[status]
            assert refused.value.key_variable == "A"
            [key] = limiter.keys.snapshot()
            assert (key["variable"], key["endpoint"], key["status"]) == ("A", "search", status)
        assert await world.done(one, "B") == ENVIRONMENT["B"]
        late = world.start()
        await late.keys.load()
        with pytest.raises(error):
            await world.permit(late)


@pytest.mark.parametrize("statuses", [[40202] * 3, [40103] * 3, [40104] * 3, [40102, 40201, 40203], [40102, 40202]])
@requirement("keys.blocked")
async def test_faults_of_a_call_and_single_refusals_never_block_a_key(statuses: list[int]) -> None:
    async with replicas() as world:
        for number, status in enumerate(statuses):
            await world.refused(world.limiters[number % 2], status)
        assert [await world.done(limiter) for limiter in world.limiters] == [ENVIRONMENT["A"]] * 2


@requirement("keys.blocked", "hostile.neighbour")
async def test_a_key_that_serves_other_calls_between_two_refusals_is_not_blocked() -> None:
    async with replicas() as world:
        one, two = world.limiters
        for _ in range(3):
            await world.refused(one, 40201)
            assert await world.done(two) == "first value"
        running = await world.permit(two)
        await world.refused(one, 40201)
        await world.refused(one, 40201)
        assert ("A", "search") in one.keys.blocked
        running.done(1)
        await world.settled()
        assert ("A", "search") in two.keys.blocked, "the request was sent before the refusals"


@pytest.mark.parametrize("status", STATES)
@pytest.mark.parametrize(("refusing", "other"), [("search", "reader"), ("reader", "search")])
@requirement("keys.blocked")
async def test_a_key_that_one_endpoint_refuses_serves_the_other(refusing: str, other: str, status: int) -> None:
    async with replicas() as world:
        for limiter in world.limiters:
            permit = await world.permit(limiter, endpoint=refusing)
            (await world.permit(limiter, endpoint=other)).done(1)  # no success of the refusing endpoint
            permit.failed(refusal(status))
            await world.settled()
        for limiter in world.limiters:
            await world.fails_as_blocked(limiter, refusing)
            (await world.permit(limiter, endpoint=other)).done(1)
            assert [key["endpoint"] for key in limiter.keys.snapshot()] == [refusing]
            assert [key["endpoint"] for key in refused_keys([{"upstream_keys": limiter.keys.snapshot()}])] == [refusing]
        late = world.start()
        await late.keys.load()
        (await world.permit(late, endpoint=other)).failed(refusal(status))
        (await world.permit(late, endpoint=other)).failed(refusal(status))
        await world.settled()
        for endpoint in (refusing, other):
            await world.fails_as_blocked(late, endpoint)
        assert [key["endpoint"] for key in late.keys.snapshot()] == ["reader", "search"]


@requirement("keys.blocked")
async def test_a_record_of_an_earlier_version_for_both_endpoints_blocks_neither() -> None:
    async with replicas(1) as world:
        [limiter] = world.limiters
        for _ in range(2):
            await world.refused(limiter, 40102)
        [(name, (_, value))] = [entry for entry in world.records.items() if entry[0].startswith("key.")]
        world.records.clear()
        world.put(name.replace("search-", ""), value)
        late = world.start()
        await late.keys.load()
        for endpoint in ("search", "reader"):
            (await world.permit(late, endpoint=endpoint)).done(1)


@requirement("keys.blocked", "keys.pools")
async def test_a_refused_request_may_be_sent_with_each_key_of_its_pool() -> None:
    options = LimitOptions(pools={"P": KeyPool(("A", "B", "C"))})
    world = Replicas(options)
    world.start()
    world.secrets = Secrets({**ENVIRONMENT, "C": "third value"}, {"A", "B", "C", "P"}, options.pool_of)
    [limiter] = world.limiters
    limiter.keys.set_secrets(world.secrets)
    try:
        wanted = PermitRequest("P", "search", AgentKey("p", "a"), Deadline.after(5), world.secrets("P"))
        for left in (2, 1, 0):
            permit = await limiter.acquire(wanted)
            assert permit.failed(refusal(40102)) == (2 if left else 0)
    finally:
        await limiter.aclose()


@requirement("keys.blocked")
async def test_refusals_of_the_items_of_one_call_count_once_and_expire() -> None:
    async with replicas(1) as world:
        [limiter] = world.limiters
        for _ in range(3):
            await world.refused(limiter, 40102, call=-1)
        await world.done(limiter)
        world.now += 3600
        await world.refused(limiter, 40102)
        await world.done(limiter)


@pytest.mark.parametrize("record_lost", [False, True])
@requirement("keys.tried_again")
async def test_one_call_of_all_replicas_tries_a_blocked_key_again(record_lost: bool) -> None:  # noqa: FBT001
    async with replicas() as world:
        one, two = world.limiters
        for limiter in (one, two):
            await world.refused(limiter, 40201)
        world.now += RETRY_S
        if record_lost:
            world.records.clear()
        trial = await world.permit(two)
        if not record_lost:
            with pytest.raises(BudgetExceeded):
                await world.permit(one)
            trial.failed(refusal(40201))
            await world.settled()
            with pytest.raises(BudgetExceeded):
                await world.permit(two)
            world.now += RETRIES_S[1]
            trial = await world.permit(one)
        trial.done(1)
        await world.settled()
        assert [await world.done(limiter) for limiter in (two, one)] == [ENVIRONMENT["A"]] * 2
        assert two.keys.snapshot() == []


@pytest.mark.parametrize("options", [NO_LIMITS, LimitOptions(search_requests_per_minute=10)])
@requirement("keys.tried_again")
async def test_a_trial_that_is_cancelled_at_any_await_is_left_to_the_next_call(options: LimitOptions) -> None:
    for iterations in range(30):
        async with replicas(2, options) as world:
            one, two = world.limiters
            for limiter in (one, two):
                await world.refused(limiter, 40201)
            world.now += RETRY_S
            trial = asyncio.create_task(world.permit(two))
            for _ in range(iterations):
                await asyncio.sleep(0)
            if not trial.done():
                trial.cancel()
                await asyncio.wait([trial])
                await world.settled()
                trial = asyncio.create_task(world.permit(two))
            (await trial).done(1)
            await world.settled()
            assert two.keys.snapshot() == one.keys.snapshot() == []


@requirement("keys.tried_again")
async def test_a_new_value_is_not_blocked_by_refusals_of_the_old_one() -> None:
    async with replicas(1) as world:
        [limiter] = world.limiters
        late = await world.permit(limiter)
        for _ in range(2):
            await world.refused(limiter, 40102)
        world.use({"A": "new value"})
        assert await world.done(limiter) == "new value"
        late.failed(refusal(40102))
        await world.refused(limiter, 40102)
        assert await world.done(limiter) == "new value"
        world.use(ENVIRONMENT)
        await world.settled()
        with pytest.raises(AuthFailed):
            await world.permit(limiter)


@requirement("keys.blocked")
async def test_without_the_store_a_replica_uses_the_outcomes_of_its_own_calls() -> None:
    async with replicas() as world:
        one, two = world.limiters
        world.down = True
        for _ in range(2):
            await world.refused(one, 40102)
        with pytest.raises(AuthFailed):
            await world.permit(one)
        await world.done(two)
        world.now += RETRY_S
        assert await world.done(one) == ENVIRONMENT["A"]
        assert await world.done(one) == ENVIRONMENT["A"]


@requirement("keys.blocked")
async def test_calls_that_wait_for_a_key_fail_once_it_is_blocked() -> None:
    async with replicas(1, LimitOptions(search_requests_per_minute=20)) as world:
        [limiter] = world.limiters
        permits = [await world.permit(limiter) for _ in range(10)]
        waiting = asyncio.create_task(world.permit(limiter, wait_s=100))
        await asyncio.sleep(0)
        for permit in permits[:2]:
            permit.failed(refusal(40102))
        with pytest.raises(AuthFailed):
            await waiting


@pytest.mark.parametrize("ending", ["refused for its own reasons", "cancelled", "cancelled while it waited"])
@requirement("keys.tried_again")
async def test_after_a_trial_that_does_not_depend_on_the_key_the_next_call_tries_it(ending: str) -> None:
    async with replicas(1, LimitOptions(search_requests_per_minute=10)) as world:
        [limiter] = world.limiters
        for _ in range(2):
            await world.refused(limiter, 40102)
        world.now += RETRY_S
        if ending == "cancelled while it waited":
            trial = asyncio.create_task(world.permit(limiter))
            while not limiter.snapshot()[0]["running"]:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0)
            trial.cancel()
            await asyncio.wait([trial])
        elif ending == "cancelled":
            (await world.permit(limiter)).cancelled()
        else:
            (await world.permit(limiter)).failed(refusal(42200))
        await world.settled()
        await world.done(limiter)
        assert limiter.keys.snapshot() == []


@requirement("keys.tried_again")
async def test_a_forged_record_blocks_a_key_for_minutes_only() -> None:
    async with replicas(1) as world:
        [limiter] = world.limiters
        for _ in range(2):
            await world.refused(limiter, 40102)
        [(name, (_, value))] = [entry for entry in world.records.items() if entry[0].startswith("key.")]
        forged = orjson.dumps(orjson.loads(value) | {"retry_at": 1e12})
        world.put(name, forged)
        with pytest.raises(AuthFailed):
            await world.permit(limiter)
        world.now += RETRIES_S[-1]
        await world.done(limiter)
        assert limiter.keys.snapshot() == []


@requirement("keys.blocked")
async def test_a_call_that_waits_while_its_key_is_replaced_is_sent_with_the_new_one() -> None:
    async with replicas(1, LimitOptions(search_concurrent=1)) as world:
        [limiter] = world.limiters
        held = await world.permit(limiter)
        waiting = asyncio.create_task(world.permit(limiter))
        await asyncio.sleep(0)
        world.use({"A": "new value"})
        held.done(1)
        assert (await waiting).key.get_secret_value() == "new value"


@requirement("keys.pools")
async def test_the_keys_of_a_pool_share_the_load_by_their_limits() -> None:
    limits = {"A": KeyLimits(search_requests_per_minute=3_000), "B": KeyLimits(search_requests_per_minute=1_000)}
    async with replicas(1, LimitOptions(keys=limits, pools=POOL)) as world:
        [limiter] = world.limiters
        for number in range(100):  # a tool that names a key uses its pool
            await world.done(limiter, "P" if number % 2 else "B")
        # About three quarters, since the other key is used while one gets new permits.
        assert 68 <= world.sent[ENVIRONMENT["A"]] <= 76


@pytest.mark.parametrize("status", [40102, 40201, 42901])
@requirement("keys.pools")
async def test_a_refused_or_paused_key_is_passed_over_and_its_request_repeated(status: int) -> None:
    async with replicas(1, LimitOptions(pools=POOL)) as world:
        [limiter] = world.limiters
        for _ in range(4):
            permit = await world.permit(limiter, "P")
            if permit.key.get_secret_value() == ENVIRONMENT["A"]:
                assert permit.failed(refusal(status)) == 1
            else:
                permit.done(1)
            await world.settled()
        assert [await world.done(limiter, "P") for _ in range(4)] == [ENVIRONMENT["B"]] * 4
        for _ in range(2 if status // 100 != 429 else 0):
            assert await world.refused(limiter, status, "P") == 0
        if status // 100 != 429:
            with pytest.raises(ToolError) as refused:
                await world.permit(limiter, "P")
            assert refused.value.key_variable in ("A", "B")


@requirement("keys.pools")
async def test_a_call_that_waits_takes_the_first_free_key_of_its_pool() -> None:
    limits = {"A": KeyLimits(search_concurrent=1), "B": KeyLimits(search_concurrent=1)}
    async with replicas(1, LimitOptions(keys=limits, pools=POOL)) as world:
        [limiter] = world.limiters
        first, second = [await world.permit(limiter, "P") for _ in range(2)]
        assert first.key != second.key
        for ending in (second, first):
            waiting = asyncio.create_task(world.permit(limiter, "P", wait_s=100))
            await asyncio.sleep(0)
            ending.done(1)
            assert (await waiting).key == ending.key


@requirement("keys.pools")
async def test_a_pool_uses_the_keys_that_are_set() -> None:
    async with replicas(1, LimitOptions(pools=POOL)) as world:
        [limiter] = world.limiters
        world.use({"B": "the only one"})
        assert world.secrets.missing() == ["A"]
        assert {await world.done(limiter, variable) for variable in ("P", "P", "A", "B")} == {"the only one"}


MUTATIONS: list[Callable[[dict[str, object]], object]] = [
    lambda value: value.pop("refusals"),
    lambda value: value.update(version=2),
    lambda value: value.update(status=40202),
    lambda value: value.update(since=None),
    lambda value: value.update(retry_at="nan"),
    lambda value: value.update(refusals={"x": {"call": "1", "at": 1}}),
    lambda value: value.update(refusals=[1]),
]


@requirement("keys.blocked")
def test_a_record_of_a_key_that_is_none_is_empty() -> None:
    record = KeyRecord(refusals={40102: key_record.Refusal("r/1", 5.0)})
    assert key_record.decode(key_record.encode(record), 9.0) == record
    for stored in (None, b"", b"null", b"[]", b"{}", b"\xff"):
        assert key_record.decode(stored, 9.0) == KeyRecord()
    for mutate in MUTATIONS:
        value = orjson.loads(key_record.encode(record))
        mutate(value)
        assert key_record.decode(orjson.dumps(value), 9.0) == KeyRecord()
