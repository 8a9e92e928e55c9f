"""Dead letters: content, limits, replay; storing one never blocks other commands."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import nats.errors
import orjson
import pytest
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, StreamConfig
from prometheus_client import REGISTRY
from typer.testing import CliRunner, Result

from openapi_tool.cli import app
from openapi_tool.kernel.jetstream.dead_letter_reader import abandoned_commands
from openapi_tool.kernel.jetstream.dead_letters import STREAM as DEAD_LETTERS
from openapi_tool.kernel.jetstream.dead_letters import SUBJECT_FILTER, SUBJECT_PREFIX
from openapi_tool.local.caller import STREAM
from openapi_tool.nats_client.options import DurableOptions, NatsOptions
from openapi_tool.protocol.command import MAX_BODY_BYTES, Delivery
from tests.conftest import PROJECT
from tests.requirements import requirement
from tests.support import dead_letters
from tests.waiting import WAIT_S
from tests.wire.conftest import DURABLE, World, header_block, publish

LARGE = b"x" * 790_000
FILTER = "cg.v1r4.*.*.cmd.tool.jina.>"
STALE = {"CG-Turn-Id": "an-old-turn"}
COMMAND = b"cg.v1r4.proj_test.public.cmd.tool.jina.search"


def discarded(cause: str) -> float:
    return REGISTRY.get_sample_value("openapi_tool_dead_letters_discarded_total", {"cause": cause}) or 0.0


def stored(reason: str) -> float:
    return REGISTRY.get_sample_value("openapi_tool_dead_letters_total", {"reason": reason}) or 0.0


@pytest.fixture
def environment(world_without_executor: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connection settings of the command line."""
    monkeypatch.setenv("PG_DSN", world_without_executor.dsn)
    monkeypatch.setenv("NATS_SERVERS", world_without_executor.stack.nats.url)


def logged(caplog: pytest.LogCaptureFixture, action: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "action", "") == action]


@requirement("deadletters")
async def test_large_command_without_identity_is_recorded_in_part(world: World) -> None:
    call = await world.place()
    headers: dict[str, str | None] = {**dict.fromkeys(call.headers), "CG-Turn-Id": "a-turn", "x-other": "v" * 30_000}
    outcome = await world.send(call, headers=headers, data=LARGE)
    assert (outcome.term_acks, outcome.deliveries) == (1, 1)
    [letter] = outcome.dead_letters
    assert (letter["whole"], letter["size"]) == (False, len(LARGE))
    assert letter["sha256"] == hashlib.sha256(LARGE).hexdigest()
    assert base64.b64decode(letter["data_base64"]) == LARGE[:4096]
    assert (letter["stream"], letter["stream_sequence"]) == (STREAM, world.caller.last_sequence)
    assert (letter["project_id"], letter["channel_id"], letter["agent_turn_id"]) == (PROJECT, "public", "a-turn")
    assert (letter["agent_id"], letter["tool_call_id"]) == (None, None)
    assert letter["headers"] == {"CG-Turn-Id": "a-turn", "x-other": "v" * 1024}


@requirement("deadletters")
async def test_large_commands_without_identity_do_not_delay_others(world: World) -> None:
    for _ in range(20):
        await publish(world.stack.nats.url, COMMAND, LARGE)
    call = await world.place()
    outcome = await world.send(call)
    assert outcome.content["status"] == "success"
    assert (outcome.term_acks, outcome.deliveries, len(outcome.dead_letters)) == (20, 21, 20)


@requirement("deadletters")
async def test_command_of_64_kib_is_recorded_whole(world: World) -> None:
    call = await world.place()
    data = bytes(range(256)) * 128
    outcome = await world.send(call, headers={**STALE, "x-other": "é" * 15_000}, data=data)
    [letter] = outcome.dead_letters
    assert (letter["whole"], base64.b64decode(letter["data_base64"])) == (True, data)
    assert letter["headers"]["x-other"] == "é" * 15_000
    assert letter["headers"]["CG-Tool-Call-Id"] == call.tool_call_id == letter["tool_call_id"]


@pytest.mark.usefixtures("environment")
@requirement("deadletters")
async def test_replay_reads_a_partly_recorded_command_from_its_stream(world_without_executor: World) -> None:
    world, call = world_without_executor, await world_without_executor.place()
    async with world.executor():
        await world.send(call, headers=STALE, data=LARGE)
    [listed] = lines(await deadletters("list", "--json"))
    assert (listed["whole"], listed["size"], listed["data"]) == (False, len(LARGE), "x" * 4096)
    [sent] = lines(await deadletters("replay", listed["id"], "--yes", "--json"))
    assert (sent["sent"], sent["why"]) == (True, None)
    jetstream = world.caller.client.jetstream()
    again = await jetstream.get_msg(STREAM, listed["stream_sequence"] + 1)
    assert (again.data, (again.headers or {})["CG-Turn-Id"]) == (LARGE, "an-old-turn")
    assert lines(await deadletters("list", "--json")) == []


@pytest.mark.parametrize("change", ["purged", "deleted", "another"])
@pytest.mark.usefixtures("environment")
@requirement("deadletters")
async def test_replay_reports_a_command_that_expired_or_was_replaced(
    world_without_executor: World, change: str
) -> None:
    world, jetstream = world_without_executor, world_without_executor.caller.client.jetstream()
    async with world.executor():
        await world.send(await world.place(), headers=STALE, data=LARGE)
    [listed] = lines(await deadletters("list", "--json"))
    if change == "purged":
        await jetstream.purge_stream(STREAM)
    elif change == "deleted":
        await jetstream.delete_stream(STREAM)
    else:
        await jetstream.delete_stream(STREAM)
        await world.caller.make_stream()
        await publish(world.stack.nats.url, COMMAND, LARGE[:-1] + b"y")
    refused = await deadletters("replay", listed["id"], "--yes")
    assert (refused.exit_code, refused.stdout) == (1, "")
    reason = "holds another message now" if change == "another" else "its stream no longer holds it"
    assert reason in refused.stderr
    assert f"{STREAM}, message 1" in refused.stderr
    assert len(lines(await deadletters("list", "--json"))) == 1


@pytest.mark.usefixtures("environment")
@requirement("deadletters")
async def test_replay_refuses_an_invalid_subject_and_an_unreadable_record(world_without_executor: World) -> None:
    world, jetstream = world_without_executor, world_without_executor.caller.client.jetstream()
    await publish(world.stack.nats.url, COMMAND + b"\xff", b"{}")
    async with world.executor():
        await world.send(await world.place())
    foreign = "no record" + "x" * MAX_BODY_BYTES
    await jetstream.publish(f"{SUBJECT_PREFIX}.x", foreign.encode())
    listed = lines(await deadletters("list", "--json"))
    assert [letter["reason"] for letter in listed] == ["bad_subject", "unreadable"]
    assert listed[1]["data"] == foreign
    assert listed[0]["subject"].endswith("search\\xff")
    for letter in listed:
        refused = await deadletters("replay", letter["id"], "--yes", "--json")
        assert (refused.exit_code, json.loads(refused.stdout)["sent"]) == (1, False)
    assert "bad_subject" in (await deadletters("list")).stdout


# The stream.


@requirement("deadletters")
async def test_created_stream_has_limits_per_project_and_in_total(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.send(await world.place(), headers=STALE)
    config = (await world.caller.client.jetstream().stream_info(DEAD_LETTERS)).config
    assert (config.subjects, config.max_age) == ([SUBJECT_FILTER], 7 * 24 * 3600)
    assert (config.max_bytes, config.max_msgs, config.max_msgs_per_subject) == (512 * 1024 * 1024, 100_000, 1_000)
    assert (config.discard, config.discard_new_per_subject) == (DiscardPolicy.NEW, True)
    assert logged(caplog, "dead_letters.unlimited") == []
    record = await world.caller.client.jetstream().get_msg(DEAD_LETTERS, 1)
    assert record.subject == f"{SUBJECT_PREFIX}.{PROJECT}"


async def _stream(world: World, **changes: Any) -> None:
    limits = {"max_age": 3600, "max_bytes": 10**8, "max_msgs": 100, "max_msgs_per_subject": 10}
    policy = {"subjects": [SUBJECT_FILTER], "discard": DiscardPolicy.NEW, "discard_new_per_subject": True}
    await world.caller.client.jetstream().add_stream(StreamConfig(DEAD_LETTERS, **{**limits, **policy, **changes}))


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"max_msgs_per_subject": 1}, "full"),
        ({"max_msgs": 1}, "full"),
        ({"max_bytes": 1_800}, "full"),  # one record has some 1,500 bytes
        ({"max_msg_size": 100}, "too_large"),
    ],
)
@requirement("deadletters")
async def test_refused_dead_letter_is_logged_and_counted_and_its_command_settled(
    world_without_executor: World, caplog: pytest.LogCaptureFixture, changes: Mapping[str, Any], cause: str
) -> None:
    world = world_without_executor
    await _stream(world, **changes)
    before, counted = discarded(cause), stored("stale_turn")
    async with world.executor():
        first = await world.place()
        await world.send(first, headers=STALE)
        call = await world.place()
        outcome = await world.send(call, headers=STALE)
    stored_records = 0 if cause == "too_large" else 1
    assert (outcome.deliveries, len(outcome.dead_letters)) == (2, stored_records)
    assert (discarded(cause) - before, stored("stale_turn") - counted) == (2 - stored_records, stored_records)
    record = vars(logged(caplog, "dead_letters.discarded")[-1])
    assert (record["project_id"], record["tool_call_id"], record["reason"]) == (
        PROJECT,
        call.tool_call_id,
        "stale_turn",
    )
    assert (record["stream_sequence"], record["cause"]) == (2, cause)


@requirement("deadletters")
async def test_project_at_its_limit_does_not_evict_dead_letters_of_others(world_without_executor: World) -> None:
    await _stream(world_without_executor, max_msgs_per_subject=2)
    url = world_without_executor.stack.nats.url
    for _ in range(5):
        await publish(url, b"cg.v1r4.loud.public.cmd.tool.jina.search", b"{}")
    for subject in (
        b"cg.v1r4.p\xff.public.cmd.tool.jina.search",
        "cg.v1r4.aéb.c.cmd.tool.jina.s".encode(),
    ):
        await publish(url, subject, b"{}")
    async with world_without_executor.executor():
        outcome = await world_without_executor.send(await world_without_executor.place(), headers=STALE)
    projects = sorted(letter["project_id"] for letter in outcome.dead_letters)
    assert projects == ["aéb", "loud", "loud", "p\\xff", PROJECT]
    jetstream = world_without_executor.caller.client.jetstream()
    subjects = {(await jetstream.get_msg(DEAD_LETTERS, number)).subject for number in range(1, 6)}
    hashed = hashlib.sha256("aéb".encode()).hexdigest()[:32]
    assert subjects == {f"{SUBJECT_PREFIX}.{token}" for token in ("loud", "=unreadable", f"={hashed}", PROJECT)}


@requirement("deadletters")
async def test_dead_letter_is_discarded_after_five_deliveries_during_an_outage(
    world_without_executor: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world, publish_, attempts = world_without_executor, JetStreamContext.publish, []

    async def publish_or_time_out(self: JetStreamContext, subject: str, *message: Any, **options: Any) -> Any:
        if subject.startswith(SUBJECT_PREFIX):
            attempts.append(subject)
            raise nats.errors.TimeoutError
        return await publish_(self, subject, *message, **options)

    monkeypatch.setattr(JetStreamContext, "publish", publish_or_time_out)
    before = discarded("unavailable")
    async with world.executor(nats={"servers": world.stack.nats.url, "ack_wait_s": 0.3}):
        outcome = await world.send(await world.place(), headers=STALE)
    assert (len(attempts), outcome.deliveries, outcome.dead_letters) == (5, 5, [])
    assert discarded("unavailable") - before == 1
    assert len(logged(caplog, "dead_letters.discarded")) == 1


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        (
            {
                "subjects": [SUBJECT_PREFIX],
                "max_msgs_per_subject": -1,
                "discard_new_per_subject": False,
                "discard": "old",
            },
            [
                f"--subjects '{SUBJECT_PREFIX},{SUBJECT_FILTER}'",
                "--max-msgs-per-subject 1000",
                "--discard new --discard-per-subject",
            ],
        ),
        (
            {"max_age": 0, "max_bytes": -1, "max_msgs": -1},
            ["--max-age 604800s", "--max-bytes 536870912", "--max-msgs 100000"],
        ),
    ],
)
@requirement("deadletters")
async def test_existing_stream_is_used_unchanged_with_a_warning_about_missing_limits(
    world_without_executor: World, caplog: pytest.LogCaptureFixture, changes: Mapping[str, Any], flags: list[str]
) -> None:
    world = world_without_executor
    await _stream(world, **changes)
    async with world.executor():
        outcome = await world.send(await world.place(), headers=STALE)
    [warning] = logged(caplog, "dead_letters.unlimited")
    assert warning.levelno == logging.WARNING
    assert f"nats stream edit {DEAD_LETTERS} {' '.join(flags)} --force" in warning.getMessage()
    assert [letter["reason"] for letter in outcome.dead_letters] == ["stale_turn"]


@pytest.mark.usefixtures("environment")
@requirement("deadletters")
async def test_record_in_the_first_format_is_listed_and_replayed(world_without_executor: World) -> None:
    world, jetstream = world_without_executor, world_without_executor.caller.client.jetstream()
    call = await world.place()
    await _stream(world, subjects=[SUBJECT_PREFIX])
    record = {
        "reason": "stale_turn",
        "message": "no turn",
        "subject": call.subject,
        "headers": dict(call.headers),
        "data_base64": base64.b64encode(orjson.dumps(call.body)).decode(),
        "stream_sequence": 7,
        "attempt": 1,
        "published_at": datetime.now(UTC),
        "recorded_at": datetime.now(UTC),
    }
    await jetstream.publish(SUBJECT_PREFIX, orjson.dumps(record))
    [listed] = lines(await deadletters("list", "--json"))
    assert (listed["whole"], json.loads(listed["data"]), listed["stream_sequence"]) == (True, dict(call.body), 7)
    assert lines(await deadletters("replay", listed["id"], "--yes", "--json"))[0]["sent"] is True
    world.caller.last_sequence = 1  # the replayed command is the first message of the stream
    async with world.executor():
        assert (await world.outcome(call)).content["status"] == "success"


@requirement("handover", "command.any")
async def test_abandoned_commands_with_a_forged_status_header_are_found(
    world_without_executor: World,
) -> None:
    """nats-py's `fetch` treats such a header as a status message of the server and stops."""
    world, jetstream = world_without_executor, world_without_executor.caller.client.jetstream()
    config = ConsumerConfig(durable_name=DURABLE, filter_subject=FILTER, ack_policy=AckPolicy.EXPLICIT)
    await jetstream.add_consumer(STREAM, config)
    for block in (
        header_block({"Status": "503"}),
        header_block({"Status": "404"}, b"\xff: x"),
        b"NATS/1.0 408\r\n\r\n",
    ):
        await publish(world.stack.nats.url, COMMAND, b"{}", block)
    await publish(world.stack.nats.url, COMMAND + b"\xff", LARGE)
    pulled = await world.caller.client.subscribe("a.pull")
    await world.caller.client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{DURABLE}", b"4", "a.pull")
    for _ in range(4):
        await (await pulled.next_msg(5)).ack_sync()

    async def answered(command: Delivery) -> bool:
        del command
        return False  # no command has a result

    options = DurableOptions("v1r4", DURABLE, FILTER, NatsOptions(ack_wait_s=6, max_ack_pending=100))
    async with asyncio.timeout(WAIT_S):
        found = await abandoned_commands(world.caller.client, options, [], answered)
    assert [letter.number for letter in found] == [1, 2, 3, 4]
    assert [letter.headers.get("Status") for letter in found[:2]] == ["503", "404"]
    assert (found[3].whole, found[3].size, found[3].subject[-1]) == (False, len(LARGE), "\N{REPLACEMENT CHARACTER}")
    assert await dead_letters(world.caller) == []


# The command line: list, show, replay.


async def deadletters(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ["deadletters", *arguments])


def lines(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.usefixtures("environment")
@requirement("deadletters")
async def test_dead_letter_is_listed_shown_and_replayed(world_without_executor: World) -> None:
    world = world_without_executor
    call = await world.place()
    async with world.executor():
        await world.send(call, headers={"CG-Turn-Id": "an-old-turn"})
    [listed] = lines(await deadletters("list", "--json"))
    assert (listed["reason"], listed["subject"], listed["attempt"]) == ("stale_turn", call.subject, 1)
    assert json.loads((await deadletters("show", listed["id"])).stdout)["headers"]["CG-Turn-Id"] == "an-old-turn"
    assert "stale_turn" in (await deadletters("list")).stdout

    dry = await deadletters("replay", listed["id"])
    assert dry.stdout == f"would send {listed['id']} to {call.subject}\n"
    assert len(lines(await deadletters("list", "--json"))) == 1

    await world.caller.database.execute("update state.agent_inbox set agent_turn_id = 'an-old-turn'")
    assert lines(await deadletters("replay", listed["id"], "--yes", "--json"))[0]["sent"] is True
    async with world.executor():
        outcome = await world.outcome(call)
    assert outcome.content["status"] == "success"
    assert lines(await deadletters("list", "--json")) == []


@pytest.mark.parametrize("header", ["Nats-Expected-Last-Subject-Sequence", "nats-msg-id"])
@pytest.mark.usefixtures("environment")
@requirement("deadletters")
async def test_replay_drops_nats_headers_that_the_server_would_interpret(
    world_without_executor: World, header: str
) -> None:
    world, jetstream = world_without_executor, world_without_executor.caller.client.jetstream()
    subject = (await world.place()).subject
    async with world.executor():
        await jetstream.publish(f"{subject}.hostile", b"{}", headers={header: "0"})
        world.caller.last_sequence = (await jetstream.publish(f"{subject}.other", b"{}")).seq
        await world.settled()
    letters = [letter["id"] for letter in lines(await deadletters("list", "--json"))]
    assert len(letters) == 2
    sent = lines(await deadletters("replay", *letters, letters[0], "--yes", "--json"))
    assert [(outcome["id"], outcome["sent"]) for outcome in sent] == [(letter, True) for letter in letters]
    assert (await jetstream.stream_info(STREAM)).state.last_seq == world.caller.last_sequence + 2
    assert lines(await deadletters("list", "--json")) == []


@pytest.mark.usefixtures("environment")
@requirement("deadletters")
async def test_replay_reports_each_refused_dead_letter(world_without_executor: World) -> None:
    world, jetstream = world_without_executor, world_without_executor.caller.client.jetstream()
    async with world.executor():
        for _ in range(2):
            await world.caller.publish(await world.place(), data=b"{}", headers={})
        await world.settled()
    letters = [letter["id"] for letter in lines(await deadletters("list", "--json"))]
    await jetstream.update_stream((await jetstream.stream_info(STREAM)).config, max_msg_size=1)
    refused = await deadletters("replay", *letters, "--yes", "--json")
    assert refused.exit_code == 1
    assert [json.loads(line)["sent"] for line in refused.stdout.splitlines()] == [False, False]
    assert len(lines(await deadletters("list", "--json"))) == 2


@pytest.mark.usefixtures("world_without_executor", "environment")
@requirement("deadletters")
async def test_an_unknown_dead_letter_gives_an_error_with_its_id() -> None:
    for command in (("show", "7"), ("replay", "7", "--yes")):
        refused = await deadletters(*command)
        assert refused.exit_code == 2
        assert "'7'" in refused.stderr


@requirement("deadletters")
async def test_unreachable_server_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_DSN", "postgresql://127.0.0.1/unused")
    monkeypatch.setenv("NATS_SERVERS", "nats://127.0.0.1:1")
    refused = await deadletters("list")
    assert (refused.exit_code, refused.stdout) == (2, "")
    line, _ = refused.stderr.splitlines()  # and where to look
    assert "cannot connect to NATS at 127.0.0.1:1: " in line
    assert "127.0.0.1" in line
    assert line.endswith("; check nats.servers (NATS_SERVERS)")


@pytest.mark.usefixtures("environment")
@requirement("handover")
async def test_durable_of_another_executor_is_taken_over_and_abandoned_commands_are_listed(
    world_without_executor: World,
) -> None:
    """The kernel's own executor refuses redelivered commands and stops after a few (protocol section 10)."""
    world, jetstream = world_without_executor, world_without_executor.caller.client.jetstream()
    filter_subject = "cg.v1r4.*.*.cmd.tool.jina.>"
    await jetstream.add_consumer(
        STREAM,
        ConsumerConfig(
            durable_name=DURABLE,
            filter_subject=filter_subject,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=0.2,
            max_deliver=1,
        ),
    )
    subscription = await jetstream.pull_subscribe_bind(DURABLE, STREAM)
    answered, given_up, waiting = [await world.place() for _ in range(3)]
    for call in (answered, given_up):
        await world.caller.publish(call)
    first, _ = await subscription.fetch(2, timeout=WAIT_S)
    await first.ack_sync()
    await asyncio.sleep(0.5)  # longer than that durable's AckWait
    with pytest.raises(TimeoutError):
        await subscription.fetch(1, timeout=0.3)

    stale = await world.place()
    async with world.executor():
        await world.send(stale, headers={"CG-Turn-Id": "an-old-turn"})
        outcome = await world.send(waiting)
        assert outcome.content["status"] == "success"
        settings = (await jetstream.consumer_info(STREAM, DURABLE)).config
        assert (settings.max_deliver, settings.ack_wait) == (-1, 6)
        assert (await world.caller.read_result(given_up)).card == {}
        listed = lines(await deadletters("list", "--abandoned", "--json"))
        assert given_up.tool_call_id in [letter["headers"]["CG-Tool-Call-Id"] for letter in listed]
        named = [letter["reason"] for letter in listed if letter["headers"]["CG-Tool-Call-Id"] == stale.tool_call_id]
        assert named == ["stale_turn"]
        chosen = next(letter for letter in listed if letter["headers"]["CG-Tool-Call-Id"] == given_up.tool_call_id)
        lines(await deadletters("replay", chosen["id"], "--yes", "--json"))
        assert (await world.caller.result(given_up, WAIT_S)).card["content"]["status"] == "success"
    assert given_up.tool_call_id not in (await deadletters("list", "--abandoned", "--json")).stdout


@pytest.mark.usefixtures("environment")
@requirement("deadletters")
async def test_dead_letters_are_listed_newest_first_and_by_project(
    world_without_executor: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_without_executor
    subjects = [f"cg.v1r4.proj_{'one' if number % 2 else 'two'}.public.cmd.tool.jina.search" for number in range(5)]
    async with world.executor():
        for subject in subjects:
            await world.caller.client.jetstream().publish(subject, b"{}")
        async with asyncio.timeout(WAIT_S):
            while len(lines(await deadletters("list", "--json"))) < len(subjects):
                pass
    everything = [letter["id"] for letter in lines(await deadletters("list", "--json"))]
    assert [letter["id"] for letter in lines(await deadletters("list", "--json", "--limit", "2"))] == everything[:2:-1]
    of_one = lines(await deadletters("list", "--json", "--project", "proj_one"))
    assert {letter["subject"] for letter in of_one} == {subjects[1]}
    assert len(of_one) == 2

    monkeypatch.setenv("COLUMNS", "80")
    table = await deadletters("list", "--limit", "1", "--project", "proj_two")
    assert "proj_two" in table.stdout
    assert "jina.search" in table.stdout
    assert table.stderr == "2 older ones are not shown; --limit shows more\n"
