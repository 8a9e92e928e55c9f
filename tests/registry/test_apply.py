"""`tools apply`, `list`, `show` and `delete`, through the kernel's API and through its database."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from openapi_tool.cli import app, tools_registry
from openapi_tool.cli.management_api import ManagementApi
from openapi_tool.kernel.queries import ToolRows
from openapi_tool.local.caller import Caller
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.tools.exports import RegistryError
from tests.conftest import PROJECT, search_tool
from tests.registry.kernel_api import served
from tests.requirements import requirement
from tests.support import dsn_of, make_role

TOOLS = Path(__file__).parent.parent.parent / "config" / "tools"
SEARCH, EXAMPLE = str(TOOLS / "jina_search.yaml"), str(TOOLS / "example.yaml")
SEARCH_TEXT = Path(SEARCH).read_text(encoding="utf-8")
OTHER = "proj_other"

Tools = Callable[..., Any]


@pytest.fixture
def api(stack: EmbeddedStack, database: str) -> Iterator[str]:
    with served(stack.postgres.dsn(database)) as url:
        yield url


@pytest.fixture
def tools(stack: EmbeddedStack, database: str) -> Tools:
    """Return a function that runs `openapi-tool tools …` in a thread."""
    environment = {"PG_DSN": stack.postgres.dsn(database), "COLUMNS": "200"}

    async def run(*arguments: str, answer: str = "") -> Any:
        return await asyncio.to_thread(
            CliRunner().invoke, app, ["tools", *arguments], input=answer, env=environment, catch_exceptions=False
        )

    return run


async def rows(caller: Caller, project: str) -> list[dict[str, Any]]:
    found = await caller.database.fetch(
        "select tool_name, description, parameters, target_subject, after_execution, options "
        "from resource.tools where project_id = $1 order by tool_name",
        project,
    )
    return [dict(row) for row in found]


@requirement("definition.apply")
async def test_api_and_database_store_the_same_row(caller: Caller, api: str, tools: Tools) -> None:
    await caller.add_project(OTHER)
    files = [str(file) for file in TOOLS.glob("*.yaml")]
    assert (await tools("apply", *files, "--project", PROJECT, "--api", api, "--yes")).exit_code == 0
    assert (await tools("apply", *files, "--project", OTHER, "--db", "--yes")).exit_code == 0
    through_api, through_database = await rows(caller, PROJECT), await rows(caller, OTHER)
    assert len(through_api) == 5
    assert through_api == through_database
    listed = [(await tools("list", "--project", PROJECT, *way, "--json")).stdout for way in (["--api", api], ["--db"])]
    assert listed[0] == listed[1]
    shown = [(await tools("show", "jina_read", "--project", OTHER, *way)).stdout for way in (["--api", api], ["--db"])]
    assert shown[0] == shown[1]
    assert yaml.safe_load(shown[0]) == yaml.safe_load((TOOLS / "jina_read.yaml").read_text(encoding="utf-8"))


@requirement("definition.apply")
@pytest.mark.parametrize("way", ["api", "db"])
async def test_applying_again_changes_nothing(caller: Caller, api: str, tools: Tools, way: str) -> None:
    where = ["--project", PROJECT, *(["--db"] if way == "db" else ["--api", api])]
    first = await tools("apply", SEARCH, *where, "--yes", "--json")
    assert json.loads(first.stdout)["outcome"] == "created"
    version = "select xmin::text from resource.tools where tool_name = 'jina_search'"
    before = await caller.database.fetchval(version)
    again = await tools("apply", SEARCH, *where)
    assert again.exit_code == 0
    assert "1 unchanged" in again.stdout
    await tools("apply", SEARCH, EXAMPLE, *where, "--yes")
    assert len(await rows(caller, PROJECT)) == 2
    assert await caller.database.fetchval(version) == before, (
        "unchanged definitions are not written together with others"
    )


@requirement("definition.apply")
@pytest.mark.parametrize("way", ["api", "db"])
async def test_a_difference_is_shown_and_needs_confirmation(
    caller: Caller, api: str, tools: Tools, tmp_path: Path, way: str
) -> None:
    where = ["--project", PROJECT, *(["--db"] if way == "db" else ["--api", api])]
    await tools("apply", SEARCH, *where, "--yes")
    edited = tmp_path / "edited.yaml"
    edited.write_text(
        SEARCH_TEXT.replace("suspend_timeout_seconds: 60", "suspend_timeout_seconds: 75"),
        encoding="utf-8",
    )
    for flags, answer, code in ((["--dry-run"], "", 0), ([], "n\n", 1), ([], "", 1)):
        done = await tools("apply", str(edited), *where, *flags, answer=answer)
        assert done.exit_code == code
        no_terminal = done.stderr.endswith(
            "[y/N]: \nopenapi-tool: nothing was changed: no terminal to ask; use --yes\n"
        )
        assert no_terminal == (not answer and not flags)
        assert done.stdout == "" or flags
        changed = [
            line for line in done.stderr.splitlines() if line[:1] in ("+", "-") and line[:3] not in ("+++", "---")
        ]
        assert changed == ["-  suspend_timeout_seconds: 60", "+  suspend_timeout_seconds: 75"]
        assert (await rows(caller, PROJECT))[0]["options"]["suspend_timeout_seconds"] == 60
    done = await tools("apply", str(edited), *where, answer="y\n")
    assert done.exit_code == 0
    assert (await rows(caller, PROJECT))[0]["options"]["suspend_timeout_seconds"] == 75


@requirement("definition.apply")
async def test_a_failed_project_does_not_stop_the_others(
    caller: Caller, api: str, tools: Tools, tmp_path: Path
) -> None:
    names = [f"proj_{number:03}" for number in range(60)]
    for name in names:
        await caller.add_project(name)
    listed = tmp_path / "projects.txt"
    listed.write_text(
        "# all of them\n" + "\n".join(["proj_gone", *names, "proj_broken", names[0]]) + "\n\n", encoding="utf-8"
    )
    for way in (["--api", api], ["--db"]):
        done = await tools("apply", SEARCH, "--projects-file", str(listed), *way, "--yes", "--json")
        assert done.exit_code == 1
        outcomes = {item["project_id"]: item for item in map(json.loads, done.stdout.splitlines())}
        assert len(outcomes) == 62
        assert {outcomes[name]["outcome"] for name in names} == {"created"}
        assert "not_found" in (outcomes["proj_gone"]["reason"] or "")
        assert outcomes["proj_broken"]["outcome"] == "failed"
        await caller.database.execute("delete from resource.tools")
    done = await tools("apply", SEARCH, "--projects-file", str(listed), "--db", "--yes")
    assert "60 created" in done.stdout
    assert "2 failed" in done.stdout


@requirement("definition.apply")
async def test_files_with_errors_prevent_any_change(caller: Caller, tools: Tools, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("tool_name: fork_join\n", encoding="utf-8")
    done = await tools("apply", SEARCH, str(broken), "--project", PROJECT, "--db", "--yes")
    assert done.exit_code == 1
    assert "reserved by the kernel" in done.stderr
    assert await rows(caller, PROJECT) == []
    assert (await tools("apply", SEARCH, SEARCH, "--project", PROJECT, "--db", "--yes")).exit_code == 1


@requirement("definition.apply")
@pytest.mark.parametrize("way", ["api", "db"])
async def test_definitions_are_deleted(caller: Caller, api: str, tools: Tools, way: str) -> None:
    where = ["--project", PROJECT, *(["--db"] if way == "db" else ["--api", api])]
    await tools("apply", SEARCH, *where, "--yes")
    assert (await tools("delete", "jina_search", *where)).exit_code == 1
    assert len(await rows(caller, PROJECT)) == 1
    assert (await tools("delete", "jina_search", *where, "--yes")).exit_code == 0
    assert await rows(caller, PROJECT) == []
    await tools("apply", SEARCH, *where, "--yes")
    for command in (["delete", "jina_search", "jina_serch", "--yes"], ["show", "jina_serch"]):
        unknown = await tools(*command, *where)
        assert (unknown.exit_code, unknown.stdout) == (2, "")
        assert f"project {PROJECT} has no tool 'jina_serch'; did you mean 'jina_search'?" in unknown.stderr
    assert len(await rows(caller, PROJECT)) == 1, "nothing is deleted if one name is unknown"
    for command in (["delete", "x", "--yes"], ["show", "x"], ["list"]):
        unknown = await tools(*command, "--project", "proj_gone", *where[2:])
        assert (unknown.exit_code, "not_found: " in unknown.stderr) == (2, True)


@requirement("definition.apply")
async def test_the_kernels_own_tools_cannot_be_deleted(caller: Caller, tools: Tools, api: str) -> None:
    await caller.add_tool(PROJECT, {"tool_name": "inner", "target_subject": "cg.v1r4.p.c.cmd.sys.pmo.inner"})
    for way in (["--api", api], ["--db"]):
        done = await tools("delete", "inner", "--project", PROJECT, *way, "--yes")
        assert (done.exit_code, "bad_request" in done.stdout) == (1, True)


@requirement("definition.apply")
async def test_many_tools_are_listed_page_by_page(caller: Caller, tools: Tools, api: str) -> None:
    for number in range(205):
        await caller.add_tool(
            PROJECT, {"tool_name": f"tool_{number:03}", "target_subject": "cg.v1r4.p.c.cmd.tool.jina.x", "options": {}}
        )
    listed = [(await tools("list", "--project", PROJECT, *way, "--json")).stdout for way in (["--api", api], ["--db"])]
    assert listed[0] == listed[1]
    assert len(listed[0].splitlines()) == 205


@requirement("definition.bounds", "options.envs")
async def test_the_list_shows_which_stored_rows_the_executor_would_refuse(
    caller: Caller, tools: Tools, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: dict[str, dict[str, Any]] = {
        "a_good": search_tool(),
        "b_referring": {**search_tool(), "parameters": {"properties": {"query": {"$ref": "#/[bold]"}}}},
        "c_large": {**search_tool(), "parameters": {"description": "x" * 300_000}},
        "d_leaking": search_tool(envs={"tenant_token": "JINA_API_KEY"}),
        "e_odd": {**search_tool(), "options": ["no", "object"]},
    }
    for name, row in rows.items():
        await caller.add_tool(PROJECT, {**row, "tool_name": name})
    for way in (["--api", api], ["--db"]):
        done = await tools("list", "--project", PROJECT, *way, "--json")
        found = {row["tool_name"]: row["problems"] for row in map(json.loads, done.stdout.splitlines())}
        assert (found.keys(), found["a_good"]) == (rows.keys(), [])
        assert "parameters.properties.query.$ref: references are not read" in found["b_referring"][0]
        assert "larger than 262,144 bytes" in found["c_large"][0]
        assert found["d_leaking"] == ["options.envs.tenant_token: may not take a secret"]
        assert found["e_odd"][0] == "options: must be an object"
    shown = await tools("list", "--project", PROJECT, "--db")
    assert (shown.exit_code, shown.stdout.count("unusable")) == (0, 4)
    monkeypatch.setenv("OPENAPI_TOOL__SECRETS__ENV_PARAMETERS", "tenant_token")
    shown = await tools("list", "--project", PROJECT, "--db")
    assert shown.stdout.count("unusable") == 3


REFUSED_BY_EVERY_CALL: list[tuple[dict[str, Any], str]] = [
    ({"jina": {"mode": "search", "auth_env": "PG_DSN"}}, "'PG_DSN', which is one of the executor's own"),
    ({"jina": {"mode": "search", "auth_env": "HOME"}}, "'HOME', which this executor does not pass to tools"),
    ({"jina": {"mode": "search", "auth_env": "jina_" + "0a" * 20}}, "has what looks like a key where the name"),
    ({"envs": {"api_key": "0123456789abcdef0123"}}, "has what looks like a key where the name"),
    ({"jina": {"mode": "search", "headers": {"Authorization": "x"}}}, "options.jina.headers.Authorization: is not"),
    ({"jina": {"mode": "reader", "headers": {"X-Set-Cookie": "x"}}}, "options.jina.headers.X-Set-Cookie: is not"),
    ({"jina": {"mode": "reader", "params": {"proxyUrl": "http://x"}}}, "options.jina.params.proxyUrl: may not be sent"),
    ({"jina": {"mode": "reader", "params": {"engine": 5}}}, "options.jina.params.engine: must be a text"),
    ({"args": {"fixed": {"site": "{api_key}"}}}, "unknown placeholder {api_key} in options.args.fixed.site"),
    ({"args": {"defaults": {"hl": ["{nowhere}"]}}}, "unknown placeholder {nowhere} in options.args.defaults.hl"),
    ({"args": {"defaults": {"count": "many"}}}, "options.args.defaults.count: "),
    (
        {"jina": {"mode": "reader"}, "args": {"fixed": {"url": "http://10.0.0.1/"}}},
        "options.args.fixed.url: is no address that may be read (target_refused)",
    ),
    (
        {"jina": {"mode": "reader", "tool": "jina.read_many"}, "args": {"fixed": {"urls": ["http://10.0.0.1/"]}}},
        "options.args.fixed.urls: is no address that may be read (target_refused)",
    ),
    ({"suspend_timeout_seconds": "forever"}, "options.suspend_timeout_seconds: is ignored"),
]


@requirement("definition.bounds")
async def test_the_list_runs_the_checks_of_a_call(caller: Caller, tools: Tools) -> None:
    for number, (options, _) in enumerate(REFUSED_BY_EVERY_CALL):
        row = search_tool() | {"tool_name": f"tool_{number:02}", "options": {"jina": {"mode": "search"}} | options}
        await caller.add_tool(PROJECT, row)
    await caller.add_tool(PROJECT, search_tool() | {"tool_name": "tool_x0", "parameters": False})
    await caller.add_tool(PROJECT, search_tool() | {"tool_name": "tool_x1", "after_execution": "explode"})
    good = {"defaults": {"session_id": "{agent_turn_id}", "hl": "de"}, "fixed": {"site": "{project_id}.example"}}
    await caller.add_tool(PROJECT, search_tool(args=good) | {"tool_name": "tool_x2"})
    done = await tools("list", "--project", PROJECT, "--db", "--json")
    found = [row["problems"] for row in map(json.loads, done.stdout.splitlines())]
    expected = [*(says for _, says in REFUSED_BY_EVERY_CALL), "parameters: must be an object"]
    expected.append("after_execution: is ignored")
    for problems, says in zip(found, expected, strict=False):
        assert len(problems) == 1, (says, problems)
        assert says in problems[0]
    assert found[-1] == []


@pytest.mark.parametrize("way", ["show", "list"])
@requirement("secrets.output")
async def test_a_pasted_key_is_masked_in_output(
    caller: Caller, tools: Tools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str
) -> None:
    pasted, plain, mounted = "jina_" + "0a" * 20, "0123456789abcdef0123", "a-tenants-value"
    (tmp_path / "key").write_text(mounted)
    monkeypatch.setenv("JINA_API_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setenv("SOME_TOKEN", "another-value")
    options = {
        "jina": {"mode": "search", "auth_env": pasted, "params": {"locale": pasted}},
        "envs": {"api_key": plain, "x": pasted},
        "args": {"fixed": {"site": [mounted], "hl": "another-value"}},
    }
    row = search_tool() | {"tool_name": "a_tool", "description": f"Uses {pasted}.", "options": options}
    await caller.add_tool(PROJECT, row)
    arguments = ["show", "a_tool"] if way == "show" else ["list"]
    for flags in ([], ["--json"]):
        done = await tools(*arguments, "--project", PROJECT, "--db", *flags)
        assert done.exit_code == 0
        assert "[redacted]" in done.output or "a key where the name" in done.output
        assert not [text for text in (pasted[5:], plain, mounted, "another-value") if text in done.output]


@requirement("definition.apply")
async def test_an_unreachable_api_is_reported_without_credentials_or_traceback(tools: Tools) -> None:
    for url in ("http://me:word-of-mine@127.0.0.1:9", "no url", "http://me:word-of-mine@:x"):
        done = await tools("apply", SEARCH, "--project", PROJECT, "--api", url, "--yes")
        assert done.exit_code == 2
        assert "word-of-mine" not in done.output
        assert "Traceback" not in done.output
    assert (await tools("list", "--project", PROJECT)).exit_code == 2
    assert (await tools("apply", SEARCH, "--db")).exit_code == 2
    assert (await tools("apply", SEARCH, "--db", "--project", PROJECT, "--json")).exit_code == 2


@requirement("definition.apply")
async def test_the_fake_api_refuses_like_the_kernels(caller: Caller, api: str) -> None:
    async with httpx.AsyncClient(base_url=api) as client:
        path = f"/projects/{PROJECT}/tools"
        assert (await client.post(path)).status_code == 422
        reserved = {"file": ("t.yaml", b"name: fork_join")}
        refused = await client.post(path, files=reserved)
        assert (refused.status_code, refused.json()["detail"]["error_code"]) == (400, "bad_request")
        assert (await client.get("/projects/none/tools")).status_code == 404


@requirement("definition.apply")
async def test_a_write_to_an_unknown_project_is_refused(
    caller: Caller, stack: EmbeddedStack, database: str, api: str
) -> None:
    row = yaml.safe_load(SEARCH_TEXT)
    async with ToolRows.open(stack.postgres.dsn(database), 5) as registry, ManagementApi.open(api) as client:
        for store in (registry, client):
            with pytest.raises(RegistryError, match="not_found"):
                await store.put("proj_gone", row)
            with pytest.raises(RegistryError, match="bad_request"):
                await store.put(PROJECT, {**row, "tool_name": "fork_join"})
    assert await caller.database.fetchval("select count(*) from resource.tools") == 0


@requirement("definition.apply")
async def test_an_unparsable_row_hides_no_other(caller: Caller, tools: Tools) -> None:
    await caller.set_up_project(
        PROJECT, "agent_1", [{**search_tool(), "tool_name": name} for name in ("deep", "huge", "numbers", "whole")]
    )
    odd = {
        "deep": "[" * 3_000 + "]" * 3_000,
        "huge": json.dumps({"a": "x" * 2_000_000}),
        "numbers": f"[{','.join(['1e131071'] * 10_000)}]",  # 1.3 GB as text, more than PostgreSQL can return
    }
    for name, parameters in odd.items():
        await caller.database.execute(
            "update resource.tools set parameters = $3::text::jsonb where project_id = $1 and tool_name = $2",
            PROJECT,
            name,
            parameters,
        )
    listed = await tools("list", "--project", PROJECT, "--db", "--json")
    assert listed.exit_code == 0, listed.output
    problems = {row["tool_name"]: row["problems"] for row in map(json.loads, listed.output.splitlines())}
    assert problems["deep"], listed.output[:1_000]
    assert problems["whole"] == []
    for name in ("huge", "numbers"):
        assert problems[name] == ["parameters: is too large; a definition may have at most 262,144 bytes"]
        shown = await tools("show", name, "--project", PROJECT, "--db")
        assert "too large to show" in shown.output
        assert len(shown.output) < 10_000
    assert (await tools("delete", *odd, "--project", PROJECT, "--db", "--yes")).exit_code == 0


@requirement("definition.apply")
async def test_the_grants_for_registration_are_enough_and_missing_ones_are_named(
    caller: Caller, stack: EmbeddedStack, database: str
) -> None:
    row, own = yaml.safe_load(SEARCH_TEXT), stack.postgres.dsn(database)
    await make_role(own, "reader_only")
    async with ToolRows.open(dsn_of(stack, database, "reader_only"), 5) as registry:
        with pytest.raises(RegistryError, match="permission denied for table"):
            await registry.put(PROJECT, row)
    await make_role(own, "registrar_only", registration=True)
    async with ToolRows.open(dsn_of(stack, database, "registrar_only"), 5) as registry:
        await registry.put(PROJECT, row)
        await registry.put(PROJECT, row)
        assert await registry.delete(PROJECT, row["tool_name"])


@requirement("definition.apply")
@pytest.mark.parametrize("db", [False, True], ids=["api", "db"])
async def test_an_unknown_project_is_reported_before_the_confirmation(api: str, tools: Tools, *, db: bool) -> None:
    way = ["--db"] if db else ["--api", api]
    done = await tools("apply", SEARCH, "--project", "proj_gone", *way, answer="y\n")
    assert done.exit_code == 1
    assert "Write" not in done.stderr
    assert "not_found" in done.stdout


@requirement("definition.apply")
async def test_a_tool_of_another_executor_is_listed_as_not_ours(caller: Caller, tools: Tools) -> None:
    subject = "cg.v1r4.{project_id}.{channel_id}.cmd.tool.e2b.run"
    await caller.add_tool(PROJECT, {"tool_name": "sandbox", "target_subject": subject, "options": {"e2b": {}}})
    shown = await tools("list", "--project", PROJECT, "--db")
    assert "not ours" in shown.stdout
    assert "unusable" not in shown.stdout


@requirement("definition.apply")
async def test_the_list_is_complete_in_a_narrow_terminal(
    caller: Caller, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    await caller.add_tool(PROJECT, {**search_tool(), "tool_name": "search_of_a_long_name", "options": ["none"]})
    monkeypatch.setattr(tools_registry, "output", partial(Console, width=50))
    shown = await tools("list", "--project", PROJECT, "--db")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.stdout.splitlines() if "│" in line]
    assert ["".join(column) for column in zip(*cells, strict=True)][:2] == ["search_of_a_long_name", "unusable"]
    assert "must be an object" in " ".join(row[3] for row in cells)
