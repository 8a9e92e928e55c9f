"""Outages of servers, seen by a `serve` process and its health server."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import nats
import pytest
from nats.js.api import DiscardPolicy

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.engine.runner import ToolRunner
from openapi_tool.local.caller import STREAM, Caller
from openapi_tool.local.database import prepare_database
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.local.servers import ServerFailed, accepts, free_port
from openapi_tool.local.stack import EmbeddedStack, kernel_schema
from openapi_tool.protocol.subjects import default_durable
from openapi_tool.reloading import FileWatcher, Reloader
from openapi_tool.settings import Settings, load_settings
from openapi_tool.telemetry.health import DEPENDENCIES
from openapi_tool.telemetry.recent_warnings import RECENT_WARNINGS
from openapi_tool.telemetry.redact import MASK, Redactor
from openapi_tool.telemetry.replica_problems import found_problems
from openapi_tool.tools.policy import Authorizer
from openapi_tool.tools.secret_variables import Secrets
from tests.conftest import AGENT, PROJECT, search_tool
from tests.requirements import requirement
from tests.support import delete_streams, dsn_of, make_role
from tests.waiting import WAIT_S, until

DATABASE = "outages"
HELLO = {"query": "hello world", "count": 3}
REACTION_S = 6.0
_LONGEST_DRAIN_S = 40.0  # drain_timeout_s, and some seconds for requests to a silent server


@pytest.fixture(scope="module")
def fragile() -> Iterator[EmbeddedStack]:
    """Stack of this module's own, because its tests stop the servers."""
    with EmbeddedStack() as stack:
        yield stack


@dataclass(frozen=True, slots=True)
class Served:
    """An executor and its health server."""

    stack: EmbeddedStack
    executor: ExecutorProcess
    port: int

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def ready(self) -> dict[str, Any]:
        status, body = self.get("/readyz")
        shown: dict[str, Any] = json.loads(body)
        assert shown["ready"] == (status == 200)
        return shown

    def scraped(self, line: str) -> str:
        """Return all metrics once they contain `line`: a call is counted a moment after its result is committed."""
        give_up = time.monotonic() + WAIT_S
        while line not in (metrics := self.get("/metrics")[1]):
            assert time.monotonic() < give_up, metrics
            time.sleep(0.05)
        return metrics

    def wait(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        give_up = time.monotonic() + WAIT_S
        while not condition(shown := self.ready()):
            assert time.monotonic() < give_up, shown
            time.sleep(0.05)
        return shown


@pytest.fixture
async def served(fragile: EmbeddedStack) -> AsyncIterator[Served]:
    fragile.upstream.rules()
    fragile.upstream.clear_requests()
    database = f"{DATABASE}_{time.monotonic_ns()}"
    await prepare_database(fragile.postgres.dsn(), database, kernel_schema())
    await make_role(fragile.postgres.dsn(database))
    async with Caller.connect(fragile.postgres.dsn(database), fragile.nats.url) as caller:
        await caller.add_project(PROJECT)
        await caller.add_agent(PROJECT, AGENT)
        await caller.add_tool(PROJECT, search_tool())
    port = free_port()
    settings = {
        "PG_DSN": dsn_of(fragile, database),
        "OPENAPI_TOOL__HEALTH__PORT": str(port),
        "OPENAPI_TOOL__CACHE__TTL_S": "0",
    }
    executor = fragile.executor(database, database, settings)
    executor.start()
    yield Served(fragile, executor, port)
    assert executor.stop(WAIT_S) == 0, executor.log_text()
    async with Caller.connect(fragile.postgres.dsn(database), fragile.nats.url) as caller:
        await delete_streams(caller)


async def _placed(served: Served) -> PlacedCall:
    async with Caller.connect(served.stack.postgres.dsn(served.executor.process.name), served.stack.nats.url) as caller:
        return await caller.place(PROJECT, AGENT, "jina_search", HELLO, publish=False)


async def _result_content(served: Served, call: PlacedCall) -> dict[str, Any]:
    dsn = served.stack.postgres.dsn(served.executor.process.name)
    async with Caller.open(dsn, servers=served.stack.nats.url) as caller:
        give_up = time.monotonic() + WAIT_S
        while not ((answer := await caller.read_result(call)).inbox_row and answer.card):
            assert time.monotonic() < give_up, served.executor.process.log_tail()
        content: dict[str, Any] = answer.card["content"]
        return content


@requirement("health")
async def test_health_metrics_and_readiness(served: Served) -> None:
    shown = served.wait(lambda shown: shown["ready"])
    assert {name: part["ok"] for name, part in shown["dependencies"].items()} == {
        "postgres": True,
        "nats": True,
        "consumer": True,
        "jetstream": True,
    }
    assert all(0 <= part["age_s"] < 20 for part in shown["dependencies"].values())
    assert served.get("/livez") == (200, '{"live": true}')
    assert served.get("/elsewhere")[0] == 404
    call = await _placed(served)
    async with Caller.connect(served.stack.postgres.dsn(served.executor.process.name), served.stack.nats.url) as caller:
        await caller.publish(call)
    assert (await _result_content(served, call))["status"] == "success"
    metrics = served.scraped(
        'openapi_tool_calls_total{error_code="",project="",status="success",tool="jina.search"} 1.0'
    )
    assert "openapi_tool_event_loop_lag_seconds_bucket" in metrics
    assert float(metrics.partition("\nopenapi_tool_event_loop_tasks ")[2].partition("\n")[0]) >= 1
    assert PROJECT not in metrics


@requirement("health")
async def test_a_port_in_use_is_reported(served: Served) -> None:
    second = served.stack.executor(
        "second", served.executor.process.name, {"OPENAPI_TOOL__HEALTH__PORT": str(served.port)}
    )
    with pytest.raises(ServerFailed, match=r"health\.port: cannot listen"):
        second.start()


@requirement("outage")
async def test_without_the_database_nothing_is_fetched_and_afterwards_everything_is_answered(served: Served) -> None:
    served.wait(lambda shown: shown["ready"])
    call = await _placed(served)
    served.stack.postgres.stop()
    shown = served.wait(lambda shown: not shown["dependencies"]["postgres"]["ok"])
    assert shown["dependencies"]["nats"]["ok"]
    delivered = await _deliveries(served, lambda info: info.num_waiting == 0)
    await _publish(served, call)
    assert await _deliveries(served, lambda info: info.num_pending == 1) == delivered
    assert served.stack.upstream.requests() == []
    served.stack.postgres.start()
    assert (await _result_content(served, call))["status"] == "success"
    served.wait(lambda shown: shown["ready"])
    assert len(served.stack.upstream.requests()) == 1


@requirement("outage")
async def test_servers_may_come_up_after_the_executor(served: Served) -> None:
    """PostgreSQL starts first, then NATS; meanwhile /readyz says why each dependency is unavailable."""
    port, stack = free_port(), served.stack
    early = stack.executor("early", served.executor.process.name, {"OPENAPI_TOOL__HEALTH__PORT": str(port)})
    waiting = Served(stack, early, port)
    stack.postgres.stop()
    stack.nats.stop()
    early.process.start(lambda: accepts(port))
    parts = waiting.wait(lambda shown: "reason" in shown["dependencies"]["postgres"])["dependencies"]
    assert tuple(parts) == tuple(DEPENDENCIES)
    assert {(part["ok"], part["age_s"]) for part in parts.values()} == {(False, None)}
    assert "refused" in parts["postgres"]["reason"]
    stack.postgres.start()
    waiting.wait(lambda shown: shown["dependencies"]["postgres"]["ok"] and not shown["dependencies"]["nats"]["ok"])
    stack.nats.start()
    waiting.wait(lambda shown: shown["ready"])
    assert early.stop(WAIT_S) == 0, early.log_text()


@requirement("outage")
async def test_serve_stops_at_once_while_it_waits_for_servers(served: Served) -> None:
    port = free_port()
    lonely = served.stack.executor(
        "lonely",
        served.executor.process.name,
        {"OPENAPI_TOOL__HEALTH__PORT": str(port), "PG_DSN": "postgresql://127.0.0.1:1/nowhere"},
    )
    lonely.process.start(lambda: accepts(port))
    began = time.monotonic()
    assert lonely.stop() == 0
    assert time.monotonic() - began < 20


@requirement("outage")
async def test_nats_may_restart_while_a_call_runs(served: Served) -> None:
    served.wait(lambda shown: shown["ready"])
    served.stack.upstream.rules({"delay_s": 1.0})
    call = await _placed(served)
    await _publish(served, call)
    served.stack.upstream.requests(1)
    served.stack.nats.stop()
    served.wait(lambda shown: not shown["dependencies"]["nats"]["ok"])
    served.stack.nats.start()
    assert (await _result_content(served, call))["status"] == "success"
    served.wait(lambda shown: shown["ready"])
    again = await _placed(served)
    await _publish(served, again)
    assert (await _result_content(served, again))["status"] == "success"
    assert len(served.stack.upstream.requests()) == 2


async def _deliveries(served: Served, condition: Callable[[Any], bool]) -> int:
    """Return the number of deliveries once the condition holds."""
    client = await nats.connect(served.stack.nats.url)
    async with asyncio.timeout(WAIT_S):
        while not condition(info := await client.jetstream().consumer_info(STREAM, default_durable("v1r4", "jina"))):
            pass
    await client.close()
    return int(info.delivered.consumer_seq)


async def _publish(served: Served, call: PlacedCall) -> None:
    """Publish a command without the database, which may be unavailable."""
    client = await nats.connect(served.stack.nats.url)
    await client.jetstream().publish(call.subject, json.dumps(call.body).encode(), headers=dict(call.headers))
    await client.close()


@pytest.mark.alone
@requirement("nats.watched")
async def test_a_silent_nats_makes_readyz_fail_and_loses_nothing(served: Served) -> None:
    served.wait(lambda shown: shown["ready"])
    call = await _placed(served)
    with frozen(served):
        began = time.monotonic()
        shown = served.wait(lambda shown: not shown["ready"])
        assert time.monotonic() - began < REACTION_S
        assert "no answer" in shown["dependencies"]["nats"]["reason"]
        served.wait(lambda shown: shown["dependencies"]["nats"]["reason"].startswith("no connection"))
    began = time.monotonic()
    served.wait(lambda shown: shown["ready"])
    assert time.monotonic() - began < REACTION_S
    await _publish(served, call)
    assert (await _result_content(served, call))["status"] == "success"


@pytest.mark.thorough
@pytest.mark.parametrize("noticed", [False, True])
@requirement("nats.watched")
async def test_sigterm_while_nats_is_silent_ends_the_process_cleanly(
    served: Served,
    noticed: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """A call is running; SIGTERM comes before or after the executor has noticed the silence and tries to reconnect."""
    served.wait(lambda shown: shown["ready"])
    served.stack.upstream.rules({"delay_s": 1.5 + 6.0 * noticed})  # the call still runs when SIGTERM comes
    call = await _placed(served)
    await _publish(served, call)
    served.stack.upstream.requests(1)
    with frozen(served):
        if noticed:
            served.wait(lambda shown: shown["dependencies"]["nats"].get("reason", "").startswith("no connection"))
        served.executor.signal(signal.SIGTERM)
        assert served.executor.process.wait(_LONGEST_DRAIN_S) == 0, served.executor.log_text()[-5000:]
    log = served.executor.log_text()
    assert '"service.stopped"' in log
    assert "Traceback" not in log
    served.executor.start()
    assert (await _result_content(served, call))["status"] == "success"


@contextmanager
def frozen(served: Served) -> Iterator[None]:
    process = served.stack.nats.process
    assert process is not None
    process.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.signal(signal.SIGCONT)


# JetStream stores no message: results are committed, and their doorbells are sent once it does.


@dataclass(frozen=True, slots=True)
class Full:
    """Settings of the command stream by which it stores no doorbell, and what `/readyz` says of that."""

    settings: Mapping[str, Any]
    says: str


FULL = {
    "refused": Full(
        {"max_msgs": 1, "discard": DiscardPolicy.NEW},
        f"JetStream stores no message in {STREAM}: maximum messages exceeded",
    ),
    # As after a write error: nats-server 2.15 then answers no publication to this stream until it is restarted.
    "not confirmed": Full({"no_ack": True}, f"JetStream confirms no doorbell in {STREAM}"),
}


@asynccontextmanager
async def full(served: Served, settings: Mapping[str, Any]) -> AsyncIterator[None]:
    client = await nats.connect(served.stack.nats.url)
    jetstream = client.jetstream()
    before = (await jetstream.stream_info(STREAM)).config
    await jetstream.update_stream(before.evolve(**settings))
    try:
        yield
    finally:
        await jetstream.update_stream(before)
        await client.close()


async def _doorbells(served: Served) -> int:
    client = await nats.connect(served.stack.nats.url)
    info = await client.jetstream().stream_info(STREAM, subjects_filter="cg.v1r4.*.*.cmd.agent.*.wakeup")
    await client.close()
    return sum((info.state.subjects or {}).values())


@pytest.mark.parametrize("kind", FULL.values(), ids=FULL)
@requirement("answer.doorbell", "outage")
async def test_doorbells_that_jetstream_cannot_store_are_sent_once_it_can(served: Served, kind: Full) -> None:
    served.wait(lambda shown: shown["ready"])
    served.stack.upstream.rules({"delay_s": 1.0})
    calls = [await _placed(served) for _ in range(3)]
    for call in calls[:2]:
        await _publish(served, call)
    served.stack.upstream.requests(2)
    async with full(served, kind.settings):
        shown = await asyncio.to_thread(served.wait, lambda shown: not shown["ready"])
        assert kind.says in shown["dependencies"]["jetstream"]["reason"]
        assert shown["dependencies"]["nats"]["ok"]
        for call in calls[:2]:
            assert (await _result_content(served, call))["status"] == "success"
        await _deliveries(served, lambda info: info.num_waiting == 0)
        stored = await _doorbells(served)
    await asyncio.to_thread(served.wait, lambda shown: shown["ready"])
    await _publish(served, calls[2])
    assert (await _result_content(served, calls[2]))["status"] == "success"
    await _deliveries(served, lambda info: not info.num_pending and not info.num_ack_pending)
    assert "no_ack" in kind.settings or stored == 0
    assert await _doorbells(served) >= 3
    assert len(served.stack.upstream.requests()) == 3
    log = [json.loads(line) for line in served.executor.log_text().splitlines() if line.startswith("{")]
    named = [line for line in log if kind.says in line["message"] and line["action"] != "command.requeued"]
    assert [line["action"] for line in named] == ["health.changed"]
    assert "doorbell.missed" not in {line["action"] for line in log}


# SIGHUP: policy and mounted keys are reloaded; an invalid file changes nothing.


@dataclass(frozen=True, slots=True)
class Reloaded:
    stack: EmbeddedStack
    caller: Caller
    executor: ExecutorProcess
    key: Path
    config: Path

    async def hang_up(self, action: str) -> None:
        """Send SIGHUP, and wait until the log has one more line of this action."""
        await self.logged(action, lambda: self.executor.signal(signal.SIGHUP))

    async def logged(self, action: str, cause: Callable[[], object]) -> None:
        """Run `cause`, and wait until the log has one more line of this action."""
        before = self.executor.log_text().count(f'"{action}"')
        cause()
        async with asyncio.timeout(WAIT_S):
            while self.executor.log_text().count(f'"{action}"') == before:  # noqa: ASYNC110 - a log file has no event
                await asyncio.sleep(0.05)

    async def call(self) -> dict[str, Any]:
        """Make a call; return the content of its result."""
        call: PlacedCall = await self.caller.place(PROJECT, AGENT, "jina_search", {"query": "hello world", "count": 3})
        async with asyncio.timeout(WAIT_S):
            while not (answer := await self.caller.read_result(call)).card:  # noqa: ASYNC110 - nor has a table
                await asyncio.sleep(0.05)
        content: dict[str, Any] = answer.card["content"]
        return content

    async def keys_used(self) -> list[str]:
        return [request["key"] for request in await asyncio.to_thread(self.stack.upstream.requests)]


@pytest.fixture
async def reloaded(stack: EmbeddedStack, caller: Caller, database: str, tmp_path: Path) -> AsyncIterator[Reloaded]:
    await caller.add_tool(PROJECT, search_tool())
    key, config = tmp_path / "key", tmp_path / "settings.toml"
    key.write_text(stack.upstream.keys["JINA_API_KEY"])
    config.write_text("")
    settings = {
        "PG_DSN": dsn_of(stack, database),
        "JINA_API_KEY": "",
        "JINA_API_KEY_FILE": str(key),
        "OPENAPI_TOOL_CONFIG": str(config),
        "OPENAPI_TOOL__CACHE__TTL_S": "0",
    }
    executor = stack.executor(f"reload-{database}", database, settings)
    await asyncio.to_thread(executor.start)
    yield Reloaded(stack, caller, executor, key, config)
    assert await asyncio.to_thread(executor.stop) == 0


@requirement("reload")
async def test_sighup_reloads_policy_and_keys_without_ending_calls(reloaded: Reloaded) -> None:
    assert (await reloaded.call())["status"] == "success"
    reloaded.key.write_text(reloaded.stack.upstream.keys["SEARCH_API_KEY"])
    await reloaded.hang_up("reload.done")
    assert (await reloaded.call())["status"] == "success"
    assert await reloaded.keys_used() == ["JINA_API_KEY", "SEARCH_API_KEY"]
    reloaded.config.write_text('[policy]\ndeny = ["jina.*"]\n')
    await reloaded.hang_up("reload.done")
    assert (await reloaded.call())["error"]["code"] == "tool_not_available"


@requirement("reload")
async def test_files_that_change_are_read_again_without_a_signal(reloaded: Reloaded) -> None:
    await reloaded.logged("reload.done", lambda: reloaded.config.write_text('[policy]\ndeny = ["jina.*"]\n'))
    assert (await reloaded.call())["error"]["code"] == "tool_not_available"


@requirement("reload")
def test_a_file_counts_as_changed_once_it_is_stable(tmp_path: Path) -> None:
    """The kubelet replaces a mounted key by another link; others write a file in steps."""
    link, files = tmp_path / "key", [tmp_path / name for name in ("first", "second")]
    for file in files:
        file.write_text("of equal length")
    link.symlink_to(files[0])
    watched = FileWatcher([link, tmp_path / "missing"])
    assert not watched.changed()
    link.unlink()
    link.symlink_to(files[1])
    assert [watched.changed() for _ in range(3)] == [False, True, False]
    files[1].write_text("longer than before")
    assert not watched.changed()
    files[1].unlink()
    assert [watched.changed() for _ in range(3)] == [False, True, False]


@requirement("reload")
async def test_a_new_key_is_masked_before_its_first_use() -> None:
    bootstrap = build_bootstrap(
        Settings(postgres={"dsn": "postgresql://127.0.0.1/x"}), {"JINA_API_KEY": "the-first-key"}
    )
    used: list[str] = []

    class RecordingRunner:
        def reload(self, authorizer: Authorizer, secret: Secrets) -> None:
            del authorizer
            used.append(bootstrap.redactor.text(secret("JINA_API_KEY").get_secret_value()))

    environment = {"JINA_API_KEY": "the-second-key"}
    runner = cast("ToolRunner", RecordingRunner())

    def use_keys(secrets: Secrets) -> None:
        used.extend(map(bootstrap.redactor.text, secrets.values().values()))

    await Reloader(bootstrap, lambda: bootstrap.settings, environment, [runner], use_keys).reload()
    assert used == [MASK, MASK]


@requirement("reload")
async def test_invalid_settings_change_nothing_and_are_logged(reloaded: Reloaded) -> None:
    reloaded.key.unlink()
    reloaded.config.write_text('[policy]\ndeny = ["jina.*"]\n')
    await reloaded.hang_up("reload.failed")
    assert "JINA_API_KEY_FILE: the file that it names cannot be read" in reloaded.executor.log_text()
    assert (await reloaded.call())["status"] == "success"
    assert await reloaded.keys_used() == ["JINA_API_KEY"]


@requirement("reload")
@pytest.mark.parametrize(
    "text",
    [
        "executor.concurrency=" + "9" * 5_000,
        "a=" + "[" * 2_000 + "]" * 2_000,
        "policy=" + "{a=" * 1_000 + "1" + "}" * 1_000,
    ],
    ids=["a number of 5,000 digits", "2,000 lists in each other", "1,000 tables in each other"],
)
async def test_a_file_that_cannot_be_parsed_changes_nothing(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even the process ends: every replica that mounts the file would."""
    file = tmp_path / "settings.toml"
    file.write_text("")
    monkeypatch.setenv("OPENAPI_TOOL_CONFIG", str(file))
    monkeypatch.setenv("PG_DSN", "postgresql://127.0.0.1/x")
    reloader = Reloader(build_bootstrap(load_settings(), {}), load_settings, {})
    file.write_text(text)
    await reloader.reload()
    assert [record.__dict__["action"] for record in caplog.records] == ["reload.failed"]
    assert "has too long a number, or is nested too deep; correct it there" in caplog.text


def watched_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Reloader]:
    """Return an empty file of settings, and what reads it again when it changes, looking at it all the time."""
    monkeypatch.setattr("openapi_tool.reloading.POLL_S", 0.01)
    file = tmp_path / "settings.toml"
    file.write_text("")
    monkeypatch.setenv("OPENAPI_TOOL_CONFIG", str(file))
    monkeypatch.setenv("PG_DSN", "postgresql://127.0.0.1/x")
    return file, Reloader(build_bootstrap(load_settings(), {}), load_settings, {"OPENAPI_TOOL_CONFIG": str(file)})


@requirement("reload")
async def test_a_defect_in_a_reload_is_logged_and_the_next_reload_takes_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file, reloader = watched_settings(tmp_path, monkeypatch)
    changed, failures = FileWatcher.changed, iter([RuntimeError("no thread can be started")] * 3)

    def fail_at_first(watcher: FileWatcher) -> bool:
        for failure in failures:
            raise failure
        return changed(watcher)

    monkeypatch.setattr(FileWatcher, "changed", fail_at_first)
    reloader.use_limits = Mock(side_effect=[KeyError("a defect"), None])
    running = asyncio.create_task(reloader.run(asyncio.Event()))
    await asyncio.sleep(0)  # until it has seen the file
    for text, action in (("# 1", "reload.failed"), ("# 12", "reload.done")):
        file.write_text(text)
        await until(partial(acted, caplog, action))
    running.cancel()
    assert actions(caplog) == ["background.failed", "reload.failed", "reload.done"]


@requirement("reload")
async def test_a_change_before_the_watch_begins_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The watch begins only once the connections are opened."""
    caplog.set_level(logging.INFO)
    file, reloader = watched_settings(tmp_path, monkeypatch)
    file.write_text("# changed\n")
    running = asyncio.create_task(reloader.run(asyncio.Event()))
    await until(lambda: actions(caplog) == ["reload.done"])
    running.cancel()


def actions(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.__dict__["action"] for record in caplog.records]


def acted(caplog: pytest.LogCaptureFixture, action: str) -> bool:
    return action in actions(caplog)


@requirement("reload", "policy.tools")
async def test_a_file_that_has_become_empty_lifts_no_denial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A writer truncates it first, and perhaps fails then."""
    caplog.set_level(logging.INFO)
    file = tmp_path / "settings.toml"
    file.write_text('[policy]\ndeny = ["jina.search"]\n')
    monkeypatch.setenv("OPENAPI_TOOL_CONFIG", str(file))
    monkeypatch.setenv("PG_DSN", "postgresql://127.0.0.1/x")
    environment = {"OPENAPI_TOOL_CONFIG": str(file)}
    reloader = Reloader(build_bootstrap(load_settings(), environment), load_settings, environment)
    file.write_text("")
    await reloader.reload()
    await reloader.reload()
    file.write_text("# nothing denied\n")
    await reloader.reload()
    actions = [record.__dict__["action"] for record in caplog.records]
    assert actions == ["reload.failed", "reload.failed", "reload.done"]
    assert "the file has become empty" in caplog.text


@requirement("reload", "cli.top")
async def test_top_shows_a_failed_reload_until_one_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("")
    monkeypatch.setenv("OPENAPI_TOOL_CONFIG", str(file))
    monkeypatch.setenv("PG_DSN", "postgresql://127.0.0.1/x")
    reloader = Reloader(build_bootstrap(load_settings(), {}), load_settings, {})
    RECENT_WARNINGS.install(Redactor())
    try:
        file.write_text("[executor]\nconcurrency = 'many'\n")
        await reloader.reload()
        an_hour_later = time.monotonic() + 3_600
        with monkeypatch.context() as later:
            later.setattr(time, "monotonic", lambda: an_hour_later)
            [line] = found_problems([{"instance": "r", "warnings": RECENT_WARNINGS.snapshot()}]).now
        assert line.startswith("r: reload.failed, 1 time, last 60 min ago: cannot reload the settings; the old ones")
        assert f"executor.concurrency (in {file})" in line
        file.write_text("")
        await reloader.reload()
        found = found_problems([{"instance": "r", "warnings": RECENT_WARNINGS.snapshot()}])
        assert (found.now, len(found.earlier)) == ([], 1)
    finally:
        logging.getLogger("openapi_tool").removeHandler(RECENT_WARNINGS)


@requirement("reload")
async def test_sections_that_need_a_restart_are_logged(reloaded: Reloaded) -> None:
    reloaded.config.write_text("[executor]\nconcurrency = 3\n")
    await reloaded.hang_up("reload.done")
    assert '"need_restart":["executor"]' in reloaded.executor.log_text()


@requirement("reload")
async def test_a_change_of_limits_is_used_at_once_but_for_pools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "settings.toml"
    file.write_text("[limits]\nsearch_concurrent = 3\n")
    monkeypatch.setenv("OPENAPI_TOOL_CONFIG", str(file))
    monkeypatch.setenv("PG_DSN", "postgresql://127.0.0.1/x")
    environment = {"OPENAPI_TOOL_CONFIG": str(file)}
    used: list[int | None] = []
    reloader = Reloader(build_bootstrap(load_settings(), environment), load_settings, environment)
    reloader.use_limits = lambda limits: used.append(limits.search_concurrent)
    file.write_text("[limits]\nsearch_concurrent = 4\n")
    await reloader.reload()
    file.write_text("[limits.pools.JINA_API_KEY]\nkeys = ['JINA_API_KEY']\n")
    await reloader.reload()
    assert used == [4, None]
    assert [record.__dict__["need_restart"] for record in caplog.records] == [[], ["limits.pools"]]


@requirement("reload")
def test_new_secrets_reach_every_redactor_and_old_ones_stay_masked() -> None:
    redactor = Redactor(["the-old-secret"])
    elsewhere = redactor.with_label("error")
    redactor.add(["the-new-secret"])
    for place in (redactor, elsewhere, redactor.with_label("span")):
        assert place.text("the-old-secret the-new-secret") == f"{MASK} {MASK}"
    assert Redactor(["the-old-secret"]).text("the-new-secret") == "the-new-secret"
