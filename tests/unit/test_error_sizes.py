"""However large an option, an argument or a message is, the error about it is short."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from openapi_tool.cli import app
from openapi_tool.protocol.errors import BadRequest
from openapi_tool.settings_error import SettingsError
from tests.requirements import requirement

MAX_CHARS = 2_000
HUGE = "x" * 70_000
WITH_BLANKS = "a b " * 17_500
GIVEN = {
    "tool_call_id": "tc_1",
    "project": "proj_x",
    "reason": "a test",
    "tool": "jina_search",
    "token": "ab12cd34ef56",
    "files": "config/tools/jina_search.yaml",
    "file": "config/tools/jina_search.yaml",
    "letter": "1",
    "letters": "1",
    "tools": "jina_search",
}
"""Values of what commands require."""


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner = getattr(command, "commands", None)
    if not inner:
        yield words, command
    for name, child in (inner or {}).items():
        yield from commands(child, (*words, name))


COMMANDS = dict(commands(typer.main.get_command(app)))
NOT_RUN = ("serve", "mcp", "gateway", "dev", "demo")  # most values of their options are those of any service


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@requirement("errors.bounded")
def test_no_option_makes_an_error_of_a_command_long(words: tuple[str, ...], tmp_path: Path) -> None:
    environment = {
        "PG_DSN": "postgresql://u@127.0.0.1:1/x",
        "NATS_SERVERS": "nats://127.0.0.1:1",
        "XDG_RUNTIME_DIR": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path),
    }
    parameters = [each for each in COMMANDS[words].params if each.name != "help"]
    with_values = [] if words[0] in NOT_RUN else [each for each in parameters if not getattr(each, "is_flag", False)]
    lines = [[*words, f"--{HUGE}"], [*words, *(HUGE for _ in range(9))]]
    for changed in with_values:
        for value in (HUGE, WITH_BLANKS):
            options, arguments = [], []
            for each in parameters:
                if each is not changed and not each.required:
                    continue
                text = value if each is changed else GIVEN[str(each.name)]
                if each.param_type_name == "argument":
                    arguments.append(text)
                else:
                    options += [each.opts[0], text]
            lines.append([*words, *options, "--", *arguments])
    for line in lines:
        result = CliRunner().invoke(app, line, env=environment, input="n\n")
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert len(result.stderr) < MAX_CHARS, (line[:4], result.stderr[:200])


@pytest.mark.parametrize("words", [[HUGE], ["tools", HUGE], [f"--{HUGE}"], ["--dev", HUGE, "top"]], ids=range(4))
@requirement("errors.bounded")
def test_no_name_of_a_command_makes_the_error_long(words: list[str]) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert len(result.stderr) < MAX_CHARS


@requirement("errors.bounded")
def test_a_message_that_quotes_a_huge_value_keeps_its_beginning_and_its_remedy() -> None:
    text = f"The value {HUGE!r} is wrong; give another one."
    error = BadRequest(text)
    later = BadRequest("short")
    later.message = text
    shown = [error.message, str(error), later.message, str(later), error.as_error()["message"]]
    shown += SettingsError([text]).problems
    for each in shown:
        assert len(each) <= 6_000
        assert each.startswith("The value 'xxx")
        assert each.endswith("xxx' is wrong; give another one.")
    assert BadRequest("y" * 5_000).message == "y" * 5_000
