"""The Deployment that the chart renders, run as the kubelet would: real NATS and PostgreSQL, least privilege."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import trustme

from openapi_tool.local.caller import Caller, PlacedCall
from openapi_tool.local.servers import NatsServer
from openapi_tool.local.stack import EmbeddedStack
from scripts.docs import ROOT
from tests.charts import objects_of
from tests.conftest import AGENT, PROJECT, search_tool
from tests.end_to_end.kubelet import Pod
from tests.requirements import requirement
from tests.support import dsn_of
from tests.unit.test_egress import Proxy
from tests.wire.test_bus import server
from tests.wire.test_permissions import config, printed
from tests.wire.world import KNOWN

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
        await kernel.delete_streams()


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
    del caller  # the double's rules are reset by it
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
            self.calls.append(await self.kernel.place(PROJECT, AGENT, "jina_search", KNOWN))
            await asyncio.sleep(0.05)

    async def waits_s(self) -> list[float]:
        """Check that every call has one success; return the seconds that each took."""
        waits = []
        for call in self.calls:
            answer = await self.kernel.result(call, ANSWERED_S)
            assert answer.card["content"]["status"] == "success"
            waits.append((answer.doorbell_at or 0) - call.placed_at)
        return waits


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
            assert '"call.answered"' in pod.process.log.read_text()
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
        assert code == 2
        assert "egress.proxy" in output


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
