"""Requests to the upstream, and the memory of their responses."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest
from pydantic import SecretStr

from openapi_tool.jina.byte_semaphore import ByteSemaphore
from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.egress import EgressTransport, tls_context
from openapi_tool.jina.memory_estimates import max_call_memory
from openapi_tool.jina.options import EgressOptions
from openapi_tool.jina.request import UpstreamRequest
from openapi_tool.jina.response import Expected
from openapi_tool.jina.transport import AiohttpTransport
from openapi_tool.local.caller import Caller
from openapi_tool.local.executor import LoopbackResolver
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.protocol.cards import TOOL_RESULT
from openapi_tool.protocol.errors import RateLimited, ToolError, UpstreamRejected
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.output import ToolOutput
from tests.answering import for_request
from tests.canary.run import Collector
from tests.conftest import AGENT, PROJECT, StartExecutor, reader_tool, search_tool
from tests.requirements import requirement
from tests.support import memory_limit
from tests.unit.test_egress import Proxy
from tests.waiting import WAIT_S
from tests.wire.conftest import RECORDED_ARGUMENTS, World, open_world

SEARCH_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["query"],
    "properties": {"query": {"type": "string"}, "count": {"type": "integer", "maximum": 20}},
}


@requirement("arguments.prepared", "options.envs", "upstream.request")
async def test_two_unequal_definitions_give_exactly_the_requests_that_they_imply(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(
        PROJECT,
        {
            **search_tool(
                args={
                    "defaults": {"session_id": "{agent_turn_id}", "count": 2, "hl": "de"},
                    "fixed": {"project_id": "{project_id}", "site": ["jina.ai", "{project_id}.example"]},
                },
                envs={"api_key": "SEARCH_API_KEY"},
                jina={
                    "mode": "search",
                    "base_url": "https://s.jina.ai",
                    "path": "/search",
                    "method": "GET",
                    "auth_env": "JINA_API_KEY",
                    "params": {"nfpr": True},
                },
            ),
            "parameters": SEARCH_SCHEMA,
        },
    )
    await caller.add_tool(
        PROJECT,
        reader_tool(
            args={
                "defaults": {"session_id": "s"},
                "fixed": {"target_selector": "#{agent_id}", "agent_id": "{agent_id}"},
            },
            envs={"tenant_token": "TENANT_TOKEN"},
            jina={
                "mode": "reader",
                "endpoint_template": "https://r.jina.ai/{url}",
                "method": "GET",
                "headers": {"X-Retain-Images": "none"},
            },
        ),
    )
    start_executor()

    search = await caller.place(PROJECT, AGENT, "jina_search", {"query": "a b+c&d"})
    await caller.result(search, WAIT_S)
    read = await caller.place(
        PROJECT, AGENT, "jina_reader", {"url": "https://a.example/?x=%20#f", "tenant_token": "forged"}, suffix="read"
    )
    await caller.result(read, WAIT_S)

    first, second = stack.upstream.requests()
    assert (first["method"], first["host"], first["key"]) == ("GET", "s.jina.ai", "SEARCH_API_KEY")
    assert sorted(first["target"].partition("?")[2].split("&")) == sorted(
        ["nfpr=true", "num=2", "hl=de", "q=a%20b%2Bc%26d", "site=jina.ai", f"site={PROJECT}.example"]
    )
    assert first["target"].startswith("/search?")
    assert headers_of(first) == {"accept": "application/json", "x-respond-with": "no-content"}
    assert first["body"] == ""

    assert (second["method"], second["host"], second["target"]) == ("POST", "r.jina.ai", "/")
    assert second["key"] == "JINA_API_KEY"
    assert headers_of(second) == {"accept": "application/json", "content-type": "application/json"}
    assert json.loads(second["body"]) == {
        "url": "https://a.example/?x=%20#f",
        "targetSelector": f"#{AGENT}",
        "retainImages": "none",
        "tenant_token": "tenant-value",
        "maxTokens": 20_000,
        "timeout": 12.875,  # two stages in the 30 s of the worker, less 3 s for the commit, 1 s and what has passed
    }


def headers_of(received: dict[str, Any]) -> dict[str, str]:
    """Return the headers that depend on the tool."""
    usual = {"host", "content-length", "accept-encoding", "user-agent", "connection"}
    return {name.lower(): value for name, value in received["headers"].items() if name.lower() not in usual}


@requirement("secrets.output")
async def test_a_key_that_the_upstream_echoes_reaches_no_row_and_no_log(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, reader_tool())
    executor = start_executor({"OPENAPI_TOOL__TELEMETRY__LOG_LEVEL": "debug"})
    rule = {"match": "example", "answer": "r-post-json", "echo_headers": True}
    for statuses, status, where in (
        ([], "success", "result"),
        ([400] * 2, "failed", "error"),
        ([422] * 2, "failed", "error"),
    ):
        stack.upstream.rules({**rule, "statuses": statuses})
        call = await caller.place(PROJECT, AGENT, "jina_reader", {"url": "https://a.example/"}, suffix="read")
        content = (await caller.result(call, WAIT_S)).card["content"]
        assert content["status"] == status, content
        assert "[redacted]" in json.dumps(content[where]), "the upstream did echo it"
    everything = await _rows(caller) + executor.log_text()
    assert stack.upstream.keys["JINA_API_KEY"] not in everything


@requirement("secrets.output")
async def test_a_secret_of_the_body_reaches_no_row_and_no_log(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, reader_tool(envs={"tenant_token": "TENANT_TOKEN"}))
    executor = start_executor({"OPENAPI_TOOL__TELEMETRY__LOG_LEVEL": "debug"})
    call = await caller.place(PROJECT, AGENT, "jina_reader", {"url": "https://a.example/"}, suffix="read")
    await caller.result(call, WAIT_S)
    assert json.loads(stack.upstream.requests()[0]["body"])["tenant_token"] == "tenant-value"
    assert "tenant-value" not in await _rows(caller) + executor.log_text()


async def _rows(caller: Caller) -> str:
    """Return all result cards and inbox rows as text."""
    rows = await caller.database.fetch(
        "select c::text from cards as c where metadata ->> 'type' = $1 "
        "union all select i::text from state.agent_inbox as i",
        TOOL_RESULT,
    )
    assert rows
    return "\n".join(row[0] for row in rows)


@requirement("local.stack")
async def test_the_double_answers_unknown_requests_with_an_error(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    start_executor()
    call = await caller.place(PROJECT, AGENT, "jina_search", {"query": "a query without a recording"})
    answer = await caller.result(call, WAIT_S)
    assert answer.card["content"]["status"] == "failed"
    error = answer.card["content"]["error"]
    assert (error["code"], error["http_status"]) == ("upstream_rejected", 422)
    says = "the Jina double refuses: no recording answers s.jina.ai 'a query without a recording'"
    assert f'The service says: "{says}' in error["message"]
    assert [entry["status"] for entry in stack.upstream.requests()] == [422]


@requirement("local.stack")
async def test_the_double_refuses_an_unknown_key(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    await caller.add_tool(PROJECT, search_tool())
    start_executor({"JINA_API_KEY": "not-the-right-one"})
    call = await caller.place(PROJECT, AGENT, "jina_search", {"query": "hello world", "count": 3})
    answer = await caller.result(call, WAIT_S)
    assert answer.card["content"]["error"]["code"] == "auth_failed"
    assert stack.upstream.requests()[0]["key"] is None


# Rules of the Jina double, through the executor's client.


HEADERS = {"Accept": "application/json", "Content-Type": "application/json"}
BODY = {"q": "hello world", "num": 3, "respondWith": "no-content"}


@pytest.fixture
async def client(stack: EmbeddedStack) -> AsyncIterator[JinaClient]:
    stack.upstream.rules()
    stack.upstream.clear_requests()
    tls = tls_context(str(stack.certificates.ca))
    client = JinaClient(
        EgressTransport(AiohttpTransport(tls, EgressOptions(), LoopbackResolver(stack.upstream.port))), 10_000_000
    )
    yield client
    await client.aclose()
    stack.upstream.rules()


def search(**changes: Any) -> UpstreamRequest:
    values: dict[str, Any] = {
        "method": "POST",
        "host": "s.jina.ai",
        "target": "/",
        "headers": HEADERS,
        "body": json.dumps(BODY).encode(),
        "expected": Expected("search"),
    }
    return UpstreamRequest(**(values | changes))


async def ask(client: JinaClient, stack: EmbeddedStack, request: UpstreamRequest | None = None) -> ToolOutput:
    key = SecretStr(stack.upstream.keys["JINA_API_KEY"])
    outcome = await client.fetch(
        request or search(), key, Deadline.after(10), for_request(ByteSemaphore(10_000_000).for_call())
    )
    assert isinstance(outcome, ToolOutput)
    return outcome


@requirement("local.stack")
async def test_a_recorded_request_gets_its_recorded_response(client: JinaClient, stack: EmbeddedStack) -> None:
    assert [item["title"] for item in cast("Any", (await ask(client, stack)).state["results"])] == [
        f"Result {number} for hello world" for number in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    "request_of",
    [
        search(headers={**HEADERS, "Accept": "application/json, text/plain"}),
        search(headers={"Content-Type": "application/json"}),
        search(headers={"Accept": "application/json", "Content-Type": "text/plain"}),
        search(body=b"{broken"),
        search(body=json.dumps({**BODY, "session_id": "s"}).encode()),
        search(body=json.dumps({**BODY, "num": 4}).encode()),
        search(body=b"{}"),
        search(host="r.jina.ai"),
        search(target="/elsewhere?q=x"),
    ],
)
@requirement("local.stack")
async def test_an_unknown_request_is_refused(
    request_of: UpstreamRequest, client: JinaClient, stack: EmbeddedStack
) -> None:
    with pytest.raises(UpstreamRejected) as refused:
        await ask(client, stack, request_of)
    assert refused.value.http_status == 422
    assert "the Jina double refuses" in refused.value.message


@requirement("local.stack")
async def test_statuses_of_a_rule_are_used_once(client: JinaClient, stack: EmbeddedStack) -> None:
    stack.upstream.rules({"statuses": [429, 503], "retry_after": "7"})
    with pytest.raises(RateLimited) as limited:
        await ask(client, stack)
    assert limited.value.retry_after == 7.0
    with pytest.raises(ToolError):
        await ask(client, stack)
    assert (await ask(client, stack)).items


@requirement("local.stack")
async def test_a_rate_limit_is_enforced(client: JinaClient, stack: EmbeddedStack) -> None:
    stack.upstream.rules({"rate_per_minute": 3})
    answers = await asyncio.gather(*(ask(client, stack) for _ in range(5)), return_exceptions=True)
    assert sum(isinstance(answer, RateLimited) for answer in answers) == 2


@requirement("local.stack")
async def test_a_body_can_have_any_size(client: JinaClient, stack: EmbeddedStack) -> None:
    stack.upstream.rules({"body_bytes": 1_000_000})
    assert len((await ask(client, stack)).items[0].body) == 1_000_000


# Connections of the executor during calls: audited in plain asyncio, and confined by Linux.


_ENDS = {"socket.connect": 1, "socket.sendto": 1, "socket.getaddrinfo": 0}
_watching: list[set[Any]] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook of Python for connections of this process; uvloop would bypass it."""
    if _watching and event in _ENDS:
        end = arguments[_ENDS[event]]
        _watching[-1].add(end[:2] if isinstance(end, tuple) else (end, arguments[1]))


sys.addaudithook(_note)


@contextmanager
def watched() -> Iterator[set[Any]]:
    """Yield the set of all addresses and names, with ports, that the process connects to, sends to or looks up."""
    _watching.append(set())
    try:
        yield _watching[-1]
    finally:
        _watching.pop()


@pytest.fixture
async def world_without_executor(stack: EmbeddedStack, caller: Caller, database: str) -> AsyncIterator[World]:
    async with open_world(stack, caller, database) as world:
        await caller.add_tool(PROJECT, reader_tool())
        batch = {"type": "object", "properties": {"queries": {"type": "array", "items": {"type": "string"}}}}
        await caller.add_tool(PROJECT, {**search_tool(), "tool_name": "jina_batch", "parameters": batch})
        yield world


CALLS: list[tuple[list[dict[str, Any]], str, Any]] = [
    ([], "jina_search", RECORDED_ARGUMENTS),
    ([], "jina_search", RECORDED_ARGUMENTS),
    ([{"answer": "r-post-json"}], "jina_reader", {"url": "https://a.example/"}),
    ([], "jina_reader", {"url": "http://169.254.169.254/latest"}),
    ([], "jina_reader", {"url": 7}),
    ([], "jina_batch", {"queries": ["hello world", "another"]}),
    ([{"statuses": [429, 503, 500], "retry_after": "0"}], "jina_search", RECORDED_ARGUMENTS),
    ([{"statuses": [302]}], "jina_search", RECORDED_ARGUMENTS),
    ([{"statuses": [401]}], "jina_search", RECORDED_ARGUMENTS),
    ([{"drop": "half"}], "jina_search", RECORDED_ARGUMENTS),
    ([{"body": "<html>"}], "jina_search", RECORDED_ARGUMENTS),
    ([], "no_such_tool", {}),
]


@requirement("egress.hosts")
async def test_calls_connect_to_the_configured_servers_only(
    world_without_executor: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    stack, world = world_without_executor.stack, world_without_executor
    with Collector() as collector:
        telemetry = {"otlp_endpoint": f"http://127.0.0.1:{collector.port}/v1/traces"}
        with watched() as ends:
            async with world.executor(telemetry=telemetry):
                for rules, tool, arguments in CALLS:
                    stack.upstream.rules(*rules)
                    await world.send(await world.place(arguments, tool))
                unidentified = await world.place()
                await world.caller.publish(unidentified, headers={"traceparent": "x"})
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
async def test_the_setting_for_public_addresses_reaches_the_transport(world_without_executor: World) -> None:
    async with world_without_executor.executor(egress={"public_addresses_only": True}, retry={"max_retries": 0}):
        outcome = await world_without_executor.send(await world_without_executor.place())
    assert outcome.content["error"]["code"] == "upstream_unavailable"
    assert outcome.upstream_requests == []


@requirement("egress.proxy")
async def test_every_upstream_request_uses_the_configured_proxy(world_without_executor: World) -> None:
    async with Proxy(world_without_executor.stack.upstream.port) as proxy:
        with watched() as ends:
            async with world_without_executor.executor(egress={"proxy": f"http://u:password@127.0.0.1:{proxy.port}"}):
                outcome = await world_without_executor.send(await world_without_executor.place())
    assert outcome.content["status"] == "success"
    assert [head.partition(b" HTTP")[0] for head in proxy.heads] == [b"CONNECT s.jina.ai:443"]
    assert ("127.0.0.1", proxy.port) in ends


CONFINED = """
import errno, fcntl, os, socket, struct, sys
with socket.socket() as control:
    fcntl.ioctl(control, 0x8914, struct.pack("16sh14x", b"lo", 1))
for family, address in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
    with socket.socket(family) as outside:
        assert outside.connect_ex((address, 443)) in (errno.ENETUNREACH, errno.EADDRNOTAVAIL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def _in_namespace(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in its own network namespace, which has loopback only."""
    flags = ["-n"] if os.geteuid() == 0 else ["-cn", "--keep-caps"]
    return subprocess.run(  # noqa: S603 - our own code
        ["unshare", *flags, sys.executable, "-c", CONFINED, *arguments],  # noqa: S607 - wherever it is
        env={"PATH": os.environ["PATH"], "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )


@pytest.mark.thorough
@requirement("egress.hosts")
def test_the_executor_needs_no_network_but_loopback(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("there is no `unshare` on this machine")
    probe = _in_namespace("-c", "pass", folder=tmp_path)
    if probe.returncode:
        pytest.skip(f"this machine gives no network namespace: {probe.stderr.strip()[-200:]}")
    done = _in_namespace("-m", "openapi_tool", "demo", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    journeys = [json.loads(line) for line in done.stdout.splitlines()]
    assert [journey["status"] for journey in journeys] == ["success"] * 4


@requirement("cli.dev")
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"status": 429}, "these fields: match, key, answer, delay_s, statuses, retry_after, "),
        ({"answer": "s-none"}, "no recording is named 's-none'"),
    ],
)
def test_an_invalid_rule_of_the_double_is_refused_with_a_message(
    stack: EmbeddedStack, rule: dict[str, Any], expected: str
) -> None:
    with pytest.raises(HTTPError) as refused:
        stack.upstream.rules(rule)
    assert refused.value.code == 400
    assert expected in refused.value.read().decode()


LARGE_CALLS, PAGE_BYTES, MAX_BYTES = 64, 1_800_000, 2_000_000
BUDGET_BYTES = max_call_memory(MAX_BYTES) + MAX_BYTES
CONCURRENCY, CACHE_BYTES = 64, 4_000_000


@pytest.mark.thorough
@requirement("memory.limit")
async def test_many_large_pages_at_once_are_answered_within_the_limit(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    """64 pages of four bytes a character: `pages_of_ten_megabytes_at_once` of the hostile suite."""
    stack.upstream.rules({"answer": "r-post-json", "body_bytes": PAGE_BYTES})
    await caller.add_tool(PROJECT, reader_tool(suspend_timeout_seconds=100))
    executor = start_executor(
        {
            "OPENAPI_TOOL__EGRESS__MAX_RESPONSE_BYTES": str(MAX_BYTES),
            "OPENAPI_TOOL__EGRESS__BODY_BUDGET_BYTES": str(BUDGET_BYTES),
            "OPENAPI_TOOL__CACHE__TTL_S": "60",
        }
    )
    addresses = [f"https://a.example/{number}" for number in range(LARGE_CALLS)]
    calls = [
        await caller.place(PROJECT, AGENT, "jina_reader", {"url": address}, suffix="read", publish=False)
        for address in addresses
    ]
    for call in calls:
        await caller.publish(call)
    for call in calls:
        assert (await caller.result(call, 90)).card["content"]["status"] == "success"
    limit = memory_limit(BUDGET_BYTES + CACHE_BYTES, CONCURRENCY)
    assert _peak_bytes(executor.process.pid) < limit


def _peak_bytes(pid: int) -> int:
    """Return the peak resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024
