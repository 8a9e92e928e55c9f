"""Two kernels, one of each protocol version, in one process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from typer.testing import CliRunner, Result

from openapi_tool.bootstrap import build_bootstrap, build_runner, scoped_key
from openapi_tool.bus.options import NatsOptions
from openapi_tool.bus.replica_statistics import gather_stats
from openapi_tool.cli import app
from openapi_tool.cli.dev_executor import dev_settings
from openapi_tool.cli.options import UpstreamChoice
from openapi_tool.concurrency.fair_semaphore import FairSemaphore
from openapi_tool.executor.runner import ToolCallRequest, ToolRunner
from openapi_tool.isolation.service import Isolation
from openapi_tool.jina.byte_semaphore import ByteSemaphore
from openapi_tool.local.caller import Caller, ResultRows
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.local.servers import free_port
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.protocol.cards import ToolCall
from openapi_tool.protocol.dialect import ProtocolVersion
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.payload import Parts, Payload, unpack
from openapi_tool.protocol.records import Artifact
from openapi_tool.protocol.subjects import subject_in_version
from openapi_tool.settings import Settings
from openapi_tool.telemetry.metrics import list_projects, project_label
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.output import Item, ToolOutput
from openapi_tool.tools.result import ResultFields
from openapi_tool.worker_tasks import TASKS
from tests.conftest import AGENT, PROJECT, StartExecutor, search_tool
from tests.requirements import requirement
from tests.support import dead_letters, definition, dsn_of

PREFIX = "OPENAPI_TOOL__DIALECTS__V1R3__"


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels by protocol version, all served by one executor."""

    callers: Mapping[str, Caller]
    executor: ExecutorProcess
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
    executor = start_executor(
        {
            f"{PREFIX}POSTGRES__DSN": dsn_of(stack, v1r3_database),
            "OPENAPI_TOOL__CACHE__TTL_S": "300",
            "OPENAPI_TOOL__EXECUTOR__REQUEUE_DELAY_S": "0.05",
        }
    )
    async with asyncio.timeout(10):
        while executor.log_text().count('"consumer.started"') < len(callers):  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0.05)
    return Kernels(callers, executor, stack)


KERNELS = {
    "postgres": {"dsn": "postgresql://127.0.0.1/main"},
    "dialects": {"v1r3": {"postgres": {"dsn": "postgresql://127.0.0.1/older"}}},
}
KEY = b"0123456789abcdef"


@requirement("dialects.isolated")
def test_a_project_of_two_kernels_has_separate_shares_of_memory_and_permits() -> None:
    reserved: list[str] = []
    backend = SimpleNamespace(call_memory=reserved.append, run=None)
    upstream: Any = SimpleNamespace(backend=backend, errors=SimpleNamespace(value=str), isolation=Isolation())
    main = build_bootstrap(Settings.model_validate(KERNELS), {})
    for kernel in (main, *main.others):
        artifacts: Any = None
        build_runner(kernel, upstream, artifacts, scoped_key(KEY, kernel.scope)).new_call(CallIdentity("proj", "agent"))
    assert len(set(reserved)) == 2
    assert reserved[0] == "proj"


class _Pool:
    """Pool of workers that runs each task here, and records for which project."""

    def __init__(self) -> None:
        self.tasks: list[tuple[str, str]] = []

    async def run(self, name: str, argument: Parts, *, project: str, wait_s: float, subject: bytes = b"") -> Payload:
        del wait_s, subject
        self.tasks.append((name, project))
        return unpack(TASKS[name](unpack(b"".join(argument))))


class _Page:
    """Backend whose tool reads a long page, and store of its text."""

    call_memory = staticmethod(ByteSemaphore(0).for_call)

    @staticmethod
    def without_unknown(_: object, arguments: Any) -> Any:
        return arguments

    async def run(self, *_: object) -> ToolOutput:
        return ToolOutput((Item("a page " * 20_000),))

    async def artifact(self, project_id: str, agent_id: str, card_id: str, start: int, chars: int) -> Artifact:
        assert (project_id, agent_id) == ("proj", "agent")
        text = "a page " * 20_000
        return Artifact(card_id, len(text), "sha", text[start : start + chars])


COSTLY_SCHEMA = {"type": "object", "properties": {"url": {"type": "string"}}, "allOf": [{}]}  # never checked inline


@requirement("dialects.isolated")
async def test_a_project_of_two_kernels_is_two_projects_to_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would share its turns among the worker processes with the other kernel's project of that name."""
    pool, searching, page = _Pool(), list[str](), _Page()
    take = FairSemaphore.take

    async def record(semaphore: FairSemaphore, project: str) -> None:
        searching.append(project)
        await take(semaphore, project)

    monkeypatch.setattr(FairSemaphore, "take", record)
    upstream: Any = SimpleNamespace(backend=page, isolation=Isolation(cast("Any", pool)))
    tool = definition({"tool": "jina.read"}, parameters=COSTLY_SCHEMA)
    main = build_bootstrap(Settings.model_validate(KERNELS), {"JINA_API_KEY": "a-key-of-the-test"})
    names = []
    for kernel in (main, *main.others):
        runner = build_runner(kernel, upstream, cast("Any", page), scoped_key(KEY, kernel.scope))

        async def call(runner: ToolRunner = runner, **arguments: Any) -> ResultFields:
            one = runner.new_call(CallIdentity("proj", "agent"))
            names.append(one.project)
            with one.memory:
                return (await runner.run(one, ToolCallRequest(tool, ToolCall(arguments), Deadline.after(9))))[0]

        read = await call(url="https://site.example/")
        assert read.tool_output is not None
        found = await call(cursor=read.tool_output["next_cursor"], find="page")
        assert (read.status, found.status) == ("success", "success")
    assert names == ["proj", "proj", "v1r3 proj", "v1r3 proj"]
    assert searching == ["proj", "v1r3 proj"]
    checks = ("check_arguments",) * 2  # of the arguments, and whether the schema takes a cursor
    tasks = (*checks, "check_arguments", "search_text")
    assert pool.tasks == [(task, project) for project in ("proj", "v1r3 proj") for task in tasks]


@pytest.fixture
def listed() -> Iterator[None]:
    list_projects(["proj"])
    yield
    list_projects([])


@requirement("dialects.isolated")
def test_the_label_of_a_project_is_its_id_in_either_kernel(listed: None) -> None:
    del listed
    labels = [project_label(name) for name in ("proj", "v1r3 proj", "v1r3 other", "other", "", None)]
    assert labels == ["proj", "proj", "", "", "", ""]


@requirement("dialects.isolated")
def test_the_settings_of_one_kernel_contain_nothing_of_the_other() -> None:
    settings = Settings.model_validate({**KERNELS, "nats": {"durable": "mine", "password": "-", "user": "u"}})
    older, main = settings.of_version(ProtocolVersion.V1R3), settings.of_version(ProtocolVersion.V1R4)
    assert [len(one.kernels) for one in (settings, main, older)] == [2, 1, 1]
    assert (older.postgres.parsed.database, older.durable) == ("older", "tool_jina_openapi_cmd_v1r3")
    assert (main.postgres.parsed.database, main.durable) == ("main", "mine")
    assert (older.actor_id, main.actor_id) == ("tool.openapi.jina", "tool.openapi")
    alone = main.of_version(ProtocolVersion.V1R3)
    assert (alone.postgres, alone.durable) == (main.postgres, older.durable)


V1R3 = ("--protocol", "v1r3")
OF_PROJECT = ("--project", PROJECT)
GARBAGE = b'{"tool_call_id": "same", "agent_id": 7}'


@pytest.fixture
async def environment(kernels: Kernels) -> dict[str, str]:
    """Return settings of both kernels, with the owner of the databases as user."""
    databases = {
        version: await one.database.fetchval("select current_database()") for version, one in kernels.callers.items()
    }
    stack = kernels.stack
    return {
        "PG_DSN": stack.postgres.dsn(databases["v1r4"]),
        f"{PREFIX}POSTGRES__DSN": stack.postgres.dsn(databases["v1r3"]),
        "NATS_SERVERS": stack.nats.url,
        **stack.upstream.keys,
    }


async def run(environment: Mapping[str, str], *words: str, code: int = 0) -> Result:
    result = await asyncio.to_thread(lambda: CliRunner().invoke(app, words, env=dict(environment)))
    assert result.exit_code == code, f"{words}: {result.output}"
    return result


@requirement("dialects.commands")
async def test_a_call_of_the_older_kernel_can_be_made_inspected_and_counted(environment: dict[str, str]) -> None:
    whole = [*OF_PROJECT, "--agent", AGENT, "--yes", "--json", "--args", '{"query": "hello world", "count": 3}']
    made = json.loads((await run(environment, "call", "jina_search", *whole, *V1R3)).stdout)
    assert (made["status"], made["doorbell"]["data"]) == ("success", json.dumps({"agent_id": AGENT}).replace(" ", ""))
    inspect = ("inspect", made["tool_call_id"], *OF_PROJECT, "--json")
    found = json.loads((await run(environment, *inspect, *V1R3)).stdout)
    assert found["verdict"].startswith("answered with success")
    assert [command["subject"].split(".")[1] for command in found["commands"]] == ["v1r3"]
    assert [doorbell["subject"].split(".")[1] for doorbell in found["doorbells"]] == ["v1r3"]
    await run(environment, *inspect, code=2)
    for option, calls in ((V1R3, 1), ((), 0)):
        used = json.loads((await run(environment, "usage", *OF_PROJECT, "--json", *option)).stdout)
        assert used["total"]["calls"] == calls


@requirement("dialects.commands")
async def test_check_covers_both_kernels_or_one(environment: dict[str, str]) -> None:
    whole = (await run(environment, "check", *OF_PROJECT)).stdout.splitlines()
    own = ["postgres", "nats", f"definitions of {PROJECT}"]
    names = ["settings", *own, *(f"v1r3.{name}" for name in own), "JINA_API_KEY"]
    assert [line.partition(": ")[0] for line in whole if ": ok" in line] == names
    one = (await run(environment, "check", *V1R3)).stdout
    assert "stream cg_cmd_v1r3" in one
    assert "cg_cmd_v1r4" not in one
    shown = json.loads((await run(environment, "nats", "durable", "--json", *V1R3)).stdout)
    assert "tool_jina_openapi_cmd_v1r3" in shown.values()


@requirement("dialects.commands")
async def test_the_same_file_can_be_registered_in_both_kernels(
    environment: dict[str, str], kernels: Kernels, tmp_path: Path
) -> None:
    file = tmp_path / "tool.yaml"
    file.write_text(yaml.safe_dump({**search_tool(), "tool_name": "mine", "after_execution": "suspend"}))
    for version, one in kernels.callers.items():
        words = ("tools", "apply", str(file), *OF_PROJECT, "--db", "--yes", "--protocol", version)
        await run(environment, *words)
        assert "1 unchanged" in (await run(environment, *words)).stdout
        subject = await one.database.fetchval("select target_subject from resource.tools where tool_name = 'mine'")
        assert subject == f"cg.{version}.{{project_id}}.{{channel_id}}.cmd.tool.jina.search"
    await kernels.callers["v1r3"].add_tool(PROJECT, {**search_tool(), "tool_name": "of_v1r4"})
    listed = (await run(environment, "tools", "list", *OF_PROJECT, "--db", "--json", *V1R3)).stdout.splitlines()
    problems = {tool["tool_name"]: tool["problems"] for tool in map(json.loads, listed)}
    assert problems["mine"] == problems["jina_search"] == []
    assert problems["of_v1r4"] == [
        "target_subject: must begin with cg.v1r3., or no executor of this kernel gets a call"
    ]


@requirement("dialects.isolated")
async def test_dead_letters_with_equal_ids_are_distinguished(environment: dict[str, str], kernels: Kernels) -> None:
    for version, one in kernels.callers.items():
        call = await one.place(PROJECT, AGENT, "jina_search", {}, publish=False)
        headers = {"CG-Tool-Call-Id": "same"} if version == "v1r4" else {}
        await one.publish(call, headers=headers, data=GARBAGE)
    async with asyncio.timeout(10):
        while len(await dead_letters(kernels.callers["v1r4"])) < 2:  # noqa: ASYNC110 - a stream has no event here
            await asyncio.sleep(0.05)
    for version in kernels.callers:
        option = ("--protocol", version)
        listed = (await run(environment, "deadletters", "list", "--json", *option)).stdout.splitlines()
        [letter] = map(json.loads, listed)
        assert (letter["subject"].split(".")[1], letter["tool_call_id"]) == (version, "same")
        found = json.loads((await run(environment, "inspect", "same", *OF_PROJECT, "--json", *option)).stdout)
        assert [one["number"] for one in found["dead_letters"]] == [int(letter["id"])]


@requirement("dialects.recognised")
async def test_commands_report_a_database_of_the_other_version(environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "tool.yaml"
    file.write_text(yaml.safe_dump({**search_tool(), "after_execution": "suspend"}))
    wrong = {**environment, f"{PREFIX}POSTGRES__DSN": environment["PG_DSN"]}
    alone = {name: value for name, value in environment.items() if not name.startswith(PREFIX)}
    for settings in (wrong, alone):
        for words, code in (
            (("check",), 1),
            (("tools", "apply", str(file), *OF_PROJECT, "--db", "--yes"), 1),
            (("inspect", "tc", *OF_PROJECT), 2),
            (("usage", *OF_PROJECT), 2),
        ):
            result = await run(settings, *words, *V1R3, code=code)
            assert "a database of protocol v1r4, but v1r3 is configured" in result.output


@requirement("dialects.commands", "start.reasons")
def test_an_error_of_the_older_kernel_names_its_own_settings() -> None:
    unreachable = "127.0.0.1:1"
    main = {"PG_DSN": f"postgresql://main@{unreachable}/main", "NATS_SERVERS": f"nats://{unreachable}"}
    older = {f"{PREFIX}POSTGRES__DSN": f"postgresql://older@{unreachable}/older"}
    elsewhere = {**older, f"{PREFIX}NATS__SERVERS": f"nats://{unreachable}"}
    own_dsn = f"connection refused; check dialects.v1r3.postgres.dsn ({PREFIX}POSTGRES__DSN)"
    main_dsn = "connection refused; check postgres.dsn (PG_DSN)"
    own_servers = f"connection refused; check dialects.v1r3.nats.servers ({PREFIX}NATS__SERVERS)"
    main_servers = "connection refused; check nats.servers (NATS_SERVERS)"

    def output_of(environment: Mapping[str, str], *words: str) -> str:
        result = CliRunner().invoke(app, words, env={**main, **environment})
        assert result.exit_code, result.output
        return result.output

    both = output_of(elsewhere, "check").splitlines()
    found = {name: line for line in both for name, _, _ in [line.partition(": ")]}
    expected = {"postgres": main_dsn, "nats": main_servers, "v1r3.postgres": own_dsn, "v1r3.nats": own_servers}
    assert all(found[name].endswith(text) for name, text in expected.items()), both
    assert main_servers in output_of(older, "check", *V1R3), "it uses the main kernel's servers"
    assert own_servers in output_of(elsewhere, "inspect", "tc", *OF_PROJECT, *V1R3)
    assert own_dsn in output_of(elsewhere, "usage", *OF_PROJECT, *V1R3)
    assert main_dsn in output_of(elsewhere, "usage", *OF_PROJECT)


@requirement("dialects.commands")
def test_permissions_and_grants_are_those_of_the_configured_kernels() -> None:
    def allowed(*words: str, **settings: str) -> set[str]:
        result = CliRunner().invoke(app, ["nats", "permissions", "--json", *words], env=settings)
        assert result.exit_code == 0, result.output
        return set(json.loads(result.stdout)["publish"]["allow"])

    older = {f"{PREFIX}POSTGRES__DSN": "postgresql://older@db/older"}
    both = allowed() | allowed(*V1R3)
    assert allowed(**older) == both > allowed()
    assert not any("v1r4" in subject for subject in allowed(*V1R3))
    elsewhere = {**older, f"{PREFIX}NATS__SERVERS": "nats://older:4222"}
    assert (allowed(**elsewhere), allowed(*V1R3, **elsewhere)) == (allowed(), allowed(*V1R3))
    granted = CliRunner().invoke(app, ["sql", "grants", *V1R3], env={"PG_DSN": "postgresql://main@db/main", **older})
    assert 'to "older"' in granted.stdout


@requirement("dialects.isolated")
def test_the_executor_of_dev_never_serves_a_kernel_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, Any] = {f"{PREFIX}POSTGRES__DSN": "postgresql://older@db/older"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = dev_settings(UpstreamChoice.DOUBLE, environment, ProtocolVersion.V1R3)
    assert json.loads(settings.environment["OPENAPI_TOOL__DIALECTS"]) == {}
    assert settings.environment["OPENAPI_TOOL__PROTOCOL__VERSION"] == "v1r3"
    assert "dialects.v1r3" in settings.remarks[-1]


RECORDED_ARGUMENTS = {"query": "hello world", "count": 3}


@pytest.fixture(params=["v1r4", "v1r3"])
def kernel(kernels: Kernels, request: pytest.FixtureRequest) -> Caller:
    return kernels.callers[request.param]


async def call_answer(kernel: Caller, arguments: Any = None, tool: str = "jina_search", **changes: Any) -> ResultRows:
    call = await kernel.place(PROJECT, AGENT, tool, RECORDED_ARGUMENTS if arguments is None else arguments, **changes)
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
    first = await kernel.result(call, 10)
    await kernel.publish(call)
    await logged(kernels.executor, "call.deduplicated")
    assert (await kernel.read_result(call)).card["card_id"] == first.card["card_id"]
    assert len(await asyncio.to_thread(kernels.stack.upstream.requests)) == 1


@requirement("dialects.behaviour")
async def test_a_missing_report_is_written_again(kernel: Caller, kernels: Kernels) -> None:
    call = await kernel.place(PROJECT, AGENT, "jina_search", RECORDED_ARGUMENTS)
    first = await kernel.result(call, 10)
    await kernel.database.execute("delete from state.agent_inbox where message_type = 'tool_result'")
    await kernel.publish(call)
    await logged(kernels.executor, "call.deduplicated")
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
    await logged(kernels.executor, "call.deduplicated")
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
    async with asyncio.timeout(10):
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
    return [line for line in lines if line["action"] == "call.finished"]


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
    assert most == NatsOptions().max_ack_pending, "the value of each kernel, not the sum"


async def statistics(kernels: Kernels) -> dict[str, Any]:
    [replica] = await gather_stats(kernels.callers["v1r4"].client, 0.5)
    return replica


@requirement("dialects.isolated")
async def test_the_log_line_of_a_dead_letter_names_its_kernel(kernels: Kernels) -> None:
    for version, one in kernels.callers.items():
        call = await one.place(PROJECT, AGENT, "jina_search", RECORDED_ARGUMENTS, publish=False)
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
        (one, await one.place(PROJECT, AGENT, "jina_search", RECORDED_ARGUMENTS))
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
