"""What each NATS user can do beyond its own commands, tried on a real server with exactly the printed permissions."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from typer.testing import CliRunner

from openapi_tool.cli import app
from openapi_tool.kernel.jetstream import dead_letters, leases
from openapi_tool.kernel.jetstream.parked_records import PARKED_BUCKET
from openapi_tool.local.caller import STREAM, Caller
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.local.servers import NatsServer
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.nats_client.client import routed
from openapi_tool.nats_client.options import INBOX
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.nats_records.record_store import LIMITS
from openapi_tool.nats_records.replica_statistics import gather_stats
from openapi_tool.nats_records.session_key import SESSION_KEY
from openapi_tool.nats_records.shared_bucket import BUCKET, RESTRICT
from openapi_tool.nats_records.shared_bucket import STREAM as SHARED
from openapi_tool.nats_records.switches import SWITCHES_KEY
from tests.requirements import requirement
from tests.waiting import WAIT_S, until
from tests.wire.conftest import DURABLE, World, open_world
from tests.wire.test_bus import server
from tests.wire.test_permissions import covers, kernel_of, printed

FILTER = "cg.v1r4.*.*.cmd.tool.jina.>"
OPERATORS = [user for user in NatsUser if user.is_operator]
DOCUMENT = Path(__file__).parents[2] / "docs" / "least-privilege.md"
STALE = {"CG-Turn-Id": "an-old-turn"}
VICTIMS = 20

STREAM_VERBS = (
    *("INFO", "CREATE", "UPDATE", "DELETE", "PURGE", "MSG.GET", "MSG.DELETE", "SNAPSHOT", "RESTORE"),
    *("LEADER.STEPDOWN", "PEER.REMOVE", "PEER.EVACUATE", "CANCEL_MOVE"),
)
CONSUMER_VERBS = (
    *("CREATE", "DURABLE.CREATE", "INFO", "DELETE", "MSG.NEXT", "PAUSE", "RESET", "UNPIN", "LEADER.STEPDOWN"),
    *("PEER.REMOVE", "PEER.EVACUATE"),
)
FILTERS = (FILTER, "cg.v1r4.p.c.cmd.tool.jina.search", "cg.v1r4.*.*.cmd.agent.*.wakeup", "cg.v1r4.>", ">")
OTHER_SUBJECTS = (
    "$JS.API.INFO",
    "$JS.API.STREAM.LIST",
    "$JS.API.STREAM.NAMES",
    "$JS.API.ACCOUNT.PURGE.x",
    "$JS.API.ACCOUNT.STREAM.MOVE.x.x",
    "$JS.API.ACCOUNT.STREAM.CANCEL_MOVE.x.x",
    "$JS.API.META.LEADER.STEPDOWN",
    "$JS.API.META.RESCUE",
    "$JS.API.SERVER.REMOVE",
    "$JS.API.SERVER.EVACUATE",
    "$JS.domain.API.STREAM.NAMES",
    "$JS.EVENT.ADVISORY.x",
    "$JSC.SI.x.x",
    "$O.files.C.x",
    "$O.files.M.x",
    "$SYS.REQ.SERVER.x.KICK",
    "$SYS.REQ.USER.INFO",
    "cg.v1r4.p.c.cmd.tool.jina.search",
    "cg.v1r4.p.c.cmd.tool.other.x",
    "cg.v1r4.p.c.cmd.agent.w.wakeup",
    "cg.v1r4.p.c.cmd.agent.w.stop",
    "cg.v1r3.p.c.cmd.tool.jina.search",
    "openapi_tool.dead_letter.p",
    "openapi_tool.key_limits.x",
    "openapi_tool.accounts.x",
    "openapi_tool.stats",
    "openapi_tool.stats.x",
    "anything",
)
WIDE = (">", "*.>", "_INBOX.>", "_INBOX.*", "$JS.>", "$JS.EVENT.>", "$KV.>", "cg.>", FILTER, "openapi_tool.>", "$SYS.>")


def permissions(user: NatsUser) -> dict[str, list[str]]:
    found = json.loads(printed("--json", "--for", user))
    return {action: rights["allow"] for action, rights in found.items()}


@pytest.fixture(scope="module")
def least(stack: EmbeddedStack) -> Iterator[NatsServer]:
    """Server whose users have exactly the printed permissions."""
    users = [
        f"  {{ user: {user}, password: {user}-word, {printed('--format', 'server-config', '--for', user)} }}\n"
        for user in NatsUser
    ]
    kernel = "  { user: kernel, password: kernel-word }\n"
    with server(stack, f"authorization {{ users: [\n{kernel}{''.join(users)}] }}\n") as nats_server:
        yield nats_server


@dataclass(frozen=True, slots=True)
class Scene:
    """Kernel after an executor has run: it has answered a call, stored a dead letter, and left its streams behind."""

    server: NatsServer
    world: World
    answered: PlacedCall

    async def snapshot(self) -> dict[str, Any]:
        """Return by stream what it holds and how it and its consumers are configured."""
        jetstream, found = self.world.caller.client.jetstream(), {}
        for info in await jetstream.streams_info():
            name = str(info.config.name)
            consumers = [
                (asdict(each.config), each.delivered, each.ack_floor, each.num_pending, each.num_waiting)
                for each in await jetstream.consumers_info(name)
            ]
            found[name] = asdict(info.config), info.state.messages, info.state.last_seq, consumers
        return found

    async def values(self) -> dict[str, bytes | None]:
        """Return the keys of the bucket with the session key, but for the switches."""
        jetstream = self.world.caller.client.jetstream()
        bucket = await jetstream.key_value(BUCKET)
        subjects = (await jetstream.stream_info(SHARED, subjects_filter=">")).state.subjects or {}
        keys = [subject.removeprefix(f"$KV.{BUCKET}.") for subject in subjects]
        return {key: (await bucket.get(key)).value for key in keys if key != SWITCHES_KEY}


@pytest.fixture
async def scene(least: NatsServer, stack: EmbeddedStack, caller: Caller, database: str) -> AsyncIterator[Scene]:
    del caller  # the fixture has created project and agent
    async with kernel_of(least, stack.postgres.dsn(database)) as kernel, open_world(stack, kernel, database) as world:
        executor = {"servers": least.url, "user": "executor", "password": "executor-word"}
        call = await world.place()
        async with world.executor(nats=executor, budgets={"project_day_requests": 600}) as consumer:
            await until(lambda: consumer.durable)
            await world.send(call)
            await world.send(await world.place(), headers=STALE)
        for bucket in (leases.BUCKET, PARKED_BUCKET, LIMITS.bucket.name):  # this executor needed none of them
            await kernel.client.jetstream().create_key_value(bucket=bucket)
        yield Scene(least, world, call)


@asynccontextmanager
async def login(least: NatsServer, user: NatsUser) -> AsyncIterator[tuple[Client, list[str]]]:
    """Yield a client of this user, and the subjects that the server denies it, which nats-py reports in lower case."""
    denied: list[str] = []

    async def record(error: Exception) -> None:
        denied.extend(re.findall(r'permissions violation for \w+ to "([^"]*)"', str(error).lower()))

    client = await nats.connect(
        least.url, user=user, password=f"{user}-word", inbox_prefix=user.inbox_prefix(INBOX), error_cb=record
    )
    yield client, denied
    await client.close()


async def flush(client: Client) -> None:
    """Wait until the server has handled everything that was sent: nats-py's PING overtakes pending messages."""
    await client.flush()
    await client.flush()


def attempts(streams: list[str], keys: list[str]) -> list[str]:
    """Return every subject to try: the JetStream API on all streams and consumers, all keys, and all printed rights."""
    api = "$JS.API"
    subjects = [f"{api}.STREAM.{verb}.{stream}" for verb, stream in product(STREAM_VERBS, streams)]
    for stream in streams:
        subjects += [
            f"{api}.{verb}.{stream}" for verb in ("DIRECT.GET", "CONSUMER.CREATE", "CONSUMER.LIST", "CONSUMER.NAMES")
        ]
        subjects += [f"$JS.SNAPSHOT.ACK.{stream}.x", f"$JS.SNAPSHOT.RESTORE.{stream}.x"]
        for consumer in (DURABLE, "another"):
            subjects += [f"{api}.CONSUMER.{verb}.{stream}.{consumer}" for verb in CONSUMER_VERBS]
            subjects += [f"{api}.CONSUMER.CREATE.{stream}.{consumer}.{each}" for each in FILTERS]
            subjects += [f"$JS.ACK.{stream}.{consumer}.1.1.1.1.0", f"$JS.FC.{stream}.{consumer}.x"]
            subjects += [f"$JS.ACK.domain.account.{stream}.{consumer}.1.1.1.1.0.x"]
        if stream.startswith("KV_"):
            bucket = stream.removeprefix("KV_")
            for key in (*keys, "another", "command.x.1", "result.x", "budget.x", "a.b.c"):
                subjects += [f"$KV.{bucket}.{key}", f"{api}.DIRECT.GET.{stream}.$KV.{bucket}.{key}"]
    inboxes = [f"{user.inbox_prefix(INBOX)}.x" for user in NatsUser]
    of_others = [subject for user in NatsUser for subject in permissions(user)["publish"]]
    concrete = [subject.replace("*", "x").replace(">", "x.y") for subject in of_others]
    return list(dict.fromkeys((*subjects, *OTHER_SUBJECTS, *inboxes, "_INBOX.x", *of_others, *concrete)))


async def allowed(scene: Scene, user: NatsUser, subjects: list[str]) -> list[str]:
    """Publish to all subjects; return those that the server does not deny."""
    async with login(scene.server, user) as (client, denied):
        for subject in subjects:
            await client.publish(subject, b"")
        await flush(client)
    assert set(denied) <= {subject.lower() for subject in subjects}
    return [subject for subject in subjects if subject.lower() not in denied]


def documented(user: NatsUser) -> list[str]:
    """Return the rights of a user that docs/least-privilege.md lists as wider than what one run needs."""
    _, _, section = DOCUMENT.read_text().partition("### Rights that are wider than needed")
    rows = [line.split("|") for line in section.partition("\n#")[0].splitlines() if line.startswith(f"| `{user}` |")]
    return [subject for row in rows for subject in re.findall(r"`([^`]+)`", row[2])]


COMMANDS = {
    NatsUser.DEADLETTERS: [["deadletters", "list", "--abandoned"], ["deadletters", "replay", "1", "--yes"]],
    NatsUser.INSPECT: [["inspect", "CALL", "--project", "PROJECT"], ["usage", "--project", "PROJECT"]],
    NatsUser.TOP: [["top", "--json"], ["limits"], ["budgets"]],
    NatsUser.SWITCHES: [
        ["tools", "disable", "--project", "PROJECT", "--reason", "x"],
        ["tools", "disabled"],
        ["tools", "enable", "--project", "PROJECT", "--reason", "x"],
    ],
    NatsUser.DURABLE: [["nats", "durable"], ["nats", "durable", "--restore"]],
}


async def run(scene: Scene, user: NatsUser, words: list[str], domain: str | None = None) -> str:
    """Run a command with the login of its user, as from a shell; return what it prints."""
    of_call = {"CALL": scene.answered.tool_call_id, "PROJECT": scene.answered.project_id}
    environment = {
        "PG_DSN": scene.world.dsn,
        "NATS_SERVERS": scene.server.url,
        "OPENAPI_TOOL__NATS__USER": user,
        "OPENAPI_TOOL__NATS__PASSWORD": f"{user}-word",
        **({"OPENAPI_TOOL__NATS__JETSTREAM_DOMAIN": domain} if domain else {}),
    }
    words = [of_call.get(word, word) for word in words]
    done = await asyncio.to_thread(CliRunner().invoke, app, words, env=environment)
    assert done.exit_code == 0, done.output
    assert "is denied" not in done.output
    return done.stdout


@requirement("privilege.subjects", "privilege.least")
async def test_what_a_user_may_do_is_what_its_commands_do_or_documented(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [*await scene.snapshot(), "KV_another", "OBJ_files"]
    subjects = attempts(streams, list(await scene.values()))
    assert len(subjects) > 400
    assert scene.server.process is not None
    binary = await asyncio.to_thread(Path(f"/proc/{scene.server.process.pid}/exe").read_bytes)
    known = {found.decode() for found in re.findall(rb"\$JS\.API\.[A-Z_.]+[A-Z](?:\.\*)+(?:\.>)?", binary)}
    assert len(known) > 25, "of the requests that this nats-server knows"
    assert [pattern for pattern in known if not any(covers(pattern, subject) for subject in subjects)] == []
    publish, published = Client.publish, list[str]()

    async def record_and_publish(self: Client, subject: str, *message: Any, **options: Any) -> None:
        published.append(subject)
        await publish(self, subject, *message, **options)

    monkeypatch.setattr(Client, "publish", record_and_publish)
    for user in OPERATORS:
        used = set[str]()
        for words in COMMANDS[user]:
            published.clear()
            if user in (NatsUser.TOP, NatsUser.DURABLE):
                await _with_a_replica(scene, user, words, published)
            else:
                await run(scene, user, words)
            used.update(published)
        wider = documented(user)
        succeeded = await allowed(scene, user, subjects)
        assert succeeded, user
        unexplained = [
            subject
            for subject in succeeded
            if subject not in used | set(wider) and not any(covers(pattern, subject) for pattern in wider)
        ]
        assert unexplained == [], user
        unneeded = [pattern for pattern in wider if pattern not in permissions(user)["publish"]]
        assert unneeded == [], "documented, but not printed"


async def _with_a_replica(scene: Scene, user: NatsUser, words: list[str], published: list[str]) -> None:
    """Run a command that asks the replicas for statistics; the hand-over must find none."""
    if user is NatsUser.DURABLE:
        await run(scene, user, words)
        return
    executor = {"servers": scene.server.url, "user": "executor", "password": "executor-word"}
    async with scene.world.executor(nats=executor) as consumer:
        await until(lambda: consumer.durable)
        published.clear()
        await run(scene, user, words)
        ours = set(permissions(NatsUser.TOP)["publish"])
        published[:] = [subject for subject in published if subject in ours]


@requirement("privilege.subjects", "privilege.least")
async def test_a_user_reads_only_its_own_inbox(scene: Scene) -> None:
    printed_ones = [subject for user in NatsUser for subject in permissions(user)["subscribe"]]
    inboxes = [f"{user.inbox_prefix(INBOX)}{end}" for user in NatsUser for end in (".>", ".x", ".*")]
    subjects = list(dict.fromkeys((*WIDE, *inboxes, *printed_ones, SHARED, "$JS.ACK.>", "openapi_tool.stats")))
    for user in NatsUser:
        async with login(scene.server, user) as (client, denied):
            for subject in subjects:
                await client.subscribe(subject)
            await flush(client)
        own = permissions(user)["subscribe"]
        succeeded = [subject for subject in subjects if subject.lower() not in denied]
        assert [subject for subject in succeeded if not any(covers(pattern, subject) for pattern in own)] == [], user
        others = [other for other in NatsUser if other is not user]
        assert not [s for s in succeeded for other in others if s.startswith(f"{other.inbox_prefix(INBOX)}.")], user


def requests_for(key: str) -> list[tuple[bytes, dict[str, str]]]:
    """Return payloads and headers with which a permitted subject might give or change more than it is meant for."""
    secret = f"$KV.{BUCKET}.{key}"
    bodies: list[Any] = [{"seq": number} for number in range(1, 6)]
    bodies += [{"last_by_subj": secret}, {"next_by_subj": secret, "seq": 1}, {"multi_last": [secret]}]
    bodies += [{"batch": 10, "seq": 1}, {"subjects_filter": ">", "deleted_details": True}]
    for more in ({"filter_subject": "cg.v1r4.>"}, {"filter_subject": FILTER, "deliver_subject": "anything"}):
        config = {"name": DURABLE, "durable_name": DURABLE, "ack_policy": "explicit", **more}
        bodies.append({"stream_name": STREAM, "config": config})
    plain: list[tuple[bytes, dict[str, str]]] = [(json.dumps(body).encode(), {}) for body in bodies]
    headers = ({"Nats-Rollup": "all"}, {"Nats-Rollup": "sub"}, {"Nats-TTL": "1s"}, {"KV-Operation": "PURGE"})
    return [(b"", {}), *plain, *((b"{}", header) for header in headers)]


MAY_CHANGE = {
    NatsUser.DEADLETTERS: {STREAM, dead_letters.STREAM},  # sends commands again, and deletes their records
    NatsUser.SWITCHES: {SHARED},
    NatsUser.DURABLE: {STREAM},  # its consumer
}


@pytest.mark.parametrize("user", OPERATORS)
@requirement("privilege.subjects", "privilege.least")
async def test_no_request_of_an_operator_gets_a_command_or_the_session_key_or_changes_what_is_not_its_own(
    scene: Scene, user: NatsUser
) -> None:
    values = await scene.values()
    secret = values[SESSION_KEY] or b""
    assert len(secret) == 32
    for _ in range(VICTIMS):
        await scene.world.caller.publish(await scene.world.place())
    before = await scene.snapshot()
    granted = await allowed(scene, user, attempts(list(before), list(values)))
    replies: list[Msg] = []

    async def keep(message: Msg) -> None:
        replies.append(message)

    async with login(scene.server, user) as (client, _):
        for subject in permissions(user)["subscribe"]:
            await client.subscribe(subject, cb=keep)
        inbox = f"{user.inbox_prefix(INBOX)}.x" if user is not NatsUser.TOP else "openapi_tool.stats.x"
        for subject, (body, headers) in product(granted, requests_for(SESSION_KEY)):
            await client.publish(subject, body, inbox, headers=headers or None)
        await flush(client)
        await scene.world.caller.client.jetstream().account_info()  # answered after what was asked before
        await flush(client)
    for form in (secret, base64.b64encode(secret)):
        assert not [reply for reply in replies if form in reply.data], user
    after, kept = await scene.snapshot(), await scene.values()
    assert {name for name in before if before[name] != after.get(name)} <= MAY_CHANGE.get(user, set())
    assert after.keys() == before.keys()
    assert kept == values
    [(config, delivered, ack_floor, pending, waiting)] = before[STREAM][3]
    [(now, *progress)] = after[STREAM][3]
    assert now["filter_subject"] == config["filter_subject"]
    assert now["deliver_subject"] is None
    # An invalid acknowledgement, which a user of the hand-over may send, changes the time of the last one only.
    assert [(at.consumer_seq, at.stream_seq) for at in progress[:2]] == [
        (at.consumer_seq, at.stream_seq) for at in (delivered, ack_floor)
    ]
    assert progress[2] >= pending >= VICTIMS
    assert waiting == progress[3]


@requirement("privilege.least", "switches")
async def test_a_bucket_of_an_earlier_version_is_named_with_its_remedy(scene: Scene) -> None:
    jetstream = scene.world.caller.client.jetstream()
    config = (await jetstream.stream_info(SHARED)).config
    await jetstream.update_stream(config.evolve(allow_direct=False, allow_rollup_hdrs=True))
    environment = {
        "NATS_SERVERS": scene.server.url,
        "OPENAPI_TOOL__NATS__USER": "switches",
        "OPENAPI_TOOL__NATS__PASSWORD": "switches-word",
    }
    refused = await asyncio.to_thread(CliRunner().invoke, app, ["tools", "disabled"], env=environment)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert f"need not be granted: an earlier version created the bucket openapi_tool; run: {RESTRICT}" in refused.stderr
    await jetstream.delete_stream(SHARED)
    words = ["tools", "disable", "--all-projects", "--reason", "x"]
    refused = await asyncio.to_thread(CliRunner().invoke, app, words, env=environment)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "start an executor, which creates the missing bucket openapi_tool" in refused.stderr


REPLY_SUBJECTS = [b"\xff", b"\xed\xa0\x80", b"a\x0bb", b"a.b", b">", b"", b"z" * 3_000]


@requirement("privilege.least", "cli.top")
async def test_no_request_for_statistics_ends_the_answers_to_others_or_causes_a_line(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """Without an answer `nats durable --restore` would take the durable from a replica whose slots are all busy."""
    executor = {"servers": scene.server.url, "user": "executor", "password": "executor-word"}

    async def answers_after(reply: bytes) -> int:
        async with login(scene.server, NatsUser.TOP) as (client, _):
            await client._send_command(b"PUB openapi_tool.stats openapi_tool.stats.%b 0\r\n\r\n" % reply)  # noqa: SLF001
            await flush(client)
            return len(await gather_stats(client, 5.0))

    async with scene.world.executor(nats=executor) as consumer:
        await until(lambda: consumer.durable)
        assert await asyncio.gather(*map(answers_after, REPLY_SUBJECTS)) == [1] * len(REPLY_SUBJECTS)
    assert {getattr(record, "action", "") for record in caplog.records} & {"nats.denied", "stats.not_answered"} == set()


DOMAIN = "kernel"


def _accounts(*, own: bool) -> str:
    """Return accounts in which the user `switches` has the printed rights, maybe in an account of its own."""
    rights = printed("--format", "server-config", "--for", NatsUser.SWITCHES)
    subjects = permissions(NatsUser.SWITCHES)["publish"]
    imports = exports = ""
    if own:
        rights = rights.replace('"$JS.API.', f'"$JS.{DOMAIN}.API.').replace('"$KV.', f'"$JS.{DOMAIN}.API.$KV.')
        exports = ", ".join(f'{{ service: "{subject}" }}' for subject in subjects)
        imports = ", ".join(
            f'{{ service: {{ account: KERNEL, subject: "{subject}" }}, to: "{routed(subject, DOMAIN)}" }}'
            for subject in subjects
        )
    user = f"{{ user: switches, password: switches-word, {rights} }}"
    kernel = "{ user: kernel, password: kernel-word }"
    return f"""accounts {{
      KERNEL {{ jetstream: enabled, users: [{kernel}{"" if own else f", {user}"}], exports: [{exports}] }}
      OPERATOR {{ users: [{user if own else ""}], imports: [{imports}] }}
    }}
    """


@pytest.mark.parametrize("own", [False, True], ids=["shared account", "account of its own"])
@requirement("privilege.least", "switches")
async def test_only_an_account_of_its_own_keeps_a_user_from_choosing_where_answers_are_published(
    stack: EmbeddedStack, *, own: bool
) -> None:
    """A direct get publishes what the user has written, body and headers, on the reply subject of the request."""
    session_key, command = f"$KV.{BUCKET}.{SESSION_KEY}", "cg.v1r4.p.c.cmd.tool.jina.search"
    with server(stack, _accounts(own=own)) as nats_server:
        kernel = await nats.connect(nats_server.url, user="kernel", password="kernel-word")
        jetstream = kernel.jetstream()
        bucket = await jetstream.create_key_value(bucket=BUCKET, direct=True)
        await bucket.put(SESSION_KEY, b"random")
        await jetstream.add_stream(name=STREAM, subjects=["cg.>"])
        environment = {
            "NATS_SERVERS": nats_server.url,
            "OPENAPI_TOOL__NATS__USER": "switches",
            "OPENAPI_TOOL__NATS__PASSWORD": "switches-word",
            **({"OPENAPI_TOOL__NATS__JETSTREAM_DOMAIN": DOMAIN} if own else {}),
        }
        words = ["tools", "disable", "--all-projects", "--reason", "x"]
        done = await asyncio.to_thread(CliRunner().invoke, app, words, env=environment)
        assert done.exit_code == 0, done.output
        async with login(nats_server, NatsUser.SWITCHES) as (client, _):
            domain, key = DOMAIN if own else None, f"$KV.{BUCKET}.{SWITCHES_KEY}"
            await client.request(routed(key, domain), b"chosen", timeout=5, headers={"CG-Agent-Id": "victim"})
            for reply in (session_key, command):
                await client.publish(routed(f"$JS.API.DIRECT.GET.{SHARED}.{key}", domain), b"", reply)
            answer = await client.request(routed(f"$JS.API.DIRECT.GET.{SHARED}.{key}", domain), timeout=5)
            assert answer.data == b"chosen"

        async def outcome() -> tuple[bytes | None, int]:
            return (await bucket.get(SESSION_KEY)).value, (await jetstream.stream_info(STREAM)).state.messages

        expected = (b"random", 0) if own else (b"chosen", 1)
        async with asyncio.timeout(WAIT_S):
            while await outcome() != expected:  # noqa: ASYNC110 - the server tells nobody
                await asyncio.sleep(0.05)
        await kernel.close()
