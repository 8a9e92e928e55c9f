"""The process that a client starts: real clients of both eras, its end, kills, and hostile clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from mcp import Client, StdioServerParameters
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCResponse, ToolListChangedNotification

from openapi_tool.local.stack import UpstreamDouble
from openapi_tool.mcp import stdio
from openapi_tool.mcp.stdio import StdioTransport
from tests.gateway.conftest import PAGE
from tests.gateway.test_mcp import CUSTOM, ERAS, text_of
from tests.requirements import requirement
from tests.waiting import WAIT_S

_ONE = "; send one JSON object per line"


def command(double: UpstreamDouble, state: Path | str, *options: str) -> list[str]:
    module = ["-m", "openapi_tool.local.door_server", "mcp", "--upstream-port", str(double.port), "--state", str(state)]
    return [sys.executable, *module, *options]


class RawClient:
    """Client that writes and reads lines."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self.stdin: IO[bytes] = process.stdin
        self.stdout: IO[bytes] = process.stdout
        self.last_id = 0

    def send(self, message: dict[str, Any]) -> None:
        self.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self.stdin.flush()

    def request(self, method: str, params: dict[str, Any]) -> int:
        self.last_id += 1
        self.send({"id": self.last_id, "method": method, "params": params})
        return self.last_id

    def call(self, name: str, arguments: dict[str, Any]) -> int:
        return self.request("tools/call", {"name": name, "arguments": arguments})

    def shake_hands(self) -> None:
        client = {"name": "raw", "version": "1"}
        self.request("initialize", {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client})
        assert self.receive()["result"]["protocolVersion"] == "2025-06-18"
        self.send({"method": "notifications/initialized"})

    def receive(self) -> dict[str, Any]:
        line = self.stdout.readline()
        assert line, f"the server has ended with {self.process.wait(5)}"
        received: dict[str, Any] = json.loads(line)
        return received

    def answer(self, request_id: int) -> dict[str, Any]:
        """Return the answer to a request, and skip others."""
        while (message := self.receive()).get("id") != request_id:
            pass
        return message


@contextmanager
def raw_client(
    double: UpstreamDouble, environment: dict[str, str], state: Path | str, **more: str
) -> Iterator[RawClient]:
    variables = {"PATH": os.environ["PATH"], **environment, **more}
    with subprocess.Popen(  # noqa: S603 - the interpreter
        command(double, state), env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        client = RawClient(process)
        try:
            client.shake_hands()
            yield client
        finally:
            process.kill()
            with suppress(OSError):
                client.stdin.close()


@requirement("mcp.eras")
@pytest.mark.parametrize("era", ERAS)
async def test_a_real_client_of_either_era_is_served_over_stdio(
    double: UpstreamDouble, environment: dict[str, str], tmp_path: Path, era: Any
) -> None:
    first, *rest = command(double, tmp_path / "state.sqlite3")
    server = StdioServerParameters(command=first, args=rest, env=environment)
    async with asyncio.timeout(WAIT_S), Client(server, mode=era) as client:
        assert len((await client.list_tools()).tools) == 4
        result = await client.call_tool("jina_read", {"url": PAGE})
        assert "A Fixture Article" in text_of(result)
        failed = await client.call_tool("jina_read", {"url": "ftp://x"})
        assert failed.is_error


@requirement("mcp.tools")
@pytest.mark.parametrize("era", ERAS)
async def test_a_changed_folder_is_used_once_it_is_valid_and_clients_hear_of_it(
    double: UpstreamDouble, environment: dict[str, str], tmp_path: Path, era: Any
) -> None:
    (tmp_path / "docs.yaml").write_text(CUSTOM)
    first, *rest = command(double, ":memory:", "--tools", str(tmp_path))
    heard = asyncio.Event()

    async def hear(message: Any) -> None:
        if isinstance(message, ToolListChangedNotification):
            heard.set()

    server = StdioServerParameters(command=first, args=rest, env=environment)
    async with asyncio.timeout(60), Client(server, mode=era, message_handler=hear) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["docs__search"]
        (tmp_path / "wrong.yaml").write_text("tool_name: [")
        await asyncio.sleep(5)
        assert [tool.name for tool in (await client.list_tools()).tools] == ["docs__search"]
        async with AsyncExitStack() as stack:
            listening = client.listen(tools_list_changed=True)
            events = await stack.enter_async_context(listening) if era != "legacy" else None
            (tmp_path / "wrong.yaml").write_text(CUSTOM.replace("docs.search", "notes_search"))
            await (heard.wait() if events is None else anext(events))
        assert len((await client.list_tools(cache_mode="refresh")).tools) == 2


@requirement("mcp.eras")
def test_nothing_but_messages_is_written_to_the_client(
    double: UpstreamDouble, environment: dict[str, str], tmp_path: Path
) -> None:
    with raw_client(double, environment, tmp_path / "s", OPENAPI_TOOL__TELEMETRY__LOG_LEVEL="debug") as client:
        answer = client.answer(client.call("jina_read", {"url": PAGE}))
        assert answer["result"]["isError"] is False
        client.stdin.close()
        assert client.stdout.read() == b""
        assert client.process.wait(WAIT_S) == 0
        assert client.process.stderr is not None
        log = client.process.stderr.read().decode()
        assert "call.finished" in log or "finished" in log
        assert environment["JINA_API_KEY"] not in log


_NOISY = """
import os, runpy
from openapi_tool.mcp import results
text_of = results.text_of
def noisy(answer):
    print("stray", flush=True)
    os.write(1, b"stray\\n")
    return text_of(answer)
results.text_of = noisy
runpy.run_module("openapi_tool.local.door_server", run_name="__main__", alter_sys=True)
"""


@requirement("mcp.eras")
async def test_no_further_request_is_read_while_too_many_are_unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends requests without reading the answers would fill the memory."""
    monkeypatch.setattr(stdio, "MAX_UNANSWERED", 2)
    (read_requests, requests), (answers, write_answers) = os.pipe(), os.pipe()
    os.write(requests, b"".join(b'{"jsonrpc": "2.0", "id": %d, "method": "ping"}\n' % number for number in range(3)))
    os.close(requests)
    with os.fdopen(read_requests, "rb") as source, os.fdopen(answers, "rb"):
        transport = StdioTransport(source, write_answers, lambda _: None)
        async with transport.streams(asyncio.Event()) as (incoming, outgoing), incoming:
            first, _ = [(await incoming.receive()).message for _ in range(2)]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await incoming.receive()
            await outgoing.send(SessionMessage(JSONRPCResponse(jsonrpc="2.0", id=first.id, result={})))
            async with asyncio.timeout(WAIT_S):
                assert (await incoming.receive()).message.id == 2
    os.close(write_answers)


@requirement("mcp.eras")
def test_what_a_library_prints_does_not_reach_the_client(double: UpstreamDouble, environment: dict[str, str]) -> None:
    first, _, _, *options = command(double, ":memory:")
    with subprocess.Popen(  # noqa: S603 - the interpreter
        [first, "-c", _NOISY, *options],
        env={"PATH": os.environ["PATH"], **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        client = RawClient(process)
        client.shake_hands()
        client.call("jina_read", {"url": PAGE})
        assert client.receive()["result"]["isError"] is False
        client.stdin.close()
        assert process.stderr is not None
        assert process.stderr.read().count(b"stray") == 2


@requirement("mcp.eras")
def test_a_start_without_a_key_says_so_and_serves(double: UpstreamDouble, environment: dict[str, str]) -> None:
    del environment["JINA_API_KEY"]
    with raw_client(double, environment, ":memory:") as client:
        answer = client.answer(client.call("jina_search", {"query": "x"}))
        assert "JINA_API_KEY" in answer["result"]["content"][0]["text"]
        client.stdin.close()
        assert client.process.stderr is not None
        assert b"JINA_API_KEY is not set" in client.process.stderr.read()


@requirement("mcp.eras")
def test_a_missing_configuration_file_is_named_with_its_option(tmp_path: Path) -> None:
    done = subprocess.run(  # noqa: S603 - the interpreter
        [sys.executable, "-m", "openapi_tool", "mcp", "--config", str(tmp_path / "none.toml")],
        env={"PATH": os.environ["PATH"]},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--config" in done.stderr
    assert "does not exist" in done.stderr


@requirement("state.file")
def test_an_unusable_state_file_ends_the_start_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"no database" * 1_000)
    done = subprocess.run(  # noqa: S603 - the interpreter
        [sys.executable, "-m", "openapi_tool", "mcp", "--state", str(tmp_path / "s")],
        env={"PATH": os.environ["PATH"], "JINA_API_KEY": "unused"},
        input=b"",
        capture_output=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 2
    assert b"is damaged" in done.stderr
    assert done.stdout == b""


@requirement("state.file", "gateway.quotas")
def test_calls_go_on_and_the_process_ends_while_another_process_holds_the_lock(
    double: UpstreamDouble, environment: dict[str, str], tmp_path: Path
) -> None:
    quotas = {
        "OPENAPI_TOOL__BUDGETS__PROJECT_DAY_REQUESTS": "1000",
        "OPENAPI_TOOL__LIMITS__READER_REQUESTS_PER_MINUTE": "500",
    }
    with raw_client(double, environment, tmp_path / "s", **quotas) as client:
        client.answer(client.call("jina_read", {"url": PAGE}))
        with closing(sqlite3.connect(tmp_path / "s", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            for number in range(4):
                answer = client.answer(client.call("jina_read", {"url": f"{PAGE}?{number}"}))
                assert answer["result"]["isError"] is False
            client.stdin.close()
            assert client.process.wait(WAIT_S) == 0


@requirement("mcp.cancellation")
@pytest.mark.parametrize("end", [None, signal.SIGTERM, signal.SIGQUIT])
def test_a_client_that_is_gone_stops_the_upstream_request_and_the_process(
    double: UpstreamDouble, environment: dict[str, str], tmp_path: Path, end: signal.Signals | None
) -> None:
    """It closes its end, or the process gets a signal."""
    double.rules({"match": "article", "hang": True})
    budget = {"OPENAPI_TOOL__BUDGETS__PROJECT_DAY_REQUESTS": "1"}
    with raw_client(double, environment, tmp_path / "s", **budget) as client:
        client.call("jina_read", {"url": PAGE})
        double.requests(1)
        began = time.monotonic()
        for meaningless in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
            client.process.send_signal(meaningless)
        if end is None:
            client.stdin.close()
        else:
            client.process.send_signal(end)
        assert client.process.wait(WAIT_S) == 0
        assert time.monotonic() - began < 30, "a call may take 60 s"
    with closing(sqlite3.connect(tmp_path / "s")) as stored:
        rows = stored.execute("SELECT error, requests, tokens > 0 FROM calls").fetchall()
    assert rows == [("cancelled", 1, 1)]
    with raw_client(double, environment, tmp_path / "s", **budget) as client:
        refused = client.answer(client.call("jina_read", {"url": PAGE + "?2"}))
        assert refused["result"]["content"][0]["text"].startswith("budget_exceeded")


@requirement("mcp.cancellation")
def test_a_client_that_closes_only_its_reading_end_is_gone_too(
    double: UpstreamDouble, environment: dict[str, str], tmp_path: Path
) -> None:
    with raw_client(double, environment, tmp_path / "s") as client:
        client.stdout.close()
        client.call("jina_read", {"url": PAGE})
        assert client.process.wait(WAIT_S) == 0
    with raw_client(double, environment, tmp_path / "s") as client:
        assert client.answer(client.call("jina_read", {"url": PAGE}))["result"]["isError"] is False
    assert len(double.requests()) == 1


@requirement("gateway.quotas")
def test_a_kill_after_an_answer_loses_nothing_of_its_cost(
    double: UpstreamDouble, environment: dict[str, str], tmp_path: Path
) -> None:
    budget = {"OPENAPI_TOOL__BUDGETS__PROJECT_DAY_REQUESTS": "3"}
    for number in range(3):
        with raw_client(double, environment, tmp_path / "s", **budget) as client:
            answer = client.answer(client.call("jina_read", {"url": f"{PAGE}?{number}"}))
            assert answer["result"]["isError"] is False
            client.process.send_signal(signal.SIGKILL)
            client.process.wait(WAIT_S)
    with raw_client(double, environment, tmp_path / "s", **budget) as client:
        refused = client.answer(client.call("jina_read", {"url": f"{PAGE}?3"}))
        assert refused["result"]["content"][0]["text"].startswith("budget_exceeded")


@requirement("mcp.hostile")
@pytest.mark.parametrize(
    ("line", "code", "remedy"),
    [
        (
            b'{"jsonrpc":"2.0","id":77,"method":"tools/call","params":{"name":"' + b"x" * 10_000_000 + b'"}}',
            -32600,
            "send less",
        ),
        (
            b'{"jsonrpc":"2.0","id":77,"method":"tools/call","params":' + b"[" * 500_000 + b"]" * 500_000 + b"}",
            -32700,
            _ONE,
        ),
        (
            b'{"jsonrpc":"2.0","id":77,"method":"x","params":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
            -32700,
            _ONE,
        ),
        (b'{"jsonrpc":"2.0","id":77,', -32700, _ONE),
        (b'{"jsonrpc":"2.0","id":1.5,"method":"x"}', -32600, "a whole number"),
        (b"\xff\xfe\x00", -32700, _ONE),
        (b'[{"jsonrpc":"2.0","id":77,"method":"ping"}]', -32600, _ONE),
    ],
    ids=["10 MB", "1 MB of lists", "nested", "cut off", "id 1.5", "no text", "batch"],
)
def test_a_hostile_line_is_refused_and_the_next_one_is_answered(
    double: UpstreamDouble, environment: dict[str, str], line: bytes, code: int, remedy: str
) -> None:
    with raw_client(double, environment, ":memory:") as client:
        client.stdin.write(line + b"\n")
        client.stdin.flush()
        refused = client.receive()
        assert refused["error"]["code"] == code
        assert refused["error"]["message"].endswith(remedy)
        assert refused["id"] is None  # an id in a line that is no message may be that of another request
        assert client.answer(client.call("jina_read", {"url": PAGE}))["result"]["isError"] is False
        assert psutil.Process(client.process.pid).memory_info().rss < 300_000_000


@requirement("mcp.hostile")
def test_a_line_that_never_ends_takes_bounded_memory(double: UpstreamDouble, environment: dict[str, str]) -> None:
    with raw_client(double, environment, ":memory:") as client:
        client.stdin.write(b'{"jsonrpc":"2.0","id":77,"method":"')
        for _ in range(300):
            client.stdin.write(b"x" * 1_000_000)
        client.stdin.flush()
        assert psutil.Process(client.process.pid).memory_info().rss < 250_000_000
        client.stdin.write(b'"}\n')
        client.stdin.flush()
        assert client.receive()["error"]["code"] == -32600


@requirement("mcp.hostile")
def test_a_million_small_values_are_refused_with_a_remedy(double: UpstreamDouble, environment: dict[str, str]) -> None:
    with raw_client(double, environment, ":memory:") as client:
        answer = client.answer(client.call("jina_search", {"query": "x", "more": [[]] * 200_000}))
        assert answer["result"]["isError"] is True
        assert "call again with fewer" in answer["result"]["content"][0]["text"]


@requirement("mcp.hostile")
def test_a_storm_of_cancelled_calls_leaves_the_process_free(
    double: UpstreamDouble, environment: dict[str, str]
) -> None:
    double.rules({"match": "?", "hang": True})
    with raw_client(double, environment, ":memory:") as client:
        for number in range(2_000):
            request_id = client.call("jina_read", {"url": f"{PAGE}?{number}"})
            client.send({"method": "notifications/cancelled", "params": {"requestId": request_id}})
        assert client.answer(client.call("jina_read", {"url": PAGE}))["result"]["isError"] is False
        process = psutil.Process(client.process.pid)
        assert process.memory_info().rss < 300_000_000
        assert process.num_fds() < 300


@requirement("mcp.hostile", "mcp.cancellation")
def test_a_client_that_reads_nothing_takes_bounded_memory_and_loses_no_result(
    double: UpstreamDouble, environment: dict[str, str], tmp_path: Path
) -> None:
    with raw_client(double, environment, tmp_path / "s") as client:
        os.set_blocking(client.stdin.fileno(), False)
        sent, last = 0, time.monotonic()
        while time.monotonic() - last < 3 and sent < 3_000:
            with suppress(BlockingIOError):
                client.call("jina_read", {"url": f"{PAGE}?{sent}"})
                sent, last = sent + 1, time.monotonic()
                continue
            time.sleep(0.01)
        assert 256 < sent < 3_000
        assert psutil.Process(client.process.pid).memory_info().rss < 300_000_000
        asked = len(double.requests())
        client.process.send_signal(signal.SIGTERM)
        assert client.process.wait(WAIT_S) == 0
    assert asked <= 256 + 64
    with raw_client(double, environment, tmp_path / "s") as client:
        double.clear_requests()
        answers = [client.answer(client.call("jina_read", {"url": f"{PAGE}?{number}"})) for number in range(60, 80)]
        assert all(answer["result"]["isError"] is False for answer in answers)
        assert len(double.requests()) < 20
