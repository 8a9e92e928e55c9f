"""What the doors add: CPU of a call beside bare servers that only send the upstream request, latency, memory, start.

python -m benchmarks.doors --calls 400
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import orjson
import psutil

from benchmarks.gateway import door, double_of

_MB, _KB = 1e6, 1e3
_ROUNDS = 8
_MODULE = (sys.executable, "-m")
_CONNECTIONS = 1_000
_START_S = 120.0
_MODERN = "2026-07-28"
_META = {
    "io.modelcontextprotocol/protocolVersion": _MODERN,
    "io.modelcontextprotocol/clientInfo": {"name": "b", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}

Call = Callable[[HTTPConnection, int], None]


def _url(number: int) -> str:
    return f"http://site.fixture.test:8099/article?{number}"


def _plain(connection: HTTPConnection, number: int) -> None:
    body = orjson.dumps({"url": _url(number)})
    connection.request("POST", "/v1/tools/jina_read", body, {"Content-Type": "application/json"})
    _check(connection, lambda answer: "content" in answer)


def _mcp(connection: HTTPConnection, number: int) -> None:
    params = {"name": "jina_read", "arguments": {"url": _url(number)}, "_meta": _META}
    headers = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": _MODERN,
        "Mcp-Method": "tools/call",
        "Mcp-Name": "jina_read",
    }
    body = orjson.dumps({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params})
    connection.request("POST", "/mcp", body, headers)
    _check(connection, lambda answer: not answer["result"].get("isError"))


def _mcp_2025(connection: HTTPConnection, number: int) -> None:
    params = {"name": "jina_read", "arguments": {"url": _url(number)}}
    headers = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": "2025-06-18",
    }
    body = orjson.dumps({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params})
    connection.request("POST", "/mcp", body, headers)
    _check(connection, lambda answer: not answer["result"].get("isError"))


def _check(connection: HTTPConnection, is_right: Callable[[dict[str, dict[str, object]]], bool]) -> None:
    answer = connection.getresponse().read()
    if answer.startswith(b"event:"):
        answer = next(line for line in answer.splitlines() if line.startswith(b"data: {")).removeprefix(b"data: ")
    if not is_right(orjson.loads(answer)):
        raise SystemExit(f"a call failed: {answer!r}")


@contextmanager
def _running(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[psutil.Process]:
    variables = {"PATH": os.environ["PATH"], **environment}
    with subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:  # noqa: S603
        try:
            yield psutil.Process(process.pid)
        finally:
            process.kill()


def _connected(port: int) -> HTTPConnection:
    until = time.monotonic() + _START_S
    while True:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.connect()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
        else:
            return connection


def _read_pages(port: int, call: Call, numbers: range) -> None:
    connection = _connected(port)
    for number in numbers:
        call(connection, number)
    connection.close()


def _cpu(process: psutil.Process, port: int, call: Call, numbers: range) -> float:
    """Return the CPU of a call in seconds."""
    before = sum(process.cpu_times()[:2])
    _read_pages(port, call, numbers)
    return (sum(process.cpu_times()[:2]) - before) / len(numbers)


async def _latencies(port: int, clients: int, calls: int, first: int) -> tuple[float, float]:
    """Return calls a second and the 99th percentile in seconds, of clients that call one after the other."""
    taken: list[float] = []
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=120, trust_env=False
    ) as client:

        async def one(index: int) -> None:
            for number in range(calls):
                began = time.monotonic()
                body = {"url": _url(first + index * calls + number)}
                (await client.post("/v1/tools/jina_read", json=body)).raise_for_status()
                taken.append(time.monotonic() - began)

        began = time.monotonic()
        await asyncio.gather(*map(one, range(clients)))
        seconds = time.monotonic() - began
    return len(taken) / seconds, statistics.quantiles(taken, n=100)[98]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def _compare(bare: tuple[psutil.Process, int], door: tuple[psutil.Process, int], calls: int) -> None:
    """Compare CPU in rounds, each of which measures both: what else the machine does changes both alike."""
    numbers = count()
    for name, call in (("plain HTTP", _plain), ("MCP over HTTP, 2026-07-28", _mcp), ("MCP over HTTP, 2025", _mcp_2025)):

        def next_numbers(call: Call = call) -> range:
            del call
            first = next(numbers) * 10_000
            return range(first, first + calls // _ROUNDS)

        for _, port in (bare, door):
            _read_pages(port, call, next_numbers())
        rounds = [[_cpu(process, port, call, next_numbers()) for process, port in (bare, door)] for _ in range(_ROUNDS)]
        ratio = statistics.median(of_door / of_bare for of_bare, of_door in rounds)
        of_bare, of_door = (statistics.median(column) * 1000 for column in zip(*rounds, strict=True))
        _say(f"CPU of a call over {name}: {of_door:.2f} ms, of the bare server {of_bare:.2f} ms: {ratio:.2f} times")


def _idle(process: psutil.Process, port: int) -> None:
    before = process.memory_info().rss
    idle = [_connected(port) for _ in range(_CONNECTIONS)]
    time.sleep(2)
    each = (process.memory_info().rss - before) / _CONNECTIONS
    _say(
        f"memory after all calls: {before / _MB:.0f} MB; of an idle connection, of {_CONNECTIONS}: {each / _KB:.1f} kB"
    )
    for connection in idle:
        connection.close()


def main() -> None:
    """Measure all servers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=400, help="calls of each server and protocol")
    parser.add_argument("--clients", type=int, default=200, help="clients at the same time, for the latency")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder, double_of(Path(folder)) as (double, environment):
        bare_port, port, state = _free_port(), _free_port(), str(Path(folder) / "state.sqlite3")
        options = ["--upstream-port", str(double.port), "--state", state, "--port", str(port)]
        with (
            _running([*_MODULE, "benchmarks.bare_doors", str(double.port), str(bare_port)], environment) as bare,
            _running([*_MODULE, "openapi_tool.local.door_server", "gateway", *options], environment) as gateway,
        ):
            for process, its_port, name in ((bare, bare_port, "bare server"), (gateway, port, "gateway")):
                _connected(its_port).close()
                _say(f"memory of the {name} at its start: {process.memory_info().rss / _MB:.0f} MB")
            _compare((bare, bare_port), (gateway, port), arguments.calls)
            for its_port, name in ((bare_port, "bare server"), (port, "gateway")):
                rate, p99 = asyncio.run(_latencies(its_port, arguments.clients, 3, 5_000_000))
                _say(f"{arguments.clients} clients of the {name}: {rate:.0f} calls/s, p99 {p99 * 1000:.0f} ms")
            _idle(gateway, port)
        door(double, environment, Path(folder) / "stdio.sqlite3", arguments.calls)


if __name__ == "__main__":
    main()
