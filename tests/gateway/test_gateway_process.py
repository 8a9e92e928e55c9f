"""The process of `openapi-tool gateway`: its start, tokens of replicas, its end, kills."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from openapi_tool.cli import app, gateway_serve
from openapi_tool.cli.gateway_serve import GatewayFlags
from openapi_tool.gateway.opening import NATS
from openapi_tool.local.stack import UpstreamDouble
from tests.gateway.conftest import PAGE
from tests.gateway.test_http import READ
from tests.requirements import requirement
from tests.waiting import WAIT_S, until


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def command(double: UpstreamDouble, state: Path, *options: str) -> list[str]:
    module = ["-m", "openapi_tool.local.door_server", "gateway"]
    options = ("--upstream-port", str(double.port), "--state", str(state), *options)
    return [sys.executable, *module, *options]


@dataclass(frozen=True, slots=True)
class Replica:
    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def client(self, token: str | None = None) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=WAIT_S, trust_env=False
        )

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)


@asynccontextmanager
async def replica(
    double: UpstreamDouble, environment: dict[str, str], state: Path, *options: str, **more: str
) -> AsyncIterator[Replica]:
    """Yield a running process."""
    port = free_port()
    log = state.parent / f"{port}.log"
    with (
        log.open("wb") as out,
        subprocess.Popen(  # noqa: ASYNC220, S603 - the interpreter; it starts at once
            command(double, state, "--port", str(port), *options),
            env={"PATH": os.environ["PATH"], **environment, **more},
            stdout=out,
            stderr=out,
        ) as process,
    ):
        try:
            await until(lambda: process.poll() is not None or b"gateway.serving" in log.read_bytes())
            assert process.poll() is None, log.read_text()
            yield Replica(process, port, log)
        finally:
            process.kill()


async def run(*arguments: str) -> str:
    """Return what a command prints."""
    done = await asyncio.to_thread(lambda: CliRunner().invoke(app, list(arguments)))
    assert done.exit_code == 0, done.stderr
    return done.stdout.strip()


@requirement("gateway.access")
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])  # noqa: S104 - what must be refused
def test_without_tokens_it_refuses_to_listen_elsewhere_and_says_why(
    double: UpstreamDouble, environment: dict[str, str], tmp_path: Path, host: str
) -> None:
    refused = subprocess.run(  # noqa: S603 - the interpreter
        command(double, tmp_path / "state", "--port", "0", "--host", host),
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        timeout=WAIT_S,
        check=False,
    )
    assert refused.returncode == 2
    assert refused.stderr.startswith(b"openapi-tool: gateway.host: without tokens anyone who reaches")
    assert f"(openapi-tool tokens create --project local --state {tmp_path / 'state'})" in refused.stderr.decode()


@requirement("gateway.access")
@pytest.mark.parametrize("where", ["state", "default", "memory", "tokens file", "NATS of --config"])
def test_the_printed_command_creates_a_token_with_which_it_listens(
    environment: dict[str, str], tmp_path: Path, where: str
) -> None:
    (tmp_path / "a folder").mkdir(mode=0o700)
    config = tmp_path / "a folder" / "settings.toml"
    config.write_text('[nats]\nservers = "nats://127.0.0.1:1"\n', encoding="utf-8")
    options = {
        "state": ["--state", str(tmp_path / "a folder" / "state")],
        "memory": ["--state", ":memory:"],
        "NATS of --config": ["--config", str(config)],
    }
    variables = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "XDG_STATE_HOME": str(tmp_path),
    }
    if where == "tokens file":
        variables["OPENAPI_TOOL__GATEWAY__TOKENS_FILE"] = str(tmp_path / "a folder" / "tokens.json")
        (tmp_path / "a folder" / "tokens.json").write_text("{}", encoding="utf-8")
    listen = ["openapi-tool", "gateway", "--host", "0.0.0.0", "--port", "0", *options.get(where, [])]  # noqa: S104
    if where == "NATS of --config":
        flags = GatewayFlags(config=config)
        advice = gateway_serve._create_token(flags, NATS, None)  # noqa: SLF001 - without servers it does not get there
    else:
        advice = _refusal(listen, variables | environment, tmp_path)
    printed = advice.partition("(")[2].partition(")")[0]
    created = subprocess.run(  # noqa: S602 - as a user would
        printed, shell=True, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    if where == "NATS of --config":
        assert "cannot connect to NATS at 127.0.0.1:1" in created.stderr, "it reads the same settings"
        return
    assert created.returncode == 0, created.stderr
    if where == "memory":
        variables["OPENAPI_TOOL__GATEWAY__TOKENS_FILE"] = advice.partition("TOKENS_FILE=")[2].partition(")")[0]
    occupied = socket.create_server(("0.0.0.0", 0))  # noqa: S104 - so that it ends where it would listen
    listen[listen.index("--port") + 1] = str(occupied.getsockname()[1])
    assert "cannot listen on 0.0.0.0" in _refusal(listen, variables | environment, tmp_path)
    occupied.close()


def _refusal(command: list[str], variables: dict[str, str], folder: Path) -> str:
    """Return what a gateway prints that does not start."""
    refused = subprocess.run(  # noqa: S603 - our own program
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert refused.returncode == 2, refused.stderr
    assert refused.stderr.startswith("openapi-tool: gateway.host")
    return refused.stderr


@requirement("gateway.http")
async def test_a_start_without_a_key_says_so_and_serves(
    double: UpstreamDouble, environment: dict[str, str], tmp_path: Path
) -> None:
    del environment["JINA_API_KEY"]
    async with replica(double, environment, tmp_path / "state") as running, running.client() as client:
        assert "JINA_API_KEY is not set: calls of tools that need it will fail" in running.log.read_text()
        assert "JINA_API_KEY" in (await client.post(READ, json={"url": PAGE})).json()["detail"]


@requirement("gateway.access")
async def test_a_port_in_use_is_named(double: UpstreamDouble, environment: dict[str, str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = await asyncio.to_thread(
            subprocess.run,
            command(double, tmp_path / "state", "--port", str(taken.getsockname()[1])),
            env={"PATH": os.environ["PATH"], **environment},
            capture_output=True,
            timeout=WAIT_S,
        )
    assert refused.returncode == 2
    assert refused.stderr.startswith(b"openapi-tool: gateway.host, gateway.port: cannot listen on 127.0.0.1")


@requirement("gateway.tokens", "gateway.access")
async def test_tokens_take_effect_on_all_replicas_within_two_seconds(
    double: UpstreamDouble, environment: dict[str, str], tmp_path: Path
) -> None:
    state, file = tmp_path / "state", tmp_path / "tokens.json"
    file.write_text("{}")
    variable = {"OPENAPI_TOOL__GATEWAY__TOKENS_FILE": str(file)}
    async with (
        replica(double, environment, state, **variable) as first,
        replica(double, environment, state, **variable) as second,
        first.client() as one,
        second.client() as two,
    ):

        async def statuses(token: str | None) -> list[int]:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            return [(await client.get("/v1/tools", headers=headers)).status_code for client in (one, two)]

        assert await statuses(None) == [200, 200]
        token = await run("tokens", "create", "--project", "p", "--state", str(state))
        await asyncio.sleep(2)
        assert await statuses(None) == [401, 401]
        assert await statuses(token) == [200, 200]
        await run("tokens", "revoke", token, "--state", str(state))
        await asyncio.sleep(2)
        assert await statuses(token) == [401, 401]
        assert await statuses(None) == [401, 401]  # as there was one
        created = await run("tokens", "create", "--project", "p", "--file", str(file))
        await asyncio.sleep(2)
        assert await statuses(created) == [200, 200]
        damaged = file.with_suffix(".new")
        damaged.write_text("{")
        damaged.replace(file)  # not emptied first, which would be another problem
        await asyncio.sleep(2)
        assert await statuses(created) == [200, 200]
        for each in (first, second):
            log = each.log.read_text()
            assert token.rpartition("_")[2] not in log
            assert log.count("cannot read the tokens; the old ones stay in use") == 1
            assert await asyncio.to_thread(each.end) == 0


@requirement("gateway.drain")
async def test_sigterm_finishes_running_calls_and_takes_no_new_ones(
    double: UpstreamDouble, environment: dict[str, str], tmp_path: Path
) -> None:
    double.rules({"match": "article", "delay_s": 3.0})
    health = free_port()
    variables = {"OPENAPI_TOOL__HEALTH__PORT": str(health)}
    async with replica(double, environment, tmp_path / "state", **variables) as running, running.client() as client:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{health}", trust_env=False) as probe:
            assert (await probe.get("/livez")).status_code == 200
            assert (await probe.get("/readyz")).json()["dependencies"]["state"]["ok"]
            assert b"openapi_tool_" in (await probe.get("/metrics")).content
            calls = [asyncio.create_task(client.post(READ, json={"url": f"{PAGE}?{n}"})) for n in range(3)]
            await until(lambda: len(double.requests()) == 3)
            running.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.5)
            assert (await probe.get("/readyz")).status_code == 503
        with pytest.raises(httpx.TransportError):
            async with running.client() as other:
                await other.get("/v1/tools")
        answers = await asyncio.gather(*calls)
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert await asyncio.to_thread(running.process.wait, WAIT_S) == 0


@requirement("gateway.drain")
async def test_a_call_that_takes_longer_than_the_drain_is_stopped_and_settled(
    double: UpstreamDouble, environment: dict[str, str], tmp_path: Path
) -> None:
    double.rules({"match": "article", "hang": True})
    state = tmp_path / "state"
    variables = {
        "OPENAPI_TOOL__EXECUTOR__DRAIN_TIMEOUT_S": "5",
        "OPENAPI_TOOL__BUDGETS__PROJECT_DAY_TOKENS": "1000000",
    }
    async with replica(double, environment, state, **variables) as running, running.client() as client:
        call = asyncio.create_task(client.post(READ, json={"url": PAGE}))
        await until(lambda: len(double.requests()) == 1)
        began = time.monotonic()
        assert await asyncio.to_thread(running.end) == 0
        assert time.monotonic() - began < 30, "a call may take 60 s"
        with suppress(httpx.TransportError):
            assert (await call).status_code >= 500
    total = json.loads(await run("usage", "--project", "local", "--json", "--state", str(state)))["total"]
    assert (total["calls"], total["errors"], total["requests"]) == (1, 1, 1)


@requirement("gateway.drain", "gateway.quotas")
async def test_a_kill_loses_nothing_that_a_returned_result_has_cost(
    double: UpstreamDouble, environment: dict[str, str], tmp_path: Path
) -> None:
    state = tmp_path / "state"
    token = await run("tokens", "create", "--project", "p", "--state", str(state))
    variables = {"OPENAPI_TOOL__BUDGETS__PROJECT_DAY_REQUESTS": "4", "OPENAPI_TOOL__CACHE__TTL_S": "0"}
    async with replica(double, environment, state, **variables) as first, first.client(token) as client:
        for _ in range(3):
            assert (await client.post(READ, json={"url": PAGE})).status_code == 200
        await asyncio.to_thread(first.end, signal.SIGKILL)
    async with replica(double, environment, state, **variables) as second, second.client(token) as client:
        [row] = (await client.get("/v1/usage")).json()["by_tool"]
        assert (row["calls"], row["requests"]) == (3, 3)
        [budget] = (await client.get("/v1/budget")).json()["budgets"]
        assert budget["requests_left"] == 1
        statuses = [(await client.post(READ, json={"url": PAGE})).status_code for _ in range(2)]
        assert statuses == [200, 402]
