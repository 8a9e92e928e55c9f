"""`demo --door http`: a client of the gateway on loopback, against the double or the real Jina."""

from __future__ import annotations

import subprocess
from http.client import HTTPConnection
from typing import IO, Any

import orjson

from openapi_tool.local.door_demo import CALL_TIMEOUT_S, DoorDemo, ShownCall, cursor_in, door_command
from openapi_tool.local.sample_arguments import SAMPLE_CALLS
from openapi_tool.local.servers import ServerFailed

_STARTED = b"gateway.serving"  # action of the log line that has the port
_END_S = 30.0


async def play(upstream: str) -> DoorDemo:
    """List the tools, run the calls of the demo, and read the second part of the last result. Raises ServerFailed."""
    with door_command(upstream, "gateway", "--port", "0") as command:
        process = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs in this loop
            command.words, env=command.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            assert process.stdout is not None  # noqa: S101 - it is a pipe
            return _make_calls(_port(process.stdout), upstream)
        finally:
            process.terminate()
            process.communicate(timeout=_END_S)


def _port(log: IO[bytes]) -> int:
    """Return the port that the gateway listens on, which its log names."""
    last = b""
    for line in log:
        last = line
        if _STARTED in line:
            return int(orjson.loads(line)["port"])
    raise ServerFailed(f"the gateway has ended: {last.decode(errors='replace').strip()}")


def _make_calls(port: int, upstream: str) -> DoorDemo:
    connection = HTTPConnection("127.0.0.1", port, timeout=CALL_TIMEOUT_S)
    try:
        listed = _answer(connection, "GET", "/v1/tools")
        tools = [str(tool["name"]) for tool in listed["tools"]]
        calls = [_call(connection, name, arguments) for name, arguments in SAMPLE_CALLS[upstream]]
        cursor = cursor_in(calls[-1].text)
        if cursor:
            calls.append(_call(connection, "jina_read", {"cursor": cursor}))
    finally:
        connection.close()
    return DoorDemo(f"HTTP at http://127.0.0.1:{port}, POST /v1/tools/NAME", tools, calls)


def _call(connection: HTTPConnection, name: str, arguments: dict[str, Any]) -> ShownCall:
    answer = _answer(connection, "POST", f"/v1/tools/{name}", orjson.dumps(arguments))
    failed = "code" in answer
    text = answer["detail"] if failed else answer["content"]
    return ShownCall(name, arguments, failed, str(text))


def _answer(connection: HTTPConnection, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
    connection.request(method, path, body, {"Content-Type": "application/json"})
    answer: dict[str, Any] = orjson.loads(connection.getresponse().read())
    return answer
