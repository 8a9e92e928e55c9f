"""Two kernels, one of each protocol version, on the same servers, each served by a process of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from openapi_tool.cli import app
from openapi_tool.cli.dev_settings import dev_settings
from openapi_tool.cli.options import UpstreamChoice
from openapi_tool.local.caller import Caller, ResultRows
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.protocol.dialect import ProtocolVersion
from openapi_tool.protocol.subjects import subject_in_version
from tests.conftest import AGENT, PROJECT, StartExecutor, search_tool
from tests.requirements import requirement
from tests.support import dead_letters, dsn_of
from tests.waiting import WAIT_S, until

VERSION = "OPENAPI_TOOL__PROTOCOL__VERSION"


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels and their executors by protocol version, and the settings of each."""

    callers: Mapping[str, Caller]
    executors: Mapping[str, ExecutorProcess]
    stack: EmbeddedStack


def tool_of(version: str, **options: Any) -> dict[str, Any]:
    """Return the search tool for a kernel of this version."""
    tool = search_tool(**options)
    return {**tool, "target_subject": subject_in_version(tool["target_subject"], version)}


@pytest.fixture
async def kernels(
    stack: EmbeddedStack, caller: Caller, v1r3_caller: Caller, v1r3_database: str, start_executor: StartExecutor
) -> Kernels:
    callers = {one.version: one for one in (caller, v1r3_caller)}
    for one in callers.values():
        await one.add_tool(PROJECT, tool_of(one.version))
    settings = {"OPENAPI_TOOL__CACHE__TTL_S": "300", "OPENAPI_TOOL__EXECUTOR__REQUEUE_DELAY_S": "0.05"}
    older = {VERSION: "v1r3", "PG_DSN": dsn_of(stack, v1r3_database)}
    executors = {"v1r4": start_executor(settings), "v1r3": start_executor({**settings, **older})}
    return Kernels(callers, executors, stack)


OF_PROJECT = ("--project", PROJECT)
GARBAGE = b'{"tool_call_id": "same", "agent_id": 7}'


@pytest.fixture
async def environments(kernels: Kernels) -> dict[str, dict[str, str]]:
    """Return the settings of both kernels by version, with the owner of the databases as user."""
    stack = kernels.stack
    return {
        version: {
            VERSION: version,
            "PG_DSN": stack.postgres.dsn(await one.database.fetchval("select current_database()")),
            "NATS_SERVERS": stack.nats.url,
            **stack.upstream.keys,
        }
        for version, one in kernels.callers.items()
    }


async def run(environment: Mapping[str, str], *words: str, code: int = 0) -> Result:
    result = await asyncio.to_thread(lambda: CliRunner().invoke(app, words, env=dict(environment)))
    assert result.exit_code == code, f"{words}: {result.output}"
    return result


Environments = Mapping[str, Mapping[str, str]]


@requirement("dialects.commands")
async def test_a_call_of_the_older_kernel_can_be_made_inspected_and_counted(environments: Environments) -> None:
    older = environments["v1r3"]
    whole = [*OF_PROJECT, "--agent", AGENT, "--yes", "--json", "--args", '{"query": "hello world", "count": 3}']
    made = json.loads((await run(older, "call", "jina_search", *whole)).stdout)
    assert (made["status"], made["doorbell"]["data"]) == ("success", json.dumps({"agent_id": AGENT}).replace(" ", ""))
    inspect = ("inspect", made["tool_call_id"], *OF_PROJECT, "--json")
    found = json.loads((await run(older, *inspect)).stdout)
    assert found["verdict"].startswith("answered with success")
    assert [command["subject"].split(".")[1] for command in found["commands"]] == ["v1r3"]
    assert [doorbell["subject"].split(".")[1] for doorbell in found["doorbells"]] == ["v1r3"]
    await run(environments["v1r4"], *inspect, code=2)
    for version, calls in (("v1r3", 1), ("v1r4", 0)):
        used = json.loads((await run(environments[version], "usage", *OF_PROJECT, "--json")).stdout)
        assert used["total"]["calls"] == calls


@requirement("dialects.commands")
async def test_check_and_durable_are_those_of_the_configured_kernel(environments: Environments) -> None:
    checked = (await run(environments["v1r3"], "check")).stdout
    assert "stream cg_cmd_v1r3" in checked
    assert "cg_cmd_v1r4" not in checked
    shown = json.loads((await run(environments["v1r3"], "nats", "durable", "--json")).stdout)
    assert "tool_jina_openapi_cmd_v1r3" in shown.values()


@requirement("dialects.commands")
async def test_the_same_file_can_be_registered_in_both_kernels(
    environments: Environments, kernels: Kernels, tmp_path: Path
) -> None:
    file = tmp_path / "tool.yaml"
    file.write_text(yaml.safe_dump({**search_tool(), "tool_name": "mine", "after_execution": "suspend"}))
    for version, one in kernels.callers.items():
        words = ("tools", "apply", str(file), *OF_PROJECT, "--db", "--yes")
        await run(environments[version], *words)
        assert "1 unchanged" in (await run(environments[version], *words)).stdout
        subject = await one.database.fetchval("select target_subject from resource.tools where tool_name = 'mine'")
        assert subject == f"cg.{version}.{{project_id}}.{{channel_id}}.cmd.tool.jina.search"
    await kernels.callers["v1r3"].add_tool(PROJECT, {**search_tool(), "tool_name": "of_v1r4"})
    listed = (await run(environments["v1r3"], "tools", "list", *OF_PROJECT, "--db", "--json")).stdout.splitlines()
    problems = {tool["tool_name"]: tool["problems"] for tool in map(json.loads, listed)}
    assert problems["mine"] == problems["jina_search"] == []
    assert problems["of_v1r4"] == [
        "target_subject: must begin with cg.v1r3., or no executor of this kernel gets a call"
    ]


@requirement("dialects.isolated")
async def test_dead_letters_with_equal_ids_are_distinguished(environments: Environments, kernels: Kernels) -> None:
    for version, one in kernels.callers.items():
        call = await one.place(PROJECT, AGENT, "jina_search", {}, publish=False)
        headers = {"CG-Tool-Call-Id": "same"} if version == "v1r4" else {}
        await one.publish(call, headers=headers, data=GARBAGE)
    async with asyncio.timeout(WAIT_S):
        while len(await dead_letters(kernels.callers["v1r4"])) < 2:  # noqa: ASYNC110 - a stream has no event here
            await asyncio.sleep(0.05)
    listed = (await run(environments["v1r4"], "deadletters", "list", "--json")).stdout.splitlines()
    by_version = {letter["subject"].split(".")[1]: letter for letter in map(json.loads, listed)}
    for version, environment in environments.items():
        letter = by_version[version]
        assert letter["tool_call_id"] == "same"
        found = json.loads((await run(environment, "inspect", "same", *OF_PROJECT, "--json")).stdout)
        assert [one["number"] for one in found["dead_letters"]] == [int(letter["id"])]


@requirement("dialects.recognised")
async def test_commands_report_a_database_of_the_other_version(environments: Environments, tmp_path: Path) -> None:
    file = tmp_path / "tool.yaml"
    file.write_text(yaml.safe_dump({**search_tool(), "after_execution": "suspend"}))
    wrong = {**environments["v1r4"], VERSION: "v1r3"}
    for words, code in (
        (("check",), 1),
        (("tools", "apply", str(file), *OF_PROJECT, "--db", "--yes"), 1),
        (("inspect", "tc", *OF_PROJECT), 2),
        (("usage", *OF_PROJECT), 2),
    ):
        result = await run(wrong, *words, code=code)
        assert "a database of protocol v1r4, but v1r3 is configured" in result.output


@requirement("dialects.commands")
def test_permissions_are_those_of_the_configured_kernel() -> None:
    def allowed(**settings: str) -> set[str]:
        result = CliRunner().invoke(app, ["nats", "permissions", "--json"], env=settings)
        assert result.exit_code == 0, result.output
        return set(json.loads(result.stdout)["publish"]["allow"])

    assert not any("v1r4" in subject for subject in allowed(**{VERSION: "v1r3"}))
    assert not any("v1r3" in subject for subject in allowed())


@requirement("dialects.isolated")
def test_the_executor_of_dev_uses_nothing_of_the_settings_but_the_simulated_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quotas = {"OPENAPI_TOOL__QUOTAS__KERNEL": "mine", "OPENAPI_TOOL__QUOTAS__NATS__SERVERS": "nats://quotas"}
    environment: dict[str, Any] = {**quotas, VERSION: "v1r4"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = dev_settings(UpstreamChoice.DOUBLE, environment, ProtocolVersion.V1R3)
    assert json.loads(settings.environment["OPENAPI_TOOL__QUOTAS"]) == {}
    assert settings.environment[VERSION] == "v1r3"
    assert "quotas.kernel, quotas.nats" in settings.remarks[-1]


RECORDED_ARGUMENTS = {"query": "hello world", "count": 3}


@pytest.fixture(params=["v1r4", "v1r3"])
def kernel(kernels: Kernels, request: pytest.FixtureRequest) -> Caller:
    return kernels.callers[request.param]


async def call_answer(kernel: Caller, arguments: Any = None, tool: str = "jina_search", **changes: Any) -> ResultRows:
    call = await kernel.place(PROJECT, AGENT, tool, RECORDED_ARGUMENTS if arguments is None else arguments, **changes)
    return await kernel.result(call, WAIT_S)


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
        (RECORDED_ARGUMENTS, {"tool": "missing"}, "not_found"),
        (RECORDED_ARGUMENTS, {"card_metadata": {"type": "other"}}, "bad_request"),
        (RECORDED_ARGUMENTS, {"after_execution": "never"}, "bad_request"),
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
    call = await kernel.place(PROJECT, AGENT, "jina_search", RECORDED_ARGUMENTS)
    first = await kernel.result(call, WAIT_S)
    await kernel.publish(call)
    await logged(kernels.executors[kernel.version], "call.deduplicated")
    assert (await kernel.read_result(call)).card["card_id"] == first.card["card_id"]
    assert len(await asyncio.to_thread(kernels.stack.upstream.requests)) == 1


@requirement("dialects.behaviour")
async def test_a_missing_report_is_written_again(kernel: Caller, kernels: Kernels) -> None:
    call = await kernel.place(PROJECT, AGENT, "jina_search", RECORDED_ARGUMENTS)
    first = await kernel.result(call, WAIT_S)
    await kernel.database.execute("delete from state.agent_inbox where message_type = 'tool_result'")
    await kernel.publish(call)
    await logged(kernels.executors[kernel.version], "call.deduplicated")
    again = await kernel.read_result(call)
    assert again.inbox_row["payload"] == first.inbox_row["payload"]
    assert len(await asyncio.to_thread(kernels.stack.upstream.requests)) == 1


@requirement("dialects.behaviour")
async def test_the_result_of_another_author_is_left_alone(kernel: Caller, kernels: Kernels) -> None:
    call = await kernel.place(PROJECT, AGENT, "jina_search", RECORDED_ARGUMENTS, publish=False)
    await kernel.database.execute(
        "insert into cards (card_id, tenant_id, tool_call_id, content, metadata) values ('w', $1, $2, $3, $4)",
        PROJECT,
        call.tool_call_id,
        {"status": "timeout"},
        {"type": "tool.result", "author_id": "worker.watchdog"},
    )
    await kernel.publish(call)
    await logged(kernels.executors[kernel.version], "call.deduplicated")
    answer = await kernel.read_result(call)
    assert (answer.card["card_id"], answer.inbox_row) == ("w", {})
    assert await asyncio.to_thread(kernels.stack.upstream.requests) == []


@requirement("dialects.behaviour")
async def test_a_depth_at_the_limit_and_garbage_are_dead_letters(kernel: Caller, kernels: Kernels) -> None:
    call = await kernel.place(PROJECT, AGENT, "jina_search", RECORDED_ARGUMENTS, publish=False)
    await kernel.database.execute("update state.execution_edges set recursion_depth = 20")
    at_limit = replace(call, headers={**call.headers, "CG-Recursion-Depth": "20"})
    await kernel.publish(at_limit)
    await kernel.publish(call, headers={}, data=b"[1, 2]")
    async with asyncio.timeout(WAIT_S):
        while len(letters := await dead_letters(kernel)) < 2:  # noqa: ASYNC110 - a stream has no event here
            await asyncio.sleep(0.05)
    assert "no_identity" in {letter["reason"] for letter in letters}
    assert (await kernel.read_result(call)).card == {}
    assert await asyncio.to_thread(kernels.stack.upstream.requests) == []


@requirement("dialects.isolated")
async def test_equal_project_call_and_sequence_of_two_kernels_share_nothing(kernels: Kernels) -> None:
    made = [
        await one.place(PROJECT, AGENT, "jina_search", RECORDED_ARGUMENTS, publish=False)
        for one in kernels.callers.values()
    ]
    other = with_call_id(made[1], made[0].tool_call_id)
    await kernels.callers["v1r3"].database.execute(
        "update cards set tool_call_id = $1, metadata = metadata || jsonb_build_object('tool_call_id', $1::text)",
        other.tool_call_id,
    )
    placed = dict(zip(kernels.callers, (made[0], other), strict=True))
    sequences = [await one.publish(placed[version]) for version, one in kernels.callers.items()]
    assert len(set(sequences)) == 1
    answers = [await one.result(placed[version], WAIT_S) for version, one in kernels.callers.items()]
    cards = [answer.card for answer in answers]
    assert [card["content"]["status"] for card in cards] == ["success", "success"]
    assert cards[0]["card_id"] != cards[1]["card_id"]
    # The cache is on: equal calls of one session would share a request.
    assert len(await asyncio.to_thread(kernels.stack.upstream.requests)) == 2
    async with asyncio.timeout(WAIT_S):
        while len(lines := answer_lines(kernels)) < 2:  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0.05)
    assert {line["tool_call_id"] for line in lines} == {other.tool_call_id}
    assert sorted(line["protocol"] for line in lines) == ["v1r3", "v1r4"]


def answer_lines(kernels: Kernels) -> list[dict[str, Any]]:
    texts = [executor.log_text() for executor in kernels.executors.values()]
    lines = [json.loads(line) for text in texts for line in text.splitlines() if line.startswith("{")]
    return [line for line in lines if line["action"] == "call.finished"]


@requirement("dialects.isolated", "cli.top")
async def test_top_shows_the_replicas_of_the_configured_kernel(environments: Environments, kernels: Kernels) -> None:
    for one in kernels.callers.values():
        assert (await call_answer(one)).card["content"]["status"] == "success"
    for version, environment in environments.items():
        [replica] = json.loads((await run(environment, "top", "--json")).stdout)["replicas"]
        assert (replica["protocol"], replica["durable"]) == (version, f"tool_jina_openapi_cmd_{version}")
        assert [(row["project"], row["calls"]) for row in replica["tools"]] == [(PROJECT, 1)]


@requirement("dialects.behaviour")
async def test_both_kernels_answer_many_concurrent_calls(kernels: Kernels) -> None:
    kernels.stack.upstream.rules({"match": "hello", "answer": "s-post-json"})
    placed = [
        (one, await one.place(PROJECT, AGENT, "jina_search", RECORDED_ARGUMENTS))
        for _ in range(50)
        for one in kernels.callers.values()
    ]
    answers = await asyncio.gather(*(one.result(call, WAIT_S) for one, call in placed))
    assert {answer.card["content"]["status"] for answer in answers} == {"success"}
    for one in kernels.callers.values():
        results = await one.database.fetchval("select count(*) from cards where metadata ->> 'type' = 'tool.result'")
        rows = await one.database.fetchval("select count(*) from state.agent_inbox where message_type = 'tool_result'")
        assert (results, rows) == (50, 50)


def with_call_id(call: PlacedCall, tool_call_id: str) -> PlacedCall:
    return replace(call, tool_call_id=tool_call_id, body={**call.body, "tool_call_id": tool_call_id})


async def logged(executor: ExecutorProcess, action: str) -> None:
    await until(lambda: action in executor.log_text())
