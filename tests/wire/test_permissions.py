"""Users with exactly the permissions that `openapi-tool nats permissions` prints, on a real NATS server."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.js.api import KeyValueConfig
from typer.testing import CliRunner

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.cli import app
from openapi_tool.kernel.jetstream import leases
from openapi_tool.kernel.jetstream.ack_floor import AckFloor, load_ack_floor, save_ack_floor
from openapi_tool.kernel.jetstream.dead_letters import DeadLetters
from openapi_tool.kernel.jetstream.leases import Leases
from openapi_tool.kernel.jetstream.parked_records import PARKED_BUCKET
from openapi_tool.kernel.jetstream.streams import Durable, ensure_durable
from openapi_tool.kernel.postgres.store import KernelStore
from openapi_tool.local.caller import STREAM, Caller
from openapi_tool.local.servers import NatsServer
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.connection import connected
from openapi_tool.nats_client.connection_errors import Denied
from openapi_tool.nats_records.record_store import BUDGETS, LIMITS
from openapi_tool.nats_records.replica_statistics import gather_stats
from openapi_tool.nats_records.replicas import replica_count
from openapi_tool.nats_records.session_key import shared_session_key
from openapi_tool.nats_records.shared_bucket import BUCKET, shared_bucket
from openapi_tool.nats_records.switches import SWITCHES_KEY, SwitchMonitor, change_switches, load_switches
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.settings import Settings
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.tools.switches import Switch
from tests.conftest import AGENT, PROJECT
from tests.requirements import requirement
from tests.support import delete_streams, delivery
from tests.waiting import WAIT_S, until
from tests.wire.conftest import DURABLE, World, open_world
from tests.wire.test_bus import DSN, server

EXECUTOR, OPERATOR, KERNEL = ({"user": name, "password": f"{name}-word"} for name in ("executor", "operator", "kernel"))
FILTER = "cg.v1r4.*.*.cmd.tool.jina.>"
CREATE = f"$JS.API.CONSUMER.CREATE.{STREAM}.{DURABLE}.{FILTER}"


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["nats", "permissions", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def needed(*arguments: str) -> list[str]:
    allowed: list[str] = json.loads(printed("--json", *arguments))["publish"]["allow"]
    return allowed


def config(executor: str, operator: str = "") -> str:
    return (
        "authorization { users: [\n"
        "  { user: kernel, password: kernel-word }\n"
        f"  {{ user: executor, password: executor-word, {executor} }}\n"
        f"  {{ user: operator, password: operator-word, {operator} }}\n] }}\n"
    )


@pytest.fixture(scope="module")
def strict(stack: EmbeddedStack) -> Iterator[NatsServer]:
    """Server whose users have only the printed permissions."""
    operator = printed("--format", "server-config", "--for", "deadletters")
    with server(stack, config(printed("--format", "server-config"), operator)) as nats_server:
        yield nats_server


@asynccontextmanager
async def kernel_of(strict: NatsServer, dsn: str) -> AsyncIterator[Caller]:
    """Yield the kernel's side on a server without streams; delete all streams afterwards."""
    async with Caller.open(dsn, servers=strict.url, **KERNEL) as kernel:
        yield kernel
        await delete_streams(kernel)


@pytest.fixture
async def strict_world(strict: NatsServer, stack: EmbeddedStack, caller: Caller, database: str) -> AsyncIterator[World]:
    del caller  # the fixture has created project and agent
    async with kernel_of(strict, stack.postgres.dsn(database)) as kernel, open_world(stack, kernel, database) as world:
        yield world


def bus(strict: NatsServer) -> dict[str, Any]:
    return {"servers": strict.url, **EXECUTOR}


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect all subjects that any client publishes to, also those of the kernel's side."""
    publish, subjects = Client.publish, []

    async def record_and_publish(self: Client, subject: str, *message: Any, **options: Any) -> None:
        subjects.append(subject)
        await publish(self, subject, *message, **options)

    monkeypatch.setattr(Client, "publish", record_and_publish)
    return subjects


def covers(pattern: str, subject: str) -> bool:
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">" and given[-1] != ">":
        wanted, given = wanted[:-1], given[: len(wanted) - 1]
    return len(wanted) == len(given) and all(one in ("*", other) for one, other in zip(wanted, given, strict=True))


async def logged(caplog: pytest.LogCaptureFixture, action: str) -> logging.LogRecord:
    """Wait for and return the first log record with this action. Raises TimeoutError."""
    async with asyncio.timeout(WAIT_S):
        while True:
            for record in caplog.records:
                if getattr(record, "action", "") == action:
                    return record
            await asyncio.sleep(0.02)


# Printed permissions that the calls of the test do not use, by whether buckets allow direct gets. RESET is used only
# after another client changed the durable's filter, `handed_back` only if a command is handed back without a run.
UNUSED = {
    False: ["$JS.API.DIRECT.GET.KV_openapi_tool_", "$JS.API.CONSUMER.RESET.", "openapi_tool.handed_back."],
    True: [
        "$JS.API.STREAM.MSG.GET.KV_openapi_tool_",
        "$JS.API.STREAM.CREATE.KV_",
        "$JS.API.CONSUMER.RESET.",
        "openapi_tool.handed_back.",
    ],
}
FOR_OLD_STREAMS = {"openapi_tool.dead_letter", "$JS.API.STREAM.MSG.GET.KV_openapi_tool_budgets"}


@pytest.mark.parametrize("direct", [False, True])
@requirement("privilege.subjects")
async def test_every_call_path_needs_exactly_the_printed_permissions(
    strict: NatsServer,
    strict_world: World,
    direct: bool,  # noqa: FBT001 - a parameter of the test
    published: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Start without streams; make a call, a redelivered one, a dead letter and a parked result.

    Buckets that an operator created before may allow `direct` gets.
    """
    caplog.set_level(logging.INFO)
    world, load, outages = strict_world, KernelStore.load, [True]
    commit = KernelStore.commit

    async def fail_once(self: KernelStore, key: Any) -> Any:
        if outages:
            outages.pop()
            raise Unavailable("PostgreSQL: connection refused")
        return await load(self, key)

    async def commit_once_parked(self: KernelStore, *result: Any) -> bool:
        if "result.parked" not in [getattr(record, "action", "") for record in caplog.records]:
            raise Unavailable("PostgreSQL: connection refused")
        return await commit(self, *result)

    if direct:
        for bucket in (BUCKET, leases.BUCKET, PARKED_BUCKET, LIMITS.bucket.name, BUDGETS.bucket.name):
            config = KeyValueConfig(bucket=bucket, direct=True)
            await world.caller.client.jetstream().create_key_value(config)
        published.clear()
    capped = {"limits": {"search_requests_per_minute": 600}, "budgets": {"project_day_requests": 600}}
    async with world.executor(nats=bus(strict), **capped):
        await logged(caplog, "stream.created")
        first = await world.send(await world.place())
        assert first.content["status"] == "success"
        assert len(await gather_stats(world.caller.client, 0.5)) == 1
        monkeypatch.setattr(KernelStore, "load", fail_once)
        again = await world.send(await world.place())
        assert (again.content["status"], again.deliveries) == ("success", 3)  # the first call, and this one twice
        stale = await world.send(await world.place(), headers={"CG-Turn-Id": "an-old-turn"})
        assert [letter["reason"] for letter in stale.dead_letters] == ["stale_turn"]
        assert len(stale.doorbells) == 2
    monkeypatch.setattr(KernelStore, "commit", commit_once_parked)
    parking = {"executor": {"commit_retry_timeout_s": 0.1, "requeue_delay_s": 0.05}, "budgets": capped["budgets"]}
    async with world.executor(nats=bus(strict), **parking):
        parked = await world.send(await world.place())
        assert (parked.content["status"], len(parked.doorbells)) == ("success", 3)
    async with world.executor(nats=bus(strict)) as consumer:  # this one finds the command stream
        await until(lambda: consumer.durable)
        assert consumer.durable is not None
        await _save_floor(strict, consumer.durable)
    await _write_switches_again(strict, world)
    assert "nats.denied" not in [getattr(record, "action", "") for record in caplog.records]
    unused = {pattern for pattern in needed() if not any(covers(pattern, subject) for subject in published)}
    expected = {pattern for pattern in needed() for start in UNUSED[direct] if pattern.startswith(start)}
    assert unused == expected | FOR_OLD_STREAMS


async def _write_switches_again(strict: NatsServer, world: World) -> None:
    """Lose the record of disabled tools, as if its bucket had been deleted."""
    switch = Switch(PROJECT, "jina_search", "a reason", "an operator", "2030-01-01T00:00:00Z")
    async with connected(build_bootstrap(Settings(postgres=DSN, nats=bus(strict)), {}).bus) as client:
        monitor = SwitchMonitor(client, lambda _: None)
        await change_switches(world.caller.client, lambda switches: switches.with_disabled(switch))
        await monitor.load()
        await world.caller.client.jetstream().purge_stream(f"KV_{BUCKET}", subject=f"$KV.{BUCKET}.{SWITCHES_KEY}")
        await monitor.load()
        assert (await load_switches(client)).switches.all == [switch]


async def _save_floor(strict: NatsServer, durable: Durable) -> None:
    settings = Settings(postgres=DSN, nats=bus(strict))
    floor = AckFloor(durable.stream, durable.stream_created, FILTER, 1)
    async with connected(build_bootstrap(settings, {}).bus) as client:
        await shared_bucket().open(client.jetstream())
        await save_ack_floor(client, durable.name, floor)
        await save_ack_floor(client, durable.name, replace(floor, sequence=2))
        assert await load_ack_floor(client, durable.name, floor) == 2


REFUSED = [
    "cg.v1r4.p.c.cmd.tool.jina.search",
    "cg.v1r4.p.c.cmd.tool.other.x",
    "cg.v1r4.p.c.cmd.agent.w.stop",
    "cg.v1r4.p.c.cmd.sys.w.wakeup",
    "cg.v1r4.p.c.evt.agent.w.wakeup",
    "cg.v1r3.p.c.cmd.agent.w.wakeup",
    "anything",
    "_INBOX.somebody.1",
    "openapi_tool.other",
    "$KV.openapi_tool.other",
    "$KV.openapi_tool_leases.other",
    "$KV.another.session_key",
    "$SYS.REQ.SERVER.PING",
    "$JS.API.INFO",
    "$JS.API.STREAM.LIST",
    *(
        f"$JS.API.STREAM.{action}.{stream}"
        for action in ("DELETE", "PURGE", "UPDATE", "MSG.DELETE", "SNAPSHOT", "LEADER.STEPDOWN")
        for stream in (STREAM, "openapi_tool_dead_letters", "KV_openapi_tool")
    ),
    "$JS.API.STREAM.CREATE.another",
    "$JS.API.STREAM.INFO.another",
    f"$JS.API.STREAM.MSG.GET.{STREAM}",
    f"$JS.API.DIRECT.GET.{STREAM}",
    f"$JS.API.CONSUMER.DURABLE.CREATE.{STREAM}.{DURABLE}",
    f"$JS.API.CONSUMER.CREATE.{STREAM}",
    f"$JS.API.CONSUMER.CREATE.{STREAM}.{DURABLE}",
    f"$JS.API.CONSUMER.CREATE.{STREAM}.another.{FILTER}",
    f"$JS.API.CONSUMER.CREATE.{STREAM}.{DURABLE}.cg.v1r4.>",
    f"$JS.API.CONSUMER.DELETE.{STREAM}.{DURABLE}",
    f"$JS.API.CONSUMER.INFO.{STREAM}.another",
    f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.another",
    f"$JS.ACK.{STREAM}.another.1.1.1.1.0",
    "$JS.ACK.another.consumer.1.1.1.1.0",
]
REFUSED_SUBSCRIPTIONS = [
    ">",
    "cg.v1r4.>",
    "cg.v1r4.p.c.cmd.tool.jina.>",
    "_INBOX.>",
    "_INBOX.somebody.*",
    "$JS.EVENT.>",
    "$KV.>",
]


async def denials(strict: NatsServer, publish: Sequence[str] = (), subscribe: Sequence[str] = ()) -> list[str]:
    """Return the errors of the server for these subjects, which it refuses to the executor's user."""
    errors: list[str] = []

    async def record(error: Exception) -> None:
        errors.append(str(error))

    client = await nats.connect(strict.url, error_cb=record, inbox_prefix="_INBOX.openapi_tool", **EXECUTOR)
    for subject in publish:
        await client.publish(subject, b"{}")
    for subject in subscribe:
        await client.subscribe(subject)
    await client.flush()
    await until(lambda: len(errors) >= len(publish) + len(subscribe))
    await client.close()
    return errors


@requirement("privilege.subjects")
async def test_other_subjects_are_refused(strict: NatsServer) -> None:
    errors = await denials(strict, REFUSED, REFUSED_SUBSCRIPTIONS)
    assert errors == [
        *(f'nats: permissions violation for publish to "{subject.lower()}"' for subject in REFUSED),
        *(f'nats: permissions violation for subscription to "{subject.lower()}"' for subject in REFUSED_SUBSCRIPTIONS),
    ]


@pytest.mark.parametrize(
    "wanted", [{"filter_subject": "cg.v1r4.>"}, {"filter_subjects": [FILTER, "cg.v1r4.*.*.cmd.agent.>"]}, {}]
)
@requirement("privilege.subjects")
async def test_the_durable_cannot_be_given_a_wider_filter(
    strict: NatsServer, strict_world: World, wanted: Mapping[str, Any]
) -> None:
    await strict_world.caller.make_stream()
    request = {"stream_name": STREAM, "config": {"name": DURABLE, "durable_name": DURABLE, "ack_policy": "explicit"}}
    request["config"] |= wanted  # type: ignore[operator]
    client = await nats.connect(strict.url, inbox_prefix="_INBOX.openapi_tool", **EXECUTOR)
    answer = json.loads((await client.request(CREATE, json.dumps(request).encode(), timeout=5)).data)
    await client.close()
    assert "error" in answer


def permissions_without(subject: str) -> str:
    """Return the printed permissions with one subject replaced, because an empty list allows everything."""
    whole = printed("--format", "server-config")
    assert whole.count(f"{json.dumps(subject)}\n") == 1
    return whole.replace(json.dumps(subject), '"of_no_use"')


async def _start(client: BusClient, settings: Settings) -> None:
    """Send the requests to NATS with which `serve` starts."""
    await shared_session_key(client)
    await ensure_durable(client, build_bootstrap(settings, {}).durable)
    await Leases(client, 1.0).take(replace(delivery(), stream=STREAM))


START_SUBJECTS = [
    "$JS.API.STREAM.NAMES",
    f"$JS.API.STREAM.CREATE.{STREAM}",
    f"$JS.API.CONSUMER.INFO.{STREAM}.{DURABLE}",
    CREATE,
    "$JS.API.STREAM.INFO.KV_openapi_tool",
    "$JS.API.STREAM.CREATE.KV_openapi_tool",
    "$KV.openapi_tool.session_key",
    "$JS.API.STREAM.INFO.KV_openapi_tool_leases",
    "$KV.openapi_tool_leases.command.*.*",
    "_INBOX.openapi_tool.>",
]


@pytest.mark.parametrize("subject", START_SUBJECTS)
@requirement("privilege.subjects")
async def test_a_denied_request_fails_at_once_and_names_its_subject(
    stack: EmbeddedStack, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    with server(stack, config(permissions_without(subject))) as nats_server:
        settings = Settings(postgres=DSN, nats=bus(nats_server))
        async with asyncio.timeout(3), connected(build_bootstrap(settings, {}).bus) as client:
            with pytest.raises((Denied, Unavailable)) as refused:
                await _start(client, settings)
            with pytest.raises((Denied, Unavailable)):  # and again
                await _start(client, settings)
    exact = subject.replace("command.*.*", f"command.{STREAM}.1")
    assert f"permission for {exact} is denied; grant what `openapi-tool nats permissions` lists" in str(refused.value)
    record = await logged(caplog, "nats.denied")
    assert record.levelno == logging.ERROR
    assert f"{exact} is denied; " in record.getMessage()


@pytest.mark.parametrize(
    "subject",
    [
        "openapi_tool.dead_letter.*",
        "$JS.API.STREAM.INFO.openapi_tool_dead_letters",
        "$JS.API.STREAM.CREATE.openapi_tool_dead_letters",
    ],
)
@requirement("privilege.subjects", "deadletters")
async def test_a_denied_dead_letter_is_discarded_and_its_subject_logged(
    stack: EmbeddedStack, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    with server(stack, config(permissions_without(subject))) as nats_server:
        settings = Settings(postgres=DSN, nats=bus(nats_server))
        async with asyncio.timeout(WAIT_S), connected(build_bootstrap(settings, {}).bus) as client:
            await DeadLetters(client, Redactor()).record(delivery(), "reason", "message")
    record = await logged(caplog, "dead_letters.discarded")
    assert getattr(record, "cause", "") == "denied"
    assert f"{subject.replace('*', 'proj')} is denied" in record.getMessage()


@requirement("privilege.subjects", "nats.storage")
async def test_an_older_permission_set_creates_one_replica_with_a_warning(
    stack: EmbeddedStack, caplog: pytest.LogCaptureFixture
) -> None:
    with server(stack, config(permissions_without(f"$JS.API.STREAM.INFO.{STREAM}"))) as nats_server:
        settings = Settings(postgres=DSN, nats=bus(nats_server))
        async with asyncio.timeout(WAIT_S), connected(build_bootstrap(settings, {}).bus) as client:
            await ensure_durable(client, build_bootstrap(settings, {}).durable)
            assert await replica_count(client, build_bootstrap(settings, {}).durable) == 1
    record = await logged(caplog, "replicas.unknown")
    assert f"$JS.API.STREAM.INFO.{STREAM} is denied" in record.getMessage()


@requirement("privilege.subjects")
async def test_a_denied_start_is_logged(
    stack: EmbeddedStack, caller: Caller, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    with server(stack, config(permissions_without(CREATE))) as nats_server:
        async with kernel_of(nats_server, stack.postgres.dsn(database)) as kernel:
            world = World(stack, kernel, database)
            async with world.executor(nats=bus(nats_server)):
                lost = await logged(caplog, "consumer.lost")
    assert f"{CREATE} is denied" in getattr(lost, "error", "")


@requirement("privilege.subjects")
async def test_a_denied_pull_is_logged(
    stack: EmbeddedStack, caller: Caller, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A pull request has no reply, so only the log shows the reason."""
    pull = f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{DURABLE}"
    with server(stack, config(permissions_without(pull))) as nats_server:
        async with kernel_of(nats_server, stack.postgres.dsn(database)) as kernel:
            world = World(stack, kernel, database)
            async with world.executor(nats=bus(nats_server)):
                denied = await logged(caplog, "nats.denied")
    assert f"{pull.lower()} is denied" in denied.getMessage()


async def run(strict: NatsServer, world: World, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[Any]:
    """Run `deadletters` with an operator's login."""
    monkeypatch.setenv("PG_DSN", world.dsn)
    monkeypatch.setenv("NATS_SERVERS", strict.url)
    monkeypatch.setenv("OPENAPI_TOOL__NATS__USER", OPERATOR["user"])
    monkeypatch.setenv("OPENAPI_TOOL__NATS__PASSWORD", OPERATOR["password"])
    result = await asyncio.to_thread(CliRunner().invoke, app, ["deadletters", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@requirement("privilege.subjects")
async def test_dead_letter_commands_need_exactly_the_printed_permissions(
    strict: NatsServer, strict_world: World, published: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = strict_world
    await world.caller.make_stream()
    call = await world.place()
    async with world.executor(nats=bus(strict)):
        await world.send(call, headers={"CG-Turn-Id": "an-old-turn"})
        await world.send(call, headers={"CG-Turn-Id": "an-old-turn"}, data=b"x" * 70_000)
    published.clear()
    listed = await run(strict, world, monkeypatch, "list", "--abandoned")
    ids = [letter["id"] for letter in listed]
    await run(strict, world, monkeypatch, "show", ids[0])
    sent = await run(strict, world, monkeypatch, "replay", *ids, "--yes")
    assert [letter["sent"] for letter in sent] == [True, True]
    assert await run(strict, world, monkeypatch, "list") == []
    patterns = needed("--for", "deadletters")
    assert [pattern for pattern in patterns if not any(covers(pattern, subject) for subject in published)] == []


@requirement("privilege.subjects")
def test_printed_permissions_follow_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAPI_TOOL__PROTOCOL__PROJECT", "one")
    monkeypatch.setenv("OPENAPI_TOOL__PROTOCOL__TARGET", "other")
    monkeypatch.setenv("OPENAPI_TOOL__NATS__DURABLE", "mine")
    monkeypatch.setenv("OPENAPI_TOOL__SESSION__KEY", "sixteen bytes at least")
    lines = printed("--stream", "commands").splitlines()
    assert "publish   $JS.API.CONSUMER.CREATE.commands.mine.cg.v1r4.one.*.cmd.tool.other.>" in lines
    assert "publish   cg.v1r4.one.*.cmd.agent.*.wakeup" in lines
    assert not [line for line in lines if "session_key" in line or STREAM in line]
    refused = CliRunner().invoke(app, ["nats", "permissions", "--stream", "any.>"])
    assert (refused.exit_code, refused.stdout) == (2, "")


@requirement("privilege.subjects")
def test_two_formats_at_once_are_refused() -> None:
    for form in ("accounts", "server-config", "text"):
        refused = CliRunner().invoke(app, ["nats", "permissions", "--json", "--format", form])
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert f"--json is --format json, and cannot be given with --format {form}" in refused.stderr
    assert json.loads(printed("--json", "--format", "json"))["publish"]


@requirement("deadletters", "privilege.subjects")
async def test_a_missing_permission_or_wrong_login_is_reported_with_the_remedy(
    stack: EmbeddedStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PG_DSN", "postgresql://127.0.0.1/unused")
    monkeypatch.setenv("OPENAPI_TOOL__NATS__USER", "operator")
    nothing = 'permissions: { publish: { allow: ["of_no_use"] }, subscribe: { allow: ["_INBOX.openapi_tool.>"] } }'
    with server(stack, config(nothing, nothing)) as nats_server:
        monkeypatch.setenv("NATS_SERVERS", nats_server.url)
        monkeypatch.setenv("OPENAPI_TOOL__NATS__PASSWORD", "operator-word")
        denied = await asyncio.to_thread(CliRunner().invoke, app, ["deadletters", "list"])
        monkeypatch.setenv("OPENAPI_TOOL__NATS__PASSWORD", "a-wrong-word")
        unknown = await asyncio.to_thread(CliRunner().invoke, app, ["deadletters", "list"])
    assert denied.exit_code == unknown.exit_code == 2
    [line] = denied.stderr.splitlines()  # once, and without where to look in an outage
    assert line.startswith("openapi-tool: NATS at 127.0.0.1:")
    remedy = "grant what `openapi-tool nats permissions --for deadletters` lists to the NATS user"
    assert line.endswith(f": permission for _INBOX.openapi_tool_deadletters.> is denied; {remedy}")
    line, _ = unknown.stderr.splitlines()  # and where to look
    assert "Authorization Violation" in line
    assert "check nats.user" in line
    assert "a-wrong-word" not in line


@requirement("privilege.subjects", "cli.check")
async def test_check_names_a_denied_bucket(stack: EmbeddedStack, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = f"$JS.API.STREAM.INFO.KV_{LIMITS.bucket.name}"
    monkeypatch.setenv("PG_DSN", "postgresql://127.0.0.1:1/unused")
    monkeypatch.setenv("OPENAPI_TOOL__NATS__USER", "operator")
    monkeypatch.setenv("OPENAPI_TOOL__NATS__PASSWORD", "operator-word")
    for denied, says in (("of_no_use", ""), (subject, f"permission for {subject} is denied; grant what")):
        operator = f'permissions: {{ publish: {{ deny: ["{denied}"] }} }}'
        with server(stack, config("", operator)) as nats_server:
            monkeypatch.setenv("NATS_SERVERS", nats_server.url)
            found = await asyncio.to_thread(CliRunner().invoke, app, ["check", "--json"])
        problem = json.loads(found.stdout)["checks"]["nats"]
        assert problem.startswith(says)
        assert bool(problem) == bool(says)


@requirement("privilege.subjects", "cli.check")
async def test_check_names_a_denied_inbox(stack: EmbeddedStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor with the rights of another prefix would get no reply."""
    monkeypatch.setenv("PG_DSN", "postgresql://127.0.0.1:1/unused")
    monkeypatch.setenv("OPENAPI_TOOL__NATS__USER", "executor")
    monkeypatch.setenv("OPENAPI_TOOL__NATS__PASSWORD", "executor-word")
    monkeypatch.setenv("OPENAPI_TOOL__NATS__INBOX_PREFIX", "_INBOX_openapi_tool")
    with server(stack, config('permissions: { subscribe: { allow: ["_INBOX.>"] } }')) as nats_server:
        monkeypatch.setenv("NATS_SERVERS", nats_server.url)
        found = await asyncio.to_thread(CliRunner().invoke, app, ["check", "--json"])
    problem = json.loads(found.stdout)["checks"]["nats"]
    assert "permission for _INBOX_openapi_tool.> is denied; grant what `openapi-tool nats permissions` lists" in problem


@requirement("privilege.subjects", "cli.inspect", "cli.top")
async def test_cli_commands_need_only_the_permissions_printed_for_them(
    stack: EmbeddedStack, caller: Caller, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del caller  # the fixture has created project and agent
    executor = printed("--format", "server-config")
    for command in ("inspect", "top", "switches"):
        operator = printed("--format", "server-config", "--for", command)
        with server(stack, config(executor, operator)) as strict:
            async with (
                kernel_of(strict, stack.postgres.dsn(database)) as kernel,
                open_world(stack, kernel, database) as world,
                world.executor(nats=bus(strict)) as consumer,
            ):
                await until(lambda: consumer.durable)
                call = await world.place()
                await world.send(call)
                monkeypatch.setenv("PG_DSN", world.dsn)
                monkeypatch.setenv("NATS_SERVERS", strict.url)
                monkeypatch.setenv("OPENAPI_TOOL__NATS__USER", "operator")
                monkeypatch.setenv("OPENAPI_TOOL__NATS__PASSWORD", "operator-word")
                words = {
                    "inspect": ["inspect", call.tool_call_id, "--project", call.project_id],
                    "top": ["top", "--json"],
                    "switches": ["tools", "disable", "--project", call.project_id, "--reason", "x"],
                }
                done = await asyncio.to_thread(CliRunner().invoke, app, words[command])
                monkeypatch.delenv("OPENAPI_TOOL__NATS__USER")
                monkeypatch.delenv("OPENAPI_TOOL__NATS__PASSWORD")
        assert done.exit_code == 0, done.output
        assert "is denied" not in done.output


@requirement("privilege.subjects", "cli.call")
async def test_call_needs_no_right_to_the_executors_inbox(
    stack: EmbeddedStack, caller: Caller, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It logs in as the kernel, to which docs/least-privilege.md denies that inbox."""
    del caller  # the fixture has created project and agent
    denied = 'deny: ["_INBOX.openapi_tool.>"]'
    kernels = f"permissions: {{ subscribe: {{ {denied} }}, publish: {{ {denied} }} }}"
    with server(stack, config(printed("--format", "server-config"), kernels)) as strict:
        async with (
            kernel_of(strict, stack.postgres.dsn(database)) as kernel,
            open_world(stack, kernel, database) as world,
            world.executor(nats=bus(strict)) as consumer,
        ):
            await until(lambda: consumer.durable)
            monkeypatch.setenv("PG_DSN", world.dsn)
            monkeypatch.setenv("NATS_SERVERS", strict.url)
            monkeypatch.setenv("OPENAPI_TOOL__NATS__USER", "operator")
            monkeypatch.setenv("OPENAPI_TOOL__NATS__PASSWORD", "operator-word")
            words = ["call", "jina_search", "--args", '{"query": "hello world", "count": 3}', "--yes"]
            words += ["--project", PROJECT, "--agent", AGENT]
            done = await asyncio.to_thread(CliRunner().invoke, app, words)
    assert done.exit_code == 0, done.output
    assert "is denied" not in done.output


@requirement("privilege.subjects", "handover")
async def test_the_durable_is_handed_over_with_the_printed_permissions(
    stack: EmbeddedStack, caller: Caller, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del caller  # the fixture has created project and agent
    operator = printed("--format", "server-config", "--for", "durable")
    with server(stack, config(printed("--format", "server-config"), operator)) as strict:
        async with (
            kernel_of(strict, stack.postgres.dsn(database)) as kernel,
            open_world(stack, kernel, database) as world,
        ):
            async with world.executor(nats=bus(strict)) as consumer:
                await until(lambda: consumer.durable)
                await world.send(await world.place())
            monkeypatch.setenv("NATS_SERVERS", strict.url)
            monkeypatch.setenv("OPENAPI_TOOL__NATS__USER", "operator")
            monkeypatch.setenv("OPENAPI_TOOL__NATS__PASSWORD", "operator-word")
            done = await asyncio.to_thread(CliRunner().invoke, app, ["nats", "durable", "--restore"])
    assert (done.exit_code, done.stderr) == (0, "")
    assert "max_deliver: 3 (was -1)" in done.stdout


@requirement("privilege.subjects", "cli.top")
async def test_without_statistics_calls_are_answered_and_top_names_the_permission(
    stack: EmbeddedStack,
    caller: Caller,
    database: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The users of executor or `top` may have permissions from before the subject existed."""
    del caller  # the fixture has created project and agent
    everything, no_stats = 'permissions: { publish: ">" }', '"openapi_tool.stats"'
    no_subscribe = f"permissions: {{ subscribe: {{ deny: [{no_stats}] }} }}"
    no_publish = f"permissions: {{ publish: {{ deny: [{no_stats}] }} }}"
    monkeypatch.setenv("OPENAPI_TOOL__NATS__USER", "operator")
    monkeypatch.setenv("OPENAPI_TOOL__NATS__PASSWORD", "operator-word")
    monkeypatch.setenv("PG_DSN", "postgresql://127.0.0.1/unused")
    for executor, operator in ((no_subscribe, everything), (everything, no_publish)):
        with server(stack, config(executor, operator)) as strict:
            monkeypatch.setenv("NATS_SERVERS", strict.url)
            async with (
                kernel_of(strict, stack.postgres.dsn(database)) as kernel,
                open_world(stack, kernel, database) as world,
                world.executor(nats=bus(strict)) as consumer,
            ):
                await until(partial(getattr, consumer, "durable"))
                outcome = await world.send(await world.place())
                assert outcome.content["status"] == "success"
                done = await asyncio.to_thread(CliRunner().invoke, app, ["top", "--once"])
        assert done.exit_code == 1, done.output
        assert "none runs, none has a connection to NATS, or its user lacks permission" in done.stderr
        record = await logged(caplog, "nats.denied")
        assert "openapi_tool.stats" in record.getMessage() + str(vars(record))
        caplog.clear()
