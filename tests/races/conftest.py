"""Fakes of NATS, database, upstream and calls; runners for asyncio's loop, uvloop, and a loop in virtual time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, Self, TypeVar, TypeVarTuple, Unpack, cast

import orjson
import pytest
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError
from pydantic import SecretStr

from openapi_tool.engine.call import Call, CallMemory
from openapi_tool.engine.pagination import Pagination
from openapi_tool.engine.runner import RunnerOptions, ToolRunner
from openapi_tool.jina.byte_semaphore import ByteSemaphore
from openapi_tool.kernel.jetstream import consumer
from openapi_tool.kernel.jetstream.consumer import CommandConsumer
from openapi_tool.kernel.jetstream.dead_letters import DeadLetters
from openapi_tool.kernel.jetstream.fetch_mode import FetchMode
from openapi_tool.kernel.jetstream.leases import lease_key
from openapi_tool.kernel.jetstream.slots import Slots
from openapi_tool.kernel.jetstream.streams import Durable
from openapi_tool.kernel.pipeline.parked_results import ParkedResults
from openapi_tool.kernel.pipeline.pipeline import Pipeline, PipelineOptions
from openapi_tool.kernel.pipeline.ports import Kernel
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.options import ConsumerOptions, DurableOptions, NatsOptions
from openapi_tool.nats_client.server_clock import ServerClock
from openapi_tool.options.executor import ExecutorOptions
from openapi_tool.options.tools import ToolOptions
from openapi_tool.protocol.cards import ArtifactCard, ResultCard
from openapi_tool.protocol.command import Command, Delivery
from openapi_tool.protocol.records import Artifact, CallRecords, DefinitionRecord, RequestEdgeRecord
from openapi_tool.protocol.report import Doorbell, Report, TurnCondition
from openapi_tool.protocol.settlement import Settlement
from openapi_tool.quotas.permits import NoSlot
from openapi_tool.telemetry.spans import WireTracer
from openapi_tool.tools import deadlines
from openapi_tool.tools.arguments import Arguments, ArgumentSources, OperatorEnvs
from openapi_tool.tools.cursors import Cursors
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.output import Item, ToolOutput
from openapi_tool.tools.policy import Authorizer
from openapi_tool.tools.session_identities import SessionIdentities
from tests.support import BODY, HEADERS, SUBJECT, V1R4, call_card, records, waiting_turn
from tests.waiting import WAIT_S

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}

Run = Callable[[Coroutine[Any, Any, None]], None]
Given = TypeVarTuple("Given")
Result = TypeVar("Result")


def run_on(loop: str) -> Run:
    """Return a function that runs a coroutine on this kind of event loop, for at most WAIT_S seconds."""

    def run(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(asyncio.wait_for(work, WAIT_S))

    return run


async def iterate_loop(number: int = 10) -> None:
    """Run a few iterations of the event loop, so that other tasks proceed."""
    for _ in range(number):
        await asyncio.sleep(0)


@dataclass
class Schedule:
    """Numbers the awaits of all fakes from 1; `acts[number]` is called at that await, `seen` lists their names."""

    acts: dict[int, Callable[[], object]] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)

    async def step(self, name: str) -> None:
        """Await once, so that a cancellation can arrive here."""
        self.seen.append(name)
        self.acts.get(len(self.seen), lambda: None)()
        await asyncio.sleep(0)

    async def around(self, name: str, effect: Callable[[], Any]) -> Any:
        """Run `effect` between two awaits, as a server does between request and reply."""
        await self.step(f"{name} started")
        result = effect()
        await self.step(f"{name} finished")
        return result


@dataclass
class FakeBus:
    """NATS client with buckets in memory; records what is published."""

    schedule: Schedule
    published: list[tuple[str, bytes]] = field(default_factory=list)
    stored: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    refusing: Callable[[bytes], Awaitable[None]] | None = None
    is_connected: bool = True
    revision: int = 0

    async def publish(self, subject: str, payload: bytes = b"", **_: object) -> None:
        if self.refusing is not None:
            await self.refusing(payload)
        await self.schedule.around("publish", lambda: self.published.append((subject, payload)))

    async def subscribe(self, _: str, **__: object) -> SimpleNamespace:
        return SimpleNamespace(drain=lambda: asyncio.sleep(0))

    def drop(self, _: object) -> None:
        """Do nothing."""

    async def request(self, subject: str, payload: bytes = b"", **_: object) -> None:
        await self.publish(subject, payload)

    def jetstream(self, timeout: float = 5.0) -> Self:
        del timeout
        return self

    async def key_value(self, _: str) -> Self:
        return self

    async def get(self, key: str) -> Any:
        await self.schedule.step("get")
        if key not in self.stored:
            raise KeyNotFoundError
        revision, value = self.stored[key]
        return SimpleNamespace(revision=revision, value=value)

    async def update(self, key: str, value: bytes, last: int | None = None, **_: object) -> int:
        revision: int = await self.schedule.around("update", lambda: self._put(key, value, last or 0))
        return revision

    async def delete(self, key: str) -> None:
        await self.schedule.around("delete", lambda: self.stored.pop(key, None))

    def _put(self, key: str, value: bytes, last: int) -> int:
        if self.stored.get(key, (0, b""))[0] != last:
            raise KeyWrongLastSequenceError
        self.revision += 1
        self.stored[key] = (self.revision, value)
        return self.revision

    def sent(self, *kinds: bytes) -> list[bytes]:
        """Return the payloads of all settlements (ack, nak, term), or of these kinds."""
        return [data for _, data in self.published if data.partition(b" ")[0] in (kinds or (b"", b"-NAK", b"+TERM"))]

    def lost(self, sequence: int) -> int | None:
        """Return the number of lost runs that KV counts for a command; None without a record."""
        _, value = self.stored.get(lease_key("stream", sequence), (0, b"null"))
        record = orjson.loads(value)
        return record and int(record["lost"])

    def message(self, sequence: int = 1, attempt: int = 1, project: str = "proj", agent: str = "agent") -> Msg:
        """Return a delivery of the command with this stream sequence."""
        now_ns = int(datetime.now(UTC).timestamp() * 1e9)
        reply = f"$JS.ACK.stream.durable.{attempt}.{sequence}.{sequence}.{now_ns}.0"
        headers = {**HEADERS, "CG-Tool-Call-Id": f"call-{sequence}", "CG-Agent-Id": agent}
        return Msg(cast("Client", self), SUBJECT.replace("proj", project, 1), reply, orjson.dumps(BODY), headers)


@dataclass
class FakeKernel:
    """Database in memory; `before_commit` may wait or fail."""

    schedule: Schedule
    committed: list[ResultCard] = field(default_factory=list)
    before_commit: Callable[[], Awaitable[None]] | None = None
    arguments: Any = field(default_factory=lambda: {"query": "q"})
    calls: dict[str, tuple[DefinitionRecord, Any]] = field(default_factory=dict)
    tool: DefinitionRecord = field(
        default_factory=lambda: DefinitionRecord("jina_search", None, {}, {"jina": {"mode": "search"}})
    )

    async def load(self, command: Command) -> CallRecords:
        tool, arguments = self.calls.get(command.identity.tool_call_id or "", (self.tool, self.arguments))
        card = call_card(arguments, tool_call_id=command.identity.tool_call_id)
        row = records(card=card, tool=tool, waiting_turn=waiting_turn(), request_edge=RequestEdgeRecord("edge", 0))
        await self.schedule.step("load")
        return row

    async def commit(
        self, card: ResultCard, _: Report, __: ArtifactCard | None, ___: TurnCondition | None, *, retry: bool = False
    ) -> bool:
        del retry
        if self.before_commit is not None:
            await self.before_commit()
        await self.schedule.around("commit", lambda: self.committed.append(card))
        return True

    async def report(self, _: str, __: Report, ___: TurnCondition | None) -> bool:
        return True

    async def is_turn_busy(self, _: Report, __: float) -> bool:
        return False

    async def artifact(self, *_: object) -> Artifact | None:
        return None

    async def last_result_age_s(self, *_: str) -> float | None:
        return None


@dataclass
class FakeTools:
    """Tools that succeed after one await, or return the result of `answer`."""

    schedule: Schedule
    answer: Callable[[Schedule], Awaitable[ToolOutput]] | None = None
    projects: list[str] = field(default_factory=list)

    def call_memory(self, project: str) -> CallMemory:
        self.projects.append(project)
        return ByteSemaphore(0).for_call(project)

    def without_unknown(self, _: ToolDefinition, arguments: Arguments) -> Arguments:
        return arguments

    def known_budget(self, definition: Any, arguments: Any, call: Any) -> None:
        del definition, arguments, call

    async def run(self, _: ToolDefinition, __: Arguments, ___: Deadline, ____: Call) -> ToolOutput:
        await self.schedule.step("tool")
        return ToolOutput((Item("text"),)) if self.answer is None else await self.answer(self.schedule)


@dataclass
class FakePublisher:
    """Publisher that accepts and records every doorbell."""

    schedule: Schedule
    published: list[str] = field(default_factory=list)

    async def publish(self, doorbell: Doorbell) -> bool:
        await self.schedule.around("doorbell", lambda: self.published.append(doorbell.subject))
        return True


class FakeLetters:
    """Dead letters in memory."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    async def inspect(self) -> None:
        pass

    async def record(self, _: Delivery, reason: str, __: str) -> None:
        self.reasons.append(reason)


class FakePull:
    """Pull that fetches nothing; a test passes messages to the consumer itself."""

    silence_s = 0.0

    def __init__(self, *_: object) -> None:
        pass

    async def run(self) -> None:
        await asyncio.Event().wait()

    def wake(self) -> None:
        pass

    def renew(self) -> None:
        pass


class FakeResultStore:
    """Records by name, in memory."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}

    async def put(self, name: str, record: bytes) -> None:
        self.records[name] = record

    async def get(self, name: str) -> bytes | None:
        return self.records.get(name)

    async def delete(self, name: str) -> None:
        self.records.pop(name, None)


class FakeSlot(NoSlot):
    """Slot of a call that no consumer started."""

    requests = 1

    def release(self) -> None:
        pass


def pipeline(
    kernel: Any, tools: Any, publisher: Any, slots: Slots | None = None, min_result_delay_s: float = 0
) -> Pipeline:
    """Return a pipeline over these fakes."""
    options = PipelineOptions(
        actor_id="tool.openapi",
        executor=ExecutorOptions(requeue_delay_s=1, min_result_delay_s=min_result_delay_s),
        tools=ToolOptions(artifact_ttl_s=60),
    )
    parked = ParkedResults(FakeResultStore(), b"k" * 32)
    return Pipeline(
        options,
        V1R4,
        kernel,
        runner(kernel, tools),
        publisher,
        WireTracer(),
        ServerClock().time,
        parked,
        slots.of if slots else lambda _: FakeSlot(),
    )


def runner(kernel: Any, tools: Any, **changes: Any) -> ToolRunner:
    """Return a runner over these fakes that authorizes every call."""
    options = RunnerOptions(
        authorizer=Authorizer(),
        arguments=ArgumentSources(
            OperatorEnvs(), lambda _: SecretStr("a-key-of-the-test"), SessionIdentities(b"k" * 32)
        ),
    )
    pagination = Pagination(cast("Kernel", kernel), Cursors(b"k" * 32), ToolOptions())
    return ToolRunner(replace(options, **changes), tools, pagination)


@dataclass
class Scene:
    """Consumer and pipeline over in-memory fakes."""

    schedule: Schedule = field(default_factory=Schedule)
    ack_wait_s: float = 60.0
    concurrency: int = 16
    max_lost_runs: int = 3
    max_run_s: float = 3600.0
    max_held: int = 512
    max_paused: int = 0
    mode: FetchMode = FetchMode.UNLIMITED
    min_result_delay_s: float = 0
    tools: Any = None
    handle: Callable[[Delivery], Awaitable[Settlement]] | None = None

    def __post_init__(self) -> None:
        self.bus, self.kernel, self.publisher = (
            FakeBus(self.schedule),
            FakeKernel(self.schedule),
            FakePublisher(self.schedule),
        )
        self.tools, self.letters = self.tools or FakeTools(self.schedule), FakeLetters()
        self.slots = Slots(self.concurrency, self.max_paused)
        self.pipeline = pipeline(self.kernel, self.tools, self.publisher, self.slots, self.min_result_delay_s)
        self.consumer = CommandConsumer(
            cast("BusClient", self.bus),
            ConsumerOptions(
                DurableOptions("v1r4", "durable", "cg.>", NatsOptions(ack_wait_s=self.ack_wait_s, max_ack_pending=100)),
                ExecutorOptions(concurrency=self.concurrency, max_lost_runs=self.max_lost_runs, max_held=self.max_held),
                self.max_run_s,
            ),
            cast("DeadLetters", self.letters),
            self.handle or self.pipeline.handle,
            lambda: self.mode,
            slots=self.slots,
        )

    def deliver(self, sequence: int = 1, attempt: int = 1) -> asyncio.Task[None]:
        """Deliver a command for which a slot is free; return the task that runs it."""
        self.offer(self.bus.message(sequence, attempt))
        return next(reversed(self.consumer._running.held_by_task))  # noqa: SLF001 - for the test

    def offer(self, message: Msg) -> None:
        """Deliver a message."""
        assert self.consumer._receive(message)  # noqa: SLF001 - as the pull does

    async def ended(self, task: asyncio.Task[None]) -> None:
        """Wait until the task of a call has ended in any way, and the consumer has handled it."""
        await asyncio.wait([task])
        await iterate_loop(3)
        assert not self.consumer.running


class _JumpingSelector(selectors.DefaultSelector):
    """Selector that never waits: it moves the clock to the end of the wait instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError("deadlock: no event is scheduled")
        if not ready:
            self.now += max(0.0, timeout or 0.0)
        return ready


class VirtualTime(asyncio.SelectorEventLoop):
    """Event loop whose clock starts at 0 and moves only while nothing is ready.

    What would run in a thread runs at once: while a thread works nothing is ready, which would move the clock, or seem
    to be a deadlock.
    """

    def __init__(self) -> None:
        self._selector = _JumpingSelector()
        super().__init__(self._selector)

    def time(self) -> float:
        return self._selector.now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Given]], Result], *args: *Given
    ) -> asyncio.Future[Result]:
        del executor
        future: asyncio.Future[Result] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - raised where the future is awaited
            future.set_exception(error)
        return future


@contextmanager
def virtual_time() -> Iterator[asyncio.Runner]:
    """Yield a runner on a loop in virtual time, whose clock deadlines use, too."""
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=VirtualTime) as runner:
        patch.setattr(deadlines, "time", SimpleNamespace(monotonic=runner.get_loop().time))
        yield runner


def run_virtually(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in virtual time."""
    with virtual_time() as runner:
        runner.run(work)


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine on each of the two event loops."""
    return run_on(request.param)


@pytest.fixture(autouse=True)
def _in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ensure_durable(*_: object) -> Durable:
        return Durable("stream", "durable")

    async def observe(*_: object) -> None:
        """Leave the clock alone."""

    monkeypatch.setattr(consumer, "ensure_durable", ensure_durable)
    monkeypatch.setattr(consumer, "observe", observe)
    monkeypatch.setattr(consumer, "PullConsumer", FakePull)
    monkeypatch.setattr(consumer, "LookAhead", FakePull)
