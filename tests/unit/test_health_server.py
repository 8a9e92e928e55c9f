"""Health server, also with hostile clients."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import shutil
import subprocess
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest

from openapi_tool.service import file_limit_problem
from openapi_tool.settings import Settings
from openapi_tool.telemetry import health_server as module
from openapi_tool.telemetry.calls import RECENT, CallFacts
from openapi_tool.telemetry.health import NATS, Health, Snapshots
from openapi_tool.telemetry.health_server import MAX_CONNECTIONS, health_server
from tests.requirements import requirement

PROBE = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
HALF = b"GET /livez HTTP/1.1\r\nHost: "
TIMEOUT_S = 20.0  # long, for a busy machine; the tested events are immediate
READ = asyncio.StreamReader | None


@pytest.fixture(autouse=True)
def _descriptors() -> Iterator[None]:
    """Raise the limit of open files: one process has both ends of every connection."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with health_server("127.0.0.1", 0, Health()) as port:
        yield port


@asynccontextmanager
async def connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def response_to(port: int, request: bytes) -> bytes:
    """Return everything that the server sends until it closes. Raises TimeoutError."""
    async with asyncio.timeout(TIMEOUT_S), connection(port) as (reader, writer):
        return await read_response(reader, writer, request)


async def read_response(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> bytes:
    answer = b""
    with suppress(ConnectionError):
        writer.write(request)
        while data := await reader.read(65_536):
            answer += data
    return answer


@requirement("health")
async def test_the_text_of_metrics_is_cached(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = count()
    monkeypatch.setattr(module, "exposition", lambda: b"text %d" % next(made))
    monkeypatch.setattr(module, "METRICS_CACHE_S", 3_600.0)
    answers = await asyncio.gather(*(response_to(port, METRICS) for _ in range(20)))
    assert all(answer.endswith(b"text 0") for answer in answers)
    monkeypatch.setattr(module, "METRICS_CACHE_S", 0.0)
    assert (await response_to(port, METRICS)).endswith(b"text 1")


@requirement("health")
async def test_a_probe_is_answered_despite_many_half_sent_requests(port: int) -> None:
    async with AsyncExitStack() as exits:
        readers = []
        for _ in range(1_200):
            reader, writer = await exits.enter_async_context(connection(port))
            writer.write(HALF)
            readers.append(reader)
        assert b'"live": true' in await response_to(port, PROBE)
        async with asyncio.timeout(TIMEOUT_S):
            for reader in readers[: 1_200 - MAX_CONNECTIONS]:
                with suppress(ConnectionError):
                    assert await reader.read() == b""


@requirement("health")
async def test_open_connections_never_exceed_the_limit(port: int) -> None:
    taken: set[object] = set()
    usual = module._Connection.connection_made  # noqa: SLF001 - what the server itself holds is the point

    def count(self: module._Connection, transport: asyncio.BaseTransport) -> None:
        usual(self, transport)
        taken.add(transport)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._Connection, "connection_made", count)  # noqa: SLF001
        async with AsyncExitStack() as exits:
            for _ in range(3 * MAX_CONNECTIONS):
                await exits.enter_async_context(connection(port))
            assert b'"live": true' in await response_to(port, PROBE)
            is_open = [transport for transport in taken if not transport.is_closing()]  # type: ignore[attr-defined]
            assert len(taken) == 3 * MAX_CONNECTIONS + 1
            assert len(is_open) < MAX_CONNECTIONS


@pytest.mark.parametrize("first", [b"", HALF, b"POST /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nx"])
@requirement("health")
async def test_a_slow_connection_is_closed(first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIFE_S", 0.3)
    async with health_server("127.0.0.1", 0, Health()) as port, connection(port) as (reader, writer):
        writer.write(first)
        reading = asyncio.create_task(read_response(reader, writer, b""))
        async with asyncio.timeout(TIMEOUT_S):
            while not reading.done():
                writer.write(b"x")
                await asyncio.sleep(0.02)
        assert b"200 OK" not in reading.result()
        assert b'"live": true' in await response_to(port, PROBE)


# fmt: off
CHUNKED = b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
HOSTILE = {
    "a header of 10 MB": b"GET /livez HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 10_000_000,
    "headers of 10 MB": b"GET /livez HTTP/1.1\r\nHost: x\r\n" + b"X: x\r\n" * 1_600_000,
    "a path of 10 MB": b"GET /" + b"x" * 10_000_000 + b" HTTP/1.1\r\n\r\n",
    "a body of 10 MB": b"POST /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n" + b"x" * 10_000_000,
    "a body of a probe": b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n" + b"x" * 10_000_000,
    "chunks without end": CHUNKED + b"1\r\nx\r\n" * 100_000,
    "a chunk of any size": CHUNKED + b"ffffffffffffffff\r\n",
    "TLS": b"\x16\x03\x01" + b"\x00" * 200, "no text": b"\xff" * 1_000 + b"\r\n\r\n",
    "another version": b"GET /livez HTTP/9.9\r\n\r\n",
    "an upgrade": PROBE[:-2] + b"Upgrade: websocket\r\nConnection: upgrade\r\n\r\n",
}
# fmt: on


@pytest.mark.parametrize("request_", HOSTILE.values(), ids=HOSTILE)
@requirement("health")
async def test_any_bytes_get_at_most_one_response_and_the_connection_is_closed(request_: bytes, port: int) -> None:
    assert (await response_to(port, request_)).count(b"HTTP/1.") <= 1
    assert b'"live": true' in await response_to(port, PROBE)


@requirement("health")
async def test_only_the_first_of_pipelined_requests_is_answered(port: int) -> None:
    answer = await response_to(port, PROBE * 2_000)
    assert answer.count(b"HTTP/1.1 200 OK") == 1
    assert b"Connection: close" in answer


@pytest.mark.parametrize(
    ("request_", "status"),
    [(PROBE, b"200"), (PROBE.replace(b"live", b"ready"), b"503"), (PROBE.replace(b"livez", b"x"), b"404")],
)
@requirement("health")
async def test_every_response_closes_its_connection(request_: bytes, status: bytes, port: int) -> None:
    answer = await response_to(port, request_)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"Connection: close" in answer


@requirement("health")
def test_bytes_beyond_the_limit_are_not_buffered_and_close_the_connection() -> None:
    """aiohttp buffers data that arrives after a refusal: a few connections of 10 MB took 600 MB."""
    inner, transport = Mock(), Mock()
    connection = module._Connection(inner, {})  # noqa: SLF001 - what aiohttp keeps cannot be seen from outside
    connection._transport = transport  # noqa: SLF001
    for _ in range(100):
        connection.data_received(b"x" * 65_536)
    passed_on = sum(len(call.args[0]) for call in inner.data_received.call_args_list)
    assert 70_000 < passed_on <= module.MAX_REQUEST_BYTES
    transport.abort.assert_called()


@requirement("health")
async def test_a_port_in_use_is_an_error(port: int) -> None:
    with pytest.raises(OSError, match="in use"):
        async with health_server("127.0.0.1", port, Health()):
            pytest.fail("two servers at one port")


@requirement("health")
async def test_readyz_shows_recorded_states() -> None:
    health = Health()
    health.record(NATS, ok=True)
    async with health_server("127.0.0.1", 0, health) as port:
        assert b'"nats": {"ok": true' in await response_to(port, PROBE.replace(b"live", b"ready"))


LIMIT = """
import logging
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 300))
from openapi_tool.service import raise_file_limit
print(raise_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@requirement("health")
def test_the_soft_limit_of_open_files_is_raised_to_the_hard_limit() -> None:
    done = subprocess.run([sys.executable, "-c", LIMIT], capture_output=True, text=True, check=True, timeout=60)  # noqa: S603
    assert done.stdout.split() == ["300", "300", "300"]


@pytest.mark.parametrize(
    ("limit", "port", "enough"),
    [
        (711, 0, True),
        (647, 0, False),
        (648, 0, True),
        (711, 8080, False),
        (712, 8080, True),
        (resource.RLIM_INFINITY, 1, True),
    ],
)
@requirement("health")
def test_a_shortage_of_open_files_is_reported_with_the_numbers(limit: int, port: int, enough: bool) -> None:  # noqa: FBT001
    settings = Settings.model_validate({"postgres": {"dsn": "postgresql://h/db"}, "health": {"port": port}})
    message = file_limit_problem(settings, limit)
    assert (message is None) == enough
    if message:
        assert f"may open {limit} files" in message
        assert "egress.max_connections 512, postgres.pool_size 8" in message


@requirement("health")
def test_an_alternating_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "openapi_tool.telemetry.health")
    health = Health()
    health.record(NATS, ok=True)
    for number in range(20):
        health.record(NATS, ok=False, reason="timeout" if number % 2 else "no responders")
    health.record(NATS, ok=True)
    health.record(NATS, ok=False, reason="timeout")
    assert [record.getMessage() for record in caplog.records] == [
        "nats is available",
        "nats is unavailable: no responders",
        "nats is unavailable: timeout",
        "nats is available",
        "nats is unavailable, as before",
    ]


CHROMIUM = shutil.which("chromium")
NAMED = "<script>document.title = 'taken'</script>"
_BROWSER = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom")


@pytest.fixture
async def page_port() -> AsyncIterator[int]:
    RECENT.clear()
    facts = CallFacts(
        {"project_id": NAMED, "tool_call_id": "tc_1"}, "0" * 32, "v1r4", "t", 1, 0.5, 0.0, 0.1, tool="jina.search"
    )
    facts.status, facts.ended = "success", time.monotonic()
    RECENT.append(facts)
    async with health_server("127.0.0.1", 0, Health(), Snapshots("replica-1", Health(), {"a.limit": 7})) as port:
        yield port
    RECENT.clear()


@requirement("page")
async def test_the_page_is_off_by_default(port: int) -> None:
    for path in (b"/", b"/stats.json"):
        assert b" 404 " in await response_to(port, b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path)


@requirement("page")
async def test_a_page_without_an_executor_serves_no_probes_and_metrics() -> None:
    """`dev` shows the page of another process, whose state it does not know."""
    async with health_server("127.0.0.1", 0, None, Snapshots("replica-1", Health(), {})) as port:
        for path, status in ((b"/", b" 200 "), (b"/readyz", b" 404 "), (b"/metrics", b" 404 ")):
            assert status in await response_to(port, b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)


@requirement("page")
async def test_the_page_has_a_strict_policy_and_its_numbers_no_payload(page_port: int) -> None:
    page = await response_to(page_port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"default-src 'none'; connect-src 'self'; script-src 'sha256-" in page
    assert b"unsafe" not in page
    assert b"innerHTML" not in page
    answer = await response_to(page_port, b"GET /stats.json HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"X-Content-Type-Options: nosniff" in answer
    stats = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert (stats["instance"], stats["limits"]) == ("replica-1", {"a.limit": 7})
    assert stats["last"][0].keys() == {
        "ago_s", "protocol", "project", "tool_call_id", "tool", "status", "error_code", "ms", "tokens", "cached",
    }  # fmt: skip


@requirement("page")
async def test_the_page_is_refused_under_public_host_names(page_port: int) -> None:
    """A page elsewhere could point its name here and read it (DNS rebinding)."""
    for host in (
        "localhost",
        "127.0.0.1:8080",
        "[::1]:80",
        "10.1.2.3",
        "executor",
        "executor.agents.svc",
        "a.internal",
    ):
        for path in (b"/", b"/stats.json"):
            answer = await response_to(page_port, b"GET %s HTTP/1.1\r\nHost: %s\r\n\r\n" % (path, host.encode()))
            assert b" 200 " in answer, host
    for host in ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", "[", "x.svc.example"):
        for path in (b"/", b"/stats.json"):
            answer = await response_to(page_port, b"GET %s HTTP/1.1\r\nHost: %s\r\n\r\n" % (path, host.encode()))
            assert answer.split()[1] in (b"421", b"400"), host


@requirement("page")
async def test_the_last_calls_stay_on_the_page_beyond_the_minute(page_port: int) -> None:
    RECENT[-1].ended = time.monotonic() - 600
    answer = await response_to(page_port, b"GET /stats.json HTTP/1.1\r\nHost: x\r\n\r\n")
    stats = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert (len(stats["last"]), stats["calls"]) == (1, 0)


@pytest.mark.skipif(CHROMIUM is None, reason="chromium (Debian's package) is not installed")
@requirement("page")
async def test_a_browser_shows_the_numbers_and_runs_no_script_from_a_call(page_port: int, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    url = f"http://127.0.0.1:{page_port}/"
    browser = await asyncio.create_subprocess_exec(
        CHROMIUM, *_BROWSER, f"--user-data-dir={tmp_path}", url, stdout=PIPE, stderr=DEVNULL
    )
    async with asyncio.timeout(60):
        shown, _ = await browser.communicate()
    text = shown.decode()
    assert "replica-1" in text
    assert "a.limit" in text
    assert "tc_1" in text
    assert "<title>openapi-tool</title>" in text
    assert "&lt;script&gt;document.title" in text
