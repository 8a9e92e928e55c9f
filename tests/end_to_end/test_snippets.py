"""Run every command and snippet of the documents, except those listed with a reason.

A new block without a handler fails, and so does a line of the list that no document needs. Commands run in a shell, in
a folder with some definitions; `openapi-tool` asks for no confirmation there, and finds the servers of the test.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
import yaml
from nats.aio.client import Client
from typer.testing import CliRunner

from openapi_tool.cli import app
from openapi_tool.cli.kernel import NO_DATABASE
from openapi_tool.local.caller import Caller
from openapi_tool.local.dev import FALLBACKS
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.settings import Settings, load_settings
from openapi_tool.tools.policy import HOOKS_GROUP, Denial, PlannedCall
from tests.conftest import AGENT, PROJECT, StartExecutor, search_tool
from tests.requirements import requirement
from tests.support import V1R4, delivery, each
from tests.waiting import WAIT_S
from tests.wire.test_bus import server

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "VERSIONING.md", "ARCHITECTURE.md")),
    ROOT / "helm" / "openapi-tool" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`openapi-tool ([^`]+)`")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block; `place` is its file and line."""

    place: str
    kind: str
    text: str

    @property
    def commands(self) -> list[str]:
        """Return the commands of a shell block: continued lines joined, comments removed."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def blocks() -> Iterator[Block]:
    for file in DOCUMENTS:
        text = file.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            line = text[: match.start()].count("\n") + 1
            yield Block(f"{file.relative_to(ROOT)}:{line}", match[2], match[3])


ALL = list(blocks())
SHELL = [block for block in ALL if block.kind == "sh"]
COMMANDS = [(block.place, command) for block in SHELL for command in block.commands]

NOT_RUN = {
    r"(kubectl|for pod in|done$|helm) ?.*": "needs a cluster; tests/unit/test_chart.py renders the chart",
    r".*--upstream real.*": "needs a key of Jina and the internet",
    r"\.venv/bin/openapi-tool demo --json( +#.*)?": "tests/end_to_end/test_local.py runs the demo with --json",
    r"\.venv/bin/openapi-tool demo --door (mcp|http)( +#.*)?": "tests/gateway/test_demo.py runs it",
    r"openapi-tool state purge --yes( +#.*)?": "tests/gateway/test_commands.py runs it, on a file of its own",
    r"pip install '\.\[gateway\]'": "the tests' environment has the extra",
    r"openapi-tool demo --protocol v1r3( +#.*)?": "tests/end_to_end/test_local.py runs it",
    r"openapi-tool dev( --keep \S+| --protocol v1r3| --replicas 4)?( +#.*)?": "runs until Ctrl-C, in test_dev.py",
    r"pip install \.": "takes minutes; tests/end_to_end/test_deployment.py installs the package as the image does",
    r"openapi-tool usage .*--plot .*": "needs the extra [plot]; tests/kernel/test_inspection.py draws where it can",
    r"python -c .*/livez.*": "runs in a container; tests/unit/test_telemetry.py asks /livez",
    r"docker compose .*": "needs an engine; tests/unit/test_compose.py checks file, commands and variables",
    r"openapi-tool --(install|show)-completion( +#.*)?": "is for a shell; tests/unit/test_completion.py runs it",
    r"export \w+=.*": "a variable that each run of `serve` in the tests has",
    r"openapi-tool gateway( +#.*)?": "runs until SIGTERM; tests/gateway/test_gateway_process.py starts it",
    r"curl -s http://127\.0\.0\.1:8090/.*": "needs a gateway; tests/gateway/test_http.py sends such requests",
    r"openapi-tool tokens .*": "tests/gateway/test_tokens.py runs them, on a file of its own",
    r"openapi-tool serve": "runs until SIGTERM; most of tests/end_to_end starts it",
    r"openapi-tool .*product_docs.*|(cp|openapi-tool) .*my_tool\.yaml.*": "tests/end_to_end/test_dev.py runs the five",
    r"openapi-tool .*--api http://kernel:8000": "needs the kernel's API; tests/registry/test_lint.py has a double",
}
"""Reason why a command is not run, by the pattern of the whole command."""

DRY_RUN = r"make .*"
"""Commands that take minutes: only their rules in the Makefile are resolved."""

HELP_ONLY = r"\.venv/bin/python -m .*"
"""Programs that take minutes: only their arguments are checked, with --help."""


def adjusted(words: list[str]) -> list[str]:
    """Add --yes: `apply` would ask for confirmation, and `call` refuses a kernel that `dev` did not create."""
    if words[:1] == ["call"]:
        return [*words, "--yes", "--project", PROJECT, "--agent", AGENT]
    if words[:2] == ["tools", "apply"]:
        return [*words, *({"--yes", "--db"} - set(words))]
    return words


def reason(command: str) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.fullmatch(pattern, command)), None)


def run(command: str, folder: Path, environment: Mapping[str, str]) -> None:
    """Run a command, which must succeed: `openapi-tool` in this process, the part after a pipe in a shell."""
    command, *piped = command.split(" | ")
    program, *words = shlex.split(command, comments=True)
    if program != "openapi-tool":
        _in_shell(command, "", folder, environment)
        return
    expanded = [name for word in words for name in (_files(word, folder) if "*" in word else [word])]
    result = CliRunner().invoke(app, adjusted(expanded), env=dict(environment))
    assert result.exit_code == 0, f"{command}: {result.output}"
    for after in piped:
        _in_shell(after, result.stdout, folder, environment)


def _files(pattern: str, folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.glob(pattern))


def _in_shell(command: str, text: str, folder: Path, environment: Mapping[str, str]) -> None:
    done = subprocess.run(  # noqa: S603 - our own documents
        ["/bin/sh", "-c", command], input=text, cwd=folder, env=environment, capture_output=True, text=True,
        check=False, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder as the documents assume it: own definitions, a list of projects, arguments."""
    for name in ("config", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "my-tools").mkdir()
    definition = yaml.safe_load((ROOT / "config" / "tools" / "jina_search.yaml").read_text(encoding="utf-8"))
    (tmp_path / "my-tools" / "search.yaml").write_text(yaml.safe_dump({**definition, "tool_name": "my_search"}))
    (tmp_path / "my-tool.yaml").write_text(yaml.safe_dump({**definition, "tool_name": "my_tool"}))
    (tmp_path / "projects.txt").write_text("my-project\nproj_dev\n")
    (tmp_path / "arguments.json").write_text('{"url": "https://example.com/"}')
    return tmp_path


@pytest.fixture
async def environment(
    stack: EmbeddedStack, caller: Caller, database: str, start_executor: StartExecutor
) -> AsyncIterator[dict[str, str]]:
    """Return the environment of a shell that reaches the servers of the test, with executor, projects and tools."""
    stack.upstream.fallbacks(*FALLBACKS)
    for project in ("my-project", "proj_dev"):
        await caller.add_project(project)
    reader = yaml.safe_load((ROOT / "config" / "tools" / "jina_read.yaml").read_text(encoding="utf-8"))
    for tool in (search_tool(), reader, {**search_tool(), "tool_name": "my_tool"}):
        await caller.add_tool(PROJECT, tool)
    await asyncio.to_thread(start_executor)
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    yield {
        "PATH": path,
        "HOME": str(stack.folder),
        "PG_DSN": stack.postgres.dsn(database),
        "NATS_SERVERS": stack.nats.url,
        **stack.upstream.keys,
        "PORT": str(stack.upstream.admin_port),
    }
    stack.upstream.fallbacks()


@requirement("docs.run")
async def test_the_commands_of_the_documents_succeed(
    stack: EmbeddedStack, folder: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    ran = 0
    for place, command in COMMANDS:
        if reason(command) or re.fullmatch(f"{DRY_RUN}|{HELP_ONLY}", command):
            continue
        assert command.startswith(("openapi-tool ", "curl ")), f"{place}: neither run nor on the list: {command}"
        here = command.replace(":PORT/", f":{environment['PORT']}/")
        await asyncio.to_thread(run, here, folder, environment)
        stack.upstream.rules()  # one of the commands sets some
        ran += 1
    assert ran >= 15


@requirement("docs.run")
@each(("place", "command"), [entry for entry in COMMANDS if re.fullmatch(DRY_RUN, entry[1]) and not reason(entry[1])])
def test_the_rules_of_the_makefile_exist(place: str, command: str) -> None:
    assert shutil.which("make"), place
    words = shlex.split(command.partition(" && ")[0], comments=True)
    made = subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603, S607
    assert made.returncode == 0, f"{place}: {made.stderr}"


@pytest.mark.thorough
@requirement("docs.run")
@each(("place", "command"), [entry for entry in COMMANDS if re.fullmatch(HELP_ONLY, entry[1])])
def test_programs_know_their_arguments(place: str, command: str) -> None:
    _, _, module, *arguments = shlex.split(command, comments=True)
    help_text = _help_of(module)
    for argument in arguments:
        assert argument in help_text, f"{place}: {argument}"


@functools.cache
def _help_of(module: str) -> str:
    program = [sys.executable, "-m", module, "--help"]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True, timeout=WAIT_S).stdout  # noqa: S603


@requirement("docs.run")
def test_every_reason_belongs_to_a_command_of_a_document() -> None:
    for pattern in NOT_RUN:
        assert any(re.fullmatch(pattern, command) for _, command in COMMANDS), pattern


# Blocks that are no commands, by file and first words: the function that checks the block, or why none does.


def _lints(text: str) -> None:
    """Lint a definition, or a fragment of the options of one."""
    document = yaml.safe_load(text)
    if "tool_name" not in document:
        document = {**search_tool(), "after_execution": "suspend", "options": {"jina": {"mode": "search"}, **document}}
    secrets = {"ALLOWED_ENV": "DOCS_READER_KEY,DOCS_TENANT", "ENV_PARAMETERS": "tenant_token"}
    settings = {f"OPENAPI_TOOL__SECRETS__{name}": value for name, value in secrets.items()}
    result = CliRunner().invoke(app, ["tools", "lint", "-"], input=yaml.safe_dump(document), env=settings)
    assert result.exit_code == 0, result.output


def _is_a_command(text: str) -> None:
    subject, *headers, body = text.splitlines()
    named = dict(pair.split(": ") for line in headers for pair in re.split(r" {2,}", line))
    command = V1R4.decode(delivery(named, subject=subject, data=body.encode()))
    assert command.function_name == "jina_search"


def _is_a_policy(text: str) -> None:
    policy = Settings.model_validate({"postgres": {"dsn": "postgresql://h/db"}, **tomllib.loads(text)}).policy
    assert policy.deny
    assert policy.projects


def _is_of_the_older_kernel(text: str) -> None:
    settings = Settings.model_validate(tomllib.loads(text))
    assert settings.protocol.version == settings.quotas.kernel == "v1r3"
    assert settings.quotas.nats is not None


def _limits_a_project(text: str) -> None:
    settings = Settings.model_validate({"postgres": {"dsn": "postgresql://h/db"}, **tomllib.loads(text)})
    assert settings.budgets.limited
    assert settings.budgets.projects


def _limits_keys(text: str) -> None:
    given = {"postgres": {"dsn": "postgresql://h/db"}, "secrets": {"allowed_env": ("SEARCH_API_KEY",)}}
    settings = Settings.model_validate(given | tomllib.loads(text))
    assert settings.limits.of("SEARCH_API_KEY").search_requests_per_minute == 1_000
    assert settings.limits.pools["JINA_API_KEY"].keys
    assert settings.fairness.weights


def _is_an_entry_point(text: str) -> None:
    assert tomllib.loads(text)["project"]["entry-points"][HOOKS_GROUP]


def _is_a_hook(text: str) -> None:
    scope: dict[str, Any] = {"is_night": lambda: True}
    exec(compile(text, "hook", "exec"), scope)  # noqa: S102 - our own document
    call = PlannedCall("jina.read", "t", frozenset(), "p", "c", "a", "turn", "call", {})
    assert isinstance(asyncio.run(scope["office_hours"](call)), Denial)


def _is_printed(text: str) -> None:
    result = CliRunner().invoke(app, ["sql", "grants", "--role", "openapi_tool"])
    assert text.split() == result.stdout.split()


def _passes(text: str) -> None:
    """Run a test of an own tool in a copy of the example project."""
    project = Path(os.environ["SNIPPET_FOLDER"])
    shutil.copytree(ROOT / "examples" / "own-tools" / "tools", project / "tools")
    (project / "test_snippet.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "test_snippet.py"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 0, done.stdout


def _configures_a_client(text: str) -> None:
    """Check that the command of a client's configuration exists, with its options and settings."""
    [server] = json.loads(text)["mcpServers"].values()
    group: Any = typer.main.get_command(app)
    known = {option for parameter in group.commands["mcp"].params for option in parameter.opts}
    assert (server["command"], server["args"][0]) == ("openapi-tool", "mcp")
    assert {word for word in server["args"] if word.startswith("--")} <= known
    settings = {name: value for name, value in server["env"].items() if name != "JINA_API_KEY"}
    with mock.patch.dict(os.environ, settings):
        load_settings(NO_DATABASE)


def _names_an_issuer(text: str) -> None:
    oauth = tomllib.loads(text)["gateway"]["oauth"]
    assert Settings(gateway={"oauth": oauth}, **NO_DATABASE).gateway.oauth is not None  # type: ignore[arg-type]


HANDLED: dict[tuple[str, str], Callable[[str], None] | str] = {
    ("docs/tools.md", "[budgets]"): _limits_a_project,
    ("docs/tools.md", "[limits]"): _limits_keys,
    ("ARCHITECTURE.md", "cg.v1r4."): _is_a_command,
    ("ARCHITECTURE.md", "cards "): "a drawing of rows; tests/kernel_conformance compares real ones",
    ("ARCHITECTURE.md", "kernel door "): "a drawing",
    ("README.md", "MCP client ──"): "a drawing",
    ("docs/serving.md", "cmd.tool.jina.*"): "a drawing",
    ("docs/on-call.md", "! exec-1, exec-2: the upstream"): "a picture of `top`; tests/unit/test_commands.py draws it",
    ("README.md", '{"mcpServers"'): _configures_a_client,
    ("docs/mcp.md", '{"mcpServers"'): _configures_a_client,
    ("docs/gateway.md", '{"mcpServers"'): "an address and a header; tests/gateway/test_mcp_http.py connects so",
    ("docs/gateway.md", "[gateway.oauth]"): _names_an_issuer,
    ("docs/registering-tools.md", "tool_name: web_search"): _lints,
    ("CONTRIBUTING.md", "# cosmic.toml"): "settings of a tool with an environment of its own",
    ("SECURITY.md", "delete from cards as result"): "tests/wire/test_secrets.py runs it",
    ("SECURITY.md", "delete from cards"): "tests/wire/test_secrets.py runs it",
    ("SECURITY.md", "nats stream purge"): "tests/wire/test_secrets.py purges the subject; the program nats is Go's",
    ("helm/openapi-tool/README.md", "image:"): "tests/unit/test_chart.py renders the chart with it",
    ("helm/openapi-tool/README.md", "config:"): "tests/unit/test_chart.py renders the chart with it",
    ("helm/openapi-tool/README.md", "podSecurityContext:"): "tests/unit/test_chart.py renders the chart with it",
    ("helm/openapi-tool/README.md", "secrets:"): "tests/unit/test_chart.py renders the chart with it",
    ("helm/openapi-tool/README.md", "autoscaling:"): "tests/unit/test_chart.py renders the chart with it",
    ("helm/openapi-tool/README.md", "toolsJob:"): "tests/unit/test_chart.py renders the chart with it",
    ("helm/openapi-tool/README.md", "serve:"): "tests/unit/test_chart.py renders the chart with it",
    ("helm/openapi-tool/README.md", "gateway:"): "tests/unit/test_chart.py renders the chart with it",
    ("docs/registering-tools.md", "12:00:01.250 →"): "lines that `dev` prints; test_dev.py checks such lines",
    ("docs/registering-tools.md", "import json"): _passes,
    ("docs/least-privilege.md", "grant usage"): _is_printed,
    ("docs/least-privilege.md", "permissions: {"): "test_a_nats_server_accepts_the_permissions_of_other_users",
    ("docs/migrating.md", "[protocol]"): _is_of_the_older_kernel,
    ("docs/registering-tools.md", "my-tools/search.yaml:9:7"): "what `lint` prints of a wrong definition",
    ("docs/registering-tools.md", "[policy]"): _is_a_policy,
    ("docs/registering-tools.md", "[project.entry-points"): _is_an_entry_point,
    ("docs/registering-tools.md", "from openapi_tool.tools.policy"): _is_a_hook,
}  # fmt: skip
"""If one beginning contains another, the longer one comes first."""


def _handler(block: Block) -> Callable[[str], None] | str | None:
    file = block.place.partition(":")[0]
    return next((how for (name, begin), how in HANDLED.items() if name == file and _begins(block, begin)), None)


def _begins(block: Block, begin: str) -> bool:
    return block.text.lstrip().startswith(begin)


@pytest.mark.thorough
@requirement("docs.run")
def test_every_other_snippet_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNIPPET_FOLDER", str(tmp_path))
    others = [block for block in ALL if block.kind != "sh"]
    for block in others:
        how = _handler(block)
        assert how is not None, f"{block.place}: neither run nor on the list"
        if not isinstance(how, str):
            how(block.text)
    for name, begin in HANDLED:
        blocks = [block for block in others if block.place.startswith(f"{name}:") and _begins(block, begin)]
        assert blocks, f"no document has this: {name} {begin}"


@requirement("docs.run")
async def test_a_nats_server_accepts_the_permissions_of_other_users(stack: EmbeddedStack) -> None:
    (block,) = (block for block in ALL if block.text.startswith("permissions: {"))
    with server(stack, f"authorization {{ users: [{{ user: a, password: a-word, {block.text.strip()} }}] }}\n") as nats:
        denied: asyncio.Queue[str] = asyncio.Queue()

        async def on_error(error: Exception) -> None:
            denied.put_nowait(str(error).lower())

        client = Client()
        await client.connect(nats.url, user="a", password="a-word", error_cb=on_error)
        await client.publish("_INBOX.openapi_tool.x", b"")
        await client.subscribe("_INBOX.openapi_tool.x")
        async with asyncio.timeout(WAIT_S):
            for _ in range(2):
                assert "permissions violation" in await denied.get()
        await client.close()


# Commands within a sentence.

INLINE = [(str(file.relative_to(ROOT)), snippet) for file in DOCUMENTS for snippet in _INLINE.findall(file.read_text())]


@pytest.mark.thorough
@requirement("docs.run")
@each(("file", "words"), INLINE)
def test_a_command_within_a_sentence_exists_with_its_flags(file: str, words: str) -> None:
    command: Any = typer.main.get_command(app)
    top, known = command, {"--help", "-h"}
    for word in words.split():
        command = getattr(command, "commands", {}).get(word, command)
        known |= {option for parameter in command.params for option in parameter.opts}
        if word.startswith("--"):
            assert word.partition("=")[0].rstrip(",.;") in known, f"{file}: openapi-tool {words}"
    assert command is not top or words.startswith("--"), f"{file}: openapi-tool {words}"


@requirement("docs.run")
def test_the_blocks_and_commands_of_the_documents_are_found() -> None:
    assert len(ALL) >= 40
    assert len(INLINE) >= 20
