"""Commands of an operator on a gateway's state file, without any server."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from openapi_tool.cli import app
from openapi_tool.gateway.calls import Gateway
from openapi_tool.gateway.state import BUDGETS_TTL_S
from openapi_tool.local.executor import LoopbackResolver
from openapi_tool.local.stack import UpstreamDouble
from openapi_tool.options.budgets import BudgetOptions
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.quotas.budgets import Budgets, Spender
from openapi_tool.quotas.permits import Permit
from openapi_tool.state.sqlite import StateFile
from openapi_tool.telemetry.upstream_waits import UPSTREAM_WAITS
from openapi_tool.tools.deadlines import Deadline
from tests.gateway.conftest import ME, PAGE, OpenGateway
from tests.requirements import requirement
from tests.waiting import WAIT_S, until

Run = Callable[..., Awaitable[Result]]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state.sqlite3"


@pytest.fixture
def run(state: Path) -> Run:
    """Return a function that runs a command on the state file in a thread, beside the gateway."""

    async def command(*arguments: str) -> Result:
        return await asyncio.to_thread(lambda: CliRunner().invoke(app, [*arguments, "--state", str(state)]))

    return command


@requirement("gateway.commands")
async def test_usage_sums_up_the_rows_of_calls(opened: OpenGateway, state: Path, run: Run) -> None:
    async with opened(state) as gateway:
        await gateway.call(ME, "jina_read", {"url": PAGE})
        await gateway.call(ME, "jina_read", {"url": PAGE})
        await gateway.call(ME, "jina_search", {"nothing": 1})
    shown = json.loads((await run("usage", "--project", ME.project_id, "--json")).stdout)
    assert shown["total"]["calls"] == 3
    assert shown["total"]["cache_hits"] == 1
    assert {row["key"]: (row["calls"], row["errors"], row["requests"]) for row in shown["rows"]} == {
        "jina_read": (2, 0, 1),
        "jina_search": (1, 1, 0),
    }
    errors = json.loads((await run("usage", "--project", ME.project_id, "--json", "--by", "error")).stdout)
    assert {row["key"] for row in errors["rows"]} == {None, "bad_request"}
    local = json.loads((await run("usage", "--json")).stdout)
    assert (local["project_id"], local["total"]["calls"]) == ("local", 0)
    nobody = await run("usage", "--project", "nobody")
    assert (nobody.exit_code, nobody.stderr) == (0, "no calls of project 'nobody' in this time\n")
    unnamed = await run("usage")
    assert unnamed.stderr == (
        "of the gateway that --state names, project local\n"
        "no calls of project 'local' in this time; name another project with --project\n"
    )


@requirement("gateway.commands", "mcp.cancellation")
@pytest.mark.parametrize("settings", [{}, {"cache": {"ttl_s": 0}}], ids=["shared", "not cached"])
@pytest.mark.parametrize("tool", ["jina_search", "jina_read", "jina_read_many"])
async def test_usage_counts_of_a_cancelled_call_what_the_budget_counts(
    opened: OpenGateway, state: Path, run: Run, double: UpstreamDouble, tool: str, settings: dict[str, Any]
) -> None:
    double.rules({"match": "", "hang": True})
    pages = [PAGE, "http://site.fixture.test:8099/short"]
    arguments: dict[str, dict[str, Any]] = {
        "jina_search": {"query": "hello"},
        "jina_read": {"url": PAGE},
        "jina_read_many": {"urls": pages},
    }
    async with opened(state, budgets={"project_day_tokens": 1_000_000}, **settings) as gateway:
        call = asyncio.create_task(gateway.call(ME, tool, arguments[tool]))
        await asyncio.to_thread(double.requests, 2 if tool == "jina_read_many" else 1)
        call.cancel()
        await until(lambda: not gateway.running)
        [budget] = await gateway.budget_of(ME)
        used = json.loads((await run("usage", "--project", ME.project_id, "--by", "error", "--json")).stdout)
    assert used["total"]["tokens"] == 1_000_000 - budget["tokens_left"] > 0
    assert [(row["key"], row["errors"]) for row in used["rows"]] == [("cancelled", 1)]


@requirement("budgets.exact", "mcp.cancellation")
async def test_calls_that_are_cancelled_before_their_requests_are_sent_are_charged_nothing(
    opened: OpenGateway, double: UpstreamDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 calls end while they wait for a slot, for a TLS handshake or for a response."""
    sent: list[Permit] = []
    connected = Permit.connected

    def record(permit: Permit) -> None:
        sent.append(permit)
        connected(permit)

    monkeypatch.setattr(Permit, "connected", record)
    double.rules({"match": "", "hang": True})

    async def give_up(gateway: Gateway, after_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                await gateway.call(ME, "jina_read", {"url": PAGE})

    budgets = {"project_day_requests": 1_000}
    async with opened(budgets=budgets, executor={"concurrency": 200}, cache={"ttl_s": 0}) as gateway:
        await asyncio.gather(*(give_up(gateway, number / 1_000) for number in range(300)))
        await until(lambda: not gateway.running)
        [budget] = await gateway.budget_of(ME)
        [usage] = await gateway.usage_of(ME, 0)
    charged = 1_000 - budget["requests_left"]
    assert usage["requests"] == charged == len(sent)
    assert len(double.requests()) <= charged < 300  # what was written to a connection that then ended may be lost


@requirement("gateway.http")
@pytest.mark.parametrize("quotas", [{}, {"kernel": "staging"}])
async def test_a_budget_shows_what_was_charged_to_it(opened: OpenGateway, state: Path, quotas: dict[str, Any]) -> None:
    async with opened(state, budgets={"project_day_requests": 5}, quotas=quotas) as gateway:
        await gateway.call(ME, "jina_read", {"url": PAGE})
        [budget] = await gateway.budget_of(ME)
    assert budget["requests_left"] == 4


@requirement("usage.lost", "gateway.commands")
async def test_usage_shows_requests_of_a_process_that_died_in_a_column_of_their_own(
    opened: OpenGateway, state: Path, run: Run
) -> None:
    async with opened(state, budgets={"project_day_tokens": 1_000_000}) as gateway:
        await gateway.call(ME, "jina_read", {"url": PAGE})
    options = BudgetOptions(project_day_tokens=1_000_000)
    async with aclosing(StateFile.open(state)) as file:
        died = Budgets("died", options, file.records("budgets", BUDGETS_TTL_S), time.time, lambda: 1.0)
        accounts = died.accounts_of(Spender(ME.project_id, ME.agent_id, "s", "jina_read"))
        assert accounts is not None
        await accounts.reserve(3_000, Deadline.after(5))  # and is killed
    shown = json.loads((await run("usage", "--project", ME.project_id, "--json", "--by", "day")).stdout)
    for row in (shown["total"], *shown["rows"]):
        assert (row["calls"], row["requests"], row["no_result"], row["no_result_tokens"]) == (1, 1, 1, 3_000)
    by_tool = json.loads((await run("usage", "--project", ME.project_id, "--json")).stdout)
    assert (by_tool["total"]["no_result"], by_tool["rows"][0]["no_result"]) == (1, None)
    without = json.loads((await run("usage", "--json")).stdout)
    assert without["total"]["no_result"] is None


@requirement("gateway.commands")
async def test_inspect_shows_a_call_and_says_what_it_has_no_data_for(
    opened: OpenGateway, state: Path, run: Run
) -> None:
    ids: list[str] = []
    async with opened(state) as gateway:
        await gateway.call(ME, "jina_read", {"url": PAGE}, lambda running: ids.append(running.id))
    shown = await run("inspect", ids[0], "--project", ME.project_id)
    assert "upstream request: 200" in shown.stdout
    assert "success" in shown.stdout
    assert "no data for arguments, texts, commands" in shown.stderr
    local = await run("inspect", ids[0])
    assert (local.exit_code, "project 'local' has no call" in local.stderr) == (2, True)
    foreign = await run("inspect", ids[0], "--project", "another")
    assert foreign.exit_code == 2


@requirement("gateway.commands", "cli.limits", "budgets.calls")
async def test_what_gets_no_connection_is_no_request_anywhere(
    opened: OpenGateway,
    state: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def unresolved(*_: Any, **__: Any) -> list[Any]:
        raise socket.gaierror(-2, "Name or service not known")

    caplog.set_level("INFO")
    settings: dict[str, Any] = {
        "budgets": {"project_day_requests": 100},
        "limits": {"reader_requests_per_minute": 100},
        "retry": {"max_retries": 2},
    }
    async with opened(state, **settings) as gateway:
        with monkeypatch.context() as patch:
            patch.setattr(LoopbackResolver, "resolve", unresolved)
            answer = await gateway.call(ME, "jina_read", {"url": PAGE})
            assert UPSTREAM_WAITS.snapshot() == []
        assert (await gateway.call(ME, "jina_read", {"url": PAGE})).fields.error is None
        [limit] = json.loads((await run("limits", "--json")).stdout)["limits"]
        table = (await run("limits")).stdout
        [budget] = json.loads((await run("budgets", "--json")).stdout)["budgets"]
    assert answer.fields.error_code == "upstream_unavailable"
    assert len(answer.facts["attempts"]) == 3
    assert answer.facts["retries"] == 0
    finished = [vars(record) for record in caplog.records if vars(record).get("action") == "call.finished"]
    assert [record["requests"] for record in finished] == [0, 1]
    assert [each["sent_per_minute"] for each in limit["replicas"].values()] == [1]
    _, endpoint, _, per_minute, *_ = table.rpartition("JINA_API_KEY")[2].split("│")  # of the last table
    assert (endpoint.strip(), per_minute.strip()) == ("reader", "1")
    assert budget["requests_left"] == 99


@requirement("gateway.commands")
async def test_running_processes_answer_top_limits_and_budgets(opened: OpenGateway, state: Path, run: Run) -> None:
    settings: dict[str, Any] = {
        "budgets": {"project_day_tokens": 1_000_000},
        "limits": {"reader_requests_per_minute": 100},
    }
    async with opened(state, **settings) as gateway:
        await gateway.call(ME, "jina_read", {"url": PAGE})
        top = json.loads((await run("top", "--json")).stdout)
        limits = json.loads((await run("limits", "--json")).stdout)
        budgets = json.loads((await run("budgets", "--json")).stdout)
        shown = await run("top", "--once")
        table = await run("limits")
    assert ("not shared" in table.stdout, table.stderr) == (True, "")
    assert len(top["replicas"]) == 1
    assert top["problems"] == []
    assert [row["tool"] for row in top["replicas"][0]["tools"]] == ["jina_read"]
    assert "no problem is known now" in shown.stdout
    assert limits["limits"][0]["requests_per_minute"] == 100
    assert budgets["budgets"][0]["project"] == ME.project_id
    assert budgets["budgets"][0]["tokens_left"] < 1_000_000
    assert "no data for commands and lag" in shown.stderr
    gone = await run("top", "--json")
    assert gone.exit_code == 1
    assert "no process of this gateway runs" in gone.stderr


@requirement("gateway.commands", "switches")
async def test_a_disabled_tool_fails_with_the_reason_within_two_seconds_and_costs_nothing(
    opened: OpenGateway, state: Path, run: Run, double: UpstreamDouble
) -> None:
    async with opened(state) as gateway:
        await run("tools", "disable", "jina_read", "--all-projects", "--reason", "It costs too much.", "--by", "me")
        await asyncio.sleep(2)
        answer = await gateway.call(ME, "jina_read", {"url": PAGE})
        assert answer.fields.error_code == "tool_not_available"
        assert "It costs too much." in str(answer.fields.error)
        assert "jina_read" in (await run("tools", "disabled")).stdout
        await run("tools", "enable", "jina_read", "--all-projects", "--reason", "Cheap again.", "--by", "me")
        await asyncio.sleep(2)
        assert (await gateway.call(ME, "jina_read", {"url": PAGE})).fields.error_code is None
    assert len(double.requests()) == 1


@requirement("switches")
async def test_the_name_of_an_operation_instead_of_its_tool_is_pointed_out(state: Path, run: Run) -> None:
    await StateFile.open(state).aclose()
    for name, pointed_out in (("jina.read", True), ("jina_read", False)):
        done = await run("tools", "disable", name, "--all-projects", "--reason", "Broken.")
        assert (done.exit_code, "but as 'jina_read'" in done.stderr) == (0, pointed_out)
        warning = f"warning: this stops no call unless a tool is named {name!r} in its project: "
        assert done.stderr.startswith(warning) is pointed_out
        assert done.stderr.splitlines()[-1] == f"disabled tool {name!r} of all projects"


async def store(state: Path, value: bytes | str, key: str) -> None:
    """Write a shared record as only a defect, or somebody with the file, could."""
    async with aclosing(StateFile.open(state)) as opened_state:
        statement = "INSERT OR REPLACE INTO records VALUES ('gateway', ?, ?, 1000000, 1e12)"
        await opened_state.run(lambda connection: connection.execute(statement, (key, value)))


@requirement("gateway.commands", "switches")
@pytest.mark.parametrize("value", [b"{", b"[]", b'{"disabled":[]}', "a text"])
async def test_a_damaged_record_of_switches_lets_no_tool_run_after_a_restart(
    opened: OpenGateway,
    state: Path,
    run: Run,
    double: UpstreamDouble,
    value: bytes | str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await store(state, value, "switches")
    async with opened(state) as gateway:
        answer = await gateway.call(ME, "jina_read", {"url": PAGE})
        assert answer.fields.error_code == "tool_not_available"
        [logged] = [record for record in caplog.records if record.__dict__.get("action") == "switches.not_read"]
        assert f"{state}: the record switches is damaged" in logged.getMessage()
        shown = await run("tools", "disabled")
        assert (shown.exit_code, "disable again what must not run: sqlite3" in shown.stderr) == (2, True)
        async with aclosing(StateFile.open(state)) as opened_state:
            await opened_state.run(lambda connection: connection.execute("DELETE FROM records WHERE key = 'switches'"))
        await asyncio.sleep(2)
        assert double.requests() == []
        assert (await gateway.call(ME, "jina_read", {"url": PAGE})).fields.error_code is None


@requirement("gateway.commands", "switches")
async def test_while_the_record_is_damaged_the_last_known_switches_stay(
    opened: OpenGateway, state: Path, run: Run
) -> None:
    async with opened(state) as gateway:
        await run("tools", "disable", "jina_read", "--all-projects", "--reason", "It costs too much.", "--by", "me")
        await asyncio.sleep(2)
        await store(state, b"{", "switches")
        await asyncio.sleep(2)
        assert "It costs too much." in str((await gateway.call(ME, "jina_read", {"url": PAGE})).fields.error)
        assert (await gateway.call(ME, "jina_search", {"query": "x"})).fields.error_code is None


@requirement("gateway.commands", "switches")
async def test_the_first_call_of_a_process_finds_its_tool_disabled(
    opened: OpenGateway, state: Path, run: Run, double: UpstreamDouble
) -> None:
    async with opened(state):
        pass
    await run("tools", "disable", "jina_read", "--all-projects", "--reason", "It costs too much.", "--by", "me")
    async with opened(state) as gateway:
        answer = await gateway.call(ME, "jina_read", {"url": PAGE})
    assert "It costs too much." in str(answer.fields.error)
    assert double.requests() == []


@requirement("state.file")
@pytest.mark.parametrize("value", [b"", b"\0", "text"])
async def test_a_damaged_session_key_is_named_with_its_remedy(
    opened: OpenGateway, state: Path, value: bytes | str
) -> None:
    await store(state, value, "session_key")
    with pytest.raises(Unavailable, match=r"the record session_key is damaged.*: sqlite3"):
        async with opened(state):
            pass


@requirement("gateway.commands", "state.file")
async def test_a_purge_needs_a_confirmation(opened: OpenGateway, state: Path, run: Run) -> None:
    async with opened(state) as gateway:
        await gateway.call(ME, "jina_read", {"url": PAGE})
    refused = await run("state", "purge")
    assert (refused.exit_code, "--yes" in refused.stderr) == (1, True)
    purged = await run("state", "purge", "--yes")
    assert purged.exit_code == 0
    deleted = "budgets, limits, switches of tools, tokens, stored texts and results, and the rows of calls"
    assert f"this deletes {deleted} from" in refused.stderr
    assert f"deleted {deleted} from" in purged.stderr
    shown = json.loads((await run("usage", "--project", ME.project_id, "--json")).stdout)
    assert shown["total"]["calls"] == 0


@requirement("gateway.commands", "gateway.quotas")
async def test_after_a_purge_running_processes_go_on_with_empty_budgets(
    opened: OpenGateway, state: Path, run: Run, double: UpstreamDouble
) -> None:
    double.rules({"match": "slow", "delay_s": 3})
    settings: dict[str, Any] = {"budgets": {"project_day_requests": 2}, "cache": {"ttl_s": 0}}
    async with opened(state, **settings) as gateway, opened(state, **settings) as other:

        async def read(where: Gateway, page: str) -> str | None:
            return (
                await where.call(ME, "jina_read", {"url": f"http://site.fixture.test:8099/{page}"})
            ).fields.error_code

        assert await read(gateway, "article") is None
        running = asyncio.create_task(read(gateway, "slow"))
        await asyncio.to_thread(double.requests, 2)
        for each in (gateway, other):
            assert await read(each, "article") == "budget_exceeded"
        assert (await run("state", "purge", "--yes")).exit_code == 0
        await running  # it settles its own cost, and brings nothing back
        await asyncio.sleep(1)
        assert await read(other, "article") is None
        assert await read(gateway, "article") is None
        # The processes tell what they know, which may be older than the last request.
        async with asyncio.timeout(WAIT_S):
            used = 0
            while used != 2:
                [left] = json.loads((await run("budgets", "--json")).stdout)["budgets"]
                used = left["requests_used"]


@requirement("gateway.commands")
async def test_without_a_state_file_a_command_says_so(run: Run) -> None:
    missing = await run("usage", "--project", "p")
    assert missing.exit_code == 2
    assert "cannot be opened: No such file" in missing.stderr


@pytest.mark.parametrize("command", [["usage"], ["usage", "--project", "p"], ["inspect", "tc_1"]])
@requirement("gateway.commands")
def test_a_command_that_finds_nothing_to_ask_names_the_state_file(command: list[str], tmp_path: Path) -> None:
    found = ("PG_DSN", "NATS_SERVERS", "OPENAPI_TOOL_CONFIG", "CG_CONFIG_TOML", "OPENAPI_TOOL_DEV")
    nowhere = {"XDG_STATE_HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    result = CliRunner().invoke(app, command, env={**dict.fromkeys(found), **nowhere})
    assert result.exit_code == 2
    file = tmp_path / "openapi-tool" / "gateway.sqlite3"
    assert result.stderr.startswith(
        f"no settings name a server, no `dev` runs, and there is no gateway's state file {file}: see --state\n"
    )
