"""Where the executor connects to while it answers calls: watched in plain asyncio, and shut in by the kernel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from openapi_tool.local.caller import Caller
from openapi_tool.local.stack import EmbeddedStack
from tests.canary.collector import Collector
from tests.conftest import PROJECT, reader_tool, search_tool
from tests.promises import requirement
from tests.unit.test_egress import Proxy
from tests.wire.world import KNOWN, World, open_world

_ENDS = {"socket.connect": 1, "socket.sendto": 1, "socket.getaddrinfo": 0}
_watching: list[set[Any]] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    """Python's own audit of whatever leaves this process; uvloop would pass it by."""
    if _watching and event in _ENDS:
        end = arguments[_ENDS[event]]
        _watching[-1].add(end[:2] if isinstance(end, tuple) else (end, arguments[1]))


sys.addaudithook(_note)


@contextmanager
def watched() -> Iterator[set[Any]]:
    """Every address and name that was connected to, sent to or looked up, with its port."""
    _watching.append(set())
    try:
        yield _watching[-1]
    finally:
        _watching.pop()


@pytest.fixture
async def idle_world(stack: EmbeddedStack, caller: Caller, database: str) -> AsyncIterator[World]:
    async with open_world(stack, caller, database) as world:
        await caller.add_tool(PROJECT, reader_tool())
        batch = {"type": "object", "properties": {"queries": {"type": "array", "items": {"type": "string"}}}}
        await caller.add_tool(PROJECT, {**search_tool(), "tool_name": "jina_batch", "parameters": batch})
        yield world


CALLS: list[tuple[list[dict[str, Any]], str, Any]] = [
    ([], "jina_search", KNOWN),
    ([], "jina_search", KNOWN),
    ([{"answer": "r-post-json"}], "jina_reader", {"url": "https://a.example/"}),
    ([], "jina_reader", {"url": "http://169.254.169.254/latest"}),
    ([], "jina_reader", {"url": 7}),
    ([], "jina_batch", {"queries": ["hello world", "another"]}),
    ([{"statuses": [429, 503, 500], "retry_after": "0"}], "jina_search", KNOWN),
    ([{"statuses": [302]}], "jina_search", KNOWN),
    ([{"statuses": [401]}], "jina_search", KNOWN),
    ([{"drop": "half"}], "jina_search", KNOWN),
    ([{"body": "<html>"}], "jina_search", KNOWN),
    ([], "no_such_tool", {}),
]


@requirement("egress.watched")
async def test_calls_connect_to_nothing_else(idle_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    stack, world = idle_world.stack, idle_world
    with Collector() as collector:
        telemetry = {"otlp_endpoint": f"http://127.0.0.1:{collector.port}/v1/traces"}
        with watched() as ends:
            async with world.executor(telemetry=telemetry):
                for rules, tool, arguments in CALLS:
                    stack.upstream.rules(*rules)
                    await world.send(await world.place(arguments, tool))
                nobody = await world.place()
                await world.caller.publish(nobody, headers={"traceparent": "x"})
                await world.settled()
        assert collector.bodies
    parts = {
        "NATS": urlsplit(stack.nats.url).port,
        "PostgreSQL": stack.postgres.port,
        "upstream": stack.upstream.port,
        "collector": collector.port,
        "the test's own way to the double": stack.upstream.admin_port,
    }
    assert {end[0] for end in ends} <= {"127.0.0.1", "localhost"}
    assert {int(end[1]) for end in ends} == set(parts.values()), parts


@requirement("egress.public")
async def test_the_setting_for_public_addresses_reaches_the_transport(idle_world: World) -> None:
    async with idle_world.executor(egress={"public_addresses_only": True}, retry={"max_repeats": 0}):
        outcome = await idle_world.send(await idle_world.place())
    assert outcome.content["error"]["code"] == "upstream_unavailable"
    assert outcome.upstream_requests == []


@requirement("egress.proxy")
async def test_the_proxy_of_the_settings_is_the_one_way_out(idle_world: World) -> None:
    async with Proxy(idle_world.stack.upstream.port) as proxy:
        with watched() as ends:
            async with idle_world.executor(egress={"proxy": f"http://u:password@127.0.0.1:{proxy.port}"}):
                outcome = await idle_world.send(await idle_world.place())
    assert outcome.content["status"] == "success"
    assert [head.partition(b" HTTP")[0] for head in proxy.heads] == [b"CONNECT s.jina.ai:443"]
    assert ("127.0.0.1", proxy.port) in ends


SHUT_IN = """
import errno, fcntl, os, socket, struct, sys
with socket.socket() as control:
    fcntl.ioctl(control, 0x8914, struct.pack("16sh14x", b"lo", 1))
for family, address in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
    with socket.socket(family) as outside:
        assert outside.connect_ex((address, 443)) in (errno.ENETUNREACH, errno.EADDRNOTAVAIL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def _in_namespace(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Python in a network namespace of its own, in which there is loopback and nothing else."""
    flags = ["-n"] if os.geteuid() == 0 else ["-cn", "--keep-caps"]
    return subprocess.run(  # noqa: S603 - our own code
        ["unshare", *flags, sys.executable, "-c", SHUT_IN, *arguments],  # noqa: S607 - wherever it is
        env={"PATH": os.environ["PATH"], "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )


@requirement("egress.watched")
def test_shut_in_with_loopback_alone_the_executor_answers_every_call(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("there is no `unshare` on this machine")
    probe = _in_namespace("-c", "pass", folder=tmp_path)
    if probe.returncode:
        pytest.skip(f"this machine gives no network namespace: {probe.stderr.strip()[-200:]}")
    done = _in_namespace("-m", "openapi_tool", "demo", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    journeys = [json.loads(line) for line in done.stdout.splitlines()]
    assert [journey["status"] for journey in journeys] == ["success"] * 4
