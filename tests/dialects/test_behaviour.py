"""One process that serves a kernel of each version: the same behaviour, from command to doorbell."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from openapi_tool.bus.stats import gather_stats
from openapi_tool.local.caller import Caller, PlacedCall, ResultRows
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.servers import free_port
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.settings.sections import NatsSettings
from tests.conftest import AGENT, PROJECT, StartExecutor, search_tool
from tests.dialects.conftest import PREFIX, Kernels, tool_of
from tests.requirements import requirement
from tests.support import dead_letters, dsn_of

KNOWN = {"query": "hello world", "count": 3}


@pytest.fixture(params=["v1r4", "v1r3"])
def kernel(kernels: Kernels, request: pytest.FixtureRequest) -> Caller:
    return kernels.callers[request.param]


async def call_answer(kernel: Caller, arguments: Any = None, tool: str = "jina_search", **changes: Any) -> ResultRows:
    call = await kernel.place(PROJECT, AGENT, tool, KNOWN if arguments is None else arguments, **changes)
    return await kernel.result(call, 10)


@requirement("dialects.behaviour")
async def test_a_call_is_answered_from_command_to_doorbell(kernel: Caller, kernels: Kernels) -> None:
    answer = await call_answer(kernel)
    content, metadata = answer.card["content"], answer.card["metadata"]
    assert content["status"] == "success"
    assert metadata["author_id"] == answer.edge["source_agent_id"]
    assert answer.inbox_row["status"] == "pending"
    assert answer.inbox_row["payload"]["tool_result_card_id"] == answer.card["card_id"]
    assert answer.edge["metadata"]["inbox_id"] == answer.inbox_row["inbox_id"]
    assert answer.doorbell is not None
    assert answer.doorbell["subject"] == f"cg.{kernel.version}.{PROJECT}.public.cmd.agent.worker_generic.wakeup"
    assert len(await asyncio.to_thread(kernels.stack.upstream.requests)) == 1


@pytest.mark.parametrize(
    ("arguments", "changes", "code"),
    [
        ({"query": 7}, {}, "bad_request"),
        ({"_raw": "x"}, {}, "bad_request"),
        (KNOWN, {"tool": "missing"}, "not_found"),
        (KNOWN, {"card_metadata": {"type": "other"}}, "bad_request"),
        (KNOWN, {"after_execution": "never"}, "bad_request"),
    ],
)
@requirement("dialects.behaviour")
async def test_an_invalid_call_gives_a_typed_error_and_no_request(
    kernel: Caller, kernels: Kernels, arguments: Any, changes: dict[str, Any], code: str
) -> None:
    answer = await call_answer(kernel, arguments, **changes)
    assert answer.card["content"]["status"] == "failed"
    assert answer.card["content"]["error"]["code"] == code
    assert answer.doorbell is not None
    assert await asyncio.to_thread(kernels.stack.upstream.requests) == []


@requirement("dialects.behaviour")
async def test_a_repeated_command_is_answered_once(kernel: Caller, kernels: Kernels) -> None:
    call = await kernel.place(PROJECT, AGENT, "jina_search", KNOWN)
    first = await kernel.result(call, 10)
    await kernel.publish(call)
    await logged(kernels.executor, "call.deduplicated")
    assert (await kernel.read_result(call)).card["card_id"] == first.card["card_id"]
    assert len(await asyncio.to_thread(kernels.stack.upstream.requests)) == 1


@requirement("dialects.behaviour")
async def test_a_missing_report_is_written_again(kernel: Caller, kernels: Kernels) -> None:
    call = await kernel.place(PROJECT, AGENT, "jina_search", KNOWN)
    first = await kernel.result(call, 10)
    await kernel.database.execute("delete from state.agent_inbox where message_type = 'tool_result'")
    await kernel.publish(call)
    await logged(kernels.executor, "call.deduplicated")
    again = await kernel.read_result(call)
    assert again.inbox_row["payload"] == first.inbox_row["payload"]
    assert len(await asyncio.to_thread(kernels.stack.upstream.requests)) == 1


@requirement("dialects.behaviour")
async def test_the_result_of_another_author_is_left_alone(kernel: Caller, kernels: Kernels) -> None:
    call = await kernel.place(PROJECT, AGENT, "jina_search", KNOWN, publish=False)
    await kernel.database.execute(
        "insert into cards (card_id, tenant_id, tool_call_id, content, metadata) values ('w', $1, $2, $3, $4)",
        PROJECT,
        call.tool_call_id,
        {"status": "timeout"},
        {"type": "tool.result", "author_id": "worker.watchdog"},
    )
    await kernel.publish(call)
    await logged(kernels.executor, "call.deduplicated")
    answer = await kernel.read_result(call)
    assert (answer.card["card_id"], answer.inbox_row) == ("w", {})
    assert await asyncio.to_thread(kernels.stack.upstream.requests) == []


@requirement("dialects.behaviour")
async def test_a_depth_at_the_limit_and_garbage_are_dead_letters(kernel: Caller, kernels: Kernels) -> None:
    call = await kernel.place(PROJECT, AGENT, "jina_search", KNOWN, publish=False)
    await kernel.database.execute("update state.execution_edges set recursion_depth = 20")
    at_limit = replace(call, headers={**call.headers, "CG-Recursion-Depth": "20"})
    await kernel.publish(at_limit)
    await kernel.publish(call, headers={}, data=b"[1, 2]")
    async with asyncio.timeout(10):
        while len(letters := await dead_letters(kernel)) < 2:  # noqa: ASYNC110 - a stream has no event here
            await asyncio.sleep(0.05)
    assert "no_identity" in {letter["reason"] for letter in letters}
    assert (await kernel.read_result(call)).card == {}
    assert await asyncio.to_thread(kernels.stack.upstream.requests) == []


@requirement("dialects.isolated")
async def test_equal_project_call_and_sequence_of_two_kernels_share_nothing(kernels: Kernels) -> None:
    made = [await one.place(PROJECT, AGENT, "jina_search", KNOWN, publish=False) for one in kernels.callers.values()]
    other = with_call_id(made[1], made[0].tool_call_id)
    await kernels.callers["v1r3"].database.execute(
        "update cards set tool_call_id = $1, metadata = metadata || jsonb_build_object('tool_call_id', $1::text)",
        other.tool_call_id,
    )
    placed = dict(zip(kernels.callers, (made[0], other), strict=True))
    sequences = [await one.publish(placed[version]) for version, one in kernels.callers.items()]
    assert len(set(sequences)) == 1
    answers = [await one.result(placed[version], 10) for version, one in kernels.callers.items()]
    cards = [answer.card for answer in answers]
    assert [card["content"]["status"] for card in cards] == ["success", "success"]
    assert cards[0]["card_id"] != cards[1]["card_id"]
    # The cache is on: equal calls of one session would share a request.
    assert len(await asyncio.to_thread(kernels.stack.upstream.requests)) == 2
    async with asyncio.timeout(10):
        while len(lines := answer_lines(kernels)) < 2:  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0.05)
    assert {line["tool_call_id"] for line in lines} == {other.tool_call_id}
    assert sorted(line["protocol"] for line in lines) == ["v1r3", "v1r4"]


def answer_lines(kernels: Kernels) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in kernels.executor.log_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["action"] == "call.answered"]


@requirement("dialects.isolated", "metrics", "cli.top")
async def test_statistics_and_gauges_distinguish_the_kernels(kernels: Kernels) -> None:
    for one in kernels.callers.values():
        assert (await call_answer(one)).card["content"]["status"] == "success"
    async with asyncio.timeout(10):
        while len((replica := await statistics(kernels))["last"]) < 2 or not all(  # noqa: ASYNC110 - a gauge has no event
            kernel["max_unacknowledged"] for kernel in replica["kernels"]
        ):
            await asyncio.sleep(0.05)
    assert sorted((row["protocol"], row["project"], row["calls"]) for row in replica["tools"]) == [
        ("v1r3", PROJECT, 1),
        ("v1r4", PROJECT, 1),
    ]
    assert sorted(call["protocol"] for call in replica["last"]) == ["v1r3", "v1r4"]
    assert sorted(kernel["protocol"] for kernel in replica["kernels"]) == ["v1r3", "v1r4"]
    [most] = {kernel["max_unacknowledged"] for kernel in replica["kernels"]}
    assert most == NatsSettings().max_ack_pending, "the value of each kernel, not the sum"


async def statistics(kernels: Kernels) -> dict[str, Any]:
    [replica] = await gather_stats(kernels.callers["v1r4"].client, 0.5)
    return replica


@requirement("dialects.isolated")
async def test_the_log_line_of_a_dead_letter_names_its_kernel(kernels: Kernels) -> None:
    for version, one in kernels.callers.items():
        call = await one.place(PROJECT, AGENT, "jina_search", KNOWN, publish=False)
        headers = {"CG-Tool-Call-Id": "same"} if version == "v1r4" else {}
        await one.publish(call, headers=headers, data=b'{"tool_call_id": "same", "agent_id": 7}')
    async with asyncio.timeout(10):
        while (text := kernels.executor.log_text()).count('"call.dead_lettered"') < 2:  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0.05)
    lines = [json.loads(line) for line in text.splitlines() if '"call.dead_lettered"' in line]
    assert {(line["protocol"], line["subject"].split(".")[1]) for line in lines} == {("v1r3", "v1r3"), ("v1r4", "v1r4")}


@requirement("dialects.isolated")
async def test_an_unavailable_kernel_does_not_stop_the_other(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    wrong = dsn_of(stack, str(await caller.database.fetchval("select current_database()")))
    executor = start_executor({f"{PREFIX}POSTGRES__DSN": wrong})
    assert (await call_answer(caller)).card["content"]["status"] == "success"
    assert "a database of protocol v1r4, but v1r3 is configured" in executor.log_text()


@requirement("dialects.isolated", "dialects.recognised")
async def test_calls_of_the_older_kernel_continue_without_the_main_one(
    stack: EmbeddedStack, v1r3_caller: Caller, v1r3_database: str, start_executor: StartExecutor
) -> None:
    await v1r3_caller.add_tool(PROJECT, tool_of("v1r3"))
    older = dsn_of(stack, v1r3_database)
    reachable = {f"{PREFIX}POSTGRES__DSN": older, f"{PREFIX}NATS__SERVERS": stack.nats.url}
    nowhere = f"127.0.0.1:{free_port()}"
    for outage, message in (
        ({"NATS_SERVERS": f"nats://{nowhere}"}, f"NATS at {nowhere}: connection refused"),
        ({"PG_DSN": older}, "a database of protocol v1r3, but v1r4 is configured"),
    ):
        executor = start_executor({**reachable, **outage})
        assert (await call_answer(v1r3_caller)).card["content"]["status"] == "success"
        assert message in executor.log_text()
        [replica] = await gather_stats(v1r3_caller.client, 0.5)
        assert "tool_jina_openapi_cmd_v1r3" in replica["durables"]
        assert executor.stop() == 0


@requirement("dialects.behaviour")
async def test_both_kernels_answer_many_concurrent_calls(kernels: Kernels) -> None:
    kernels.stack.upstream.rules({"match": "hello", "answer": "s-post-json"})
    placed = [
        (one, await one.place(PROJECT, AGENT, "jina_search", KNOWN))
        for _ in range(50)
        for one in kernels.callers.values()
    ]
    answers = await asyncio.gather(*(one.result(call, 30) for one, call in placed))
    assert {answer.card["content"]["status"] for answer in answers} == {"success"}
    for one in kernels.callers.values():
        results = await one.database.fetchval("select count(*) from cards where metadata ->> 'type' = 'tool.result'")
        rows = await one.database.fetchval("select count(*) from state.agent_inbox where message_type = 'tool_result'")
        assert (results, rows) == (50, 50)


def with_call_id(call: PlacedCall, tool_call_id: str) -> PlacedCall:
    return replace(call, tool_call_id=tool_call_id, body={**call.body, "tool_call_id": tool_call_id})


async def logged(executor: ExecutorProcess, action: str) -> None:
    async with asyncio.timeout(10):
        while action not in executor.log_text():  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0.02)
