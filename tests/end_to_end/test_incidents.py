"""Staged incidents: the alert of each fires on really scraped metrics, and a command names the culprit.

promtool evaluates the rules of the chart over two scrapes of a real executor, one before the incident and one during
it. From minute 15 on every counter grows each minute by its growth between the two scrapes, and every gauge keeps its
value.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from nats.js.api import DiscardPolicy, StreamConfig
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from openapi_tool.cli import app
from openapi_tool.jina.memory_estimates import max_call_memory
from openapi_tool.kernel.jetstream.dead_letters import STREAM as DEAD_LETTERS
from openapi_tool.kernel.jetstream.leases import BUCKET as LEASES
from openapi_tool.local.caller import STREAM, Caller
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.local.servers import free_port
from openapi_tool.local.stack import EmbeddedStack
from tests.chaos.fail_points import FOLDER_VARIABLE, KILLER
from tests.chaos.shifted import JUMP_VARIABLE, OFFSET_VARIABLE
from tests.conftest import AGENT, PROJECT, search_tool
from tests.requirements import requirement
from tests.support import ROLE, dsn_of
from tests.unit.test_chart import POD, firing_alerts, needs_promtool
from tests.waiting import WAIT_S, until
from tests.wire.conftest import DURABLE

HELLO = {"query": "hello world", "count": 3}
DOORBELLS = "cg.v1r4.*.*.cmd.agent.*.wakeup"
BEGINS, ONCE, LASTING = 15, 20, 58
"""Minutes: begin of an incident, and evaluation of an incident that happens once and of one that lasts."""

pytestmark = [needs_promtool, pytest.mark.long]

Scrape = Mapping[str, float]


@dataclass(slots=True)
class Scene:
    """An executor with its health server, the kernel's side, and the scrape `before` the incident."""

    stack: EmbeddedStack
    caller: Caller
    executor: ExecutorProcess
    environment: Mapping[str, str]
    port: int
    folder: Path
    before: Scrape = field(default_factory=dict)

    def scrape(self) -> Scrape:
        """Return the executor's own series; none if it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            return {}
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        own = [sample for sample in samples if sample.name.startswith("openapi_tool_")]
        return {_series(sample.name, sample.labels): sample.value for sample in own}

    async def place(self, arguments: Mapping[str, Any] = HELLO) -> PlacedCall:
        """Send a call."""
        return await self.caller.place(PROJECT, AGENT, "jina_search", arguments)

    async def finished_call(self, arguments: Mapping[str, Any] = HELLO) -> PlacedCall:
        """Send a call, and wait for its result."""
        call = await self.place(arguments)
        await until(lambda: self._has_result(call))
        return call

    async def _has_result(self, call: PlacedCall) -> bool:
        return (await self.caller.read_result(call)).inbox_row is not None

    async def fires(self, *alerts: str, once: bool = False) -> None:
        """Wait until these alerts fire."""

        fired: set[str] = set()

        async def all_fire() -> bool:
            nonlocal fired
            fired = firing_alerts(_replayed(self.before, self.scrape()), self.folder, ONCE if once else LASTING)
            return fired.issuperset(alerts)

        try:
            await until(all_fire)
        except TimeoutError:
            pytest.fail(f"only {fired} fire, not {alerts}")

    async def run(self, *arguments: str) -> str:
        """Return the output of a command that has the executor's settings, whatever its exit code."""
        result = await asyncio.to_thread(CliRunner().invoke, app, list(arguments), env=dict(self.environment))
        return " ".join(result.output.split())

    async def prints(self, *parts: str, command: tuple[str, ...] = ("top", "--once")) -> None:
        """Wait until a command prints these texts."""

        output = ""

        async def all_named() -> bool:
            nonlocal output
            output = await self.run(*command)
            return all(part in output for part in parts)

        try:
            await until(all_named)
        except TimeoutError:
            pytest.fail(f"{command} does not print {parts}: {output}")

    async def inspect_prints(self, call: PlacedCall, *parts: str) -> None:
        await self.prints(*parts, command=("inspect", call.tool_call_id, "--project", PROJECT))

    async def run_as_owner(self, statement: str) -> None:
        """Run a statement as the owner of the tables."""
        await self.caller.database.execute(statement)


def _series(name: str, labels: Mapping[str, str]) -> str:
    pairs = [f'{label}="{value}"' for label, value in sorted(labels.items())]
    return f"{name}{{{','.join([POD, *pairs])}}}"


def _replayed(before: Scrape, during: Scrape) -> dict[str, str]:
    """Return every series in promtool's notation, one sample a minute."""
    return {name: _values(name, before.get(name), during.get(name)) for name in {**before, **during}}


def _values(name: str, before: float | None, during: float | None) -> str:
    first = f"_x{BEGINS}" if before is None else f"{before}x{BEGINS - 1}"
    if during is None:
        return f"{first} _x{LASTING}"
    counted = name.partition("{")[0].endswith(("_total", "_bucket", "_count", "_sum"))
    growth = during - (before or 0.0) if counted else 0.0
    return f"{first} {during}+{max(0.0, growth)}x{LASTING}"  # a restarted process counts from 0


@pytest.fixture
async def scenes(stack: EmbeddedStack, caller: Caller, database: str, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that starts an executor with these settings, without any firing alert."""
    await caller.add_tool(PROJECT, search_tool())

    @asynccontextmanager
    async def begin(module: str = "openapi_tool.local.executor", **settings: str) -> AsyncIterator[Scene]:
        port = free_port()
        environment = {
            "PG_DSN": dsn_of(stack, database),
            "NATS_SERVERS": stack.nats.url,
            "OPENAPI_TOOL__HEALTH__PORT": str(port),
            "OPENAPI_TOOL__CACHE__TTL_S": "0",
            "OPENAPI_TOOL__RETRY__MAX_RETRIES": "0",
            **settings,
        }
        executor = stack.executor(f"incident-{database}", database, environment, module=module)
        await asyncio.to_thread(executor.start)
        scene = Scene(stack, caller, executor, {**stack.upstream.keys, **environment}, port, tmp_path)
        try:
            await until(lambda: _ready(scene))
            scene.before = scene.scrape()
            assert (
                firing_alerts(_replayed(scene.before, scene.before), tmp_path, LASTING) - _expected(settings) == set()
            )
            yield scene
        finally:
            stack.upstream.rules()
            if executor.process.alive:
                executor.signal(signal.SIGKILL)
                await asyncio.to_thread(executor.process.wait, WAIT_S)

    return begin


def _expected(settings: Mapping[str, str]) -> set[str]:
    """Return the alerts that the settings alone cause: a shifted clock is one from the start."""
    return {"OpenapiToolClockOffset"} if OFFSET_VARIABLE in settings else set()


async def _ready(scene: Scene) -> bool:
    up = [value for name, value in scene.scrape().items() if name.startswith("openapi_tool_dependency_up")]
    return len(up) == 4 and all(up)


@requirement("chart.metrics", "cli.top", "cli.inspect")
async def test_a_dead_key(scenes: Any) -> None:
    async with scenes(JINA_API_KEY="refused-by-the-double") as scene:
        call = await scene.finished_call()
        await scene.fires("OpenapiToolKeyRefused", "OpenapiToolCallsFail")
        await scene.prints("auth_failed", "key.refused", "JINA_API_KEY")
        await scene.inspect_prints(call, "HTTP 401", "auth_failed")


@pytest.mark.parametrize(("status", "code"), [(503, "upstream_unavailable"), (429, "rate_limited")])
@requirement("chart.metrics", "cli.top", "cli.inspect")
async def test_a_storm_of_upstream_errors(scenes: Any, status: int, code: str) -> None:
    async with scenes() as scene:
        scene.stack.upstream.rules({"statuses": [status] * 10, "retry_after": "0"})
        call = await scene.finished_call()
        await scene.fires("OpenapiToolUpstreamFails", "OpenapiToolCallsFail")
        await scene.prints(code)
        await scene.inspect_prints(call, f"HTTP {status}", code)


@requirement("cli.top", "cli.inspect")
async def test_an_upstream_that_does_not_answer(scenes: Any) -> None:
    async with scenes() as scene:
        scene.stack.upstream.rules({"hang": True})
        call = await scene.place()
        await scene.prints("requests to s.jina.ai have had no answer for 2")
        await scene.inspect_prints(call, "HTTP without response", "tool_timeout")


@requirement("chart.metrics", "cli.top")
async def test_a_slow_database(scenes: Any) -> None:
    async with scenes() as scene:
        await scene.run_as_owner(
            "create function slow() returns trigger language plpgsql as "
            "'begin perform pg_sleep(1.5); return new; end'; "
            "create trigger slow before insert on cards for each row when (new.metadata ->> 'type' = 'tool.result') "
            "execute function slow()"
        )
        await scene.finished_call()
        await scene.fires("OpenapiToolDatabaseSlow")
        await scene.prints("the database is slow: commit takes")


@requirement("chart.metrics", "cli.top", "cli.check")
async def test_a_primary_that_became_read_only(scenes: Any) -> None:
    async with scenes() as scene:
        await scene.run_as_owner(
            f'alter role "{ROLE}" in database "{_name(scene)}" set default_transaction_read_only = on'
        )
        await scene.run_as_owner(f"select pg_terminate_backend(pid) from pg_stat_activity where usename = '{ROLE}'")  # noqa: S608 - our own name
        await scene.place()
        await scene.fires("OpenapiToolDependencyDown")
        await scene.prints("postgres is unavailable", "read-only")
        await scene.prints("postgres:", "read-only", command=("check",))


@requirement("chart.metrics", "cli.top", "cli.check")
async def test_a_missing_grant(scenes: Any) -> None:
    async with scenes() as scene:
        await scene.run_as_owner(f'revoke insert on state.agent_inbox from "{ROLE}"')
        call = await scene.place()
        await scene.fires("OpenapiToolDependencyDown")
        await scene.prints("postgres is unavailable", "agent_inbox", "openapi-tool sql grants")
        await scene.prints("agent_inbox", "openapi-tool sql grants", command=("check",))
        await scene.inspect_prints(call, "no result")


@requirement("chart.metrics", "cli.top", "cli.inspect", "cli.check")
async def test_a_paused_durable(scenes: Any) -> None:
    async with scenes() as scene:
        until_later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        request = json.dumps({"pause_until": until_later}).encode()
        await scene.caller.client.request(f"$JS.API.CONSUMER.PAUSE.{STREAM}.{DURABLE}", request)
        calls = [await scene.place() for _ in range(101)]
        await scene.fires("OpenapiToolDependencyDown", "OpenapiToolBacklog")
        await scene.prints("consumer is unavailable", "paused until")
        await scene.prints("paused until", command=("check",))
        await scene.inspect_prints(calls[0], "the durable is paused")


@requirement("chart.metrics", "cli.top", "cli.inspect")
async def test_a_durable_at_its_maximum(scenes: Any) -> None:
    """The stream forbids the executor to raise it."""
    async with scenes(OPENAPI_TOOL__NATS__MAX_ACK_PENDING="2") as scene:
        info = await scene.caller.client.request(f"$JS.API.STREAM.INFO.{STREAM}", b"")
        config = json.loads(info.data)["config"] | {"consumer_limits": {"max_ack_pending": 2}}
        await scene.caller.client.request(f"$JS.API.STREAM.UPDATE.{STREAM}", json.dumps(config).encode())
        scene.stack.upstream.rules({"hang": True})
        calls = [await scene.place({"query": f"hello {number}"}) for number in range(4)]
        await scene.fires("OpenapiToolDurableFull")
        await scene.prints("its maximum: see durable.full in the log")
        await scene.inspect_prints(calls[-1], "the durable has not delivered it")


@pytest.mark.parametrize("stream", [DEAD_LETTERS, f"KV_{LEASES}"])
@requirement("chart.metrics", "cli.top")
async def test_a_full_stream_or_bucket_of_the_executor(scenes: Any, stream: str) -> None:
    async with scenes() as scene:
        jetstream = scene.caller.client.jetstream()
        config: StreamConfig = (await jetstream.stream_info(stream)).config
        config.max_bytes = 1
        await jetstream.update_stream(config)
        await scene.fires("OpenapiToolDependencyDown")
        await scene.prints("jetstream is unavailable", f"{stream} is full")


@requirement("chart.metrics", "cli.top")
async def test_a_full_command_stream_takes_no_doorbell(scenes: Any) -> None:
    async with scenes() as scene:
        await _limit_commands(scene, max_msgs=1)
        await scene.finished_call()
        await scene.fires("OpenapiToolDependencyDown")
        await scene.prints("jetstream is unavailable", "maximum messages exceeded")


@requirement("chart.metrics", "cli.top")
async def test_a_command_stream_that_takes_one_doorbell_of_each_worker(scenes: Any) -> None:
    settings = {"WORKER_TIMEOUT_S": "8", "COMMIT_MARGIN_S": "3", "REQUEUE_DELAY_S": "1"}
    async with scenes(**{f"OPENAPI_TOOL__EXECUTOR__{name}": value for name, value in settings.items()}) as scene:
        await scene.finished_call()
        jetstream = scene.caller.client.jetstream()
        async with asyncio.timeout(WAIT_S):
            while not (subjects := (await jetstream.stream_info(STREAM, subjects_filter=DOORBELLS)).state.subjects):
                pass
        [doorbells] = subjects
        await jetstream.publish(doorbells)  # one more than commands
        await _limit_commands(scene, max_msgs_per_subject=2, discard_new_per_subject=True)
        await scene.finished_call()
        await scene.fires("OpenapiToolWorkersNotWoken")
        await scene.prints("doorbell.missed")


async def _limit_commands(scene: Any, **limits: Any) -> None:
    jetstream = scene.caller.client.jetstream()
    config: StreamConfig = (await jetstream.stream_info(STREAM)).config
    await jetstream.update_stream(config.evolve(**limits, discard=DiscardPolicy.NEW))


@requirement("chart.metrics", "cli.top")
async def test_a_flood_of_one_project(scenes: Any) -> None:
    limits = {"OPENAPI_TOOL__EXECUTOR__MAX_HELD": "2", "OPENAPI_TOOL__EXECUTOR__CONCURRENCY": "1"}
    async with scenes(**limits) as scene:
        scene.stack.upstream.rules({"hang": True})
        for number in range(20):
            await scene.place({"query": f"hello {number}"})
        await scene.fires("OpenapiToolFlood", "OpenapiToolSaturated")
        await scene.prints("intake.full", f"project {PROJECT}", "wait for one of 1 slots")


@requirement("chart.metrics", "cli.top")
async def test_responses_that_fill_the_memory(scenes: Any) -> None:
    most_bytes = 1_000_000
    limits = {
        "MAX_RESPONSE_BYTES": str(most_bytes),
        "BODY_BUDGET_BYTES": str(max_call_memory(most_bytes) + 2 * most_bytes),
    }
    async with scenes(**{f"OPENAPI_TOOL__EGRESS__{name}": value for name, value in limits.items()}) as scene:
        scene.stack.upstream.rules({"answer": "s-post-json", "body_bytes": 900_000, "drop": "stall"})
        for number in range(4):
            await scene.place({"query": f"large {number}"})
        await scene.fires("OpenapiToolResponseMemory")
        await scene.prints("wait for memory: raise egress.body_budget_bytes")


@requirement("chart.metrics", "cli.top")
async def test_a_clock_that_is_wrong(scenes: Any, tmp_path: Path) -> None:
    shifted = {OFFSET_VARIABLE: "-28", JUMP_VARIABLE: str(tmp_path / "never"), FOLDER_VARIABLE: str(tmp_path)}
    async with scenes("tests.chaos.shifted", **shifted) as scene:
        await scene.fires("OpenapiToolClockOffset")
        await scene.prints("the local clock is -28.0 s off that of NATS", "clock.offset")


@requirement("chart.metrics", "cli.inspect")
async def test_a_command_that_kills_its_executor(scenes: Any, tmp_path: Path) -> None:
    poison = {FOLDER_VARIABLE: str(tmp_path), "OPENAPI_TOOL__EXECUTOR__MAX_LOST_RUNS": "1"}
    async with scenes("tests.chaos.fail_points", **poison) as scene:
        call = await scene.place({"query": KILLER})
        await until(lambda: asyncio.sleep(0, not scene.executor.process.alive))
        await scene.fires("OpenapiToolMissing")
        assert "no replica answers" in await scene.run("top", "--once")
        await asyncio.to_thread(scene.executor.start)
        await scene.fires("OpenapiToolDeadLetters", once=True)
        await scene.inspect_prints(call, "dead letter", "attempts_exhausted")


@requirement("chart.metrics", "cli.check")
async def test_a_silent_nats_server(scenes: Any) -> None:
    async with scenes() as scene:
        process = scene.stack.nats.process
        os.kill(process.pid, signal.SIGSTOP)
        try:
            await scene.fires("OpenapiToolDependencyDown")
            await scene.prints("cannot connect to NATS at", "no answer in time", command=("check",))
        finally:
            os.kill(process.pid, signal.SIGCONT)


def _name(scene: Scene) -> str:
    return str(scene.environment["PG_DSN"]).rpartition("/")[2]
