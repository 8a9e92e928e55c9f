"""What commands act on if nothing names it, a running `dev` or the default state file of a gateway, and say so."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from openapi_tool.cli import app
from openapi_tool.local.caller import Caller
from openapi_tool.local.dev_state import announce, claimed_state
from openapi_tool.state.sqlite import StateFile
from tests.conftest import search_tool
from tests.requirements import requirement

_SERVERS = ("PG_DSN", "NATS_SERVERS", "OPENAPI_TOOL_CONFIG", "CG_CONFIG_TOML", "OPENAPI_TOOL_DEV")
WITH_STATE = (
    ["top", "--once", "--json"],
    ["limits", "--json"],
    ["budgets", "--json"],
    ["usage", "--project", "p", "--json"],
    ["inspect", "tc_1", "--project", "p", "--json"],
    ["tools", "disabled", "--json"],
    ["tools", "disable", "x", "--project", "p", "--reason", "r", "--json"],
    ["tools", "enable", "x", "--project", "p", "--reason", "r", "--json"],
)

OF_TOKENS = (["tokens", "list"], ["tokens", "create", "--project", "p"], ["tokens", "revoke", "0" * 12])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let commands find no server, and keep their state files here; return the folder."""
    for name in _SERVERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def default_file(folder: Path) -> Path:
    """Make the default state file of a gateway."""
    path = folder / "openapi-tool" / "gateway.sqlite3"

    async def make() -> None:
        await StateFile.open(path).aclose()

    path.parent.mkdir(mode=0o700)
    asyncio.run(make())
    return path


def start(exits: ExitStack, name: str | None = None, *, port: int = 1, keys: tuple[str, ...] = ()) -> None:
    """Pretend that a `dev` runs whose servers cannot be reached."""
    claim = exits.enter_context(claimed_state(name))
    assert claim is not None
    announce(claim.descriptor, f"postgresql://me@127.0.0.1:{port}/dev", f"nats://127.0.0.1:{port}", "v1r4", keys)


@pytest.fixture
def dev(folder: Path) -> Iterator[str]:
    """Pretend that a `dev` runs; return what commands say of it."""
    with ExitStack() as exits:
        start(exits)
        yield f"of the dev stack 'dev' (started in {Path.cwd()})"


def run(*words: str, **environment: str) -> Result:
    return CliRunner().invoke(app, list(words), env=environment)


@requirement("cli.dev", "gateway.commands")
@pytest.mark.parametrize("command", WITH_STATE, ids=" ".join)
def test_a_command_that_chose_a_dev_says_so_and_how_to_choose_the_gateway(
    command: list[str], dev: str, default_file: Path
) -> None:
    result = run(*command)
    assert result.stderr.splitlines()[0] == f"{dev}; of the gateway instead: --state {default_file}"
    assert (result.exit_code, result.stdout) == (2, ""), "its servers cannot be reached"
    for silent in (run("--dev", "dev", *command), run(*command, NATS_SERVERS="nats://127.0.0.1:1", PG_DSN="x")):
        assert "of the dev stack" not in silent.stderr, "the user named it"


@requirement("cli.dev", "gateway.commands")
@pytest.mark.parametrize("command", WITH_STATE, ids=" ".join)
def test_a_command_that_chose_the_default_file_says_so(command: list[str], default_file: Path) -> None:
    result = run(*command)
    said = f"of the gateway with the state file {default_file}"
    assert result.stderr.splitlines()[0] == said
    assert said not in result.stdout
    assert said not in run(*command, "--state", str(default_file)).stderr


@requirement("cli.dev", "gateway.commands")
@pytest.mark.usefixtures("dev")
def test_without_a_state_file_no_option_for_one_is_named(folder: Path) -> None:
    for command in (*WITH_STATE, ["deadletters", "list"], ["nats", "durable"]):
        said = run(*command).stderr.splitlines()[0]
        assert said == f"of the dev stack 'dev' (started in {Path.cwd()})"
    assert list(folder.glob("openapi-tool/*")) == []


@requirement("cli.dev", "gateway.commands")
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", WITH_STATE, ids=" ".join)
def test_of_several_stacks_a_state_can_be_named_too(command: list[str]) -> None:
    with ExitStack() as exits:
        start(exits)
        start(exits)
        result = run(*command)
        one = "2 dev stacks are running: dev, dev2; name one, such as: openapi-tool --dev dev …"
        assert result.stderr == f"openapi-tool: {one}; or name a gateway's state: --state FILE\n"
        registry = run("tools", "list", "--project", "p")
        assert registry.stderr == f"openapi-tool: {one}; or name another kernel: --api URL or --db\n"
        role = run("sql", "grants")
        assert role.stderr == f"openapi-tool: {one}; or name the role: --role\n"
    assert (result.exit_code, registry.exit_code, role.exit_code) == (2, 2, 2)


@requirement("cli.dev", "gateway.commands")
def test_a_deleted_folder_is_not_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "gone").mkdir()
    monkeypatch.chdir(folder / "gone")
    (folder / "gone").rmdir()
    with ExitStack() as exits:
        start(exits)
        monkeypatch.chdir(folder)
        assert run("top", "--once").stderr.startswith("of the dev stack 'dev'\n")


@requirement("cli.dev", "gateway.commands", "cli.inspect")
def test_the_project_of_a_dev_is_the_default_and_said(dev: str, default_file: Path) -> None:
    for command in (["inspect", "tc_1"], ["usage"]):
        said = run(*command).stderr.splitlines()[0]
        assert said == f"{dev}, project proj_dev; of the gateway instead: --state {default_file}"
        assert run("--dev", "dev", *command).stderr.splitlines()[0] == f"{dev}, project proj_dev"
    for command in (["tools", "list"], ["tools", "show", "x"]):
        assert run(*command).stderr.splitlines()[0] == f"{dev}, project proj_dev"
        named = run(*command, "--project", "p")
        assert named.stderr.splitlines()[0] == dev
        of_dev = run("--dev", "dev", *command, "--db", PG_DSN="postgresql://me@127.0.0.1:9/own")
        assert of_dev.stderr.startswith(f"{dev}, project proj_dev\nopenapi-tool: PostgreSQL at 127.0.0.1:1 ")
        for other in (["--db"], ["--api", "http://127.0.0.1:1"]):
            missing = run(*command, *other)
            assert (missing.exit_code, missing.stderr) == (2, "openapi-tool: --project is missing; name the project\n")


@requirement("cli.dev", "definition.apply")
@pytest.mark.usefixtures("dev")
@pytest.mark.parametrize(
    "command",
    [["list"], ["show", "x"], ["delete", "x", "--yes"], ["apply", "config/tools/jina_search.yaml", "--yes"]],
    ids=" ".join,
)
def test_no_registry_of_a_dev_is_used_where_the_settings_name_servers(command: list[str], folder: Path) -> None:
    file = folder / "settings.toml"
    file.write_text('[nats]\nservers = ["nats://127.0.0.1:1"]\n')
    for settings in (
        {"PG_DSN": "postgresql://me@127.0.0.1:9/own"},
        {"NATS_SERVERS": "nats://127.0.0.1:1"},
        {"OPENAPI_TOOL_CONFIG": str(file)},
    ):
        refused = run("tools", *command, "--project", "p", **settings)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert refused.stderr == (
            "openapi-tool: the settings name servers, so no running `dev` is used unless it is named: "
            "give --db (PG_DSN), --api URL, or openapi-tool --dev NAME …\n"
        )
        named = run("--dev", "dev", "tools", *command, "--project", "p", **settings)
        assert "PostgreSQL at 127.0.0.1:1 " in named.stderr, "that of `dev`"
    of_settings = run("tools", *command, "--project", "p", "--db", PG_DSN="postgresql://me@127.0.0.1:9/own")
    assert "PostgreSQL at 127.0.0.1:9 " in of_settings.stderr


@requirement("cli.dev", "cli.call")
@pytest.mark.usefixtures("dev")
def test_a_call_goes_to_the_servers_of_a_settings_file_not_to_a_running_dev(folder: Path) -> None:
    file = folder / "settings.toml"
    nats = '[nats]\nservers = ["nats://127.0.0.1:9"]\n'
    for content, said in (
        (nats, "set both PG_DSN and NATS_SERVERS, or neither for the dev stack\n"),
        (f'{nats}[postgres]\ndsn = "postgresql://me@127.0.0.1:9/own"\n', " at 127.0.0.1:9: "),
    ):
        file.write_text(content)
        words = ("call", "x", "--project", "p", "--agent", "a", "--yes")
        refused = run(*words, OPENAPI_TOOL_CONFIG=str(file))
        assert (refused.exit_code, said in refused.stderr) == (2, True), refused.stderr
        named = run("--dev", "dev", *words, OPENAPI_TOOL_CONFIG=str(file))
        assert " at 127.0.0.1:1: " in named.stderr


@requirement("cli.dev", "gateway.commands")
@pytest.mark.parametrize("command", [*WITH_STATE, *OF_TOKENS], ids=" ".join)
def test_a_state_in_nats_is_never_that_of_a_dev(command: list[str], folder: Path) -> None:
    unconfigured = "openapi-tool: --state: no NATS server is configured; set NATS_SERVERS\n"
    with ExitStack() as exits:
        for name in ("dev", "other"):
            start(exits, name)
            for environment in ({}, {"OPENAPI_TOOL_DEV": "dev"}, {"PG_DSN": "postgresql://me@127.0.0.1:9/own"}):
                refused = run(*command, "--state", "nats", **environment)
                assert (refused.exit_code, refused.stdout, refused.stderr) == (2, "", unconfigured)
        configured = run(*command, "--state", "nats", NATS_SERVERS="nats://127.0.0.1:9", OPENAPI_TOOL_DEV="dev")
        assert "NATS at 127.0.0.1:9: " in configured.stderr
        assert "127.0.0.1:1:" not in configured.stderr
    assert list(folder.glob("openapi-tool/*")) == []


@requirement("gateway.commands")
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", ["mcp", "gateway"])
def test_a_gateway_needs_a_configured_server_for_a_state_in_nats(command: str) -> None:
    # A process of its own: these commands write their log in the background.
    words = [sys.executable, "-m", "openapi_tool", command, "--state", "nats"]
    refused = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)  # noqa: S603
    assert refused.returncode == 2
    assert "openapi-tool: --state: no NATS server is configured; set NATS_SERVERS\n" in refused.stderr


@requirement("cli.dev", "gateway.commands")
@pytest.mark.usefixtures("dev")
@pytest.mark.parametrize("command", WITH_STATE, ids=" ".join)
def test_a_dev_and_a_state_exclude_each_other(command: list[str], default_file: Path) -> None:
    for state in (str(default_file), "nats"):
        refused = run("--dev", "dev", *command, "--state", state, NATS_SERVERS="nats://127.0.0.1:9")
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert refused.stderr == "openapi-tool: --dev and --state name different things; give one\n"
    of_file = run(*command, "--state", str(default_file), OPENAPI_TOOL_DEV="other")
    assert "other" not in of_file.stderr, "the option precedes the variable of a whole shell"
    assert "127.0.0.1" not in of_file.stderr


@requirement("gateway.tokens")
def test_where_no_token_was_made_the_remedy_makes_one(folder: Path) -> None:
    default = folder / "openapi-tool" / "gateway.sqlite3"
    named = folder / "my state"
    for path, option in ((default, ""), (named, f" --state '{named}'")):
        words = ["--state", str(path)] if option else []
        for command in (["list"], ["revoke", "0" * 12]):
            missing = run("tokens", *command, *words)
            remedy = f"`openapi-tool tokens create --project P{option}` makes it, or name another one with --state"
            last = f"openapi-tool: there is no state file {path}: {remedy}"
            assert (missing.exit_code, missing.stderr.splitlines()[-1]) == (2, last)


@requirement("gateway.tokens", "privilege.grants")
@pytest.mark.usefixtures("folder")
def test_help_and_exit_codes_agree() -> None:
    def helped(*words: str) -> str:
        return " ".join(run(*words, "-h").stdout.split())

    assert "1 there is no such token, 2 TOKEN is neither an id nor a token, or an unusable" in helped(
        "tokens", "revoke"
    )
    assert run("tokens", "revoke", "nope", "--file", "f").exit_code == 2
    assert "2 a role name that is empty, longer than 63 bytes, not printable, `public` or `none`" in helped(
        "sql", "grants"
    )
    assert 'to "bad role;"' in run("sql", "grants", "--role", "bad role;").stdout
    for role in ("", "r" * 64, "a\nb", "public", "none"):
        assert run("sql", "grants", "--role", role).exit_code == 2
    for command in WITH_STATE:
        assert "whatever the settings name" in helped(*command)


@requirement("gateway.commands", "cli.inspect")
def test_inspect_says_that_another_project_can_be_named(default_file: Path) -> None:
    hint = "; name another project with --project\n"
    unnamed = run("inspect", "tc_1")
    assert unnamed.stderr.startswith(f"of the gateway with the state file {default_file}, project local\n")
    assert unnamed.stderr.endswith(hint)
    assert run("inspect", "tc_1", "--state", str(default_file)).stderr.endswith(hint)
    for words in (["inspect", "tc_1"], ["usage"], ["usage", "--json"], ["usage", "--csv"]):
        named_file = run(*words, "--state", str(default_file))
        said = "of the gateway that --state names, project local"
        assert (named_file.stderr.splitlines()[0], said in named_file.stdout) == (said, False)
        with_project = run(*words, "--state", str(default_file), "--project", "p")
        assert "of the gateway" not in with_project.stderr
    assert not run("inspect", "tc_1", "--project", "p").stderr.endswith(hint)


@requirement("cli.inspect", "gateway.commands")
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", [["usage"], ["inspect", "tc_1"]], ids=" ".join)
def test_what_is_missing_is_named_in_the_order_in_which_it_is_needed(command: list[str]) -> None:
    nothing = run(*command)
    first, last = nothing.stderr.splitlines()
    assert first.startswith("no settings name a server, no `dev` runs, and there is no gateway's state file ")
    assert (nothing.exit_code, last) == (2, "openapi-tool: postgres: is missing; set PG_DSN")
    kernel = run(*command, PG_DSN="postgresql://me@127.0.0.1:1/own")
    assert (kernel.exit_code, kernel.stderr) == (2, "openapi-tool: --project is missing; name the project\n")


@requirement("cli.dev", "cli.inspect")
@pytest.mark.usefixtures("folder")
async def test_on_a_dev_inspect_usage_and_tools_find_the_calls_of_its_project(
    caller: Caller, stack: Any, database: str
) -> None:
    tool = search_tool()
    await caller.set_up_project("proj_dev", "agent_dev", [tool])
    with ExitStack() as exits:
        claim = exits.enter_context(claimed_state())
        assert claim is not None
        announce(claim.descriptor, stack.postgres.dsn(database), stack.nats.url, "v1r4", ("JINA_API_KEY",))
        listed = await asyncio.to_thread(run, "tools", "list", "--json")
        assert (listed.exit_code, json.loads(listed.stdout)["tool_name"]) == (0, tool["tool_name"])
        assert "project proj_dev" in listed.stderr
        shown = await asyncio.to_thread(run, "tools", "show", tool["tool_name"])
        assert (shown.exit_code, tool["tool_name"] in shown.stdout) == (0, True)
        used = await asyncio.to_thread(run, "usage", "--json")
        assert json.loads(used.stdout)["project_id"] == "proj_dev"
        none = await asyncio.to_thread(run, "usage")
        assert none.stderr.endswith(
            "no calls of project 'proj_dev' in this time; name another project with --project\n"
        )
        missing = await asyncio.to_thread(run, "inspect", "tc_1")
        assert missing.stderr.endswith("or its command and rows are gone; name another project with --project\n")


@requirement("cli.dev", "cli.check")
@pytest.mark.usefixtures("folder")
async def test_the_keys_of_a_dev_are_those_that_its_executors_have(
    caller: Caller, stack: Any, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JINA_API_KEY", raising=False)
    keyed = {**search_tool(), "options": {"jina": {"mode": "search"}, "envs": {"api_key": "SEARCH_API_KEY"}}}
    await caller.set_up_project("proj_dev", "agent_dev", [keyed])
    with ExitStack() as exits:
        for name, keys in (("double", ("JINA_API_KEY", "SEARCH_API_KEY")), ("real", ())):
            claim = exits.enter_context(claimed_state(name))
            assert claim is not None
            announce(claim.descriptor, stack.postgres.dsn(database), stack.nats.url, "v1r4", keys)
        checked = await asyncio.to_thread(run, "--dev", "double", "check", "--project", "proj_dev")
        assert checked.exit_code == 0, checked.output
        assert "JINA_API_KEY: ok; a key of the dev stack\n" in checked.stdout
        assert "SEARCH_API_KEY: ok; a key of the dev stack\n" in checked.stdout
        assert "definitions of proj_dev: ok; 1 definition\n" in checked.stdout
        listed = await asyncio.to_thread(run, "--dev", "double", "tools", "list", "--json")
        assert json.loads(listed.stdout)["problems"] == []
        without = await asyncio.to_thread(run, "--dev", "real", "check", JINA_API_KEY="a-key-of-the-test")
        why = "JINA_API_KEY: the dev stack 'real' has no such key; set it and start that `dev` again\n"
        assert (without.exit_code, why in without.stdout) == (1, True)
        as_json = json.loads((await asyncio.to_thread(run, "--dev", "double", "check", "--json")).stdout)
        assert as_json["details"]["JINA_API_KEY"] == ["a key of the dev stack"]


@requirement("cli.dev", "privilege.grants")
@pytest.mark.usefixtures("dev")
def test_settings_grants_and_permissions_are_those_of_a_named_dev() -> None:
    shown = run("--dev", "dev", "config", "show", "--json", PG_DSN="postgresql://own@127.0.0.1/x")
    rows = {row["setting"]: (row["value"], row["from"]) for row in json.loads(shown.stdout)["settings"]}
    assert rows["postgres.dsn"] == ("postgresql://***@127.0.0.1:1/dev", "--dev dev")
    assert rows["nats.servers"][1] == rows["protocol.version"][1] == "--dev dev"
    for named in (True, False):
        grants = run(*(["--dev", "dev"] if named else []), "sql", "grants")
        assert 'to "me"' in grants.stdout
        assert grants.stdout == run("sql", "grants", "--role", "me").stdout
        assert ("of the dev stack" in grants.stderr) is not named
    unknown = run("--dev", "other", "sql", "grants")
    assert unknown.stderr == "openapi-tool: no dev stack named 'other' is running; running are: dev\n"
    assert run("--dev", "other", "config", "show").stderr == unknown.stderr
    unnamed = run("config", "show")
    assert "for the settings with a running dev stack (dev): openapi-tool --dev NAME config show\n" in unnamed.stderr
    assert "postgresql" not in unnamed.stdout
    configured = run("config", "show", PG_DSN="postgresql://own@127.0.0.1/x")
    assert "running dev stack" not in configured.stderr


@requirement("cli.dev", "dialects.commands")
@pytest.mark.usefixtures("folder")
def test_printed_permissions_are_for_the_protocol_of_a_named_dev() -> None:
    with ExitStack() as exits:
        claim = exits.enter_context(claimed_state())
        assert claim is not None
        announce(claim.descriptor, "postgresql://me@127.0.0.1:1/dev", "nats://127.0.0.1:1", "v1r3")
        assert "cg.v1r3." in run("--dev", "dev", "nats", "permissions").stdout


@requirement("cli.dev")
@pytest.mark.usefixtures("dev")
@pytest.mark.parametrize(
    "command",
    [["serve"], ["mcp"], ["gateway"], ["demo"], ["dev"], ["tokens", "list"], ["state", "purge"]],
    ids=" ".join,
)
def test_the_option_is_refused_by_commands_that_use_no_dev(command: list[str]) -> None:
    refused = run("--dev", "dev", *command)
    assert refused.exit_code == 2
    assert f"--dev: '{command[0]}' uses no running `dev`; leave the option out" in " ".join(refused.stderr.split())


@requirement("cli.dev")
@pytest.mark.usefixtures("dev")
def test_the_variable_for_a_whole_shell_is_ignored_by_them(folder: Path) -> None:
    tokens = run("tokens", "create", "--project", "p", OPENAPI_TOOL_DEV="dev")
    assert tokens.exit_code == 0, tokens.stderr
    assert f"of the gateway with the state file {folder / 'openapi-tool' / 'gateway.sqlite3'}\n" in tokens.stderr


@requirement("cli.dev", "gateway.commands")
def test_printed_commands_are_about_the_same(default_file: Path) -> None:
    state = ("--state", str(default_file))
    switch = ("tools", "enable", "x", "--project", "p", "--reason", "r")
    assert f"; openapi-tool tools disabled --state {default_file} lists what is\n" in run(*switch, *state).stderr
    unknown = run("tokens", "revoke", "0" * 12, *state)
    assert unknown.stderr == (
        f"openapi-tool: there is no token 000000000000; `openapi-tool tokens list --state {default_file}` shows them\n"
    )
    assert (
        f"`openapi-tool tokens list --state {default_file}` shows them" in run("tokens", "revoke", "x", *state).stderr
    )
    with ExitStack() as exits:
        start(exits)
        advice = "; `openapi-tool --dev dev check` tests NATS and PostgreSQL from here\n"
        for words in ([], ["--dev", "dev"]):
            assert run(*words, "top", "--once").stderr.endswith(advice)
    of_file = run("tokens", "revoke", "x", "--file", "my file").stderr
    assert "`openapi-tool tokens list --file 'my file'` shows them" in of_file
    in_nats = run("top", "--once", "--state", "nats", NATS_SERVERS="nats://127.0.0.1:1")
    assert "GET /readyz" in in_nats.stderr
    assert "check` tests" not in in_nats.stderr, "a gateway has no PostgreSQL, which `check` needs"
    assert "check` tests" not in run("usage", "--state", "nats", NATS_SERVERS="nats://127.0.0.1:1").stderr


@requirement("gateway.tokens")
@pytest.mark.parametrize(
    ("pattern", "remark"),
    [
        ("jina_serach", "--tools: 'jina_serach' matches no built-in tool; did you mean 'jina_search'? (a gateway"),
        ("x*", "--tools: 'x*' matches no built-in tool; they are jina_search, "),
        ("jina_*", ""),
        ("jina_search", ""),
        ("*", ""),
    ],
)
def test_a_token_for_tools_that_are_not_known_is_made_with_a_warning(pattern: str, remark: str, folder: Path) -> None:
    for to in (["--state", str(folder / "s" / "state")], ["--file", str(folder / "tokens.json")]):
        made = run("tokens", "create", "--project", "p", "--tools", pattern, "--json", *to)
        assert made.exit_code == 0, made.stderr
        assert json.loads(made.stdout)["tools"] == [pattern]
        assert made.stderr.startswith(remark)
        assert bool(made.stderr) is bool(remark)


@requirement("gateway.commands")
def test_a_disabled_tool_that_a_gateway_does_not_have_is_remarked(default_file: Path) -> None:
    switch = ("--project", "p", "--reason", "r", "--state", str(default_file))
    wrong = run("tools", "disable", "jina_serach", *switch)
    assert (wrong.exit_code, "no built-in tool is registered as 'jina_serach'" in wrong.stderr) == (0, True)
    assert "did you mean 'jina_search'?" in wrong.stderr
    assert run("tools", "disable", "jina_search", *switch).stderr == "disabled tool 'jina_search' of project 'p'\n"
    assert run("tools", "disable", *switch).stderr == "disabled all tools of project 'p'\n"
