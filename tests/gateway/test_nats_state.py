"""State in NATS: replicas of a gateway share tokens, cursors, quotas and rows; outages; the commands."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nats
import pytest
from typer.testing import CliRunner, Result

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.cli import app
from openapi_tool.cli.kernel import NO_DATABASE
from openapi_tool.cli.selection import chosen_state, selected_file, selected_state
from openapi_tool.gateway.call_row import CallRow
from openapi_tool.gateway.nats_rows import CALLS, NatsRows
from openapi_tool.gateway.nats_state import gateway_bus, open_nats_state, stored_tokens
from openapi_tool.gateway.opening import NATS
from openapi_tool.gateway.stored import text_name
from openapi_tool.gateway.token_record import new_token
from openapi_tool.gateway.token_stores import StoredTokens
from openapi_tool.gateway.tokens import Tokens
from openapi_tool.local.dev_state import announce, claimed_state
from openapi_tool.local.guard import Guard
from openapi_tool.local.servers import NatsServer
from openapi_tool.local.stack import UpstreamDouble
from openapi_tool.nats_client.connection import connected
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.settings import Settings
from openapi_tool.state import nats_stream
from openapi_tool.state.nats_kv import Bucket
from openapi_tool.state.nats_texts import PartedTexts, Patience
from tests.gateway.conftest import ME, PAGE, OpenGateway, Serve
from tests.gateway.test_gateway_process import replica
from tests.gateway.test_http import READ
from tests.gateway.test_mcp import page_of
from tests.requirements import requirement
from tests.waiting import WAIT_S, until


@pytest.fixture(scope="module")
def nats_process() -> Iterator[NatsServer]:
    with TemporaryDirectory() as folder:
        guard = Guard(())
        server = NatsServer(Path(folder), guard)
        server.start()
        try:
            yield server
        finally:
            server.stop()
            guard.close()


@pytest.fixture
async def server(nats_process: NatsServer) -> NatsServer:
    """An empty NATS."""
    client = await nats.connect(nats_process.url)
    for stream in await client.jetstream().streams_info():
        await client.jetstream().delete_stream(str(stream.config.name))
    await client.close()
    return nats_process


@pytest.fixture
def variables(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a command."""
    monkeypatch.setenv("NATS_SERVERS", server.url)


def settings(server: NatsServer, **more: Any) -> dict[str, Any]:
    return {"nats": {"servers": server.url}, **more}


def settings_of(server: NatsServer) -> Settings:
    values: dict[str, Any] = {**settings(server), **NO_DATABASE}
    return Settings(**values)


@asynccontextmanager
async def patience(server: NatsServer) -> AsyncIterator[Patience]:
    bus = build_bootstrap(settings_of(server), {}).bus
    async with connected(gateway_bus(bus)) as client:
        yield Patience(client)


async def run(*arguments: str) -> Result:
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, list(arguments)))


@requirement("gateway.tokens", "gateway.replicated")
@pytest.mark.usefixtures("variables")
async def test_commands_create_list_and_revoke_tokens_that_all_replicas_take(serve: Serve, server: NatsServer) -> None:
    created = await run("tokens", "create", "--project", "p", "--agent", "a", "--json")
    assert created.exit_code == 0, created.stderr
    token = json.loads(created.stdout)
    async with (
        serve(NATS, **settings(server)) as first,
        serve(NATS, **settings(server)) as second,
        first.client(token["token"]) as one,
        second.client(token["token"]) as other,
    ):

        async def statuses() -> list[int]:
            await first.tokens.refresh()
            await second.tokens.refresh()
            return [(await client.get("/v1/tools")).status_code for client in (one, other)]

        assert await statuses() == [200, 200]
        listed = await run("tokens", "list", "--json")
        assert json.loads(listed.stdout)["id"] == token["id"]
        assert (await run("tokens", "revoke", token["id"])).exit_code == 0
        assert await statuses() == [401, 401]
    client = await nats.connect(server.url)
    bucket = await client.jetstream().key_value("openapi_tool_gateway_tokens")
    stored = (await bucket.get(token["id"])).value
    await client.close()
    assert stored is not None
    assert token["token"].rpartition("_")[2].encode() not in stored


@requirement("gateway.replicated")
async def test_another_replica_reads_on_by_a_cursor_and_finds_a_repeated_request(
    serve: Serve, server: NatsServer, double: UpstreamDouble
) -> None:
    double.rules({"match": "article", "body": page_of("A sentence about lighthouses. " * 10_000)})
    async with serve(NATS, **settings(server)) as first, serve(NATS, **settings(server)) as second:
        token = await first.token()
        await second.tokens.load()
        async with first.client(token) as one, second.client(token) as other:
            read = await one.post(READ, json={"url": PAGE}, headers={"Idempotency-Key": "k"})
            assert read.status_code == 200, read.text
            part = await other.post(READ, json={"cursor": read.json()["next_cursor"]})
            assert part.status_code == 200, part.text
            assert "lighthouses" in part.json()["content"]
            again = await other.post(READ, json={"url": PAGE}, headers={"Idempotency-Key": "k"})
            assert again.headers["Idempotent-Replayed"] == "true"
            assert again.json() == read.json()
            assert len(double.requests()) == 1
            used = [(await client.get("/v1/usage")).json() for client in (one, other)]
    assert used[0] == used[1]
    assert "2" in str(used[0])


@requirement("gateway.replicated", "gateway.quotas")
async def test_two_replicas_share_a_budget(opened: OpenGateway, server: NatsServer) -> None:
    budget = {"budgets": {"project_day_requests": 3}}
    async with opened(NATS, **settings(server, **budget)) as one, opened(NATS, **settings(server, **budget)) as other:
        codes = [
            (await gateway.call(ME, "jina_read", {"url": f"{PAGE}?{number}"})).fields.error_code
            for number in range(3)
            for gateway in (one, other)
        ]
    assert sorted(codes, key=str) == [None] * 3 + ["budget_exceeded"] * 3


@requirement("gateway.commands", "gateway.replicated")
@pytest.mark.usefixtures("variables")
async def test_commands_ask_the_replicas_and_read_their_rows(opened: OpenGateway, server: NatsServer) -> None:
    async with opened(NATS, **settings(server, limits={"reader_requests_per_minute": 50})) as gateway:
        answer = await gateway.call(ME, "jina_read", {"url": PAGE})
        assert answer.fields.error_code is None
        limits = json.loads((await run("limits", "--json")).stdout)
        disabled = await run("tools", "disable", "jina_read", "--all-projects", "--reason", "Too dear.", "--by", "me")
        assert disabled.exit_code == 0, disabled.stderr
        await asyncio.sleep(1.2)
        assert (await gateway.call(ME, "jina_read", {"url": PAGE})).fields.error_code == "tool_not_available"
        shown = await run("tools", "disabled")
    assert "Too dear." in shown.stdout
    assert limits["limits"][0]["requests_per_minute"] == 50
    usage = json.loads((await run("usage", "--project", ME.project_id, "--json")).stdout)
    assert (usage["rows"][0]["key"], usage["total"]["requests"] >= 1) == ("jina_read", True)
    assert usage["total"]["errors"] >= 1
    shown = await run("inspect", str(answer.call_id), "--project", ME.project_id)
    assert shown.exit_code == 0, shown.stderr
    assert "jina_read called by agent agent_me" in shown.stdout
    other = await run("inspect", str(answer.call_id), "--project", "another")
    assert other.exit_code == 2


@requirement("gateway.replicated")
async def test_tokens_are_refused_once_they_could_not_be_read_for_too_long(
    serve: Serve, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = {"budgets": {"project_day_requests": 2}}
    async with serve(NATS, **settings(server, **budget)) as served:
        token = await served.token()
        async with served.client(token) as client:
            await asyncio.to_thread(server.stop)
            await asyncio.sleep(0.1)  # until it is noticed
            try:
                assert await served.tokens.refresh()
                assert (await client.get("/v1/tools")).status_code == 200
                began = time.monotonic()
                codes = [(await client.post(READ, json={"url": f"{PAGE}?{each}"})).status_code for each in range(3)]
                assert codes == [200, 200, 402]
                assert time.monotonic() - began < 4, "no call waits for each record"
                usage = await client.get("/v1/usage")
                assert (usage.status_code, usage.json()["code"]) == (503, "unavailable")
                assert usage.headers["Retry-After"]
                monkeypatch.setattr(served.tokens, "_grace_s", 0.0)
                refused = await client.get("/v1/tools")
                assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
                assert refused.headers["Retry-After"]
            finally:
                await asyncio.to_thread(server.start)
            async with asyncio.timeout(WAIT_S):
                while await served.tokens.refresh():  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.1)
            monkeypatch.setattr(served.tokens, "_grace_s", 300.0)
            assert (await client.get("/v1/tools")).status_code == 200


@requirement("state.texts")
@pytest.mark.parametrize("size", [0, 1, 252 * 1024, 700_000])
async def test_a_text_of_any_size_is_stored_in_parts(server: NatsServer, size: int) -> None:
    bucket = Bucket("texts", ttl_s=60, max_bytes=8 * 2**20, drops_oldest=True)
    async with patience(server) as available:
        texts = PartedTexts(available, bucket)
        assert await texts.get("a") is None
        await texts.put_all({"a": bytes([7]) * size, "b": b"other"})
        assert await texts.get("a") == bytes([7]) * size
        assert await texts.get("b") == b"other"
        for number in range(20):
            await texts.put(f"more{number}", b"x" * 700_000)
        assert await texts.get("a") is None, "the oldest are dropped"
        assert await texts.get("more19") == b"x" * 700_000
        await texts.delete("more19")
        assert await texts.get("more19") is None


@requirement("state.texts")
async def test_texts_of_one_project_do_not_take_the_place_of_anothers(server: NatsServer) -> None:
    """One stores six times as much as the bucket holds; its newest texts stay, and all of another's."""
    bucket = Bucket("texts", ttl_s=60, max_bytes=16 * 2**20, drops_oldest=True)
    async with patience(server) as available:
        texts = PartedTexts(available, bucket)
        quiet = [text_name("quiet", number) for number in range(4)]
        flood = [text_name("flood", number) for number in range(200)]
        for name in (*quiet, *flood):
            await texts.put(name, bytes(500_000))
        assert all([await texts.get(name) is not None for name in quiet])
        found = [await texts.get(name) is not None for name in flood]
        assert found == sorted(found), "the oldest are dropped"
        assert found.count(True) >= 16


@requirement("state.texts")
@pytest.mark.parametrize("damaged", [b"", b"x\nabc", b"1.5\nq", b"-1\nq", b"999999999\nq", "\u0661\nq".encode()])
async def test_a_damaged_text_is_none(server: NatsServer, damaged: bytes) -> None:
    async with patience(server) as available:
        texts = PartedTexts(available, Bucket("texts", ttl_s=60, max_bytes=8 * 2**20, drops_oldest=True))
        await texts.put("a", b"text")
        bucket = await available.client.jetstream().key_value("texts")
        await bucket.put("a.0", damaged)
        assert await texts.get("a") is None


@requirement("gateway.replicated")
async def test_a_damaged_row_hides_no_other(server: NatsServer) -> None:
    async with patience(server) as available:
        rows, jetstream = NatsRows(available), available.client.jetstream()
        await rows.store(row(0))
        good = asdict(row(1))
        values: list[Any] = [
            {"at": "now"},
            {"at": -1e30},
            {"at": 1e300},
            {"tokens": None},
            {"tokens": "9"},
            {"tool": ["t"]},
            {"error": "text"},
            {"more": 1},
        ]
        for number, changed in enumerate(values):
            await jetstream.publish(f"{CALLS.prefix}.p.a.tc_x{number}", json.dumps(good | changed).encode())
        await jetstream.publish(f"{CALLS.prefix}.p.a.tc_y", b"\xff")
        await jetstream.publish(f"{CALLS.prefix}.p.a.tc_z", json.dumps(good).replace(str(good["at"]), "NaN").encode())
        await rows.store(row(2))
        [found] = await NatsRows(available).by_tool("p", "a", 0)
        assert found["calls"] >= 2
        assert found["tokens"] == 10 * found["calls"]


@requirement("gateway.tokens")
@pytest.mark.parametrize("damaged", [b"{", b'{"created": 1e300}', b'{"hash": 1}'])
async def test_a_damaged_record_of_a_token_affects_no_other(server: NatsServer, damaged: bytes) -> None:
    async with patience(server) as available:
        records = stored_tokens(available.client, 1)
        store = StoredTokens(records)
        text, token_id, token = new_token("p", "a", ("*",), any_agent=False, expires=None)
        broken, broken_id, record = new_token("p", "b", ("*",), any_agent=False, expires=None)
        await store.add(token_id, token)
        await store.add(broken_id, record)
        tokens = Tokens([store])
        await tokens.load()
        assert tokens.find(broken)
        await records.put(broken_id, damaged)
        assert await tokens.refresh() == ""
        assert tokens.find(text)
        assert tokens.find(broken) is None


def row(number: int, agent: str = "a", **more: Any) -> CallRow:
    values: dict[str, Any] = {
        "at": time.time(),
        "tool_call_id": f"tc_{number}",
        "project": "p",
        "agent": agent,
        "session": None,
        "tool": "jina_read",
        "status": "success",
        "error": None,
        "tokens": 10,
        "requests": 1,
        "cached": False,
        "truncated": False,
        "retries": 0,
        "latency_ms": 5,
        "attempts": [],
    }
    return CallRow(**values | more)


@requirement("gateway.replicated")
@pytest.mark.parametrize("batch", [0, 7])  # 0 is as for a server before 2.11, which knows no batches
async def test_rows_are_summed_by_agent_in_batches(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr(nats_stream, "BATCH", batch)
    async with patience(server) as available, patience(server) as another:
        rows, others = NatsRows(available), NatsRows(another)
        assert await rows.by_tool("p", "a", 0) == []
        for number in range(20):
            await rows.store(row(number))
        await rows.store(row(20, "b"))
        await rows.store(row(21, at=time.time() - 3 * 86_400, tool="jina_search", status="cancelled"))
        [found] = await others.by_tool("p", "a", time.time() - 86_400)
        assert (found["tool"], found["calls"], found["tokens"], found["errors"]) == ("jina_read", 20, 200, 0)
        await rows.store(row(23))
        assert (await others.by_tool("p", "a", time.time() - 86_400))[0]["calls"] == 21
        both = await others.by_tool("p", "a", time.time() - 5 * 86_400)
        assert [(each["tool"], each["errors"]) for each in both] == [("jina_read", 0), ("jina_search", 1)]
        assert len(await rows.of_project("p")) == 23
        [one] = await rows.of_project("p", "tc_20")
        assert one.agent == "b"
        await available.client.jetstream().delete_stream(CALLS.name)
        assert await others.by_tool("p", "a", 0) == []


@requirement("gateway.tokens")
async def test_tokens_are_read_again_only_if_some_were_written(server: NatsServer) -> None:
    async with patience(server) as available:
        records = stored_tokens(available.client, 1)
        assert await records.all() == {}
        for number in range(3):
            await records.put(f"{number}", b"%d" % number)
        first = await records.all()
        assert first == {"0": b"0", "1": b"1", "2": b"2"}
        assert await records.all() is first
        await records.put("1", b"changed")
        assert await records.all() == {"0": b"0", "1": b"changed", "2": b"2"}
        bucket = await available.client.jetstream().key_value(records.bucket.name)
        await bucket.delete("2")
        assert await records.all() == {"0": b"0", "1": b"changed"}


@requirement("gateway.tokens")
async def test_a_server_that_lags_behind_accepts_no_revoked_token(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with patience(server) as available:
        store = StoredTokens(stored_tokens(available.client, 1))
        text, token_id, token = new_token("p", "a", ("*",), any_agent=False, expires=None)
        await store.add(token_id, token)
        tokens, stale = Tokens([store]), await store._records.all()  # noqa: SLF001 - what the lagging server has
        await tokens.load()
        assert tokens.find(text)
        await store.revoke(token_id)

        async def lagging(*_: object) -> AsyncIterator[nats_stream.Held]:
            yield nats_stream.Held(1, f"$KV.openapi_tool_gateway_tokens.{token_id}", stale[token_id], is_deletion=False)

        with monkeypatch.context() as patched:
            patched.setattr(nats_stream, "held_messages", lagging)
            with pytest.raises(Unavailable, match="servers differ"):
                await tokens.load()
        await tokens.load()
        assert tokens.find(text) is None


@requirement("gateway.replicated")
async def test_it_waits_for_nats_and_says_so(server: NatsServer) -> None:
    server.stop()
    reasons: list[str] = []
    bootstrap = build_bootstrap(settings_of(server), {})
    opening = asyncio.create_task(open_nats_state(bootstrap, reasons.append).__aenter__())
    await until(lambda: bool(reasons))
    assert "connection refused; check nats.servers" in reasons[0]
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await asyncio.to_thread(server.start)


@requirement("gateway.commands")
@pytest.mark.usefixtures("variables")
def test_commands_are_about_a_kernel_where_its_database_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (selected_state(None), selected_file(None), chosen_state(None)) == (NATS, None, NATS)
    monkeypatch.setenv("PG_DSN", "postgresql://127.0.0.1:1/x")
    assert (selected_state(None), selected_state(NATS), chosen_state(None)) == (None, NATS, NATS)
    assert chosen_state(Path("file")) == Path("file")
    usage = CliRunner().invoke(app, ["usage", "--state", "nats", "--json"])
    assert json.loads(usage.stdout)["total"]["calls"] == 0
    purged = CliRunner().invoke(app, ["state", "purge", "--yes", "--state", "nats"])
    assert (purged.exit_code, "is shared with others" in purged.stderr) == (2, True)


@requirement("gateway.commands", "cli.dev")
@pytest.mark.usefixtures("variables")
def test_the_nats_of_the_settings_precedes_a_running_dev_but_not_a_named_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with claimed_state() as claim:
        assert claim is not None
        announce(claim.descriptor, "postgresql://user@127.0.0.1:2/dev", "nats://127.0.0.1:1", "v1r4")
        usage = CliRunner().invoke(app, ["usage", "--project", "p", "--json"])
        assert usage.exit_code == 0, usage.stderr
        assert json.loads(usage.stdout)["total"]["calls"] == 0
        assert "in nats" in CliRunner().invoke(app, ["inspect", "tc_1", "--project", "p"]).stderr
        named = CliRunner().invoke(app, ["--dev", "dev", "usage", "--project", "p"])
        assert "PostgreSQL at 127.0.0.1:2" in named.stderr
        monkeypatch.delenv("NATS_SERVERS")
        assert "PostgreSQL at 127.0.0.1:2" in CliRunner().invoke(app, ["usage", "--project", "p"]).stderr


@requirement("gateway.commands", "cli.top")
def test_top_says_what_an_outage_of_nats_means_for_both_doors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_SERVERS", "nats://127.0.0.1:1")
    shown = CliRunner().invoke(app, ["top", "--once", "--state", "nats"])
    assert (shown.exit_code, "NATS at 127.0.0.1:1: connection refused" in shown.stderr) == (2, True)
    assert "a kernel's commands wait in NATS meanwhile, a gateway's calls go on" in shown.stderr


@requirement("gateway.commands", "gateway.replicated")
@pytest.mark.usefixtures("variables")
def test_usage_says_of_which_project_the_rows_in_nats_are() -> None:
    for words in (["usage"], ["usage", "--state", "nats"], ["inspect", "tc_1"]):
        shown = CliRunner().invoke(app, words)
        assert shown.stderr.splitlines()[0] == "of the gateway with its state in NATS, project local"


@pytest.mark.thorough
@requirement("gateway.tokens", "gateway.replicated", "gateway.drain")
@pytest.mark.usefixtures("variables")
async def test_a_token_takes_effect_on_all_replicas_within_two_seconds(
    double: UpstreamDouble,
    environment: dict[str, str],
    server: NatsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    variable = {"NATS_SERVERS": server.url}
    async with (
        replica(double, environment, NATS, **variable) as first,
        replica(double, environment, NATS, **variable) as second,
        first.client() as one,
        second.client() as other,
    ):

        async def statuses(token: str) -> list[int]:
            headers = {"Authorization": f"Bearer {token}"}
            return [(await client.get("/v1/tools", headers=headers)).status_code for client in (one, other)]

        token = (await run("tokens", "create", "--project", "p")).stdout.strip()
        await asyncio.sleep(2)
        assert await statuses(token) == [200, 200]
        await run("tokens", "revoke", token)
        await asyncio.sleep(2)
        assert await statuses(token) == [401, 401]
        assert [await asyncio.to_thread(each.end) for each in (first, second)] == [0, 0]
