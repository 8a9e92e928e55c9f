"""The image and its deployment on a simulated kubelet."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from typer.testing import CliRunner

from openapi_tool import __version__
from openapi_tool.cli import app
from openapi_tool.local.caller import Caller
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.local.servers import NatsServer
from openapi_tool.local.stack import EmbeddedStack
from scripts.docs import ROOT, values
from scripts.packages import ELSEWHERE
from scripts.packages import packages as locked
from tests.conftest import AGENT, PROJECT, search_tool
from tests.end_to_end.kubelet import USER, Pod, isolated
from tests.requirements import requirement
from tests.support import delete_streams, dsn_of, objects_of
from tests.unit.test_egress import Proxy
from tests.wire.conftest import RECORDED_ARGUMENTS
from tests.wire.test_bus import server
from tests.wire.test_permissions import config, printed

PASSWORD = "executor-word"
READY_CPU_S = 2.0
ANSWERED_S = 10.0


@dataclass(frozen=True, slots=True)
class Tls:
    """NATS server with TLS by its own CA, and the values with which a client trusts it."""

    nats: NatsServer
    ca: str
    context: ssl.SSLContext


@pytest.fixture(scope="module")
def tls(stack: EmbeddedStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tls]:
    authority, context = trustme.CA(), ssl.create_default_context()
    authority.configure_trust(context)
    file = tmp_path_factory.mktemp("nats") / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(file))
    quoted = json.dumps(str(file))
    users = config(printed("--format", "server-config"))
    with server(stack, f"tls {{ cert_file: {quoted}, key_file: {quoted} }}\n{users}") as nats:
        yield Tls(nats, authority.cert_pem.bytes().decode(), context)


@asynccontextmanager
async def kernel_of(tls: Tls, dsn: str) -> AsyncIterator[Caller]:
    user = {"user": "kernel", "password": "kernel-word", "tls": tls.context}
    async with Caller.open(dsn, servers=tls.nats.url, **user) as kernel:
        await kernel.make_stream()
        await kernel.listen("cg.v1r4.*.*.cmd.agent.*.wakeup")
        await kernel.set_up_project(PROJECT, AGENT, [search_tool()])
        yield kernel
        await delete_streams(kernel)


@dataclass(slots=True)
class Cluster:
    """Pods of one rendered release; all that still run are deleted in the end."""

    stack: EmbeddedStack
    values: dict[str, Any]
    secrets: dict[str, dict[str, str]]
    pods: list[Pod] = field(default_factory=list)
    ready_cpu_s: list[float] = field(default_factory=list)

    def pod(self, kind: str) -> Pod:
        objects = objects_of(self.values)
        config_maps = {config_map["metadata"]["name"]: config_map["data"] for config_map in objects["ConfigMap"]}
        (owner,) = objects[kind]
        template = owner if kind == "Pod" else owner["spec"]["template"]
        return Pod(self.stack, f"pod-{uuid.uuid4().hex[:8]}", template, self.secrets, config_maps)

    async def create(self) -> Pod:
        pod = self.pod("Deployment")
        self.pods.append(pod)
        cpu_s, ready_s = await asyncio.to_thread(pod.start)
        self.ready_cpu_s.append(cpu_s)
        sys.stdout.write(f"start to ready: {ready_s:.2f} s, of which {cpu_s:.2f} s of CPU\n")
        return pod

    async def delete(self, pod: Pod) -> None:
        self.pods.remove(pod)
        code, _ = await asyncio.to_thread(pod.delete)
        log = pod.process.log.read_text()
        assert code == 0, log
        assert "Traceback" not in log, log
        assert PASSWORD not in log


@pytest.fixture
async def cluster(stack: EmbeddedStack, database: str, caller: Caller, tls: Tls) -> AsyncIterator[Cluster]:
    del caller  # the fixture resets the rules of the double
    async with Proxy(stack.upstream.port) as proxy:
        values = {
            "nats": {"servers": [tls.nats.url.replace("nats://", "tls://")]},
            "secrets": {
                "nats": {"name": "nats", "userKey": "user", "passwordKey": "password"},
                "natsTls": {"name": "nats-ca"},
                "proxy": {"name": "proxy"},
                "upstreamCa": {"name": "proxy"},
                "keys": {"asFiles": True},
            },
            "config": {
                "executor": {"drain_timeout_s": 8},
                "cache": {"ttl_s": 0},
                "telemetry": {"log_level": "debug"},
            },
            "preStopSleepSeconds": 1,
        }
        secrets = {
            "openapi-tool-postgres": {"PG_DSN": dsn_of(stack, database)},
            "openapi-tool-keys": {"JINA_API_KEY": stack.upstream.keys["JINA_API_KEY"]},
            "nats": {"user": "executor", "password": PASSWORD},
            "nats-ca": {"ca.crt": tls.ca},
            "proxy": {"proxy": f"http://127.0.0.1:{proxy.port}", "ca.crt": stack.certificates.ca.read_text()},
        }
        cluster = Cluster(stack, values, secrets)
        yield cluster
        for pod in list(cluster.pods):
            await cluster.delete(pod)


@dataclass(slots=True)
class Load:
    """Calls placed one after another until it is stopped."""

    kernel: Caller
    calls: list[PlacedCall] = field(default_factory=list)
    stopped: bool = False

    async def run(self) -> None:
        while not self.stopped:
            self.calls.append(await self.kernel.place(PROJECT, AGENT, "jina_search", RECORDED_ARGUMENTS))
            await asyncio.sleep(0.05)

    async def waits_s(self) -> list[float]:
        """Check that every call has one success; return the seconds that each took."""
        waits = []
        for call in self.calls:
            answer = await self.kernel.result(call, ANSWERED_S)
            assert answer.card["content"]["status"] == "success"
            waits.append((answer.doorbell_at or 0) - call.placed_at)
        return waits


@pytest.mark.thorough
@requirement("chart.runs")
async def test_calls_are_answered_throughout_a_rolling_update(
    stack: EmbeddedStack, database: str, cluster: Cluster, tls: Tls
) -> None:
    """Two pods, of which each is replaced: the new one is ready before the old one gets SIGTERM."""
    stack.upstream.rules({"delay_s": 0.2})
    async with kernel_of(tls, stack.postgres.dsn(database)) as kernel:
        old = [await cluster.create(), await cluster.create()]
        load = Load(kernel)
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run())
            for pod in old:
                await cluster.create()
                await cluster.delete(pod)
            load.stopped = True
        waits = await load.waits_s()
        assert len(stack.upstream.requests()) == len(waits) > 20
        assert max(waits) < ANSWERED_S / 2
        assert min(cluster.ready_cpu_s) < READY_CPU_S
        for pod in cluster.pods:
            assert '"call.finished"' in pod.process.log.read_text()
        for pod in list(cluster.pods):
            await cluster.delete(pod)


@requirement("chart.runs", "outage")
async def test_a_pod_is_alive_and_not_ready_while_nats_is_down(
    stack: EmbeddedStack, database: str, cluster: Cluster, tls: Tls
) -> None:
    async with kernel_of(tls, stack.postgres.dsn(database)):
        pod = await cluster.create()
        tls.nats.stop()
        async with asyncio.timeout(ANSWERED_S):
            while pod.probe("readiness"):  # noqa: ASYNC110 - a probe is polled
                await asyncio.sleep(0.1)
        assert pod.probe("liveness")
        assert pod.probe("startup")
        tls.nats.start()
        async with asyncio.timeout(ANSWERED_S):
            while not pod.probe("readiness"):  # noqa: ASYNC110 - the same
                await asyncio.sleep(0.1)
        await cluster.delete(pod)


@pytest.mark.thorough
@requirement("chart.runs", "cli.check")
async def test_helm_test_says_what_is_missing(stack: EmbeddedStack, database: str, cluster: Cluster, tls: Tls) -> None:
    async with kernel_of(tls, stack.postgres.dsn(database)):
        code, output = await asyncio.to_thread(cluster.pod("Pod").run)
        assert code == 0, output
        assert {"settings: ok", "postgres: ok; without TLS", "JINA_API_KEY: ok"} <= set(output.splitlines())
        assert re.search("^nats: ok; TLS; stream cg_cmd_v1r4; durable ", output, re.MULTILINE)
        cluster.secrets["nats"]["password"] = "another-word"
        code, output = await asyncio.to_thread(cluster.pod("Pod").run)
        assert code == 1
        assert "Authorization Violation" in output
        assert "another-word" not in output
        cluster.secrets["proxy"]["proxy"] = "no URL"
        code, output = await asyncio.to_thread(cluster.pod("Pod").run)
        assert code == 2, output
        assert "egress.proxy" in output


@requirement("chart.runs", "gateway.tokens")
async def test_a_gateway_alone_serves_whoever_has_a_token_of_its_secret(stack: EmbeddedStack, tmp_path: Path) -> None:
    """Without NATS and PostgreSQL, as a user without a name; it may write its state file and nothing else."""
    file = tmp_path / "tokens.json"
    arguments = ["tokens", "create", "--project", PROJECT, "--file", str(file)]
    token = (await asyncio.to_thread(CliRunner().invoke, app, arguments)).stdout.strip()
    search = (ROOT / "config" / "tools" / "jina_search.yaml").read_text(encoding="utf-8")
    async with Proxy(stack.upstream.port) as proxy:
        values = {
            "serve": {"enabled": False},
            "gateway": {"enabled": True, "tokens": {"name": "tokens"}, "tools": {"search.yaml": search}},
            "secrets": {"proxy": {"name": "proxy"}, "upstreamCa": {"name": "proxy"}},
            "preStopSleepSeconds": 0,
        }
        secrets = {
            "openapi-tool-keys": {"JINA_API_KEY": stack.upstream.keys["JINA_API_KEY"]},
            "proxy": {"proxy": f"http://127.0.0.1:{proxy.port}", "ca.crt": stack.certificates.ca.read_text()},
            "tokens": {"tokens.json": file.read_text()},
        }
        cluster = Cluster(stack, values, secrets)
        pod = await cluster.create()
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{pod.client_port}", trust_env=False) as client:
            assert (await client.get("/v1/tools")).status_code == 401
            tools = await client.get("/v1/tools", headers=headers)
            assert [tool["name"] for tool in tools.json()["tools"]] == ["jina_search"]
            found = await client.post("/v1/tools/jina_search", json=RECORDED_ARGUMENTS, headers=headers)
            assert found.status_code == 200, found.text
            used = await client.get("/v1/usage", headers=headers)
            assert [row["tool"] for row in used.json()["by_tool"]] == ["jina_search"], "the state file was written"
        await cluster.delete(pod)
        assert token not in pod.process.log.read_text()


@requirement("chart.runs")
async def test_the_job_registers_tools(stack: EmbeddedStack, database: str, cluster: Cluster, tls: Tls) -> None:
    async with kernel_of(tls, stack.postgres.dsn(database)) as kernel:
        text = (ROOT / "config" / "tools" / "jina_search_many.yaml").read_text(encoding="utf-8")
        cluster.values["toolsJob"] = {
            "enabled": True,
            "projects": [PROJECT],
            "definitions": {"many.yaml": text},
            "postgresSecret": "registration",
        }
        cluster.secrets["registration"] = {"PG_DSN": stack.postgres.dsn(database)}
        code, output = await asyncio.to_thread(cluster.pod("Job").run)
        assert code == 0, output
        names = await kernel.database.fetch("select tool_name from resource.tools where project_id = $1", PROJECT)
        assert "jina_search_many" in {row["tool_name"] for row in names}


DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
MAX_BYTES = 250_000_000
STATE_HOME = "/var/lib/openapi-tool"
BASE = "python:3.11-slim-bookworm@sha256:" + "0" * 64


def instructions(stage: str, name: str) -> list[str]:
    """Return the arguments of every instruction of this name, continuation lines joined."""
    lines = re.sub(r"\\\n", " ", stage)
    return re.findall(rf"^{name} (.*)$", lines, re.MULTILINE)


def stages() -> tuple[str, str]:
    """Return build stage and final stage."""
    _, build, final = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)
    return build, final


_DOWNLOAD = re.compile(r"(?P<python>\S+) -m pip (?:install|wheel) --require-hashes .*-r (?P<lock>\S+)")
_FROM_WHEELS = re.compile(r"\S+ -m pip --python (?P<python>\S+) install --no-deps --no-index \S+/locked/\S+")
_PINNED = re.compile(r"^([a-z0-9][\w.-]*)(?:\[[^\]]*\])?==([^\s;\\]+)", re.MULTILINE)


@contextmanager
def image(*, download: bool) -> Iterator[Path]:
    """Yield the result of the build stage, below a folder instead of the root.

    Without `download` locked packages are copied from the environment of the test, which must have the same versions.
    """
    root = Path(tempfile.mkdtemp(prefix="openapi-tool-image-"))
    try:
        root.chmod(0o755)
        _build(root, download=download)
        yield root
    finally:
        shutil.rmtree(root)


def _build(root: Path, *, download: bool) -> None:
    build, _ = stages()
    _copy_context(build, root / "src")
    for step in instructions(build, "RUN"):
        for command in step.replace("/opt/", f"{root}/opt/").split("&&"):
            downloads, installs = _DOWNLOAD.fullmatch(command.strip()), _FROM_WHEELS.fullmatch(command.strip())
            if downloads and not download:
                if " wheel " not in command:  # the wheels of requirements.lock are installed by a later command
                    _copy_locked(root / "src" / downloads["lock"], Path(downloads["python"]).parents[1])
                continue
            if installs and not download:
                _copy_locked(root / "src" / "requirements.lock", Path(installs["python"]).parents[1])
                continue
            subprocess.run(  # noqa: S603 - the repository's own steps
                ["/bin/sh", "-e", "-c", f'python() {{ "{sys.executable}" "$@"; }}; {command}'],
                cwd=root / "src",
                check=True,
                timeout=600,
            )


def _copy_locked(lock: Path, prefix: Path) -> None:
    """Copy the packages of a lock file, in these versions, from this environment into that of `prefix`."""
    (packages,) = prefix.glob("lib/python3.*/site-packages")
    pinned = _PINNED.findall(lock.read_text(encoding="utf-8"))
    assert pinned
    for name, version in pinned:
        if name in ELSEWHERE:
            continue
        found = distribution(name)
        assert found.version == version, name
        for file in found.files or ():
            if ".." not in file.parts:  # no programs
                target = packages / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(str(found.locate_file(file)), target)  # bytecode is valid for one time of its source


def _copy_context(build: str, source: Path) -> None:
    """Copy the files that COPY names, except those that .dockerignore excludes."""
    left_out = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] not in "!*"]
    source.mkdir()
    for words in instructions(build, "COPY"):
        for name in words.split()[:-1]:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, source / name)
    for path in [source / name for name in left_out]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def run(image: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*isolated(image, USER), str(image / "opt/openapi-tool/bin/openapi-tool"), *arguments]
    return subprocess.run(  # noqa: S603 - the result of the build steps
        command, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.thorough
@pytest.mark.parametrize("download", [pytest.param(True, marks=pytest.mark.long, id="downloaded"), False])
@requirement("image.steps", "supply.locked")
def test_the_steps_make_an_entry_point_for_another_user_on_a_read_only_root(
    download: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """One test, so that several test processes do not repeat the steps; `make long` runs the steps unchanged."""
    with image(download=download) as made:
        _holds_what_is_locked_and_nothing_else(made / "opt/openapi-tool")
        assert run(made, "--version").stdout.strip() == __version__
        assert "Run tool calls until SIGTERM." in run(made, "serve", "--help").stdout
        refused = run(made, "gateway", "--host", "0.0.0.0", "--state", ":memory:")  # noqa: S104 - what must be refused
        assert "gateway.host: without tokens" in refused.stderr, "the packages of the extra are there"
        checked = run(made, "check")
        assert (checked.returncode, checked.stdout) == (2, "")
        assert "postgres: is missing; set PG_DSN" in checked.stderr
        assert "No such command 'demo'" in run(made, "demo").stderr


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def _holds_what_is_locked_and_nothing_else(prefix: Path) -> None:
    size = bytes_in(prefix)
    assert size < MAX_BYTES
    (packages,) = prefix.glob("lib/python3.*/site-packages")
    names = {path.name.partition("-")[0].replace("_", "-").lower() for path in packages.glob("*.dist-info")}
    assert names - {package.name for package in locked()} == {"openapi-tool"}
    largest = sorted(((bytes_in(path), path.name) for path in packages.iterdir()), reverse=True)[:10]
    sys.stdout.write(f"installed: {size / 1e6:.0f} MB, {len(names)} packages\n")
    sys.stdout.write(f"largest: {', '.join(f'{name} {part / 1e6:.1f}' for part, name in largest)}\n")
    assert not [
        name for name in ("local", "testing.py", "pytest_plugin.py") if (packages / "openapi_tool" / name).exists()
    ]
    assert list((packages / "openapi_tool/service/__pycache__").glob("process.*.pyc")), (
        "compiled, since the file system is read-only later"
    )


@requirement("image.steps")
def test_the_final_stage_has_no_installer_and_a_numeric_user() -> None:
    _, final = stages()
    _, removal, state = instructions(final, "RUN")
    assert "pip uninstall" in removal
    assert "ensurepip" in removal
    assert instructions(final, "USER") == [f"{USER}:{USER}"]
    assert [value.default["runAsUser"] for value in values() if value.path == "podSecurityContext"] == [USER]
    assert instructions(final, "COPY") == ["--from=build /opt/openapi-tool /opt/openapi-tool"]
    assert instructions(final, "CMD") == ['["serve"]']
    assert f"--owner={USER} --group={USER} --mode=0700 {STATE_HOME}" in state
    assert f"XDG_STATE_HOME={STATE_HOME}" in " ".join(instructions(final, "ENV"))
    (labels,) = instructions(final, "LABEL")
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in labels


@requirement("image.steps", "run.signals")
def test_the_image_runs_under_an_init_of_debian() -> None:
    """What that is for is shown in test_signals.py."""
    _, final = stages()
    init, *_ = instructions(final, "RUN")
    assert "apt-get install --yes --no-install-recommends tini=" in init
    assert instructions(final, "ENTRYPOINT") == ['["tini", "--", "openapi-tool"]']


@pytest.mark.parametrize(
    ("base", "code"),
    [
        (BASE, 0),
        (f"registry.example.org:5000/{BASE}", 0),
        ("", 2),
        ("python:3.11-slim-bookworm", 2),
        ("python@sha256:", 2),
        (BASE[:-1], 2),
        (f"{BASE}0", 2),
        (BASE.replace("000", "00g", 1), 2),
        (BASE.replace("000", "00A", 1), 2),
        (BASE.replace("sha256", "sha512"), 2),
        (BASE.partition("@")[2], 2),
        (f"@{BASE.partition('@')[2]}", 2),
        (f"{BASE} {BASE}", 2),
        (f"{BASE} --network=host", 2),
    ],
)
@requirement("image.steps")
def test_a_release_demands_the_digest_of_its_base(base: str, code: int) -> None:
    done = subprocess.run(  # noqa: S603 - the repository's own Makefile
        ["make", "--no-print-directory", "image", "DOCKER=echo", f"BASE={base}"],  # noqa: S607 - as it is found
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    if code:
        assert "BASE=python:3.11-slim-bookworm@sha256:" in done.stdout
    else:
        assert f"--build-arg BASE={base}" in done.stdout
        assert f"--build-arg VERSION={__version__}" in done.stdout
