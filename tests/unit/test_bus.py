"""The client's parser (any bytes, in any pieces), the order of commands, and the record of a dead letter."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count, islice, pairwise
from types import SimpleNamespace
from typing import Any, cast

import nats.errors
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.msg import Msg
from nats.errors import ProtocolError

from benchmarks.simulator import Scene, figures
from openapi_tool.kernel.jetstream.dead_letter_records import dead_letter, decode, encode
from openapi_tool.kernel.jetstream.deliveries import delivery_of, shown_subject
from openapi_tool.kernel.jetstream.held import HeldCommand
from openapi_tool.kernel.jetstream.scheduler import FairScheduler
from openapi_tool.kernel.jetstream.slots import Slots
from openapi_tool.nats_client.headers import parse_headers
from openapi_tool.nats_client.log_backoff import LogBackoff
from openapi_tool.nats_client.parser import Events, Parser
from openapi_tool.nats_records import replica_statistics
from openapi_tool.protocol.command import HEAD_BYTES, BodyDigest, Delivery
from openapi_tool.telemetry.redact import Redactor
from tests.requirements import requirement
from tests.support import HEADERS, SUBJECT, delivery
from tests.waiting import WAIT_S
from tests.wire.conftest import header_block as raw_header_block

STREAM = (
    b'INFO {"max_payload": 7}\r\nPING\r\nMSG a.b 1 5\r\nhello\r\n+OK\r\nHMSG a\x0bb\xff 2 the.reply 12 14\r\n'
    b"NATS/1.0\r\n\r\nhi\r\nPONG\r\n-ERR 'Some \xffthing'\r\nMSG a\t 1  r 2\r\n\r\n\r\n"
)
EVENTS = [
    ("info", {"max_payload": 7}),
    ("ping",),
    ("message", 1, b"a.b", b"", b"hello", b""),
    ("message", 2, b"a\x0bb\xff", b"the.reply", b"hi", b"NATS/1.0\r\n\r\n"),
    ("pong",),
    ("error", "'some \\xffthing'"),
    ("message", 1, b"a", b"r", b"\r\n", b""),
]


def parsed(pieces: Sequence[bytes]) -> list[tuple[Any, ...]]:
    """Return the parser's events for bytes that arrive in these pieces. Raises ProtocolError."""
    events: list[tuple[Any, ...]] = []

    def handler(kind: str) -> Any:
        async def handle(*arguments: Any) -> None:
            events.append((kind, *arguments))

        return handle

    async def parse() -> None:
        parser = Parser(Events(*map(handler, Events._fields)))
        for piece in pieces:
            await parser.parse(piece)

    asyncio.run(parse())
    return events


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=8))
@requirement("command.any")
def test_bytes_mean_the_same_in_whatever_pieces_they_arrive(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    assert parsed([STREAM[start:end] for start, end in pairwise(edges)]) == EVENTS


@given(data=st.binary(max_size=300) | st.lists(st.sampled_from(STREAM.split(b" ")), max_size=20).map(b" ".join))
@requirement("command.any")
def test_any_bytes_are_messages_or_a_protocol_error(data: bytes) -> None:
    try:
        events = parsed([data])
    except ProtocolError:
        return
    assert all(event[0] in ("message", "ping", "pong", "error", "info") for event in events)


@requirement("command.any")
def test_a_control_line_without_an_end_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        parsed([b"x" * 30_000] * 10)


@given(block=st.binary(max_size=400))
@requirement("command.any")
def test_any_header_block_gives_headers_of_plain_names(block: bytes) -> None:
    headers = parse_headers(block)
    assert headers.complete
    assert all(name.isascii() and name == name.strip() for name in headers)


@pytest.mark.parametrize(
    ("block", "headers"),
    [
        (b"NATS/1.0\r\nA: 1\r\nB:2\r\nA:\t3 \r\n\r\n", {"A": "3", "B": "2"}),
        (b"NATS/1.0 404 No Messages\r\nA: b\r\n\r\n", {"Status": "404", "Description": "No Messages", "A": "b"}),
        (b"NATS/1.0 100\r\n\r\n", {"Status": "100"}),
        (b"NATS/1.0 4\xff4 x\r\nA: \xff\r\n: b\r\nc d: e\r\n\xff: f\r\nno colon", {"A": "\ufffd"}),
        (b"X", {}),
    ],
)
@requirement("command.any")
def test_headers_and_inline_status_are_read(block: bytes, headers: dict[str, str]) -> None:
    assert parse_headers(block) == headers


@pytest.mark.parametrize(("lines", "complete"), [(255, True), (256, True), (257, False)])
@requirement("command.any")
def test_headers_are_read_up_to_a_number_of_lines(lines: int, complete: bool) -> None:  # noqa: FBT001 - a parameter
    headers = parse_headers(b"NATS/1.0\r\n" + b"".join(b"n%d: v\r\n" % number for number in range(lines)) + b"\r\n")
    assert (len(headers), headers.complete) == (min(lines, 256), complete)


@requirement("command.any")
def test_headers_are_read_up_to_a_number_of_bytes_and_never_half_a_line() -> None:
    headers = parse_headers(b"NATS/1.0\r\nA: b\r\nC: " + b"x" * 70_000 + b"\r\n\r\n")
    assert (headers, headers.complete) == ({"A": "b"}, False)


@requirement("command.any")
def test_a_subject_is_shown_with_its_odd_bytes_escaped() -> None:
    assert shown_subject(b"a.\xffb\xc3\xa9".decode("utf-8", "surrogateescape")) == "a.\\xffbé"


@requirement("outage")
def test_an_outage_is_logged_at_once_and_then_ever_more_seldom() -> None:
    """A client tries again twice a second; it must not log each attempt."""
    repeats = LogBackoff()
    logged = [second for second in range(3600) if repeats.should_log("refused", second)]
    assert logged[:5] == [0, 5, 15, 35, 75]
    assert len(logged) < 20
    assert repeats.should_log("another reason", 3600)
    assert not repeats.should_log("another reason", 3601)
    assert repeats.should_log("another reason", 10_000)
    assert not repeats.should_log("another reason", 10_001)
    assert repeats.should_log("another reason", 10_005)


# Fair queueing: which command runs next, which one is evicted; made-up names cost no memory.


_SEQUENCES = count(1)
FLOWS = st.tuples(st.sampled_from("abc"), st.sampled_from("xy"))


def held(project: str, agent: str = "agent", size: int = 0, more: Mapping[str, str] | None = None) -> HeldCommand:
    subject, headers = f"cg.v1r4.{project}.public.cmd.tool.jina.search", {"CG-Agent-Id": agent, **(more or {})}
    delivery = Delivery(subject, headers, b" " * size, datetime.now(UTC), number=1, stream_sequence=next(_SEQUENCES))
    message: Any = None
    return HeldCommand(message, delivery, 0.0, 0.0)


def run(scheduler: FairScheduler, calls: int) -> list[str]:
    """Run the next calls; return their projects."""
    return [work.claimed_agent.project for work in islice(iter(scheduler.next, None), calls)]


def offer(scheduler: FairScheduler, project: str, calls: int, agent: str = "agent") -> None:
    for _ in range(calls):
        scheduler.offer(held(project, agent))


@requirement("intake")
def test_a_project_behind_the_backlog_of_another_runs_next() -> None:
    scheduler = FairScheduler()
    offer(scheduler, "large", 500)
    run(scheduler, 100)
    offer(scheduler, "small", 2)
    assert run(scheduler, 4).count("small") == 2


@requirement("intake")
def test_slots_go_round_by_project_and_within_a_project_by_agent() -> None:
    scheduler = FairScheduler()
    offer(scheduler, "one", 90, "first")
    offer(scheduler, "one", 90, "second")
    offer(scheduler, "other", 90)
    flows = Counter(work.claimed_agent for work in islice(iter(scheduler.next, None), 60))
    assert flows == {("one", "first"): 15, ("one", "second"): 15, ("other", "agent"): 30}


@requirement("intake")
def test_a_queue_that_was_emptied_forgets_the_places_of_evicted_commands() -> None:
    scheduler = FairScheduler()
    offer(scheduler, "early", 1)
    run(scheduler, 1)
    offer(scheduler, "early", 1)
    scheduler.evict()
    assert scheduler.withdraw() == []
    offer(scheduler, "late", 1)
    run(scheduler, 1)
    offer(scheduler, "late", 2)
    offer(scheduler, "early", 1)
    assert run(scheduler, 3) == ["late", "early", "late"]


@requirement("hostile.neighbour")
def test_a_project_that_may_not_begin_a_command_is_passed_over_and_keeps_its_turn() -> None:
    scheduler = FairScheduler()
    offer(scheduler, "first", 3)
    offer(scheduler, "second", 2)
    others = [scheduler.next(lambda project: project != "first") for _ in range(3)]
    assert [work and work.claimed_agent.project for work in others] == ["second", "second", None]
    assert len(scheduler) == 3
    assert run(scheduler, 3) == ["first"] * 3


@requirement("hostile.neighbour")
def test_agents_whose_commands_were_all_evicted_are_removed() -> None:
    scheduler = FairScheduler()
    for number in range(2_000):
        scheduler.offer(held("flood", f"agent {number}"))
        if number >= 8:
            scheduler.evict()
    agents: Any = scheduler._projects._flows["flood"].queue  # noqa: SLF001 - not visible elsewhere
    assert (len(agents._flows), len(scheduler)) == (8, 8)  # noqa: SLF001
    assert len(agents._due) < 100  # noqa: SLF001
    assert run(scheduler, 9) == ["flood"] * 8


@requirement("limits.waiting")
def test_a_shared_request_that_outlives_its_call_takes_no_slot() -> None:
    """It may wait for a permit, or for a retry, after the call that started it was cancelled."""
    slots = Slots(2, max_paused=2)
    slots.begin(1, "one")
    slot = slots.of(1)
    slots.ended(1)
    slot.sending()
    slot.pause()
    assert (slots.paused, slots.without_slot, slots.unsent()) == (0, 0, set())
    slot.resume()
    slots.begin(1, "one")
    slots.of(1).pause()
    assert slots.unsent() == {1}, "the command is run again, and has sent nothing"


@requirement("hostile.neighbour")
def test_calls_of_one_project_that_wait_for_permits_leave_slots_for_others() -> None:
    slots = Slots(16, max_paused=8)
    slots.begin(22, "other")
    slots.ended(22)
    for sequence in range(22):
        assert slots.may_begin("one")
        slots.begin(sequence, "one")
        slots.of(sequence).pause()
    assert slots.paused == 8
    assert not slots.may_begin("one")  # the others hold 14 slots
    assert slots.may_begin("other")
    slots.of(21).release()
    assert slots.may_begin("one")
    slots.of(0).resume()
    assert not slots.may_begin("one")
    for sequence in range(22):
        slots.ended(sequence)
    assert (slots.without_slot, slots.may_begin("one")) == (0, True)


@requirement("run.concurrency")
def test_the_only_project_of_a_process_gets_all_slots() -> None:
    slots = Slots(16)
    for sequence in range(16):
        assert slots.may_begin("one")
        slots.begin(sequence, "one")
    assert not slots.may_begin("one")
    assert (slots.may_begin("other"), slots.excess) == (True, 2), "the first call of another project need not wait"
    slots.ended(0)
    assert slots.may_begin("one")
    slots.begin(16, "other")
    assert not slots.may_begin("one")


@requirement("hostile.neighbour")
def test_a_held_command_is_counted_with_all_of_its_headers_and_keeps_no_long_name() -> None:
    """The sender chooses names of headers, too, and one wide character quadruples the memory of a text."""
    assert held("one", "a" * 60_000).claimed_agent == ("one", "a" * 512)
    plain = held("one").memory_bytes
    assert held("one", more={"X" * 60_000: "", "Y": "\U0001f600" + "y" * 10_000}).memory_bytes - plain > 60_000 + 40_000


@requirement("intake")
def test_a_project_that_was_idle_gets_no_credit_for_it() -> None:
    scheduler = FairScheduler()
    offer(scheduler, "idle", 1)
    offer(scheduler, "busy", 300)
    run(scheduler, 200)
    offer(scheduler, "idle", 100)
    assert Counter(run(scheduler, 100)) == {"busy": 50, "idle": 50}


@requirement("intake")
def test_what_a_call_cost_beyond_one_request_is_charged_to_its_project() -> None:
    scheduler = FairScheduler()
    offer(scheduler, "batches", 100)
    offer(scheduler, "single", 100)
    served = Counter[str]()
    for _ in range(44):
        work = scheduler.next()
        assert work is not None
        served[work.claimed_agent.project] += 1
        scheduler.finished(work, 10 if work.claimed_agent.project == "batches" else 1)
    assert served == {"batches": 4, "single": 40}


@requirement("fair.weights")
def test_slots_are_shared_by_weight_and_cost_and_an_idle_share_goes_to_the_others() -> None:
    scheduler = FairScheduler({"double": 2, "half": 0.5, "idle": 100})
    for project in ("double", "half", "plain"):
        offer(scheduler, project, 300)
    served = Counter[str]()
    for _ in range(140):
        work = scheduler.next()
        assert work is not None
        served[work.claimed_agent.project] += 1
        scheduler.finished(work, 2 if work.claimed_agent.project == "double" else 1)
    assert served == {"double": 56, "plain": 56, "half": 28}  # requests: 112, 56, 28


@requirement("fair.weights")
def test_calls_without_an_upstream_request_are_not_free() -> None:
    scheduler = FairScheduler()
    offer(scheduler, "invalid", 100)
    offer(scheduler, "paying", 100)
    served = Counter[str]()
    for _ in range(44):
        work = scheduler.next()
        assert work is not None
        served[work.claimed_agent.project] += 1
        scheduler.finished(work, 0 if work.claimed_agent.project == "invalid" else 1)
    assert served == {"invalid": 40, "paying": 4}


@requirement("fair.weights")
def test_a_refund_is_no_credit() -> None:
    """A project whose calls cost nothing while no other had any does not take precedence afterwards."""
    scheduler = FairScheduler()
    offer(scheduler, "invalid", 100)
    for work in [scheduler.next() for _ in range(50)]:
        assert work is not None
        scheduler.finished(work, 0)
    offer(scheduler, "other", 20)
    assert run(scheduler, 20).count("other") in (9, 10, 11)


@requirement("fair.weights")
def test_the_project_that_is_largest_for_its_weight_gives_way() -> None:
    scheduler = FairScheduler({"heavy": 4})
    offer(scheduler, "heavy", 30)
    offer(scheduler, "plain", 10)
    assert [scheduler.would_evict(project) for project in ("heavy", "plain")] == [False, True]
    left = Counter(scheduler.evict().claimed_agent.project for _ in range(20))
    assert left == {"heavy": 14, "plain": 6}


@requirement("intake")
def test_the_newest_command_of_the_largest_agent_in_the_largest_project_gives_way() -> None:
    scheduler = FairScheduler()
    offer(scheduler, "small", 5)
    offer(scheduler, "large", 3, "few")
    offer(scheduler, "large", 9, "many")
    newest = held("large", "many")
    scheduler.offer(newest)
    assert scheduler.evict() is newest
    scheduler.offer(held("fat", size=100_000))
    assert scheduler.evict().claimed_agent.project == "fat"


@requirement("intake")
@given(st.lists(st.one_of(FLOWS, st.sampled_from(["next", "drop", "refund", "charge"])), max_size=60))
def test_every_command_leaves_once_and_those_of_an_agent_in_order(steps: list[Any]) -> None:
    scheduler, inside, left = FairScheduler(), list[HeldCommand](), list[HeldCommand]()
    for step in steps:
        if isinstance(step, tuple):
            inside.append(held(*step))
            scheduler.offer(inside[-1])
        elif step in ("refund", "charge"):
            for ran in left[-3:]:
                scheduler.finished(ran, 0 if step == "refund" else 5)
        elif len(scheduler):
            work = scheduler.next() if step == "next" else scheduler.evict()
            assert work is not None
            inside.remove(work)
            if step == "next":
                left.append(work)
        assert (len(scheduler), scheduler.memory_bytes) == (len(inside), sum(work.memory_bytes for work in inside))
        for project in {work.claimed_agent.project for work in inside + left}:
            own = sum(work.claimed_agent.project == project for work in inside)
            assert own <= scheduler.ahead_of(project) <= (len(inside) if own else 0)
    rest = scheduler.withdraw()
    assert sorted(rest, key=id) == sorted(inside, key=id)
    assert scheduler.next() is None
    for flow in {work.claimed_agent for work in left}:
        numbers = [work.delivery.stream_sequence for work in left if work.claimed_agent == flow]
        assert numbers == sorted(numbers)


@requirement("intake")
def test_projects_that_are_not_seen_again_are_removed() -> None:
    scheduler = FairScheduler()
    for number in range(20_000):
        scheduler.offer(work := held(f"project{number}"))
        scheduler.next()
        scheduler.finished(work, number % 3)
    assert len(scheduler._projects._flows) < 5_000  # noqa: SLF001 - their number is limited


# The record of a dead letter: bounded whatever the command, and readable in every shape that was ever written.


MAX_PAYLOAD = 1_048_576
MAX = 180_000
NOTHING = Redactor()


def message(body: bytes, block: bytes = b"") -> Msg:
    headers = parse_headers(block) if block else None
    return Msg(None, SUBJECT, "$JS.ACK.commands.durable.2.7.1.1700000000000000000.0", body, headers)  # type: ignore[arg-type]


def of(body: bytes, block: bytes = b"") -> Delivery:
    delivered = delivery_of(message(body, block))
    assert delivered is not None
    return delivered


@given(
    body=st.sampled_from([b"", b"{}", b"\xff" * 65_536, b"x" * 65_537, b"x" * 900_000]),
    name=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=8),
    value=st.sampled_from([b"v", b"\x01", "é".encode(), b"\xff"]),
    count=st.integers(0, 300),
    length=st.integers(0, 65_000),
    reason=st.text(max_size=20),
)
@requirement("deadletters")
def test_a_record_is_bounded_whatever_the_command(
    body: bytes, name: str, value: bytes, count: int, length: int, reason: str
) -> None:
    lines = [f"{name}{number}: ".encode() + value * (length // (count or 1)) for number in range(count)]
    delivered = of(body, raw_header_block(HEADERS, *lines))
    letter = dead_letter(delivered, reason, "m" * 9_000, NOTHING)
    record = encode(letter, MAX_PAYLOAD)
    assert len(record) <= MAX
    read = decode(record, 3)
    assert (read.size, read.sha256) == (len(body), BodyDigest.of(body).sha256)
    assert (read.id, read.reason, read.stream, read.stream_sequence, read.attempt) == ("3", reason, "commands", 7, 2)
    assert {name: text for name, text in read.headers.items() if name in HEADERS} == HEADERS
    assert orjson.loads(record)["tool_call_id"] == "call"
    assert not read.whole or (read.headers, read.data) == (letter.headers, body)
    assert read.whole or read.data == body[:4096]
    smaller = encode(letter, 30_000)
    assert len(smaller) <= MAX // 6


@requirement("deadletters")
def test_a_message_keeps_neither_body_nor_headers_while_it_is_worked_on() -> None:
    """A process holds 64 messages at once, each for as long as its call runs."""
    large = message(b"x" * 790_000, raw_header_block(HEADERS, b"x-other: " + b"v" * 50_000))
    delivered = delivery_of(large)
    assert delivered is not None
    assert (large.data, large.headers) == (b"", None)
    assert len(delivered.data) == HEAD_BYTES
    assert delivered.truncated_body == BodyDigest.of(b"x" * 790_000)
    whole = of(b"x" * 65_536)
    assert (len(whole.data), whole.truncated_body) == (65_536, None)


@requirement("deadletters", "secrets.output")
def test_a_secret_across_the_cut_is_masked_before_it_is_cut() -> None:
    secret = "a-secret-of-the-test"
    body = b"x" * (4096 - 10) + secret.encode() + b"x" * 100_000
    block = raw_header_block(HEADERS, b"x-other: " + b"v" * (1024 - 10) + secret.encode() + b"v" * 20_000)
    letter = dead_letter(of(body, block), "reason", f"a message with {secret}", Redactor([secret]))
    record = encode(letter, MAX_PAYLOAD)
    read = decode(record, 1)
    assert read.data.endswith(b"x[redacted]"[:11])
    assert read.headers["x-other"] == f"{'v' * 1014}[redacted]"
    assert "a-secret" not in read.message + read.data.decode()
    assert read.sha256 == BodyDigest.of(body).sha256


@requirement("deadletters")
def test_a_record_without_the_later_fields_is_a_whole_command() -> None:
    letter = dead_letter(delivery(), "reason", "message", NOTHING)
    fields = orjson.loads(encode(letter, MAX_PAYLOAD))
    first = ("reason", "message", "subject", "headers", "data_base64", "stream_sequence", "attempt", "published_at")
    read = decode(orjson.dumps({name: fields[name] for name in first}), 5)
    assert read == replace(letter, number=5)


# Shares of projects over several replicas, in virtual time with the scheduler (`benchmarks.simulator`).

OVERLOADED = Scene(2, 8, max_held=128, projects=50, greedy_every=1, greed=3.0, seconds=120.0, warm_s=20.0)


@pytest.mark.parametrize(
    "scene", [OVERLOADED, replace(OVERLOADED, projects=3, weighted=1, seconds=60.0)], ids=["equal", "weights 1:2:4"]
)
@requirement("fair.weights")
def test_projects_that_demand_three_times_the_capacity_get_their_shares(scene: Scene) -> None:
    found = figures(scene)
    assert found["of_capacity"] > 0.99
    assert 0.85 < found["greedy_share"]["p0"] <= found["greedy_share"]["p100"] < 1.15


@requirement("fair.weights")
def test_projects_that_demand_half_of_their_share_hardly_wait_beside_greedy_ones() -> None:
    found = figures(Scene(20, 16, max_held=128, projects=100, seconds=20.0, warm_s=10.0))
    assert found["of_capacity"] > 0.99
    assert found["modest_unserved"] == 0
    assert found["modest_wait_s"]["p95"] < 2.0
    assert found["greedy_share_deviation"] < 0.05


OUTAGE = nats.errors.OutboundBufferLimitError()


class _Asked:
    """Client that is asked for statistics twice in each subscription; some of its calls fail once."""

    def __init__(self, *failing: str, error: Exception = OUTAGE) -> None:
        self.failing, self.limits, self.answered = [*failing], list[int](), asyncio.Event()
        self._error = error

    def _fail_once(self, name: str) -> None:
        if name in self.failing:
            self.failing.remove(name)
            raise self._error

    async def subscribe(self, _: str) -> Any:
        self._fail_once("subscribe")
        return SimpleNamespace(unsubscribe=self._unsubscribe, messages=self._messages())

    async def _unsubscribe(self, limit: int) -> None:
        self.limits.append(limit)

    async def _messages(self) -> AsyncIterator[Any]:
        for _ in range(2):
            yield SimpleNamespace(reply="openapi_tool.stats.x", data=b"")
        await asyncio.Event().wait()

    async def publish(self, *_: object) -> None:
        self._fail_once("publish")
        self.answered.set()


@pytest.mark.parametrize("failing", ["publish", "subscribe"])
@pytest.mark.parametrize("error", [OUTAGE, TypeError("a defect")])
@requirement("cli.top")
async def test_statistics_are_answered_after_an_error(
    failing: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_statistics, "_RESUBSCRIBE_AFTER_S", -1.0)
    client = _Asked(failing, error=error)
    async with asyncio.timeout(WAIT_S), replica_statistics.answering_stats(cast("Any", client), dict):
        await client.answered.wait()
    assert set(client.limits) == {20}, "the server delivers no more in one subscription"
