"""An empty name or path, or a name that PostgreSQL and NATS cannot take, is a mistake of the user and named as such."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from inspect import unwrap
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from openapi_tool.cli import app
from tests.requirements import requirement

DEFINITION = "config/tools/jina_search.yaml"
UNREACHABLE = {"PG_DSN": "postgresql://u@127.0.0.1:1/x", "NATS_SERVERS": "nats://127.0.0.1:1"}
PROJECT = ["--project", "p"]
REASON = ["--reason", "a test"]
COMMANDS = [  # each with GIVEN in place of a name
    ("TOOL", ["call", "GIVEN"]),
    *((option, ["call", "jina_search", option, "GIVEN"]) for option in ("--project", "--agent", "--channel")),
    ("TOOL_CALL_ID", ["inspect", "GIVEN", *PROJECT]),
    ("--project", ["inspect", "tc_1", "--project", "GIVEN"]),
    ("--project", ["usage", "--project", "GIVEN"]),
    ("--project", ["budgets", "--project", "GIVEN"]),
    ("--project", ["check", "--project", "GIVEN"]),
    ("--project", ["deadletters", "list", "--project", "GIVEN"]),
    ("LETTER", ["deadletters", "show", "GIVEN"]),
    ("LETTERS", ["deadletters", "replay", "1", "GIVEN"]),
    ("--project", ["tools", "list", "--db", "--project", "GIVEN"]),
    ("TOOL", ["tools", "show", "--db", *PROJECT, "GIVEN"]),
    ("--project", ["tools", "show", "--db", "--project", "GIVEN", "x"]),
    ("TOOLS", ["tools", "delete", "--db", *PROJECT, "x", "GIVEN"]),
    ("--project", ["tools", "delete", "--db", "--project", "GIVEN", "x"]),
    ("--project", ["tools", "apply", "--db", *PROJECT, "--project", "GIVEN", DEFINITION]),
    ("--project", ["tools", "render", "--project", "GIVEN", DEFINITION]),
    *(("NAME", ["tools", word, "GIVEN", *PROJECT, *REASON]) for word in ("disable", "enable")),
    ("--project", ["tools", "disable", "x", "--project", "GIVEN", *REASON]),
    ("--reason", ["tools", "disable", "x", *PROJECT, "--reason", "GIVEN"]),
    ("--by", ["tools", "disable", "x", *PROJECT, *REASON, "--by", "GIVEN"]),
    ("--stream", ["nats", "permissions", "--stream", "GIVEN"]),
    ("--role", ["sql", "grants", "--role", "GIVEN"]),
    ("--project", ["tokens", "create", "--project", "GIVEN"]),
    ("--agent", ["tokens", "create", *PROJECT, "--agent", "GIVEN"]),
    ("--tools", ["tokens", "create", *PROJECT, "--tools", "GIVEN"]),
]


def run(words: list[str], given: str, tmp_path: Path) -> Result:
    environment = UNREACHABLE | {"XDG_RUNTIME_DIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    return CliRunner().invoke(app, [given if word == "GIVEN" else word for word in words], env=environment)


@pytest.mark.parametrize("given", ["", "a\0b", "a\udcff"], ids=["empty", "NUL", "no UTF-8"])
@pytest.mark.parametrize(("option", "words"), COMMANDS, ids=[" ".join(words) for _, words in COMMANDS])
@requirement("cli.names")
def test_a_name_that_cannot_be_one_is_a_wrong_option(option: str, words: list[str], given: str, tmp_path: Path) -> None:
    refused = run(words, given, tmp_path)
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"openapi-tool: {option}")
    assert "connect" not in refused.stderr


@requirement("cli.names")
def test_the_empty_name_of_a_dev_is_not_taken_for_any_other_server(tmp_path: Path) -> None:
    refused = run(["--dev", "GIVEN", "top", "--once"], "", tmp_path)
    assert (refused.exit_code, refused.stderr) == (
        2,
        "openapi-tool: --dev: is empty; give the name of a running `dev`\n",
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\xff\xfe", "is not UTF-8 text; name a file with one project per line"), (b"a\0b\n", "it contains NUL")],
)
@requirement("cli.names")
def test_a_file_of_projects_that_is_none_is_refused_with_its_name(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "projects"
    file.write_bytes(content)
    refused = run(["tools", "apply", "--db", "--projects-file", str(file), DEFINITION], "", tmp_path)
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"openapi-tool: --projects-file: {file}: ")
    assert words in refused.stderr


PATHS = [  # each with GIVEN in place of a path
    *(
        ("--state", [*words, "--state", "GIVEN"])
        for words in (
            ["mcp"],
            ["gateway"],
            ["tokens", "list"],
            ["tokens", "create", *PROJECT],
            ["tokens", "revoke", "000000000000"],
            ["state", "purge", "--yes"],
            ["top", "--once"],
            ["limits"],
            ["budgets"],
            ["usage"],
            ["inspect", "tc_1"],
            ["tools", "disabled"],
            ["tools", "disable", "x", *PROJECT, *REASON],
            ["tools", "enable", "x", *PROJECT, *REASON],
        )
    ),
    *(
        ("--config", [*words, "--config", "GIVEN"])
        for words in (["serve"], ["mcp"], ["gateway"], ["check"], ["config", "show"], ["tools", "lint", DEFINITION])
    ),
    *(("--tools", [*words, "--tools", "GIVEN"]) for words in (["mcp"], ["gateway"], ["demo", "--serve"])),
    *(
        ("--file", ["tokens", *words, "--file", "GIVEN"])
        for words in (["list"], ["create", *PROJECT], ["revoke", "000000000000"])
    ),
    ("--keep", ["dev", "--keep", "GIVEN"]),
    ("--plot", ["usage", *PROJECT, "--plot", "GIVEN"]),
    ("--output-dir", ["tools", "export", "--format", "kernel", "--output-dir", "GIVEN"]),
    ("--projects-file", ["tools", "apply", "--db", "--projects-file", "GIVEN", DEFINITION]),
    ("FILES", ["tools", "apply", "--db", *PROJECT, "--dry-run", DEFINITION, "GIVEN"]),
    ("FILES", ["tools", "lint", "GIVEN"]),
    ("FILES", ["tools", "export", "GIVEN"]),
    ("FILE", ["tools", "render", *PROJECT, "GIVEN"]),
]


@pytest.mark.parametrize(("option", "words"), PATHS, ids=[" ".join(words) for _, words in PATHS])
@requirement("cli.names")
def test_an_empty_path_is_refused_by_the_name_of_its_option(option: str, words: list[str], tmp_path: Path) -> None:
    refused = run(words, "", tmp_path)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == f"openapi-tool: {option}: is empty; give the path\n"


@requirement("cli.names")
def test_every_option_for_a_path_is_in_this_list() -> None:
    tested = {(" ".join(word for word in words if word in COMMAND_WORDS), option) for option, words in PATHS}
    assert {(name, option) for name, option in options_for_paths(get_command(app), ()) if name} == tested


COMMAND_WORDS = {
    *("mcp", "gateway", "tokens", "list", "create", "revoke", "state", "purge", "top", "limits", "budgets", "usage"),
    *("inspect", "tools", "disabled", "disable", "enable", "serve", "check", "config", "show", "lint", "demo", "dev"),
    *("export", "apply", "render"),
}


def options_for_paths(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the command and the name of each parameter that is a path, as users write them."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from options_for_paths(inner, (*words, name))
    if not hasattr(command, "commands"):
        hints = get_type_hints(unwrap(command.callback))
        for parameter in command.params:
            hint = str(hints[parameter.name])
            if "Path" in hint:
                yield (
                    " ".join(words),
                    parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.name.upper(),
                )


@pytest.mark.parametrize("path", [".", "/"])
@requirement("gateway.commands")
def test_a_folder_is_no_state_file(path: str, tmp_path: Path) -> None:
    says = f"openapi-tool: {path} is a folder; name a file with --state"
    for words in (["tokens", "list"], ["usage"], ["state", "purge", "--yes"]):
        refused = run([*words, "--state", "GIVEN"], path, tmp_path)
        assert (refused.exit_code, refused.stderr.splitlines()[-1]) == (2, says)
    # `mcp` writes its log in the background, so it is not run within this process.
    command = [sys.executable, "-m", "openapi_tool", "mcp", "--state", path]
    served = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)  # noqa: S603
    assert (served.returncode, served.stderr.splitlines()[-1]) == (2, says)


@pytest.mark.parametrize("words", [words for option, words in PATHS if option == "--state"], ids=" ".join)
@requirement("gateway.commands")
def test_no_operator_can_name_what_is_in_the_memory_of_another_process(words: list[str], tmp_path: Path) -> None:
    if words[0] in ("mcp", "gateway"):  # their own memory; tests/gateway runs them with it
        assert ":memory:" in run([words[0], "-h"], "", tmp_path).stdout
        return
    refused = run(words, ":memory:", tmp_path)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == "openapi-tool: --state: only the process itself can use :memory:; name a file\n"
    assert ":memory:" not in run([*words, "-h"], "", tmp_path).stdout
