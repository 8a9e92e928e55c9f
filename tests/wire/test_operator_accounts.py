"""Operators in accounts of their own, exactly as printed: no answer is published on a subject that they choose."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from typer.testing import CliRunner

from openapi_tool.cli import app
from openapi_tool.kernel.jetstream import dead_letters, leases
from openapi_tool.kernel.jetstream.operator_accounts import OPERATOR_DOMAIN, OTHER_USERS
from openapi_tool.kernel.jetstream.parked_records import PARKED_BUCKET
from openapi_tool.local.caller import STREAM, Caller
from openapi_tool.local.servers import NatsServer
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.nats_client.client import routed
from openapi_tool.nats_client.options import INBOX
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.nats_records.record_store import LIMITS
from openapi_tool.nats_records.shared_bucket import BUCKET
from openapi_tool.nats_records.switches import SWITCHES_KEY
from tests.requirements import requirement
from tests.waiting import until
from tests.wire.conftest import DURABLE, open_world
from tests.wire.test_bus import server
from tests.wire.test_least_privilege import COMMANDS, MAY_CHANGE, OPERATORS, STALE, Scene, permissions, run
from tests.wire.test_permissions import kernel_of, printed

PASSWORDS = "".join(
    f'OPENAPI_TOOL_{user.upper()}_PASSWORD: "{user}-word"\n' for user in (NatsUser.EXECUTOR, *OPERATORS)
)
KERNEL_USER = "{ user: kernel, password: kernel-word }"
VICTIM = "VICTIM"

REPLY_SUBJECTS = (
    *(f"$JS.API.STREAM.{verb}.{VICTIM}" for verb in ("INFO", "PURGE", "UPDATE", "MSG.DELETE", "SNAPSHOT", "DELETE")),
    *(f"$JS.API.STREAM.{verb}.new" for verb in ("CREATE", "RESTORE")),
    *(f"$JS.API.CONSUMER.{verb}.{VICTIM}.D" for verb in ("INFO", "PAUSE", "RESET", "MSG.NEXT", "DELETE")),
    *(f"$JS.API.CONSUMER.{verb}.{VICTIM}.spy" for verb in ("CREATE", "DURABLE.CREATE")),
    f"$JS.API.STREAM.PURGE.{STREAM}",
    f"$JS.API.CONSUMER.DELETE.{STREAM}.{DURABLE}",
    *(f"$KV.{BUCKET}.{key}" for key in ("session_key", SWITCHES_KEY, f"floor.{DURABLE}")),
    f"$KV.{leases.BUCKET}.command.x.1",
    f"$KV.{PARKED_BUCKET}.result.x",
    f"$KV.{LIMITS.bucket.name}.a.b.c",
    "openapi_tool.dead_letter.p",
    "openapi_tool.limits.x",
    "openapi_tool.budgets.x",
    "cg.v1r4.p.c.cmd.tool.jina.search",
    "cg.v1r4.p.c.cmd.agent.w.wakeup",
    f"$JS.ACK.{STREAM}.{DURABLE}.1.1.1.1.0",
    f"{INBOX}.x",
    "victim.x",
)
"""Every kind of subject on which a message of the main account is executed as a request, stored, or read by others."""

PUBLISHED = {NatsUser.SWITCHES: {f"$KV.{BUCKET}.{SWITCHES_KEY}"}}
"""Those of them that a user may publish to anyway."""


@pytest.fixture(scope="module")
def apart(stack: EmbeddedStack) -> Iterator[NatsServer]:
    """Server with exactly the printed accounts; the kernel's user is where the comment says."""
    accounts = printed("--format", "accounts").replace(OTHER_USERS, KERNEL_USER)
    with server(stack, PASSWORDS + accounts) as nats_server:
        yield nats_server


@pytest.fixture(scope="module")
def together(stack: EmbeddedStack) -> Iterator[NatsServer]:
    """Server with the same users in one account."""
    users = [
        f"  {{ user: {user}, password: {user}-word, {printed('--format', 'server-config', '--for', user)} }}\n"
        for user in NatsUser
    ]
    with server(stack, f"authorization {{ users: [\n{KERNEL_USER}\n{''.join(users)}] }}\n") as nats_server:
        yield nats_server


@asynccontextmanager
async def scene_on(nats_server: NatsServer, stack: EmbeddedStack, database: str) -> AsyncIterator[Scene]:
    """Yield a kernel after an executor has run, with a stream of another service and its consumer."""
    dsn = stack.postgres.dsn(database)
    async with kernel_of(nats_server, dsn) as kernel, open_world(stack, kernel, database) as world:
        executor = {"servers": nats_server.url, "user": "executor", "password": "executor-word"}
        call = await world.place()
        async with world.executor(nats=executor, budgets={"project_day_requests": 600}) as consumer:
            await until(lambda: consumer.durable)
            await world.send(call)
            await world.send(await world.place(), headers=STALE)
        jetstream = kernel.client.jetstream()
        for bucket in (leases.BUCKET, PARKED_BUCKET, LIMITS.bucket.name):
            await jetstream.create_key_value(bucket=bucket)
        await jetstream.add_stream(name=VICTIM, subjects=["victim.>"])
        await jetstream.publish("victim.1", b"of another service")
        await jetstream.add_consumer(VICTIM, durable_name="D", ack_policy="explicit")
        yield Scene(nats_server, world, call)


@asynccontextmanager
async def login(nats_server: NatsServer, user: NatsUser) -> AsyncIterator[Client]:
    async def ignore(error: Exception) -> None:
        """Denials are no failure here."""

    prefix = user.inbox_prefix(INBOX)
    client = await nats.connect(
        nats_server.url, user=user, password=f"{user}-word", inbox_prefix=prefix, error_cb=ignore
    )
    yield client
    await client.close()


def requests(user: NatsUser, domain: str | None) -> list[tuple[str, bytes]]:
    """Return what a user may publish, with bodies that the server answers."""
    bodies = (b"", b'{"seq": 1}', b"+WPI", b"-NAK", b'+NXT {"batch": 1}')
    subjects = [subject.replace("*", "x").replace(">", "1.99.99.1.0") for subject in permissions(user)["publish"]]
    return [(routed(subject, domain), body) for subject in subjects for body in bodies]


async def chosen_replies(scene: Scene, user: NatsUser, domain: str | None) -> list[str]:
    """Send each request of a user with each reply subject; return those on which the main account got a message."""
    seen: list[str] = []

    async def keep(message: Msg) -> None:
        if message.subject in REPLY_SUBJECTS:
            seen.append(message.subject)

    kernel = scene.world.caller.client
    everything = await kernel.subscribe(">", cb=keep)
    await kernel.flush()
    async with login(scene.server, user) as client:
        for reply in REPLY_SUBJECTS:
            for subject, body in requests(user, domain):
                await client.publish(subject, body, reply)
        await client.flush()
        await client.flush()
        await kernel.jetstream().account_info()  # answered after what was asked before
    await asyncio.sleep(0.5)
    await everything.unsubscribe()
    return seen


@pytest.mark.parametrize("user", OPERATORS)
@requirement("privilege.accounts")
async def test_no_answer_to_an_operator_is_a_request_or_a_record_in_the_main_account(
    apart: NatsServer, stack: EmbeddedStack, caller: Caller, database: str, user: NatsUser
) -> None:
    del caller  # the fixture has created project and agent
    async with scene_on(apart, stack, database) as scene:
        before, values = await scene.snapshot(), await scene.values()
        seen = await chosen_replies(scene, user, OPERATOR_DOMAIN)
        assert set(seen) <= PUBLISHED.get(user, set())
        after = await scene.snapshot()
        assert after.keys() == before.keys()
        assert {name for name in before if before[name] != after[name]} <= MAY_CHANGE.get(user, set())
        assert after[VICTIM] == before[VICTIM]
        assert await scene.values() == values


@pytest.mark.parametrize("user", OPERATORS)
@requirement("privilege.accounts")
async def test_the_document_names_the_users_that_are_administrators_in_a_shared_account(
    together: NatsServer, stack: EmbeddedStack, caller: Caller, database: str, user: NatsUser
) -> None:
    """Shows also that the test above can fail: `top` alone may send nothing that NATS answers."""
    del caller
    async with scene_on(together, stack, database) as scene:
        seen = await chosen_replies(scene, user, None)
        assert bool(seen) is (user is not NatsUser.TOP)


@pytest.mark.parametrize("user", OPERATORS)
@requirement("privilege.accounts")
async def test_the_commands_of_an_operator_work_from_its_own_account(
    apart: NatsServer, stack: EmbeddedStack, caller: Caller, database: str, user: NatsUser
) -> None:
    del caller
    async with scene_on(apart, stack, database) as scene:
        letters = (await scene.snapshot())[dead_letters.STREAM][1]
        if user in (NatsUser.TOP, NatsUser.INSPECT):
            executor = {"servers": apart.url, "user": "executor", "password": "executor-word"}
            async with scene.world.executor(nats=executor) as consumer:
                await until(lambda: consumer.durable)
                for words in COMMANDS[user]:
                    printed_by = await run(scene, user, words, domain=OPERATOR_DOMAIN)
                    if words[0] == "top":
                        assert len(json.loads(printed_by)["replicas"]) == 1
            return
        for words in COMMANDS[user]:
            await run(scene, user, words, domain=OPERATOR_DOMAIN)
        if user is NatsUser.DEADLETTERS:
            assert (await scene.snapshot())[dead_letters.STREAM][1] == letters - 1


@requirement("privilege.accounts")
def test_the_output_for_a_shared_account_says_what_such_a_login_may_do() -> None:
    for user in NatsUser:
        shown = CliRunner().invoke(app, ["nats", "permissions", "--for", user])
        assert ("administrator of the account's JetStream" in shown.stderr) is (user is not NatsUser.TOP)
    own = CliRunner().invoke(app, ["nats", "permissions", "--format", "accounts", "--for", "top"])
    assert "administrator" not in own.stderr
    assert "OPENAPI_TOOL_SWITCHES" not in own.stdout
    assert "nats.jetstream_domain = 'openapi_tool'" in own.stderr
