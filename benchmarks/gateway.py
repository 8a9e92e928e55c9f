"""What the MCP door adds: start to first answer, memory, and CPU of a call beside the engine alone.

python -m benchmarks.gateway --calls 300
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
import psutil

from openapi_tool.bootstrap import Upstream, build_bootstrap, build_runner
from openapi_tool.cli.kernel import NO_DATABASE
from openapi_tool.gateway.stored import StoredTexts
from openapi_tool.gateway.tools import built_in_tools
from openapi_tool.jina.egress import EgressTransport
from openapi_tool.jina.transport import AiohttpTransport
from openapi_tool.local.dev import FALLBACKS
from openapi_tool.local.executor import LoopbackResolver
from openapi_tool.local.guard import Guard
from openapi_tool.local.recordings import RECORDED_HOSTS
from openapi_tool.local.stack import UpstreamDouble, make_certificates
from openapi_tool.protocol.cards import ToolCall
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.settings import load_settings
from openapi_tool.state.sqlite import MEMORY, StateFile
from openapi_tool.tools.deadlines import Deadline

_KEY = "JINA_API_KEY"
_MB = 1e6
_WARM_UP = 20


@contextmanager
def double_of(folder: Path) -> Iterator[tuple[UpstreamDouble, Mapping[str, str]]]:
    """Yield the double, and the variables of a process that sends to it."""
    guard, certificates = Guard(()), make_certificates(folder)
    double = UpstreamDouble(folder, certificates, guard, (_KEY,))
    double.start()
    double.fallbacks(*FALLBACKS)
    environment = {_KEY: double.keys[_KEY], "SSL_CERT_FILE": str(certificates.ca)}
    try:
        yield double, environment | {"OPENAPI_TOOL__URL_POLICY__ALLOW": RECORDED_HOSTS}
    finally:
        double.stop()
        guard.close()


class _Client:
    """Client without a library, so that its own CPU is no part of the figures."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._id = 0

    def request(self, method: str, params: Mapping[str, object]) -> None:
        """Send a request, and wait for its answer."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None  # noqa: S101 - of `Popen`
        assert stdout is not None  # noqa: S101
        self._id += 1
        stdin.write(orjson.dumps({"jsonrpc": "2.0", "id": self._id, "method": method, "params": params}) + b"\n")
        stdin.flush()
        while orjson.loads(line := stdout.readline()).get("id") != self._id:
            pass
        if orjson.loads(line).get("result", {}).get("isError", "error" in orjson.loads(line)):
            raise SystemExit(f"a call failed: {line!r}")

    def read_page(self, number: int) -> None:
        """Call a tool with arguments of their own."""
        url = f"http://site.fixture.test:8099/article?{number}"
        self.request("tools/call", {"name": "jina_read", "arguments": {"url": url}})


def door(double: UpstreamDouble, environment: Mapping[str, str], state: Path, calls: int) -> None:
    """Measure the MCP door over standard input and output."""
    began = time.monotonic()
    module = ["-m", "openapi_tool.local.door_server", "mcp", "--upstream-port", str(double.port), "--state", str(state)]
    with subprocess.Popen(  # noqa: S603 - the interpreter
        [sys.executable, *module],
        env={"PATH": os.environ["PATH"], **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        client, measured = _Client(process), psutil.Process(process.pid)
        hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "b", "version": "1"}}
        client.request("initialize", hello)
        started, start_cpu = time.monotonic() - began, sum(measured.cpu_times()[:2])
        client.read_page(0)
        first = time.monotonic() - began
        for number in range(1, _WARM_UP):
            client.read_page(number)
        before = sum(measured.cpu_times()[:2])
        for number in range(_WARM_UP, _WARM_UP + calls):
            client.read_page(number)
        cpu = (sum(measured.cpu_times()[:2]) - before) / calls
        memory = measured.memory_info().rss
        process.kill()
    print(f"handshake answered after {started:.2f} s ({start_cpu:.2f} s of CPU), first call after {first:.2f} s")  # noqa: T201
    print(f"memory after {calls} calls: {memory / _MB:.0f} MB")  # noqa: T201
    print(f"CPU of a call through the door: {cpu * 1000:.2f} ms")  # noqa: T201


async def _engine(double: UpstreamDouble, environment: Mapping[str, str], calls: int) -> None:
    os.environ |= environment
    bootstrap = build_bootstrap(load_settings(NO_DATABASE), environment)
    egress = bootstrap.settings.egress
    transport = EgressTransport(AiohttpTransport(bootstrap.upstream_tls, egress, LoopbackResolver(double.port)))
    definition = built_in_tools()["jina_read"].definition
    async with aclosing(StateFile.open(MEMORY)) as state, aclosing(transport):
        upstream, texts = Upstream(bootstrap, transport, None, None), StoredTexts(state.texts("whole", 60))
        runner = build_runner(bootstrap, upstream, texts, b"a key of a benchmark of the engine")

        async def read_page(number: int) -> None:
            call = runner.new_call(CallIdentity("p", "a"))
            url = f"http://site.fixture.test:8099/article?{number}"
            with call.memory:
                given, deadline = ToolCall({"url": url}), Deadline.after(30)
                fields = (await runner.run(call, definition, given, deadline)).fields
            if fields.error is not None:
                raise SystemExit(str(fields.error))

        for number in range(_WARM_UP):
            await read_page(number)
        before = time.process_time()
        for number in range(_WARM_UP, _WARM_UP + calls):
            await read_page(number)
        cpu = (time.process_time() - before) / calls
    memory = psutil.Process().memory_info().rss
    print(f"CPU of a call of the engine alone: {cpu * 1000:.2f} ms; memory: {memory / _MB:.0f} MB")  # noqa: T201


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=300)
    calls = parser.parse_args().calls
    with TemporaryDirectory() as folder, double_of(Path(folder)) as (double, environment):
        door(double, environment, Path(folder) / "state.sqlite3", calls)
        asyncio.run(_engine(double, environment, calls))


if __name__ == "__main__":
    main()
