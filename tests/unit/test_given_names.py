"""An empty name, or one that PostgreSQL and NATS cannot take, is a mistake of the user and named as such."""

from __future__ import annotations

from pathlib import Path

import pytest
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
