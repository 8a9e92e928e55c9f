"""A `serve` process that may open few files."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

from openapi_tool.local.caller import Caller
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.servers import free_port
from openapi_tool.local.stack import EmbeddedStack
from tests.conftest import AGENT, PROJECT, StartExecutor, search_tool
from tests.requirements import requirement
from tests.support import dsn_of
from tests.waiting import WAIT_S, until

_FILES = 64
_CALLS = 200
_OUT_OF_FILES = "too many open files: raise ulimit -n"
_HELLO = {"query": "hello world", "count": 3}
_READY = b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def _status(port: int, path: str) -> int:
    """Return the HTTP status, 0 if the server cannot be reached."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        response = await reader.read()
        writer.close()
    except OSError:
        return 0
    return int(response.split()[1]) if response else 0


async def _probe(port: int, until: asyncio.Event) -> list[int]:
    """Probe until the event; return the statuses."""
    statuses = []
    while not until.is_set():
        statuses += [await _status(port, "/livez"), await _status(port, "/readyz")]
    return statuses


def _entries(executor: ExecutorProcess, action: str) -> list[dict[str, Any]]:
    """Return the log lines of an action."""
    lines = executor.log_text().splitlines()
    return [entry for line in lines if f'"{action}"' in line and (entry := json.loads(line))["action"] == action]


async def _logged(executor: ExecutorProcess, action: str, text: str = "") -> None:
    await until(lambda: any(text in entry["message"] for entry in _entries(executor, action)))


@requirement("open_files")
async def test_more_calls_than_files_succeed_and_probes_are_answered(
    stack: EmbeddedStack, caller: Caller, database: str, tmp_path: Path
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    stack.upstream.rules({"delay_s": 0.3})
    environment = {
        "PATH": os.environ["PATH"],
        "PG_DSN": dsn_of(stack, database),
        "NATS_SERVERS": stack.nats.url,
        "SSL_CERT_FILE": str(stack.certificates.ca),
        "OPENAPI_TOOL__HEALTH__PORT": str(port := free_port()),
        "OPENAPI_TOOL__CACHE__TTL_S": "0",
        "OPENAPI_TOOL__EXECUTOR__CONCURRENCY": str(_CALLS),
        **stack.upstream.keys,
    }
    limited = ["/bin/sh", "-c", f'ulimit -n {_FILES}; exec "$@"', "sh"]
    command = [
        *limited,
        sys.executable,
        "-m",
        "openapi_tool.local.executor",
        "--upstream-port",
        str(stack.upstream.port),
    ]
    calls = [await caller.place(PROJECT, AGENT, "jina_search", _HELLO, publish=False) for _ in range(_CALLS)]
    with _running(command, environment, tmp_path / "log") as process:
        async with asyncio.timeout(WAIT_S):
            while await _status(port, "/readyz") != HTTPStatus.OK:  # noqa: ASYNC110 - another process has no event
                await asyncio.sleep(0.05)
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(_FILES)]
        done = asyncio.Event()
        probing = asyncio.create_task(_probe(port, done))
        for call in calls:
            await caller.publish(call)
        rows = await asyncio.gather(*(caller.result(call, WAIT_S) for call in calls))
        done.set()
        for _, writer in silent:
            writer.close()
        assert set(await probing) == {HTTPStatus.OK}
        assert [row.card["content"]["status"] for row in rows] == ["success"] * _CALLS
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, WAIT_S) == 0
    assert "open_files.short" in (tmp_path / "log").read_text()


@contextmanager
def _running(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process; kill it at the end if it still runs."""
    with log.open("wb") as stderr, subprocess.Popen(command, env=environment, stderr=stderr) as process:  # noqa: S603 - ours
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def _no_free_file(executor: ExecutorProcess) -> Iterator[None]:
    """Let a process open no further file, as if others were open; it keeps those that it has."""
    pid, (soft, hard) = executor.process.pid, resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (4, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


@requirement("open_files")
async def test_a_call_that_cannot_open_a_connection_to_the_upstream_waits(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    executor = start_executor()
    with _no_free_file(executor):
        call = await caller.place(PROJECT, AGENT, "jina_search", _HELLO)
        await _logged(executor, "open_files.exhausted", _OUT_OF_FILES)
    rows = await caller.result(call, WAIT_S)
    assert rows.card["content"]["status"] == "success"
    assert rows.card["metadata"]["tool_output"]["retries"] == 0
    assert len(stack.upstream.requests()) == 1
    assert not _entries(executor, "upstream.unreachable")


@requirement("open_files")
async def test_a_call_that_cannot_open_a_connection_in_time_names_the_cause(
    caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    executor = start_executor()
    with _no_free_file(executor):
        call = await caller.place(PROJECT, AGENT, "jina_search", {**_HELLO, "timeout": 2})
        rows = await caller.result(call, WAIT_S)
    error = rows.card["content"]["error"]
    assert (error["code"], error["detail"]["cause"]) == ("tool_timeout", _OUT_OF_FILES)


@requirement("open_files")
async def test_an_unavailable_database_names_too_many_open_files(
    stack: EmbeddedStack, caller: Caller, database: str, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    settings = {"OPENAPI_TOOL__HEALTH__PORT": str(port := free_port()), "OPENAPI_TOOL__HEALTH__CHECK_INTERVAL_S": "1"}
    executor = start_executor({**settings, "OPENAPI_TOOL__POSTGRES__TIMEOUT_S": "1"})
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await _status(port, "/livez") == HTTPStatus.OK  # so the connection before it is accepted, too
    with _no_free_file(executor):
        await caller.database.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'openapi-tool' "
            "and datname = $1",
            database,
        )
        await _logged(executor, "health.changed", _OUT_OF_FILES)
        writer.write(_READY)
        async with asyncio.timeout(WAIT_S):
            shown = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
        writer.close()
    assert _OUT_OF_FILES in shown["dependencies"]["postgres"]["reason"]
    rows = await caller.result(await caller.place(PROJECT, AGENT, "jina_search", _HELLO), WAIT_S)
    assert rows.card["content"]["status"] == "success"
