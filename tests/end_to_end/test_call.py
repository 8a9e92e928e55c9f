"""`openapi-tool call` with a kernel that `dev` did not create (test_dev.py tests it with one that `dev` created)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import nats
import pytest
from nats.aio.msg import Msg
from nats.js.api import DiscardPolicy, StreamConfig
from typer.testing import CliRunner, Result

from openapi_tool.cli import app
from openapi_tool.cli.output import INTERRUPTED
from openapi_tool.cli.streams import OUTPUT_CLOSED
from openapi_tool.local.caller import STREAM, Caller
from openapi_tool.local.dev import MARK
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.local.stack import EmbeddedStack
from tests.conftest import AGENT, PROJECT, StartExecutor, reader_tool, search_tool
from tests.end_to_end.test_local import environment
from tests.requirements import requirement
from tests.support import delete_streams
from tests.waiting import WAIT_S
from tests.wire.test_bus import server

HERE = ("--yes", "--project", PROJECT, "--agent", AGENT)
RECORDED_ARGUMENTS = json.dumps({"query": "hello world", "count": 3})
SUBJECT = f"cg.v1r4.{PROJECT}.public.cmd.tool.jina.search"
SEARCH = str(Path(__file__).parents[2] / "config" / "tools" / "jina_search.yaml")
API_UNREACHABLE = "the kernel's API at 127.0.0.1:1: connection refused; check --api"
KEYS = {
    "status",
    "content",
    "result",
    "error",
    "repaired",
    "inbox_row",
    "doorbell",
    "trace_id",
    "tool_call_id",
    "times",
}

Call = Callable[..., Awaitable[Result]]


@pytest.fixture
def addresses(stack: EmbeddedStack, database: str, tmp_path: Path) -> dict[str, str]:
    return {
        "PG_DSN": stack.postgres.dsn(database),
        "NATS_SERVERS": stack.nats.url,
        "XDG_RUNTIME_DIR": str(tmp_path),
    }


@pytest.fixture
async def call(addresses: dict[str, str], caller: Caller) -> Call:
    """Run `call` against the test's kernel, which has a search tool."""
    await caller.add_tool(PROJECT, search_tool())

    async def run(*words: str, stdin: str | None = None) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, app, ["call", *words], env=addresses, input=stdin)

    return run


async def written(caller: Caller) -> int:
    """Return the number of rows and messages that calls have written."""
    tables = ("cards", "state.agent_inbox", "state.execution_edges")
    rows: list[int] = [await caller.database.fetchval(f"select count(*) from {table}") for table in tables]  # noqa: S608
    streams = await caller.client.jetstream().streams_info()
    return sum([*rows, *(stream.state.messages for stream in streams)])


@requirement("cli.call")
async def test_a_call_shows_what_the_model_reads(call: Call, start_executor: StartExecutor) -> None:
    start_executor()
    result = await call("jina_search", *HERE, "--args", RECORDED_ARGUMENTS)
    assert result.exit_code == 0, result.stderr
    assert "1. Result 1 for hello world" in result.stdout
    assert "tc_" not in result.stdout
    placed, committed, doorbell = result.stderr.split(" (tool_call_id")[0].split(" → ")
    assert placed == "success: placed"
    assert committed.split()[0] == "committed"
    assert doorbell.split()[0] == "doorbell"


@requirement("cli.call")
async def test_json_is_one_object_with_everything(call: Call, start_executor: StartExecutor, tmp_path: Path) -> None:
    start_executor()
    (tmp_path / "arguments.json").write_text(RECORDED_ARGUMENTS, encoding="utf-8")
    for given in ("-", f"@{tmp_path / 'arguments.json'}"):
        result = await call("jina_search", *HERE, "--json", "--args", given, stdin=RECORDED_ARGUMENTS)
        answer = json.loads(result.stdout)
        assert answer.keys() == KEYS
        assert (answer["status"], answer["error"]) == ("success", None)
        assert answer["content"] == answer["result"]
        assert answer["inbox_row"]["correlation_id"] == answer["tool_call_id"]
        assert answer["doorbell"]["headers"]["traceparent"].split("-")[1] == answer["trace_id"]
        assert 0 <= answer["times"]["committed"] <= answer["times"]["doorbell"] + 50


@requirement("cli.call", "cli.names")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ('{"query": "a\\u0000b"}', "query: contains NUL, which PostgreSQL cannot store; leave it out"),
        ('{"a": [{"b": "\\u0000"}]}', "a item 1.b: contains NUL, which PostgreSQL cannot store; leave it out"),
        ('{"a\\u0000b": 1}', "a\\x00b: contains NUL, which PostgreSQL cannot store; leave it out"),
        ('{"a":' * 250 + "1" + "}" * 250, "the arguments are nested deeper than 200 levels; flatten them"),
        ("@", "names no file; give it as @FILE"),
    ],
)
async def test_arguments_that_cannot_be_stored_are_a_wrong_option(
    call: Call, caller: Caller, arguments: str, message: str
) -> None:
    result = await call("jina_search", *HERE, "--args", arguments)
    assert (result.exit_code, result.stderr) == (2, f"openapi-tool: --args: {message}\n")
    assert await written(caller) == 0


@requirement("cli.call")
async def test_a_failure_is_shown_with_code_message_and_whether_to_retry(
    call: Call, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, reader_tool(result_format="object"))
    start_executor()
    result = await call("jina_search", *HERE, "--args", '{"nonsense": true}')
    assert result.exit_code == 1
    assert list(json.loads(result.stdout)) == ["error"], "the model reads nothing else of a failure"
    assert json.loads(result.stdout)["error"]["message"] not in result.stderr, "it is printed once"
    assert result.stderr.splitlines()[-1].startswith("failed with bad_request (not retryable): placed → ")
    as_json = await call("jina_search", *HERE, "--json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["error"]["code"] == "bad_request"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["jina_serch", *HERE], "its tools: internal, jina_search"),
        (["jina_search", *HERE, "--project", "nowhere"], f"projects with tools: {PROJECT}"),
        (["jina_search", *HERE, "--agent", "nobody"], f"its agents: {AGENT}"),
        (["internal", *HERE], "'internal' cannot be called"),
        (["jina_search", *HERE, "--channel", "two words"], "is no subject"),
        (["jina_search", *HERE, "--channel", "a.b"], "is no subject"),
        (["jina_search", *HERE, "--args", "[1]"], "must be one JSON object"),
        (["jina_search", *HERE, "--args", "{"], "--args: "),
        (["jina_search", *HERE, "--args", "@/nowhere"], "--args: "),
        (["jina_search", "--yes", "--agent", AGENT], "--project is needed"),
        (["jina_search", "--yes", "--project", PROJECT], "--agent is needed"),
    ],
)
@requirement("cli.call")
async def test_mistakes_are_reported_before_anything_is_written(
    words: list[str], message: str, call: Call, caller: Caller
) -> None:
    await caller.add_tool(PROJECT, {"tool_name": "internal", "target_subject": None})
    before = await written(caller)
    result = await call(*words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert await written(caller) == before == 0


@requirement("cli.call")
async def test_a_call_that_the_database_refuses_leaves_no_rows(call: Call, caller: Caller) -> None:
    await caller.database.execute("alter table state.execution_edges add check (primitive <> 'tool_call')")
    result = await call("jina_search", *HERE, "--args", RECORDED_ARGUMENTS)
    assert result.exit_code == 2
    assert "cannot use PostgreSQL or NATS" in result.stderr
    assert await written(caller) == 0


@requirement("cli.call")
async def test_a_kernel_that_dev_did_not_create_is_written_to_only_with_yes(
    call: Call, caller: Caller, database: str
) -> None:
    _, *rest = HERE
    refused = await call("jina_search", *rest)
    assert refused.exit_code == 2
    assert "the database was not created by" in refused.stderr
    assert "--yes" in refused.stderr
    await caller.database.execute(f"comment on database {database} is '{MARK}'")
    refused = await call("jina_search", *rest)
    assert refused.exit_code == 2
    assert "the stream was not created by" in refused.stderr
    assert await written(caller) == 0


@requirement("cli.call")
async def test_call_never_creates_a_stream(call: Call, caller: Caller) -> None:
    await delete_streams(caller)
    result = await call("jina_search", *HERE)
    assert result.exit_code == 2
    assert f"no stream captures {SUBJECT}" in result.stderr
    assert await caller.client.jetstream().streams_info() == []
    assert await written(caller) == 0


@requirement("cli.call")
async def test_a_command_that_the_stream_refuses_is_reported_with_what_to_do(call: Call, caller: Caller) -> None:
    jetstream = caller.client.jetstream()
    await jetstream.publish(SUBJECT, b"")
    config: StreamConfig = (await jetstream.stream_info(STREAM)).config
    await jetstream.update_stream(config.evolve(max_msgs=1, discard=DiscardPolicy.NEW))
    result = await call("jina_search", *HERE)
    assert (result.exit_code, result.stdout) == (3, "")
    told = " ".join(result.stderr.split())
    assert ": maximum messages exceeded; free its disk or raise the limit openapi-tool check says what NATS" in told
    assert told.startswith("openapi-tool: no stream has confirmed the command of tc_")
    assert "Error" not in told


@requirement("cli.call")
@pytest.mark.parametrize(
    ("denied", "exit_code", "beginning"),
    [("cg.>", 3, "no stream has confirmed the command of tc_"), ("$JS.API.>", 2, "NATS at 127.0.0.1:")],
)
async def test_a_missing_permission_is_reported_with_the_login_to_check(
    stack: EmbeddedStack, addresses: dict[str, str], caller: Caller, denied: str, exit_code: int, beginning: str
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    users = (
        "authorization { users: [ { user: kernel, password: kernel-word }\n"
        f'{{ user: weak, password: weak-word, permissions: {{ publish: {{ deny: "{denied}" }} }} }} ] }}\n'
    )
    with server(stack, users) as strict:
        client = await nats.connect(strict.url, user="kernel", password="kernel-word")
        await client.jetstream().add_stream(name=STREAM, subjects=["cg.v1r4.>"])
        await client.close()
        login = {"OPENAPI_TOOL__NATS__USER": "weak", "OPENAPI_TOOL__NATS__PASSWORD": "weak-word"}
        environment = {**addresses, "NATS_SERVERS": strict.url, **login}
        result = await asyncio.to_thread(CliRunner().invoke, app, ["call", "jina_search", *HERE], env=environment)
    told = " ".join(result.stderr.split())
    assert (result.exit_code, told.partition(beginning)[0]) == (exit_code, "openapi-tool: ")
    assert "is denied; log in as the kernel does: check the login in nats.servers (NATS_SERVERS), or nats.user" in told


@requirement("cli.call")
async def test_a_missing_result_is_reported_with_where_to_look(call: Call) -> None:
    result = await call("jina_search", *HERE, "--timeout", "0.3")
    assert result.exit_code == 3
    assert "none within 0.3 s" in result.stderr
    assert "tool_jina_openapi_cmd_v1r4" in result.stderr
    as_json = await call("jina_search", *HERE, "--timeout", "0.3", "--json")
    answer = json.loads(as_json.stdout)
    assert as_json.exit_code == 3
    assert answer.keys() == KEYS
    assert answer["status"] is None


@requirement("cli.call")
async def test_a_missing_doorbell_is_reported(call: Call, caller: Caller) -> None:
    """Simulate an executor that writes a result and publishes no doorbell."""

    async def answer(message: Msg) -> None:
        headers = message.headers or {}
        content = {"__type__": "ToolResultContent", "status": "success", "result": "\x1b[2Jdone", "error": None}
        call_id = headers["CG-Tool-Call-Id"]
        await caller.database.execute(
            "insert into cards (card_id, tenant_id, content, tool_call_id, metadata) values ($1, $2, $3, $4, $5)",
            *(uuid.uuid4().hex, PROJECT, content, call_id, {"type": "tool.result"}),
        )
        await caller.database.execute(
            "insert into state.agent_inbox (inbox_id, project_id, agent_id, message_type, correlation_id) "
            "values ($1, $2, $3, 'tool_result', $4)",
            *(uuid.uuid4().hex, PROJECT, AGENT, call_id),
        )

    await caller.client.subscribe(SUBJECT, cb=answer)
    result = await call("jina_search", *HERE)
    assert result.exit_code == 0
    assert result.stdout == "\\x1b[2Jdone\n", "no control character reaches a terminal"
    assert "no doorbell followed the result" in result.stderr
    assert "doorbell" not in result.stderr.splitlines()[-1]


@requirement("cli.call")
async def test_a_call_can_be_interrupted(addresses: dict[str, str], call: Call, caller: Caller, tmp_path: Path) -> None:
    await caller.add_tool(PROJECT, {**search_tool(), "after_execution": "terminate"})
    commands = await caller.client.subscribe(SUBJECT)
    await caller.client.flush()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "openapi_tool", "call", "jina_search", *HERE),
        stdout=PIPE,
        stderr=PIPE,
        env=environment(tmp_path) | addresses,
    )
    command: Any = json.loads((await commands.next_msg(timeout=WAIT_S)).data)
    assert command["after_execution"] == "terminate", "the definition's"
    process.send_signal(signal.SIGINT)
    out, error = await process.communicate()
    assert (process.returncode, out, error) == (130, b"", b"")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"NATS_SERVERS": None}, "set both PG_DSN and NATS_SERVERS"),
        ({"NATS_SERVERS": ""}, "NATS_SERVERS: is empty; name a server"),
        ({"NATS_SERVERS": " ", "PG_DSN": None}, "NATS_SERVERS: is empty; name a server"),
        ({"PG_DSN": "postgresql://u:p/w@127.0.0.1/x"}, "must look like"),
        ({"PG_DSN": "postgresql://u@127.0.0.1:1/x"}, "PostgreSQL at 127.0.0.1:1 (database x): connection refused"),
        ({"NATS_SERVERS": "nats://127.0.0.1:1"}, "NATS at 127.0.0.1:1: connection refused; check nats.servers"),
        ({"NATS_SERVERS": "http://127.0.0.1"}, "nats.servers"),
    ],
)
@requirement("cli.call")
def test_wrong_addresses_are_named_without_credentials(
    changes: dict[str, str | None], message: str, addresses: dict[str, str]
) -> None:
    result = CliRunner().invoke(app, ["call", "jina_search", *HERE], env=addresses | changes)
    assert result.exit_code == 2
    assert message in result.stderr
    for secret in (addresses["PG_DSN"].split(":")[2].split("@")[0], "'p'", "p/w"):
        assert secret not in result.stderr


@pytest.fixture
def silent() -> Iterator[str]:
    """Return the address of a server that accepts connections and never writes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    "command",
    [
        ["deadletters", "list"],
        ["deadletters", "show", "letter-1"],
        ["deadletters", "replay", "letter-1", "--yes"],
        ["nats", "durable"],
        ["nats", "durable", "--restore"],
        ["inspect", "tc_1", "--project", "p"],
        ["top"],
        ["top", "--once", "--json"],
        ["limits", "--watch"],
        ["budgets"],
        ["call", "jina_search"],
    ],
)
@requirement("cli.ends")
def test_an_unreachable_or_silent_nats_is_reported_within_three_seconds(command: list[str], silent: str) -> None:
    for where, why in (
        ("127.0.0.1:1", "connection refused;"),
        (silent, "no answer within 1.5 s: is it a NATS server?"),
    ):
        servers = {"PG_DSN": f"postgresql://{silent}/kernel", "NATS_SERVERS": f"nats://{where}"}
        took_s, result = _timed(command, servers)
        for _ in range(2):  # on a busy machine one of the two attempts may take seconds longer
            if took_s >= 3:
                took_s, result = _timed(command, servers)
        assert took_s < 3
        assert (result.exit_code, result.stdout) == (2, "")
        problem, *advice = result.stderr.splitlines()
        assert problem == f"openapi-tool: cannot connect to NATS at {where}: {why} check nats.servers (NATS_SERVERS)"
        assert ("/readyz" in " ".join(advice)) == (command[0] != "call")


def _timed(command: list[str], servers: dict[str, str]) -> tuple[float, Result]:
    began = time.monotonic()
    result = CliRunner().invoke(app, command, env=servers)
    return time.monotonic() - began, result


@pytest.mark.parametrize(
    "command", [["top", "--once"], ["limits"], ["budgets"], ["deadletters", "list"], ["deadletters", "show", "1"]]
)
@requirement("cli.ends")
def test_commands_that_use_only_nats_need_no_database(command: list[str], tmp_path: Path) -> None:
    servers = {"PG_DSN": None, "NATS_SERVERS": "nats://127.0.0.1:1", "XDG_RUNTIME_DIR": str(tmp_path)}
    result = CliRunner().invoke(app, command, env=servers)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("openapi-tool: cannot connect to NATS at 127.0.0.1:1: connection refused; ")
    missing = CliRunner().invoke(app, ["deadletters", "list", "--abandoned"], env=servers)
    assert (missing.exit_code, missing.stderr) == (2, "openapi-tool: postgres: is missing; set PG_DSN\n")


@requirement("cli.ends", "cli.inspect")
def test_an_unreachable_database_is_reported_if_nats_answers(stack: EmbeddedStack) -> None:
    servers = {"PG_DSN": "postgresql://127.0.0.1:1/kernel", "NATS_SERVERS": stack.nats.url}
    for command in (["inspect", "tc_1", "--project", "p"], ["deadletters", "list", "--abandoned"], ["call", "a_tool"]):
        result = CliRunner().invoke(app, command, env=servers)
        assert (result.exit_code, result.stdout) == (2, "")
        problem = "PostgreSQL at 127.0.0.1:1 (database kernel): connection refused; check postgres.dsn (PG_DSN)"
        assert result.stderr.splitlines()[0] == f"openapi-tool: {problem}"


# The recorded example calls: the same rows in, the same rows, card and doorbell out (protocol section 9).


EXAMPLE = json.loads((Path(__file__).parent.parent / "data" / "example-call.json").read_text(encoding="utf-8"))
TIMES = {"created_at", "next_retry_at", "CG-Timestamp"}


@pytest.mark.parametrize("name", ["jina_search", "jina_reader"])
@requirement("answer.example", "answer.doorbell", "card.result", "answer.trace")
async def test_the_example_call_is_answered_with_the_same_rows(
    name: str, stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    example = EXAMPLE[name]
    call = placed(example)
    await caller.add_project(call.project_id)
    await caller.add_agent(call.project_id, call.agent_id, "worker_generic")
    await caller.add_tool(call.project_id, search_tool() if name == "jina_search" else reader_tool())
    await _insert(caller, "cards", example["call_card"])
    await _insert(caller, "state.agent_inbox", example["anchor_row"])
    request_edge = next(edge for edge in example["edges"] if edge["edge_phase"] == "request")
    await _insert(caller, "state.execution_edges", request_edge)
    stack.upstream.rules({"match": "hello", "answer": "s-post-json"}, {"match": "example.org", "answer": "r-post-json"})
    start_executor()

    await caller.publish(call)
    answer = await caller.result(call, WAIT_S)

    result, row, doorbell = example["result_card"], example["inbox_row"], example["doorbells"][0]
    response_edge = next(edge for edge in example["edges"] if edge["edge_phase"] == "response")
    assert same(answer.card, result) == same(result, result)
    assert same(answer.inbox_row, row) == same(row, row)
    assert same(answer.edge, response_edge) == same(response_edge, response_edge)
    assert same(answer.doorbell, doorbell) == same(doorbell, doorbell)
    _ids_fit_together(answer, call)


def _ids_fit_together(answer: Any, call: PlacedCall) -> None:
    assert answer.inbox_row["payload"]["tool_result_card_id"] == answer.card["card_id"]
    assert answer.edge["metadata"]["inbox_id"] == answer.inbox_row["inbox_id"]
    traceparent = answer.inbox_row["context_headers"]["traceparent"]
    assert answer.doorbell["headers"]["traceparent"] == traceparent
    assert traceparent != call.headers["traceparent"]
    assert isinstance(answer.card["content"]["result"], str)
    assert answer.card["metadata"]["tool_output"]["usage"]["requests"] == 1


def placed(example: Mapping[str, Any]) -> PlacedCall:
    command, anchor = example["command"], example["anchor_row"]
    return PlacedCall(
        project_id=anchor["project_id"],
        channel_id=anchor["channel_id"],
        agent_id=anchor["agent_id"],
        agent_turn_id=anchor["agent_turn_id"],
        turn_epoch=anchor["turn_epoch"],
        step_id=command["headers"]["CG-Step-Id"],
        tool_call_id=anchor["correlation_id"],
        card_id=command["body"]["tool_call_card_id"],
        trace_id=command["headers"]["traceparent"].split("-")[1],
        subject=command["subject"],
        headers=command["headers"],
        body=command["body"],
        doorbell_key=anchor["agent_turn_id"],
    )


async def _insert(caller: Caller, table: str, row: Mapping[str, Any]) -> None:
    values = [
        datetime.fromisoformat(value) if isinstance(value, str) and name.endswith(("_at", "_retry_at")) else value
        for name, value in row.items()
    ]
    places = ", ".join(f"${number}" for number in range(1, len(values) + 1))
    query = f"insert into {table} ({', '.join(row)}) values ({places})"  # noqa: S608 - texts of this file
    await caller.database.execute(query, *values)


def same(value: Any, example: Any) -> Any:
    """Return `value` with variable parts replaced by their kind; parts that the example lacks stay."""
    return _same("", json.loads(json.dumps(value, default=lambda moment: moment.isoformat())), example)


def _same(name: str, value: Any, example: Any) -> Any:
    if name == "result":
        return "result"
    if name == "CG-Sender":
        return "sender"
    if name in TIMES:
        assert value, name
        return "time"
    if isinstance(value, dict):
        known = example if isinstance(example, dict) else {}
        return {key: _same(key, item, known.get(key)) for key, item in value.items() if key != "tool_output"}
    if isinstance(value, str):
        return _without_fresh_ids(name, value)
    return value


def _without_fresh_ids(name: str, value: str) -> str:
    if name in ("card_id", "inbox_id", "edge_id", "tool_result_card_id"):
        prefix, _, digits = value.rpartition("_")
        assert uuid.UUID(hex=digits).version == 7, value
        return prefix
    if name == "traceparent":
        assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", value)
        version, trace_id, _, flags = value.split("-")
        return f"{version}-{trace_id}-span-{flags}"
    return value


# How a command ends if its output is closed, its servers are unreachable, or the user interrupts it.


COMMAND = [sys.executable, "-m", "openapi_tool"]
PRINTING = [*COMMAND, "tools", "export"]
BARE = {"PATH": os.environ["PATH"]}

INTERRUPTED_WHILE_IMPORTED = """
import sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
from openapi_tool.__main__ import main
main()
"""


def run(
    command: list[str], stdout: IO[str] | int = subprocess.PIPE, env: dict[str, str] = BARE
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - the interpreter that runs the tests
        command, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )


@requirement("cli.ends")
def test_a_closed_output_pipe_ends_a_command_with_141() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = run(PRINTING, stdout=write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (OUTPUT_CLOSED, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@requirement("cli.ends")
def test_output_that_cannot_be_written_is_reported_in_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = run(PRINTING, stdout=full)
    assert done.returncode == 1
    assert done.stderr == "openapi-tool: standard output cannot be written: No space left on device\n"


@requirement("cli.ends")
def test_ctrl_c_during_the_import_prints_no_traceback() -> None:
    done = run([sys.executable, "-c", INTERRUPTED_WHILE_IMPORTED])
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["tools", "list", "--db", "--project", "p"],
            "PostgreSQL at 127.0.0.1:1 (database x): connection refused; check postgres.dsn (PG_DSN)",
        ),
        (["tools", "list", "--api", "http://127.0.0.1:1", "--project", "p"], API_UNREACHABLE),
        (["tools", "apply", SEARCH, "--api", "http://127.0.0.1:1", "--project", "p", "--yes"], API_UNREACHABLE),
        (
            ["tools", "list", "--api", "http://no.such.host.invalid", "--project", "p"],
            "the kernel's API at no.such.host.invalid:80: the host's name cannot be resolved; check --api",
        ),
        (["tools", "list", "--api", "foo", "--project", "p"], "--api: must be a URL that begins with http:// or"),
        (["deadletters", "list"], "check nats.servers"),
        (
            ["call", "a_tool", "--args", "@/nowhere.json"],
            "the file '/nowhere.json' cannot be read: No such file",
        ),
        (["call", "a_tool", "--args", "{'a': 1}"], "--args: must be JSON, @FILE or -: "),
    ],
)
@requirement("cli.ends")
def test_every_unreachable_server_has_the_same_exit_code(arguments: list[str], expected: str) -> None:
    unreachable = {"PG_DSN": "postgresql://127.0.0.1:1/x", "NATS_SERVERS": "nats://127.0.0.1:1"}
    done = run([*COMMAND, *arguments], env=BARE | unreachable)
    assert done.returncode == 2
    problem, *advice = done.stderr.splitlines()
    assert expected in problem
    assert all(line.startswith("  ") for line in advice)
