"""A call with real servers and executor: rows, card, doorbell and settlement."""

from __future__ import annotations

import asyncio
import base64
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from nats.js.errors import NotFoundError

from openapi_tool.kernel.jetstream.dead_letters import STREAM as DEAD_LETTERS
from openapi_tool.kernel.jetstream.dead_letters import SUBJECT_FILTER
from openapi_tool.local.caller import STREAM, Caller, ResultRows
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.protocol.subjects import default_durable
from tests.conftest import AGENT, PROJECT, StartExecutor, reader_tool, search_tool
from tests.requirements import requirement
from tests.support import dead_letters, delete_streams
from tests.waiting import WAIT_S, until

DURABLE = default_durable("v1r4", "jina")
RECORDED_ARGUMENTS = {"query": "hello world", "count": 3}


async def result_of_call(
    caller: Caller, arguments: Any, tool: str = "jina_search", suffix: str = "search"
) -> ResultRows:
    call = await caller.place(PROJECT, AGENT, tool, arguments, suffix=suffix)
    return await caller.result(call, WAIT_S)


async def settled(caller: Caller) -> Any:
    """Return the consumer's state once nothing is pending or unacknowledged. Raises TimeoutError."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                info = await caller.client.jetstream().consumer_info(STREAM, DURABLE)
            except NotFoundError:  # the executor has not created it yet
                continue
            floor = info.ack_floor.stream_seq if info.ack_floor else 0
            if floor >= caller.last_sequence and not info.num_pending and not info.num_ack_pending:
                return info
            await asyncio.sleep(0.02)


@requirement("content.search", "options.result_format")
async def test_a_search_is_answered_from_command_to_doorbell(caller: Caller, start_executor: StartExecutor) -> None:
    await caller.add_tool(PROJECT, search_tool())
    start_executor()
    rows = await result_of_call(caller, RECORDED_ARGUMENTS)
    content = rows.card["content"]
    assert (content["status"], content["error"]) == ("success", None)
    assert "1. Result 1 for hello world" in content["result"]
    info = await settled(caller)
    assert info.num_redelivered == 0
    assert await dead_letters(caller) == []


@requirement("content.reader", "options.result_format")
async def test_an_object_result_is_one_object(caller: Caller, start_executor: StartExecutor) -> None:
    await caller.add_tool(PROJECT, reader_tool(result_format="object"))
    start_executor()
    rows = await result_of_call(caller, {"url": "http://site.fixture.test:8099/article"}, "jina_reader", "read")
    assert "A Fixture Article" in rows.card["content"]["result"]["content"]
    assert list(rows.card["metadata"]["tool_output"]) == ["retries", "attempts"]


SHORT_TIMEOUTS = {
    "OPENAPI_TOOL__EXECUTOR__WORKER_TIMEOUT_S": "3",
    "OPENAPI_TOOL__EXECUTOR__REQUEUE_DELAY_S": "0.1",
    "OPENAPI_TOOL__NATS__ACK_WAIT_S": "0.15",
}


@requirement("answer.time")
async def test_an_upstream_that_hangs_is_a_timeout_before_the_worker_gives_up(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    stack.upstream.rules({"hang": True})
    start_executor({**SHORT_TIMEOUTS, "OPENAPI_TOOL__EXECUTOR__COMMIT_MARGIN_S": "2.5"})
    rows = await result_of_call(caller, RECORDED_ARGUMENTS)
    assert rows.card["content"]["status"] == "timeout"
    assert rows.card["content"]["error"]["code"] == "tool_timeout"


@requirement("answer.time")
async def test_a_command_that_waited_too_long_is_not_begun(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    call = await caller.place(PROJECT, AGENT, "jina_search", RECORDED_ARGUMENTS)
    await asyncio.sleep(1.2)
    start_executor({**SHORT_TIMEOUTS, "OPENAPI_TOOL__EXECUTOR__COMMIT_MARGIN_S": "2"})
    rows = await caller.result(call, WAIT_S)
    assert rows.card["content"]["status"] == "timeout"
    assert stack.upstream.requests() == []


@requirement("tool.definition")
async def test_the_definitions_after_execution_wins(caller: Caller, start_executor: StartExecutor) -> None:
    await caller.add_tool(PROJECT, {**search_tool(), "after_execution": "terminate"})
    executor = start_executor()
    rows = await result_of_call(caller, RECORDED_ARGUMENTS)
    assert rows.card["content"]["after_execution"] == "terminate"
    assert rows.inbox_row["payload"]["after_execution"] == "terminate"
    await _logged(executor, "after_execution.differs")


@requirement("identity.unanswerable")
async def test_a_command_without_identity_is_dead_lettered_on_its_first_delivery(
    caller: Caller, start_executor: StartExecutor
) -> None:
    start_executor()
    call = await caller.place(PROJECT, AGENT, "jina_search", RECORDED_ARGUMENTS, publish=False)
    await caller.publish(replace(call, card_id="x"), headers={}, data=b"\xff nobody")
    info = await settled(caller)
    assert info.delivered.consumer_seq == 1
    (letter,) = await dead_letters(caller)
    assert letter["reason"] == "no_identity"
    assert letter["subject"] == call.subject
    assert base64.b64decode(letter["data_base64"]) == b"\xff nobody"
    assert letter["attempt"] == 1


@requirement("answer.earlier")
async def test_a_duplicate_command_gets_one_result_and_two_doorbells(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    start_executor()
    call = await caller.place(PROJECT, AGENT, "jina_search", RECORDED_ARGUMENTS)
    first = await caller.result(call, WAIT_S)
    doorbells = await caller.client.subscribe(str(first.doorbell and first.doorbell["subject"]))
    await caller.publish(call)
    again = await doorbells.next_msg(timeout=WAIT_S)
    assert (again.headers or {})["traceparent"] == first.inbox_row["context_headers"]["traceparent"]
    await settled(caller)
    assert (await caller.read_result(call)).card == first.card
    assert len(stack.upstream.requests()) == 1


@requirement("answer.earlier")
async def test_an_unreported_result_is_reported_without_another_upstream_request(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    call = await caller.place(PROJECT, AGENT, "jina_search", RECORDED_ARGUMENTS, publish=False)
    content = {
        "__type__": "ToolResultContent",
        "status": "success",
        "after_execution": "terminate",
        "result": "ours",
        "error": None,
    }
    await _result_card(caller, call, "tool.openapi", content)
    start_executor()
    await caller.publish(call)
    rows = await caller.result(call, WAIT_S)
    assert rows.inbox_row["payload"] == {
        "status": "success",
        "after_execution": "terminate",
        "tool_result_card_id": "earlier",
    }
    assert stack.upstream.requests() == []


@requirement("answer.earlier")
async def test_another_authors_result_is_left_alone(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    call = await caller.place(PROJECT, AGENT, "jina_search", RECORDED_ARGUMENTS, publish=False)
    await _result_card(caller, call, "worker.watchdog", {"__type__": "ToolResultContent", "status": "timeout"})
    start_executor()
    await caller.publish(call)
    await settled(caller)
    assert (await caller.read_result(call)).inbox_row == {}
    assert await dead_letters(caller) == []
    assert stack.upstream.requests() == []


@requirement("answer.earlier")
async def test_a_result_that_the_watchdog_wrote_during_the_call_wins(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    stack.upstream.rules({"delay_s": 0.5})
    start_executor()
    call = await caller.place(PROJECT, AGENT, "jina_search", RECORDED_ARGUMENTS)
    await asyncio.to_thread(stack.upstream.requests, at_least=1)
    await _result_card(caller, call, "worker.watchdog", {"__type__": "ToolResultContent", "status": "timeout"})
    await settled(caller)
    assert (await caller.read_result(call)).card["card_id"] == "earlier"
    assert (await caller.read_result(call)).inbox_row == {}


async def _result_card(caller: Caller, call: PlacedCall, author: str, content: Mapping[str, Any]) -> None:
    await caller.database.execute(
        "insert into cards (card_id, tenant_id, tool_call_id, content, metadata) values ('earlier', $1, $2, $3, $4)",
        PROJECT,
        call.tool_call_id,
        content,
        {"type": "tool.result", "author_id": author, "function_name": "jina_search"},
    )


@requirement("run.concurrency")
async def test_calls_run_concurrently_up_to_the_limit(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    stack.upstream.rules({"delay_s": 1.0})
    start_executor({"OPENAPI_TOOL__EXECUTOR__CONCURRENCY": "4"})
    calls = [await caller.place(PROJECT, AGENT, "jina_search", RECORDED_ARGUMENTS) for _ in range(8)]
    await asyncio.to_thread(stack.upstream.requests, at_least=4)
    jetstream = caller.client.jetstream()
    async with asyncio.timeout(WAIT_S):
        while (info := await jetstream.consumer_info(STREAM, DURABLE)).num_pending:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)
    assert (len(stack.upstream.requests()), info.num_ack_pending) == (4, 8)  # the others wait
    for call in calls:
        await caller.result(call, WAIT_S)
    answered_first = min(entry["answered_at"] for entry in stack.upstream.requests())
    assert sum(entry["at"] < answered_first for entry in stack.upstream.requests()) == 4


@requirement("run.concurrency")
async def test_single_calls_wait_for_no_batch(caller: Caller, start_executor: StartExecutor) -> None:
    await caller.add_tool(PROJECT, search_tool())
    start_executor()
    await result_of_call(caller, RECORDED_ARGUMENTS)
    for _ in range(5):
        began = time.monotonic()
        await result_of_call(caller, RECORDED_ARGUMENTS)
        assert time.monotonic() - began < 2.0
        await asyncio.sleep(0.1)


@requirement("run.replicas")
async def test_two_replicas_share_the_load_and_answer_each_call_once(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    stack.upstream.rules({"delay_s": 0.05})
    replicas = [start_executor({"OPENAPI_TOOL__EXECUTOR__CONCURRENCY": "4"}) for _ in range(2)]
    calls = [await caller.place(PROJECT, AGENT, "jina_search", RECORDED_ARGUMENTS) for _ in range(40)]
    for call in calls:
        await caller.result(call, WAIT_S)
    await settled(caller)
    assert len(stack.upstream.requests()) == len(calls)
    await asyncio.sleep(0.5)  # the log is written by a thread
    answered_by = [replica.log_text().count('"call.finished"') for replica in replicas]
    assert sum(answered_by) == len(calls)
    assert min(answered_by) > 0


@requirement("run.heartbeat")
async def test_a_call_longer_than_the_ack_wait_is_delivered_once(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    stack.upstream.rules({"delay_s": 2.5})
    start_executor({"OPENAPI_TOOL__NATS__ACK_WAIT_S": "1"})
    await result_of_call(caller, RECORDED_ARGUMENTS)
    info = await settled(caller)
    assert info.delivered.consumer_seq == 1
    assert len(stack.upstream.requests()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
@requirement("run.stop", "run.signals")
async def test_a_stop_finishes_running_calls_and_leaves_the_others(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor, number: signal.Signals
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    stack.upstream.rules({"delay_s": 0.5})
    executor = start_executor({"OPENAPI_TOOL__EXECUTOR__CONCURRENCY": "2"})
    calls = [await caller.place(PROJECT, AGENT, "jina_search", RECORDED_ARGUMENTS) for _ in range(4)]
    await asyncio.to_thread(stack.upstream.requests, at_least=2)
    for other in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGPIPE):
        executor.signal(other)  # by default each ends the process without a drain
    executor.signal(number)
    assert await asyncio.to_thread(executor.process.wait, 10) == 0
    written = [(await caller.read_result(call)).inbox_row for call in calls]
    assert sum(bool(row) for row in written) == 2
    assert len(stack.upstream.requests()) == 2
    start_executor()
    for call in calls:
        await caller.result(call, WAIT_S)
    assert len(stack.upstream.requests()) == 4


@requirement("run.stop")
async def test_calls_that_exceed_the_drain_timeout_are_handed_back_at_once(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    stack.upstream.rules({"hang": True})
    executor = start_executor(
        {
            "OPENAPI_TOOL__EXECUTOR__DRAIN_TIMEOUT_S": "1",
            "OPENAPI_TOOL__NATS__ACK_WAIT_S": "60",
            "OPENAPI_TOOL__EXECUTOR__WORKER_TIMEOUT_S": "300",
        }
    )
    call = await caller.place(PROJECT, AGENT, "jina_search", RECORDED_ARGUMENTS)
    await asyncio.to_thread(stack.upstream.requests, at_least=1)
    assert await asyncio.to_thread(executor.stop) == 0
    stack.upstream.rules()
    start_executor()
    assert (await caller.result(call, WAIT_S)).card["content"]["status"] == "success"


@requirement("run.stop")
async def test_a_second_signal_ends_the_process_at_once(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    stack.upstream.rules({"hang": True})
    executor = start_executor()
    await caller.place(PROJECT, AGENT, "jina_search", RECORDED_ARGUMENTS)
    await asyncio.to_thread(stack.upstream.requests, at_least=1)
    executor.signal(signal.SIGTERM)
    await _logged(executor, "drain.started")
    executor.signal(signal.SIGTERM)
    assert await asyncio.to_thread(executor.process.wait, 5) == 128 + signal.SIGTERM


async def _logged(executor: ExecutorProcess, action: str) -> None:
    await until(lambda: f'"{action}"' in executor.log_text())


@requirement("subject.durable")
async def test_an_old_durable_gets_our_settings_and_continues_where_it_stopped(
    caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    jetstream = caller.client.jetstream()
    first = await caller.place(PROJECT, AGENT, "jina_search", RECORDED_ARGUMENTS)
    old = await jetstream.pull_subscribe(
        "cg.v1r4.*.*.cmd.tool.jina.*", DURABLE, stream=STREAM, config=_kernel_executor_settings()
    )
    (message,) = await old.fetch(1)
    await message.ack_sync()
    second = await caller.place(PROJECT, AGENT, "jina_search", RECORDED_ARGUMENTS)
    start_executor()
    await caller.result(second, WAIT_S)
    info = await jetstream.consumer_info(STREAM, DURABLE)
    assert (info.config.filter_subject, info.config.max_deliver) == ("cg.v1r4.*.*.cmd.tool.jina.>", -1)
    assert (info.config.ack_wait, info.config.max_ack_pending) == (6.0, 100_000)
    assert (await caller.read_result(first)).card == {}


def _kernel_executor_settings() -> Any:
    from nats.js.api import AckPolicy, ConsumerConfig  # noqa: PLC0415 - only here

    return ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, ack_wait=30, max_deliver=3)


@requirement("subject.durable")
async def test_a_stream_is_created_only_if_none_captures_the_subjects(
    caller: Caller, start_executor: StartExecutor
) -> None:
    jetstream = caller.client.jetstream()
    before = (await jetstream.stream_info(STREAM)).config
    start_executor().stop()
    assert (await jetstream.stream_info(STREAM)).config == before
    await delete_streams(caller)
    start_executor().stop()
    made = (await jetstream.stream_info(STREAM)).config
    assert (made.subjects, made.max_age) == (["cg.v1r4.*.*.cmd.*.*.>"], 24 * 3600)


async def test_dead_letters_are_stored_in_their_own_stream(caller: Caller, start_executor: StartExecutor) -> None:
    start_executor()
    for _ in range(2):
        sent = await caller.client.jetstream().publish("cg.v1r4.p.c.cmd.tool.jina.search", b"{}")
        caller.last_sequence = sent.seq
    await settled(caller)
    assert len(await dead_letters(caller)) == 2
    info = await caller.client.jetstream().stream_info(DEAD_LETTERS)
    assert info.config.subjects == [SUBJECT_FILTER]
