"""The health server, and whoever reaches its port."""

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

from openapi_tool.open_files import shortage
from openapi_tool.settings import Settings
from openapi_tool.telemetry import health_server as module
from openapi_tool.telemetry.calls import RECENT, CallFacts
from openapi_tool.telemetry.health import NATS, Health
from openapi_tool.telemetry.health_server import MAX_CONNECTIONS, health_server
from openapi_tool.telemetry.snapshot import Snapshots
from tests.requirements import requirement

PROBE = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
HALF = b"GET /livez HTTP/1.1\r\nHost: "
PATIENCE_S = 20.0  # for a machine with much else to do; what is tested ends at once
READ = asyncio.StreamReader | None


@pytest.fixture(autouse=True)
def _descriptors() -> Iterator[None]:
    """Room for both ends of every connection in one process."""
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


async def said(port: int, request: bytes) -> bytes:
    """Return everything that the server sends until it closes. Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE_S), connection(port) as (reader, writer):
        return await heard(reader, writer, request)


async def heard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> bytes:
    answer = b""
    with suppress(ConnectionError):
        writer.write(request)
        while data := await reader.read(65_536):
            answer += data
    return answer


@requirement("health")
async def test_metrics_are_made_once_in_a_while_however_often_they_are_asked_for(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = count()
    monkeypatch.setattr(module, "exposition", lambda: b"text %d" % next(made))
    monkeypatch.setattr(module, "METRICS_CACHE_S", 3_600.0)
    answers = await asyncio.gather(*(said(port, METRICS) for _ in range(20)))
    assert all(answer.endswith(b"text 0") for answer in answers)
    monkeypatch.setattr(module, "METRICS_CACHE_S", 0.0)
    assert (await said(port, METRICS)).endswith(b"text 1")


@requirement("health")
async def test_a_probe_is_answered_beside_any_number_of_half_sent_requests(port: int) -> None:
    async with AsyncExitStack() as held:
        readers = []
        for _ in range(1_200):
            reader, writer = await held.enter_async_context(connection(port))
            writer.write(HALF)
            readers.append(reader)
        assert b'"live": true' in await said(port, PROBE)
        async with asyncio.timeout(PATIENCE_S):
            for reader in readers[: 1_200 - MAX_CONNECTIONS]:
                with suppress(ConnectionError):
                    assert await reader.read() == b""


@requirement("health")
async def test_no_more_descriptors_are_open_than_connections_are_allowed(port: int) -> None:
    taken: set[object] = set()
    usual = module._Connection.connection_made  # noqa: SLF001 - what the server itself holds is the point

    def count(self: module._Connection, transport: asyncio.BaseTransport) -> None:
        usual(self, transport)
        taken.add(transport)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._Connection, "connection_made", count)  # noqa: SLF001
        async with AsyncExitStack() as held:
            for _ in range(3 * MAX_CONNECTIONS):
                await held.enter_async_context(connection(port))
            assert b'"live": true' in await said(port, PROBE)
            is_open = [transport for transport in taken if not transport.is_closing()]  # type: ignore[attr-defined]
            assert len(taken) == 3 * MAX_CONNECTIONS + 1
            assert len(is_open) < MAX_CONNECTIONS


@pytest.mark.parametrize("first", [b"", HALF, b"POST /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nx"])
@requirement("health")
async def test_a_connection_that_trickles_is_cut(first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIFE_S", 0.3)
    async with health_server("127.0.0.1", 0, Health()) as port, connection(port) as (reader, writer):
        writer.write(first)
        reading = asyncio.create_task(heard(reader, writer, b""))
        async with asyncio.timeout(PATIENCE_S):
            while not reading.done():
                writer.write(b"x")
                await asyncio.sleep(0.02)
        assert b"200 OK" not in reading.result()
        assert b'"live": true' in await said(port, PROBE)


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
async def test_whatever_is_sent_is_answered_once_and_closed(request_: bytes, port: int) -> None:
    assert (await said(port, request_)).count(b"HTTP/1.") <= 1
    assert b'"live": true' in await said(port, PROBE)


@requirement("health")
async def test_of_requests_in_a_pipeline_one_is_answered(port: int) -> None:
    answer = await said(port, PROBE * 2_000)
    assert answer.count(b"HTTP/1.1 200 OK") == 1
    assert b"Connection: close" in answer


@pytest.mark.parametrize(
    ("request_", "status"),
    [(PROBE, b"200"), (PROBE.replace(b"live", b"ready"), b"503"), (PROBE.replace(b"livez", b"x"), b"404")],
)
@requirement("health")
async def test_every_answer_ends_its_connection(request_: bytes, status: bytes, port: int) -> None:
    answer = await said(port, request_)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"Connection: close" in answer


@requirement("health")
def test_bytes_beyond_any_request_are_not_kept_and_end_the_connection() -> None:
    """aiohttp buffers data that arrives after a refusal: a few connections of 10 MB took 600 MB."""
    inner, transport = Mock(), Mock()
    connection = module._Connection(inner, {})  # noqa: SLF001 - what aiohttp keeps cannot be seen from outside
    connection._transport = transport  # noqa: SLF001
    for _ in range(100):
        connection.data_received(b"x" * 65_536)
    kept = sum(len(call.args[0]) for call in inner.data_received.call_args_list)
    assert 70_000 < kept <= module.MAX_REQUEST_BYTES
    transport.abort.assert_called()


@requirement("health")
async def test_a_port_that_is_taken_is_an_error(port: int) -> None:
    with pytest.raises(OSError, match="in use"):
        async with health_server("127.0.0.1", port, Health()):
            pytest.fail("two servers at one port")


@requirement("health")
async def test_what_is_noted_is_shown() -> None:
    health = Health()
    health.record(NATS, ok=True)
    async with health_server("127.0.0.1", 0, health) as port:
        assert b'"nats": {"ok": true' in await said(port, PROBE.replace(b"live", b"ready"))


LIMIT = """
import logging
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 300))
from openapi_tool.open_files import raise_limit
print(raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@requirement("health")
def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be() -> None:
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
def test_settings_that_may_need_more_files_are_told_with_the_numbers(limit: int, port: int, enough: bool) -> None:  # noqa: FBT001
    settings = Settings.model_validate({"postgres": {"dsn": "postgresql://h/db"}, "health": {"port": port}})
    told = shortage(settings, limit)
    assert (told is None) == enough
    if told:
        assert f"may open {limit} files" in told
        assert "egress.max_connections 512, postgres.pool_size 8" in told


@requirement("health")
def test_a_reason_is_logged_once_however_often_it_alternates_with_another(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "openapi_tool.telemetry.health")
    health = Health()
    health.record(NATS, ok=True)
    for number in range(20):
        health.record(NATS, ok=False, reason="away" if number % 2 else "no responders")
    health.record(NATS, ok=True)
    health.record(NATS, ok=False, reason="away")
    assert [record.getMessage() for record in caplog.records] == [
        "nats is available",
        "nats is unavailable: no responders",
        "nats is unavailable: away",
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
        assert b" 404 " in await said(port, b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path)


@requirement("page")
async def test_the_page_has_a_strict_policy_and_its_numbers_no_payload(page_port: int) -> None:
    page = await said(page_port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"default-src 'none'; connect-src 'self'; script-src 'sha256-" in page
    assert b"unsafe" not in page
    assert b"innerHTML" not in page
    answer = await said(page_port, b"GET /stats.json HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"X-Content-Type-Options: nosniff" in answer
    stats = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert (stats["instance"], stats["limits"]) == ("replica-1", {"a.limit": 7})
    assert stats["last"][0].keys() == {
        "ago_s", "protocol", "project", "tool_call_id", "tool", "status", "error_code", "ms", "tokens", "cached",
    }  # fmt: skip


@requirement("page")
async def test_the_page_is_shown_under_no_name_that_somebody_else_may_own(page_port: int) -> None:
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
            answer = await said(page_port, b"GET %s HTTP/1.1\r\nHost: %s\r\n\r\n" % (path, host.encode()))
            assert b" 200 " in answer, host
    for host in ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", "[", "x.svc.example"):
        for path in (b"/", b"/stats.json"):
            answer = await said(page_port, b"GET %s HTTP/1.1\r\nHost: %s\r\n\r\n" % (path, host.encode()))
            assert answer.split()[1] in (b"421", b"400"), host


@requirement("page")
async def test_the_last_calls_stay_on_the_page_beyond_the_minute(page_port: int) -> None:
    RECENT[-1].ended = time.monotonic() - 600
    answer = await said(page_port, b"GET /stats.json HTTP/1.1\r\nHost: x\r\n\r\n")
    stats = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert (len(stats["last"]), stats["calls"]) == (1, 0)


@pytest.mark.skipif(CHROMIUM is None, reason="chromium (Debian's package) is not installed")
@requirement("page")
async def test_a_browser_shows_the_numbers_and_runs_nothing_that_a_call_named(page_port: int, tmp_path: Path) -> None:
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
