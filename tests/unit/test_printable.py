"""Foreign text on a terminal and in the console log is shown, without any other effect."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import unicodedata
from collections.abc import AsyncIterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from openapi_tool.bus.dead_letters import DeadLetter, dead_letter
from openapi_tool.cli import app, call, common, deadletters, dev, tools_apply, tools_files, tools_registry
from openapi_tool.cli import call as call_command
from openapi_tool.local.caller import PlacedCall, ResultRows
from openapi_tool.local.demo import CompletedCall
from openapi_tool.telemetry.logs import ConsoleFormatter, printable_json, printable_line, printable_lines
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.tools.problems import Problem
from tests.requirements import requirement
from tests.support import delivery

MARKUP = "[/bold][link=https://evil.example]here[/link] :smile:"
HOSTILE = f"{MARKUP} \x1b[2J a\rb \u202eevil\u2066 \x9b31m \x00\x7f\u2028\u200b\U000e0041 \udcff\nopenapi-tool: forged"
JOINERS = frozenset("\u200c\u200d")
UNSAFE = (
    frozenset(map(chr, (*range(0x20), *range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0xD800, 0xE000))))
    | {char for char in map(chr, range(0x110000)) if unicodedata.bidirectional(char) == "BN"}  # no width, no direction
    | frozenset("\u061c\u200e\u200f\u2065\u2066\u2067\u2068\u2069\ufff9\ufffa\ufffb")
    | frozenset(map(chr, range(0xE0000, 0xE0080)))
) - JOINERS


def assert_text(written: str) -> None:
    """Assert that markup is unchanged, the rest escaped, and that no line begins like one of ours."""
    assert UNSAFE & set(written) <= {"\n"}
    assert "[/bold][link=https://evil.example]here[/link] :smile:" in written.replace("\n", "")
    assert not [line for line in written.splitlines() if line.startswith("openapi-tool: forged")]


@requirement("terminal.text")
def test_every_unsafe_character_is_escaped() -> None:
    assert [char for char in UNSAFE if not printable_line(char).isascii() or len(printable_line(char)) < 2] == []


@given(text=st.text(st.characters(codec=None)))
@requirement("terminal.text")
def test_any_text_is_one_line_of_safe_characters(text: str) -> None:
    line = printable_line(text)
    assert not UNSAFE & set(line)
    line.encode()  # whatever is left has an encoding
    assert UNSAFE & set(text) or line == text


@given(text=st.text(st.characters(codec=None)))
@requirement("terminal.text")
def test_printable_lines_keep_line_breaks_and_tabs_only(text: str) -> None:
    lines = printable_lines(text)
    assert not UNSAFE & set(lines.replace("\n", "").replace("\t", ""))
    assert lines.count("\n") == text.count("\n")


@given(value=st.recursive(st.text(st.characters(codec=None)), st.lists) | st.dictionaries(st.text(), st.text()))
@requirement("terminal.text")
def test_any_json_is_safe_and_parses_to_the_same_value(value: Any) -> None:
    for indent in (None, 2):
        text = printable_json(value, indent)
        assert not UNSAFE & set(text.replace("\n", ""))
        assert json.loads(text) == value


# How commands print.

PRINTS = ("add_row", "echo", "secho", "write")
SAFE = (
    *("cell", "printable_", "as_yaml(", "json.dumps(", "__version__", 'f"{statement};"', "fg=_COLOURS.get(line.split"),
    *("super().write(data)", "{error.strerror}"),
)
"""Helpers; JSON in ASCII; our own texts; `dev`'s lines, in which nothing but printable characters is left; and the
stream of standard output itself, with the system's text for a write that failed."""


@pytest.mark.parametrize("file", sorted(Path(common.__file__).parent.glob("*.py")), ids=lambda file: file.stem)
@requirement("terminal.text")
def test_commands_print_through_the_helpers_only(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    printing = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in PRINTS]
    texts = [ast.get_source_segment(source, call) or "" for call in printing]
    assert [text for text in texts if not any(safe in text for safe in SAFE)] == []


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "4000")
    monkeypatch.setenv("PG_DSN", "postgresql://127.0.0.1/unused")


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.output


def hostile_letter() -> DeadLetter:
    headers = {"CG-Tool-Call-Id": HOSTILE, HOSTILE: HOSTILE}
    letter = dead_letter(delivery(headers, data=HOSTILE.encode("utf-8", "surrogateescape")), "x", "y", Redactor())
    return replace(letter, reason=HOSTILE, message=HOSTILE, subject=HOSTILE, published_at=HOSTILE)


@pytest.mark.parametrize(
    "command", [("list",), ("list", "--json"), ("show", "0"), ("show", "0", "--json"), ("replay", "0")]
)
@requirement("terminal.text")
def test_dead_letters_are_escaped(monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> None:
    _replay_as(monkeypatch, why=None)
    assert_text(printed("deadletters", *command).replace("nothing was changed; add --yes to send\n", ""))


def _replay_as(monkeypatch: pytest.MonkeyPatch, why: str | None) -> None:
    """Replace NATS: every letter exists, and its replay has this outcome."""

    async def replay(*_: object, **__: object) -> dict[str, Any]:
        return {"id": HOSTILE, "subject": HOSTILE, "sent": False, "why": why}

    async def letters(*_: object, **__: object) -> AsyncIterator[DeadLetter]:
        yield hostile_letter()

    bootstrap = SimpleNamespace(redactor=Redactor())
    monkeypatch.setattr(deadletters, "_replay", replay)
    monkeypatch.setattr(deadletters, "_letters", letters)
    monkeypatch.setattr(deadletters, "_run", lambda work, *_, **__: asyncio.run(work(bootstrap, None)))


@requirement("terminal.text")
def test_the_reason_of_a_failed_replay_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    _replay_as(monkeypatch, why=HOSTILE)
    assert_text(printed("deadletters", "replay", "0", "--yes"))


STORED = HOSTILE.replace("\udcff", "")  # jsonb holds no lone surrogates
ROW = {
    "tool_name": STORED,
    "description": STORED,
    "target_subject": STORED,
    "after_execution": STORED,
    "parameters": {STORED: STORED},
    "options": {"suspend_timeout_seconds": STORED},
}


@pytest.mark.parametrize(
    "command", [("list",), ("list", "--json"), ("show", "x"), ("show", "x", "--json"), ("delete", "x", "--yes")]
)
@requirement("terminal.text")
def test_stored_definitions_are_escaped(monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> None:
    deleted = [{"tool_name": HOSTILE, "project_id": HOSTILE, "outcome": "failed", "reason": HOSTILE}]
    answers: Mapping[str, Any] = {"list": [ROW], "show": ROW, "delete": deleted}
    monkeypatch.setattr(tools_registry, "run_with", lambda *_: answers[command[0]])
    written = printed("tools", *command, "--project", "p", "--db")
    assert_text(written)
    if command == ("show", "x"):
        assert yaml.safe_load(written)["parameters"] == ROW["parameters"]


@requirement("terminal.text")
def test_registry_errors_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        common.fail(HOSTILE)

    monkeypatch.setattr(tools_registry, "run_with", refuse)
    assert_text(printed("tools", "list", "--project", "p", "--db"))


@requirement("terminal.text")
def test_results_of_apply_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    difference = tools_apply._difference(None, ROW)  # noqa: SLF001 - the command needs a kernel
    result = tools_apply.Result(HOSTILE, HOSTILE, "failed", HOSTILE, difference)
    tools_apply._show([result])  # noqa: SLF001
    assert_text(capsys.readouterr().out)
    tools_apply._show_differences([result])  # noqa: SLF001
    assert_text(capsys.readouterr().err)


@requirement("terminal.text")
def test_problems_of_lint_are_escaped(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    located = tools_files.LocatedProblem(HOSTILE, 1, 2, Problem((HOSTILE,), HOSTILE))
    monkeypatch.setattr("openapi_tool.cli.tools.lint_files", lambda *_, **__: [located])
    file = tmp_path / "x.yaml"
    file.write_text("")
    assert_text(printed("tools", "lint", str(file)))


def placed_call() -> PlacedCall:
    ids: dict[str, Any] = dict.fromkeys((field.name for field in fields(PlacedCall)), HOSTILE)
    return PlacedCall(**{**ids, "subject": "cg.v1r4.p.c.cmd.tool.jina.x"})


@pytest.mark.parametrize("status", ["success", "failed"])
@requirement("terminal.text")
def test_output_of_call_is_escaped(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    error = {"code": STORED, "message": STORED}
    result = STORED.replace("openapi-tool: forged", "a second line")  # of the text that a model reads
    content = {"status": status, "result": result, "error": None if status == "success" else error}
    outcome = call_command._Outcome(placed_call(), ResultRows({"content": content}, {}, {}, None, None), {"placed": 0})  # noqa: SLF001

    async def answered(*_: Any) -> Any:
        return outcome

    monkeypatch.setattr(call_command, "_addresses", lambda *_: (("", {}), Redactor()))
    monkeypatch.setattr(call_command, "_call", answered)
    assert_text(printed("call", "x"))
    assert_text(printed("call", "x", "--json"))


@requirement("terminal.text")
def test_the_reason_of_a_missing_result_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(*_: Any) -> Any:
        return call_command._Outcome(placed_call(), None, {}, HOSTILE)  # noqa: SLF001

    monkeypatch.setattr(call_command, "_addresses", lambda *_: (("", {}), Redactor()))
    monkeypatch.setattr(call_command, "_call", none)
    assert_text(printed("call", "x"))


@requirement("terminal.text")
def test_output_of_demo_is_escaped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(call, "Console", lambda **options: Console(**options, width=4000))
    of_call: dict[str, Any] = {
        "subject": HOSTILE,
        "headers": {HOSTILE: HOSTILE},
        "body": {HOSTILE: HOSTILE},
        "data": HOSTILE,
    }
    request: dict[str, Any] = {"method": "GET", "host": HOSTILE, "target": HOSTILE, "headers": {}, "body": None}
    journey = CompletedCall(
        HOSTILE,
        {HOSTILE: HOSTILE},
        of_call,
        [request],
        HOSTILE,
        HOSTILE,
        {"usage": {"tokens": 1, "requests": 1}},
        None,
        dict.fromkeys(("inbox_id", "message_type", "status", "payload"), HOSTILE),
        of_call,
        HOSTILE,
        {HOSTILE: 1},
    )
    call._show([journey], common.Upstream.DOUBLE)  # noqa: SLF001 - the command needs a stack
    assert_text(capsys.readouterr().out)


@requirement("terminal.text")
def test_lines_of_dev_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"time": "2026-01-01T00:00:00+00:00", "message": HOSTILE, "tool_call_id": HOSTILE, "subject": HOSTILE}
    line = dev._line("!", entry, dev._message(entry))  # noqa: SLF001 - the command needs a stack
    assert not UNSAFE & set(line)
    common.print_status(HOSTILE)
    common.print_line(HOSTILE)
    written = capsys.readouterr()
    assert_text(written.out)
    assert_text(written.err)


# The console log.


def logged(message: str, *arguments: object, **record: Any) -> list[str]:
    made = logging.LogRecord("openapi_tool.x", logging.ERROR, __file__, 1, message, arguments, record.pop("exc", None))
    vars(made).update(record)
    written = ConsoleFormatter(Redactor()).format(made)
    assert not UNSAFE & set(written.replace("\n", ""))
    return written.splitlines()


@requirement("terminal.text")
def test_no_message_or_field_can_forge_a_line_of_the_console_log() -> None:
    lines = logged("of %s", HOSTILE, tool_name=HOSTILE, nested={"a": [HOSTILE]}, **{HOSTILE: 1})
    assert len(lines) == 1
    assert lines[0].count("[/bold]") == 4


def _refuse() -> None:
    raise ValueError(HOSTILE)


@requirement("terminal.text")
def test_a_traceback_is_indented_and_cannot_forge_a_line_either() -> None:
    with pytest.raises(ValueError, match="bold") as refused:
        _refuse()
    first, *rest = logged("failed", action="call.broken", exc=(refused.type, refused.value, refused.tb))
    assert first.endswith(" ERROR   failed  action=call.broken")
    assert len(rest) > 3
    assert all(line.startswith("    ") for line in rest)
