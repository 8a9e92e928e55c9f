"""Log streams that fail, that nobody reads, or that are closed, seen by real processes."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from openapi_tool import __version__
from openapi_tool.local.caller import Caller
from openapi_tool.local.servers import free_port
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.nats_records.replica_statistics import gather_stats
from openapi_tool.telemetry.replica_problems import found_problems
from tests.conftest import AGENT, PROJECT, search_tool
from tests.requirements import requirement
from tests.support import dsn_of
from tests.waiting import WAIT_S, until

_PIPE_BYTES = 4_096  # the least that Linux allows
_ROOT = Path(__file__).parents[2]
# A fresh interpreter, whose exit is part of these tests; tests/forking.py does not fork for `-X`.
_PYTHON = (sys.executable, "-X", "utf8")


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """Yield both ends of a small pipe; close those that are still open."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    try:
        yield read, write
    finally:
        for end in (read, write):
            with suppress(OSError):
                os.close(end)


@contextmanager
def _broken(kind: str) -> Iterator[int]:
    """Yield a descriptor to write to: a pipe that nobody reads or whose reader has closed it, or a full disk."""
    with _pipe() as (read, write), Path("/dev/full").open("wb") as full:
        if kind == "closed":
            os.close(read)
        yield full.fileno() if kind == "full" else write


@contextmanager
def _process(
    command: Sequence[str], environment: Mapping[str, str], **streams: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process; kill it at the end if it still runs."""
    environment = {"PATH": os.environ["PATH"], **environment}
    with subprocess.Popen(command, env=environment, cwd=_ROOT, **streams) as process:  # noqa: S603 - ours
        try:
            yield process
        finally:
            process.kill()


class _Executor:
    """A `serve` process with a standard error of the test's choice."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self._port = port

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body; status 0 means that nothing listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    async def ready(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while (await asyncio.to_thread(self.get, "/readyz"))[0] != 200:
                assert self.process.poll() is None, self.process.returncode
                await asyncio.sleep(0.05)

    async def dropped_lines(self) -> int:
        _, metrics = await asyncio.to_thread(self.get, "/metrics")
        found = re.search(r"^openapi_tool_log_lines_dropped_total (\S+)$", metrics, re.MULTILINE)
        assert found, metrics
        return int(float(found[1]))

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.process.wait, WAIT_S)


Start = Callable[..., _Executor]


@pytest.fixture
async def start(stack: EmbeddedStack, caller: Caller, database: str) -> AsyncIterator[Start]:
    """Return a function that starts an executor at debug level, whose standard error is a descriptor."""
    await caller.add_tool(PROJECT, search_tool())
    with ExitStack() as processes:

        def started(stderr: int) -> _Executor:
            environment = {
                "PG_DSN": dsn_of(stack, database),
                "NATS_SERVERS": stack.nats.url,
                "SSL_CERT_FILE": str(stack.certificates.ca),
                "OPENAPI_TOOL__HEALTH__PORT": str(port := free_port()),
                "OPENAPI_TOOL__CACHE__TTL_S": "0",
                "OPENAPI_TOOL__TELEMETRY__LOG_LEVEL": "debug",
                **stack.upstream.keys,
            }
            command = [*_PYTHON, "-m", "openapi_tool.local.executor", "--upstream-port", str(stack.upstream.port)]
            process = processes.enter_context(_process(command, environment, stdin=subprocess.DEVNULL, stderr=stderr))
            return _Executor(process, port)

        yield started


async def _calls_succeed(caller: Caller, number: int) -> None:
    calls = [
        await caller.place(PROJECT, AGENT, "jina_search", {"query": "hello world", "count": 3}) for _ in range(number)
    ]
    rows = await asyncio.gather(*(caller.result(call, WAIT_S) for call in calls))
    assert [row.card["content"]["status"] for row in rows] == ["success"] * number


@requirement("logs.stream")
@pytest.mark.parametrize("kind", ["closed", "full"])
async def test_calls_are_answered_although_no_line_can_be_written(caller: Caller, start: Start, kind: str) -> None:
    with _broken(kind) as stderr:
        executor = start(stderr)
        await executor.ready()
        await _calls_succeed(caller, 20)
        assert await executor.dropped_lines() > 20
        problems = found_problems(await gather_stats(caller.client, 1.0)).now  # a busy machine may cause others, too
        assert any(
            re.search(r": since its start [0-9]{2,} log lines are dropped: nobody reads them", p) for p in problems
        )
        executor.process.send_signal(signal.SIGTERM)
        assert await executor.exit_code() == 0


@requirement("logs.stream")
async def test_calls_are_answered_although_nobody_reads_the_lines(caller: Caller, start: Start) -> None:
    with _broken("unread") as stderr:
        executor = start(stderr)
        await executor.ready()
        await _calls_succeed(caller, 40)
        executor.process.send_signal(signal.SIGTERM)
        assert await executor.exit_code() == 0


@requirement("logs.stream")
async def test_a_second_signal_ends_the_process_after_the_lines_that_the_stream_takes(
    stack: EmbeddedStack, caller: Caller, start: Start, tmp_path: Path
) -> None:
    stack.upstream.rules({"delay_s": 60})
    with (tmp_path / "log").open("wb") as log:
        executor = start(log.fileno())
        await executor.ready()
        await caller.place(PROJECT, AGENT, "jina_search", {"query": "hello world", "count": 3})
        await asyncio.to_thread(stack.upstream.requests, 1)
        executor.process.send_signal(signal.SIGTERM)
        await until(lambda: "drain.started" in (tmp_path / "log").read_text())
        executor.process.send_signal(signal.SIGTERM)
        assert await executor.exit_code() == 128 + signal.SIGTERM
    assert json.loads((tmp_path / "log").read_text().splitlines()[-1])["action"] == "service.killed"


_LOGGING = """
import logging, sys
from openapi_tool.telemetry.logs import configure_logging, guard_crashes
from openapi_tool.telemetry.redact import Redactor

configure_logging("info", "json", Redactor(), background=True)
guard_crashes()
log = logging.getLogger("openapi_tool.test")
"""
_FLOOD = 20_000
_MUCH = 100_000


def _lines(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.splitlines()]


@requirement("logs.stream")
def test_lines_that_the_queue_cannot_hold_are_counted_and_later_ones_are_written_in_order() -> None:
    """The reader begins once all lines are logged, which the process reports on its standard output."""
    script = f"""{_LOGGING}
for number in range({_FLOOD}):
    log.info("x" * 1000, extra={{"number": number}})
print("logged", flush=True)
sys.stdin.readline()
log.info("last")
"""
    with _pipe() as (read, write):
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": write}
        with _process([*_PYTHON, "-c", script], {}, **streams) as process, open(read, closefd=False) as reader:
            os.close(write)
            assert process.stdin
            assert process.stdout
            assert process.stdout.readline() == b"logged\n"
            received = []
            for line in map(json.loads, reader):
                received.append(line)
                if line["action"] == "log.dropped":
                    process.stdin.close()
            assert process.wait(WAIT_S) == 0
    *first, notice, last = received
    assert [line["number"] for line in first] == list(range(len(first)))
    assert 0 < len(first) < _FLOOD
    assert (notice["lines"], notice["level"]) == (_FLOOD - len(first), "warning")
    assert last["message"] == "last"


@requirement("logs.stream")
def test_a_stream_that_works_again_gets_the_next_line_and_the_number_of_dropped_ones(tmp_path: Path) -> None:
    script = f"""{_LOGGING}
for line in sys.stdin:
    log.info("line", extra={{"number": int(line)}})
    logging.getLogger().handlers[0].flush()
    print("done", flush=True)
"""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def opened() -> BinaryIO:
        """Open the read end, without waiting for a writer."""
        return os.fdopen(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)

    with opened() as reader, fifo.open("wb") as write:
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": write}
        with _process([*_PYTHON, "-c", script], {}, bufsize=0, **streams) as process:
            write.close()
            _log(process, 1)
            before = reader.read(_MUCH)
            reader.close()
            _log(process, 2)
            _log(process, 3)
            with opened() as second_reader:
                _log(process, 4)
                _log(process, 5)
                after = second_reader.read(_MUCH)
    assert [line["number"] for line in _lines(before)] == [1]
    assert [line.get("number", line.get("lines")) for line in _lines(after)] == [2, 4, 5]  # two lines were dropped


def _log(process: subprocess.Popen[bytes], number: int) -> None:
    """Let the process log a line, and wait until it has tried to write it."""
    assert process.stdin
    assert process.stdout
    process.stdin.write(b"%d\n" % number)
    assert process.stdout.readline() == b"done\n"


_ENDINGS = {
    "end": ("", 0),
    "exit": ("sys.exit(7)", 7),
    "crash": ("raise ValueError('x')", 1),
    "thread": ("import threading; t = threading.Thread(target=int, args=('x',)); t.start(); t.join()", 0),
    "warning": ("import warnings; warnings.warn('x')", 0),
    "atexit": ("import atexit; atexit.register(log.critical, 'at exit')", 0),
}


@requirement("logs.stream")
@pytest.mark.parametrize("ending", _ENDINGS)
@pytest.mark.parametrize("kind", ["unread", "closed", "full"])
def test_however_a_process_ends_its_log_stream_changes_neither_exit_nor_exit_code(ending: str, kind: str) -> None:
    code, expected = _ENDINGS[ending]
    script = f"{_LOGGING}\nfor _ in range(50):\n    log.info('x' * 1000)\n{code}\n"
    with _broken(kind) as stderr, _process([*_PYTHON, "-c", script], {}, stderr=stderr) as process:
        assert process.wait(WAIT_S) == expected


@requirement("logs.stream")
@pytest.mark.parametrize("kind", ["closed", "full"])
def test_invalid_settings_give_their_exit_code_although_they_cannot_be_printed(kind: str) -> None:
    command = [*_PYTHON, "-m", "openapi_tool", "serve"]
    with _broken(kind) as stderr, _process(command, {}, stderr=stderr) as process:
        assert process.wait(WAIT_S) == 2


_CLOSED = [
    "".join(closed)
    for closed in itertools.chain.from_iterable(itertools.combinations("012", number) for number in range(4))
]


def _with_closed(closed: str, *words: str) -> list[str]:
    """Return a command that runs this project's with closed descriptors."""
    redirections = " ".join({"0": "<&-", "1": ">&-", "2": "2>&-"}[number] for number in closed)
    return ["/bin/sh", "-c", f'exec "$@" {redirections}', "sh", *_PYTHON, "-m", "openapi_tool", *words]


@requirement("logs.stream")
async def test_serve_starts_and_stops_with_any_standard_streams_closed(
    stack: EmbeddedStack, caller: Caller, database: str, tmp_path: Path
) -> None:
    """The eight replicas start at the same time, as the imports are most of the test."""
    executors = {}
    with ExitStack() as processes:
        for closed in _CLOSED:
            environment = {
                "PG_DSN": dsn_of(stack, database),
                "NATS_SERVERS": stack.nats.url,
                "JINA_API_KEY": "a-key-of-the-test",
                "OPENAPI_TOOL__HEALTH__PORT": str(port := free_port()),
            }
            log = processes.enter_context((tmp_path / f"log{closed}").open("wb"))
            command = _with_closed(closed, "serve")
            process = processes.enter_context(_process(command, environment, stdout=log, stderr=log))
            executors[closed] = _Executor(process, port)
        for executor in executors.values():
            await executor.ready()
        for executor in executors.values():
            executor.process.send_signal(signal.SIGTERM)
        assert {closed: await executor.exit_code() for closed, executor in executors.items()} == dict.fromkeys(
            _CLOSED, 0
        )
    for closed in _CLOSED:
        text = (tmp_path / f"log{closed}").read_text()
        assert ("service.stopped" in text) == ("2" not in closed), text


@requirement("logs.stream")
def test_a_short_command_ends_well_with_any_standard_streams_closed(tmp_path: Path) -> None:
    with ExitStack() as stack:
        running = {}
        for closed in _CLOSED:
            out = stack.enter_context((tmp_path / f"out{closed}").open("wb"))
            running[closed] = stack.enter_context(
                _process(_with_closed(closed, "--version"), {}, stdout=out, stderr=out)
            )
        codes = {closed: process.wait(WAIT_S) for closed, process in running.items()}
    outputs = {closed: (tmp_path / f"out{closed}").read_text() for closed in _CLOSED}
    assert codes == dict.fromkeys(_CLOSED, 0)
    assert outputs == {closed: "" if "1" in closed else f"{__version__}\n" for closed in _CLOSED}
