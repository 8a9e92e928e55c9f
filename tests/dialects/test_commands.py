"""CLI commands for two kernels that one process serves (`--protocol`)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from openapi_tool.cli import app
from openapi_tool.cli.common import Upstream
from openapi_tool.cli.dev_executor import dev_settings
from openapi_tool.cli.kernels import ProtocolVersion
from tests.conftest import AGENT, PROJECT, search_tool
from tests.dialects.conftest import PREFIX, Kernels
from tests.requirements import requirement
from tests.support import dead_letters

V1R3 = ("--protocol", "v1r3")
OF_PROJECT = ("--project", PROJECT)
GARBAGE = b'{"tool_call_id": "same", "agent_id": 7}'


@pytest.fixture
async def environment(kernels: Kernels) -> dict[str, str]:
    """Settings of both kernels, with the kernels' own database users."""
    databases = {
        version: await one.database.fetchval("select current_database()") for version, one in kernels.callers.items()
    }
    stack = kernels.stack
    return {
        "PG_DSN": stack.postgres.dsn(databases["v1r4"]),
        f"{PREFIX}POSTGRES__DSN": stack.postgres.dsn(databases["v1r3"]),
        "NATS_SERVERS": stack.nats.url,
        **stack.upstream.keys,
    }


async def run(environment: Mapping[str, str], *words: str, code: int = 0) -> Result:
    result = await asyncio.to_thread(lambda: CliRunner().invoke(app, words, env=dict(environment)))
    assert result.exit_code == code, f"{words}: {result.output}"
    return result


@requirement("dialects.commands")
async def test_a_call_of_the_older_kernel_can_be_made_inspected_and_counted(environment: dict[str, str]) -> None:
    whole = [*OF_PROJECT, "--agent", AGENT, "--yes", "--json", "--args", '{"query": "hello world", "count": 3}']
    made = json.loads((await run(environment, "call", "jina_search", *whole, *V1R3)).stdout)
    assert (made["status"], made["doorbell"]["data"]) == ("success", json.dumps({"agent_id": AGENT}).replace(" ", ""))
    inspect = ("inspect", made["tool_call_id"], *OF_PROJECT, "--json")
    found = json.loads((await run(environment, *inspect, *V1R3)).stdout)
    assert found["verdict"].startswith("answered with success")
    assert [command["subject"].split(".")[1] for command in found["commands"]] == ["v1r3"]
    assert [doorbell["subject"].split(".")[1] for doorbell in found["doorbells"]] == ["v1r3"]
    await run(environment, *inspect, code=2)
    for option, calls in ((V1R3, 1), ((), 0)):
        used = json.loads((await run(environment, "usage", *OF_PROJECT, "--json", *option)).stdout)
        assert used["total"]["calls"] == calls


@requirement("dialects.commands")
async def test_check_covers_both_kernels_or_one(environment: dict[str, str]) -> None:
    whole = (await run(environment, "check", *OF_PROJECT)).stdout.splitlines()
    own = ["postgres", "nats", f"definitions of {PROJECT}"]
    names = ["settings", *own, *(f"v1r3.{name}" for name in own), "JINA_API_KEY"]
    assert [line.partition(": ")[0] for line in whole if ": ok" in line] == names
    one = (await run(environment, "check", *V1R3)).stdout
    assert "stream cg_cmd_v1r3" in one
    assert "cg_cmd_v1r4" not in one
    shown = json.loads((await run(environment, "nats", "durable", "--json", *V1R3)).stdout)
    assert "tool_jina_openapi_cmd_v1r3" in shown.values()


@requirement("dialects.commands")
async def test_the_same_file_can_be_registered_in_both_kernels(
    environment: dict[str, str], kernels: Kernels, tmp_path: Path
) -> None:
    file = tmp_path / "tool.yaml"
    file.write_text(yaml.safe_dump({**search_tool(), "tool_name": "mine", "after_execution": "suspend"}))
    for version, one in kernels.callers.items():
        words = ("tools", "apply", str(file), *OF_PROJECT, "--db", "--yes", "--protocol", version)
        await run(environment, *words)
        assert "1 unchanged" in (await run(environment, *words)).stdout
        subject = await one.database.fetchval("select target_subject from resource.tools where tool_name = 'mine'")
        assert subject == f"cg.{version}.{{project_id}}.{{channel_id}}.cmd.tool.jina.search"
    await kernels.callers["v1r3"].add_tool(PROJECT, {**search_tool(), "tool_name": "of_v1r4"})
    listed = (await run(environment, "tools", "list", *OF_PROJECT, "--db", "--json", *V1R3)).stdout.splitlines()
    problems = {tool["tool_name"]: tool["problems"] for tool in map(json.loads, listed)}
    assert problems["mine"] == problems["jina_search"] == []
    assert problems["of_v1r4"] == [
        "target_subject: must begin with cg.v1r3., or no executor of this kernel gets a call"
    ]


@requirement("dialects.isolated")
async def test_dead_letters_with_equal_ids_are_distinguished(environment: dict[str, str], kernels: Kernels) -> None:
    for version, one in kernels.callers.items():
        call = await one.place(PROJECT, AGENT, "jina_search", {}, publish=False)
        headers = {"CG-Tool-Call-Id": "same"} if version == "v1r4" else {}
        await one.publish(call, headers=headers, data=GARBAGE)
    async with asyncio.timeout(10):
        while len(await dead_letters(kernels.callers["v1r4"])) < 2:  # noqa: ASYNC110 - a stream has no event here
            await asyncio.sleep(0.05)
    for version in kernels.callers:
        option = ("--protocol", version)
        listed = (await run(environment, "deadletters", "list", "--json", *option)).stdout.splitlines()
        [letter] = map(json.loads, listed)
        assert (letter["subject"].split(".")[1], letter["tool_call_id"]) == (version, "same")
        found = json.loads((await run(environment, "inspect", "same", *OF_PROJECT, "--json", *option)).stdout)
        assert [one["number"] for one in found["dead_letters"]] == [int(letter["id"])]


@requirement("dialects.recognised")
async def test_commands_report_a_database_of_the_other_version(environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "tool.yaml"
    file.write_text(yaml.safe_dump({**search_tool(), "after_execution": "suspend"}))
    wrong = {**environment, f"{PREFIX}POSTGRES__DSN": environment["PG_DSN"]}
    alone = {name: value for name, value in environment.items() if not name.startswith(PREFIX)}
    for settings in (wrong, alone):
        for words, code in (
            (("check",), 1),
            (("tools", "apply", str(file), *OF_PROJECT, "--db", "--yes"), 1),
            (("inspect", "tc", *OF_PROJECT), 2),
            (("usage", *OF_PROJECT), 2),
        ):
            result = await run(settings, *words, *V1R3, code=code)
            assert "a database of protocol v1r4, but v1r3 is configured" in result.output


@requirement("dialects.commands", "start.reasons")
def test_an_error_of_the_older_kernel_names_its_own_settings() -> None:
    unreachable = "127.0.0.1:1"
    main = {"PG_DSN": f"postgresql://main@{unreachable}/main", "NATS_SERVERS": f"nats://{unreachable}"}
    older = {f"{PREFIX}POSTGRES__DSN": f"postgresql://older@{unreachable}/older"}
    elsewhere = {**older, f"{PREFIX}NATS__SERVERS": f"nats://{unreachable}"}
    own_dsn = f"connection refused; check dialects.v1r3.postgres.dsn ({PREFIX}POSTGRES__DSN)"
    main_dsn = "connection refused; check postgres.dsn (PG_DSN)"
    own_servers = f"connection refused; check dialects.v1r3.nats.servers ({PREFIX}NATS__SERVERS)"
    main_servers = "connection refused; check nats.servers (NATS_SERVERS)"

    def output_of(environment: Mapping[str, str], *words: str) -> str:
        result = CliRunner().invoke(app, words, env={**main, **environment})
        assert result.exit_code, result.output
        return result.output

    both = output_of(elsewhere, "check").splitlines()
    found = {name: line for line in both for name, _, _ in [line.partition(": ")]}
    expected = {"postgres": main_dsn, "nats": main_servers, "v1r3.postgres": own_dsn, "v1r3.nats": own_servers}
    assert all(found[name].endswith(text) for name, text in expected.items()), both
    assert main_servers in output_of(older, "check", *V1R3), "it uses the main kernel's servers"
    assert own_servers in output_of(elsewhere, "inspect", "tc", *OF_PROJECT, *V1R3)
    assert own_dsn in output_of(elsewhere, "usage", *OF_PROJECT, *V1R3)
    assert main_dsn in output_of(elsewhere, "usage", *OF_PROJECT)


@requirement("dialects.commands")
def test_permissions_and_grants_are_those_of_the_configured_kernels() -> None:
    def allowed(*words: str, **settings: str) -> set[str]:
        result = CliRunner().invoke(app, ["nats", "permissions", "--json", *words], env=settings)
        assert result.exit_code == 0, result.output
        return set(json.loads(result.stdout)["publish"]["allow"])

    older = {f"{PREFIX}POSTGRES__DSN": "postgresql://older@db/older"}
    both = allowed() | allowed(*V1R3)
    assert allowed(**older) == both > allowed()
    assert not any("v1r4" in subject for subject in allowed(*V1R3))
    elsewhere = {**older, f"{PREFIX}NATS__SERVERS": "nats://older:4222"}
    assert (allowed(**elsewhere), allowed(*V1R3, **elsewhere)) == (allowed(), allowed(*V1R3))
    granted = CliRunner().invoke(app, ["sql", "grants", *V1R3], env={"PG_DSN": "postgresql://main@db/main", **older})
    assert 'to "older"' in granted.stdout


@requirement("dialects.isolated")
def test_the_executor_of_dev_never_serves_a_kernel_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, Any] = {f"{PREFIX}POSTGRES__DSN": "postgresql://older@db/older"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = dev_settings(Upstream.DOUBLE, environment, ProtocolVersion.V1R3)
    assert json.loads(settings.environment["OPENAPI_TOOL__DIALECTS"]) == {}
    assert settings.environment["OPENAPI_TOOL__PROTOCOL__VERSION"] == "v1r3"
    assert "dialects.v1r3" in settings.remarks[-1]
