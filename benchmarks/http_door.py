"""What the HTTP door adds: CPU of a call over plain HTTP and over MCP beside a bare server, and memory of connections.

python -m benchmarks.http_door --calls 300
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
import psutil

from benchmarks.gateway import double_of

_MB, _KB = 1e6, 1e3
_WARM_UP = 20
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
    _check(connection, lambda answer: answer["result"]["isError"] is False)


def _check(connection: HTTPConnection, is_right: Callable[[dict[str, dict[str, object]]], bool]) -> None:
    answer = connection.getresponse().read()
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


def _cpu(process: psutil.Process, port: int, call: Call, calls: int, first: int) -> float:
    """Return the CPU of a call in seconds."""
    connection = _connected(port)
    for number in range(first, first + _WARM_UP):
        call(connection, number)
    before = sum(process.cpu_times()[:2])
    for number in range(first + _WARM_UP, first + _WARM_UP + calls):
        call(connection, number)
    connection.close()
    return (sum(process.cpu_times()[:2]) - before) / calls


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def main() -> None:
    """Measure both servers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=300)
    calls = parser.parse_args().calls
    with TemporaryDirectory() as folder, double_of(Path(folder)) as (double, environment):
        port = _free_port()
        with _running([sys.executable, "-m", "benchmarks.bare_http", str(double.port), str(port)], environment) as bare:
            reference = _cpu(bare, port, _plain, calls, 0)
        _say(f"CPU of a call through a bare Starlette server: {reference * 1000:.2f} ms")
        port, state = _free_port(), str(Path(folder) / "state.sqlite3")
        options = ["--upstream-port", str(double.port), "--state", state, "--port", str(port)]
        command = [sys.executable, "-m", "openapi_tool.local.door_server", "gateway", *options]
        with _running(command, environment) as gateway:
            _connected(port).close()
            _say(f"memory at the start: {gateway.memory_info().rss / _MB:.0f} MB")
            for name, call, first in (("plain HTTP", _plain, 0), ("MCP over HTTP", _mcp, 100_000)):
                cpu = _cpu(gateway, port, call, calls, first)
                _say(
                    f"CPU of a call over {name}: {cpu * 1000:.2f} ms, {cpu / reference:.2f} times that of the bare one"
                )
            before = gateway.memory_info().rss
            idle = [_connected(port) for _ in range(_CONNECTIONS)]
            time.sleep(2)
            each = (gateway.memory_info().rss - before) / _CONNECTIONS
            _say(f"memory after {2 * calls} calls: {before / _MB:.0f} MB; of an idle connection: {each / _KB:.1f} kB")
            for connection in idle:
                connection.close()


if __name__ == "__main__":
    main()
