"""Output of the command line: text that is safe for terminals, `check`, and tables."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import unicodedata
from collections.abc import AsyncIterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import typer
import yaml
from hypothesis import given
from hypothesis import strategies as st
from nats.js.api import ConsumerConfig
from rich.console import Console
from typer.testing import CliRunner, Result

from openapi_tool.cli import (
    app,
    budgets,
    call_outcome,
    check,
    deadletters,
    definition_files,
    demo,
    dev_feed,
    limits,
    options,
    tools_apply,
    tools_registry,
    top,
)
from openapi_tool.cli import call as call_command
from openapi_tool.cli.call_outcome import CallOutcome
from openapi_tool.cli.output import fail, print_line, print_status
from openapi_tool.cli.tables import Rows, output, redraw
from openapi_tool.environment import CONFIG_VARIABLE
from openapi_tool.kernel.jetstream.dead_letter_records import DeadLetter, dead_letter
from openapi_tool.local.caller import STREAM, Caller, ResultRows
from openapi_tool.local.executor import LoopbackResolver
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.local.sample_calls import CompletedCall
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.protocol.printable import printable_json, printable_line, printable_lines
from openapi_tool.service.process_parts import upstream_transport
from openapi_tool.telemetry.logs import ConsoleFormatter
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.telemetry.replica_problems import but_noticed, found_problems
from openapi_tool.tools.problems import Problem
from tests.requirements import requirement
from tests.support import delivery

MARKUP = "[/bold][link=https://evil.example]here[/link] :smile:"
HOSTILE = f"{MARKUP} \x1b[2J a\rb \u202eevil\u2066 \x9b31m \x00\x7f\u2028\u200b\U000e0041 \udcff\nopenapi-tool: forged"
JOINERS = frozenset("\u200c\u200d")
SELECTORS = frozenset("\ufe0e\ufe0f")  # of emoji; one after a character stays
UNSAFE = (
    frozenset(map(chr, (*range(0x20), *range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0xD800, 0xE000))))
    | {char for char in map(chr, range(0x110000)) if unicodedata.bidirectional(char) == "BN"}  # no width, no direction
    | frozenset("\u061c\u200e\u200f\u2065\u2066\u2067\u2068\u2069\ufff9\ufffa\ufffb")
    | frozenset(map(chr, range(0xE0000, 0xE1000)))
    | frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0")  # blank, or no width
    | frozenset(map(chr, range(0xFE00, 0xFE0E)))
) - JOINERS


def assert_text(written: str) -> None:
    """Assert that markup is unchanged, the rest is escaped, and no line begins like a message of the command."""
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
    line.encode()  # raises UnicodeEncodeError if a lone surrogate is left
    assert (UNSAFE | SELECTORS) & set(text) or line == text


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
    *("cell", "printable_", "as_yaml(", "json.dumps(", "__version__", 'f"{statement};"', "**allowed_style(_COLOURS"),
    *("super().write(data)", "{error.strerror}"),
)
"""Parts of a printing statement that make it safe: helpers that escape, ASCII JSON, texts of this project, lines of
`dev`, which are escaped already, and standard output itself with the system's text for a failed write."""


@pytest.mark.parametrize(
    "file", sorted(Path(options.__file__).parent.rglob("*.py")), ids=lambda file: "/".join(file.parts[-2:])
)
@requirement("terminal.text")
def test_commands_print_through_the_helpers_only(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    printing = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in PRINTS]
    texts = [ast.get_source_segment(source, call) or "" for call in printing]
    assert [text for text in texts if not any(safe in text for safe in SAFE)] == []


HELP = """
import sys

import typer
from openapi_tool.cli import main
from openapi_tool.cli.commands import app

def commands(command, words):
    yield words
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, [*words, name])

every = [words + ["--help"] for words in commands(typer.main.get_command(app), [])]
for arguments in [["--version"], *every]:
    sys.argv = ["openapi-tool", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (arguments, end.code)
print(len(every), *sorted({name.partition(".")[0] for name in sys.modules}), file=sys.__stderr__)
"""
HEAVY = frozenset(
    [
        "aiohttp",
        "asyncio",
        "asyncpg",
        "httpx",
        "jsonschema_rs",
        "nats",
        "opentelemetry",
        "prometheus_client",
        "pydantic_settings",
        "requests",
        "rich",
        "ssl",
        "uvloop",
        "yaml",
    ]
)


@requirement("cli.help")
def test_version_and_help_of_every_command_import_none_of_what_does_the_work() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)  # noqa: S603
    commands, *imported = done.stderr.split()
    assert int(commands) > 30
    assert HEAVY & set(imported) == set()


WITHOUT_EXTRA = """
import contextlib, io, pkgutil, sys

sys.modules.update(dict.fromkeys(["mcp", "mcp_types", "starlette", "uvicorn"]))  # an import of one of them fails
import openapi_tool.cli.serve
from openapi_tool import service

for module in pkgutil.iter_modules(service.__path__, "openapi_tool.service."):
    __import__(module.name)
names = ("gateway", "http", "mcp", "local", "state.sqlite", "cli.gateway_serve")
print("imported:", *[name for name in names if f"openapi_tool.{name}" in sys.modules], flush=True)
from openapi_tool.cli import main

for command in ("gateway", "mcp"):
    sys.argv = ["openapi-tool", command]
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()) as said:
        main()
    print(said.getvalue().strip())
"""


@requirement("gateway.http")
def test_a_kernel_is_served_without_the_gateway_and_without_its_packages() -> None:
    """Of installed packages the import contracts say the same; this runs where they are missing."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRA], capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 0, done.stderr
    imported, *said = done.stdout.splitlines()
    assert imported == "imported:"
    assert len(said) == 2
    assert all("pip install 'openapi-tool[gateway]'" in line for line in said)


@pytest.fixture
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


@pytest.mark.usefixtures("_wide")
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
    monkeypatch.setattr(deadletters, "_with_nats", lambda work, *_, **__: asyncio.run(work(bootstrap, None)))


@pytest.mark.usefixtures("_wide")
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


@pytest.mark.usefixtures("_wide")
@pytest.mark.parametrize(
    "command", [("list",), ("list", "--json"), ("show", "x"), ("show", "x", "--json"), ("delete", "x", "--yes")]
)
@requirement("terminal.text")
def test_stored_definitions_are_escaped(monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> None:
    deleted = [{"tool_name": HOSTILE, "project_id": HOSTILE, "outcome": "failed", "reason": HOSTILE}]
    answers: Mapping[str, Any] = {"list": ([ROW], "v1r4"), "show": ROW, "delete": deleted}
    monkeypatch.setattr(tools_registry, "run_with", lambda *_, **__: answers[command[0]])
    written = printed("tools", *command, "--project", "p", "--db")
    assert_text(written)
    if command == ("show", "x"):
        assert yaml.safe_load(written)["parameters"] == ROW["parameters"]


@pytest.mark.usefixtures("_wide")
@requirement("terminal.text")
def test_registry_errors_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        fail(HOSTILE)

    monkeypatch.setattr(tools_registry, "run_with", refuse)
    assert_text(printed("tools", "list", "--project", "p", "--db"))


@pytest.mark.usefixtures("_wide")
@requirement("terminal.text")
def test_results_of_apply_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    difference = tools_apply._difference(None, ROW)  # noqa: SLF001 - the command needs a kernel
    result = tools_apply.ApplyResult(HOSTILE, HOSTILE, "failed", HOSTILE, difference)
    tools_apply._show([result])  # noqa: SLF001
    assert_text(capsys.readouterr().out)
    tools_apply._show_differences([result])  # noqa: SLF001
    assert_text(capsys.readouterr().err)


@pytest.mark.usefixtures("_wide")
@requirement("terminal.text")
def test_problems_of_lint_are_escaped(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    located = definition_files.LocatedProblem(HOSTILE, 1, 2, Problem((HOSTILE,), HOSTILE))
    monkeypatch.setattr("openapi_tool.cli.tools.lint_files", lambda *_, **__: [located])
    file = tmp_path / "x.yaml"
    file.write_text("")
    assert_text(printed("tools", "lint", str(file)))


def placed_call() -> PlacedCall:
    ids: dict[str, Any] = dict.fromkeys((field.name for field in fields(PlacedCall)), HOSTILE)
    return PlacedCall(**{**ids, "subject": "cg.v1r4.p.c.cmd.tool.jina.x"})


@pytest.mark.usefixtures("_wide")
@pytest.mark.parametrize("status", ["success", "failed"])
@requirement("terminal.text")
def test_output_of_call_is_escaped(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    error = {"code": STORED, "message": STORED}
    result = STORED.replace("openapi-tool: forged", "a second line")  # the text for the model may have several lines
    content = {"status": status, "result": result, "error": None if status == "success" else error}
    rows = ResultRows({"content": content}, {}, {}, None, None)
    outcome = CallOutcome(placed_call(), rows, {"placed": 0})

    async def answered(*_: Any) -> Any:
        return outcome

    monkeypatch.setattr(call_command, "_kernel", lambda: SimpleNamespace(redactor=Redactor(), program="openapi-tool"))
    monkeypatch.setattr(call_command, "_call", answered)
    assert_text(printed("call", "x"))
    assert_text(printed("call", "x", "--json"))


@requirement("terminal.text")
def test_no_line_of_a_page_looks_like_a_status_line_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"status": "success", "result": "a page\nsuccess: placed", "error": None}
    outcome = CallOutcome(placed_call(), ResultRows({"content": content}, {}, {}, None, None), {"placed": 0})

    async def answered(*_: Any) -> Any:
        return outcome

    monkeypatch.setattr(call_command, "_kernel", lambda: SimpleNamespace(redactor=Redactor(), program="openapi-tool"))
    monkeypatch.setattr(call_command, "_call", answered)
    assert "\nsuccess: placed" in CliRunner().invoke(app, ["call", "x"]).stdout  # a pipe gets the text as it is
    monkeypatch.setattr(call_outcome, "is_terminal", lambda: True)
    shown = CliRunner().invoke(app, ["call", "x"]).stdout
    assert shown.startswith("  ")
    assert "\n  success: placed" in shown


@requirement("terminal.text")
def test_variation_selectors_of_emoji_stay_but_not_hidden_text_of_them() -> None:
    assert printable_line("\u2764\ufe0f") == "\u2764\ufe0f"
    assert printable_line("\u2764\ufe0f\ufe0e\ufe0f") == "\u2764\ufe0f\\ufe0e\\ufe0f"
    assert printable_line("\ufe0f") == "\\ufe0f"


@pytest.mark.parametrize("times", [{}, {"placed": 0}])
@pytest.mark.usefixtures("_wide")
@requirement("terminal.text")
def test_the_reason_of_a_missing_result_is_escaped(times: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(*_: Any) -> Any:
        return CallOutcome(placed_call(), None, times, HOSTILE)

    monkeypatch.setattr(call_command, "_kernel", lambda: SimpleNamespace(redactor=Redactor(), program="openapi-tool"))
    monkeypatch.setattr(call_command, "_call", none)
    assert_text(printed("call", "x"))


@pytest.mark.usefixtures("_wide")
@requirement("terminal.text")
def test_output_of_demo_is_escaped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "Console", lambda **options: Console(**options, width=4000))
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
    demo._show([journey], options.UpstreamChoice.DOUBLE)  # noqa: SLF001 - the command needs a stack
    assert_text(capsys.readouterr().out)


@pytest.mark.usefixtures("_wide")
@requirement("terminal.text")
def test_lines_of_dev_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"time": "2026-01-01T00:00:00+00:00", "message": HOSTILE, "tool_call_id": HOSTILE, "subject": HOSTILE}
    line = dev_feed._line("!", entry, dev_feed._message(entry))  # noqa: SLF001 - the command needs a stack
    assert not UNSAFE & set(line)
    print_status(HOSTILE)
    print_line(HOSTILE)
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


@pytest.mark.usefixtures("_wide")
@requirement("terminal.text")
def test_no_message_or_field_can_forge_a_line_of_the_console_log() -> None:
    lines = logged("of %s", HOSTILE, tool_name=HOSTILE, nested={"a": [HOSTILE]}, **{HOSTILE: 1})
    assert len(lines) == 1
    assert lines[0].count("[/bold]") == 4


def _refuse() -> None:
    raise ValueError(HOSTILE)


@pytest.mark.usefixtures("_wide")
@requirement("terminal.text")
def test_a_traceback_is_indented_and_cannot_forge_a_line_either() -> None:
    with pytest.raises(ValueError, match="bold") as refused:
        _refuse()
    first, *rest = logged("failed", action="call.broken", exc=(refused.type, refused.value, refused.tb))
    assert first.endswith(" ERROR   failed  action=call.broken")
    assert len(rest) > 3
    assert all(line.startswith("    ") for line in rest)


UNREACHABLE = {"PG_DSN": "postgresql://user:the-word@127.0.0.1:1/kernel", "NATS_SERVERS": "nats://127.0.0.1:1"}


@requirement("cli.check")
def test_every_unusable_dependency_is_reported_at_once() -> None:
    result = CliRunner().invoke(app, ["check"], env={**UNREACHABLE, "JINA_API_KEY": None})
    assert result.exit_code == 1
    lines = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    assert list(lines) == ["settings", "postgres", "nats", "JINA_API_KEY"]
    assert lines["settings"] == "ok"
    assert lines["postgres"] == (
        "PostgreSQL at 127.0.0.1:1 (database kernel): connection refused; check postgres.dsn (PG_DSN)"
    )
    assert lines["nats"] == (
        "cannot connect to NATS at 127.0.0.1:1: connection refused; check nats.servers (NATS_SERVERS)"
    )
    assert lines["JINA_API_KEY"] == "is not set; set it or JINA_API_KEY_FILE"
    assert "the-word" not in result.output


@requirement("cli.check")
def test_check_reads_the_file_that_it_is_given_as_serve_does(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[postgres]\ndsn = "postgresql://127.0.0.1:1/fromfile"\n[nats]\nservers = ["nats://127.0.0.1:1"]\n')
    without = {"PG_DSN": None, "NATS_SERVERS": None, CONFIG_VARIABLE: str(tmp_path / "missing.toml")}
    result = CliRunner().invoke(app, ["check", "--config", str(file)], env=without)
    assert result.exit_code == 1
    assert "(database fromfile): connection refused" in result.stdout
    missing = CliRunner().invoke(app, ["check", "--config", str(tmp_path / "none.toml")], env=UNREACHABLE)
    assert (missing.exit_code, missing.stdout) == (2, "")
    assert f"--config={tmp_path / 'none.toml'}: cannot be read: No such file" in missing.stderr
    assert CONFIG_VARIABLE not in missing.stderr
    by_variable = CliRunner().invoke(app, ["check"], env={**UNREACHABLE, **without})
    assert f"{CONFIG_VARIABLE}={tmp_path / 'missing.toml'}: cannot be read: No such file" in by_variable.stderr


@requirement("settings.sources")
@pytest.mark.parametrize("command", [["serve"], ["config", "show"], ["tools", "lint", "-"], ["gateway"], ["mcp"]])
def test_a_mistake_in_the_file_of_the_option_names_the_option(command: list[str], tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[executor")
    result = CliRunner().invoke(app, [*command, "--config", str(file)], env={CONFIG_VARIABLE: "/nowhere"})
    assert result.exit_code == 2
    assert f"--config={file}: is no TOML in UTF-8" in result.stderr


@requirement("cli.check")
def test_json_has_the_same_outcomes() -> None:
    result = CliRunner().invoke(app, ["check", "--json"], env={**UNREACHABLE, "JINA_API_KEY": None})
    output = json.loads(result.stdout)
    assert (result.exit_code, output["ok"], output["remarks"]) == (1, False, [])
    assert [name for name, problem in output["checks"].items() if problem] == ["postgres", "nats", "JINA_API_KEY"]


@requirement("cli.check")
def test_a_setting_without_effect_is_a_remark() -> None:
    environment = {**UNREACHABLE, "OPENAPI_TOOL_COLOUR": "blue"}
    remark = "OPENAPI_TOOL_COLOUR is no setting and has no effect"
    assert f"openapi-tool: {remark}\n" in CliRunner().invoke(app, ["check"], env=environment).stderr
    assert json.loads(CliRunner().invoke(app, ["check", "--json"], env=environment).stdout)["remarks"] == [remark]


@requirement("cli.check")
def test_a_key_that_cannot_be_masked_is_a_remark() -> None:
    result = CliRunner().invoke(app, ["check", "--json"], env={**UNREACHABLE, "JINA_API_KEY": "ab"})
    assert json.loads(result.stdout)["remarks"] == [
        "JINA_API_KEY is too short or too common a word to be masked; set another one"
    ]


@pytest.mark.parametrize(("variable", "value"), [("PG_DSN", ""), ("OPENAPI_TOOL__EXECUTOR__CONCURENCY", "8")])
@requirement("cli.check")
def test_invalid_settings_are_reported_without_connecting(variable: str, value: str) -> None:
    environment = {**UNREACHABLE, variable: value}
    result = CliRunner().invoke(app, ["check"], env=environment)
    assert (result.exit_code, result.stdout) == (2, "")
    as_json = CliRunner().invoke(app, ["check", "--json"], env=environment)
    assert (as_json.exit_code, as_json.stderr) == (2, "")
    output = json.loads(as_json.stdout)
    assert (output["ok"], f"openapi-tool: {output['checks']['settings']}\n") == (False, result.stderr)


DURABLE = "durable_that_is_checked"
TOOL = {
    "tool_name": "bad_search",
    "target_subject": "cg.v1r4.{project_id}.{channel_id}.cmd.tool.jina.search",
    "options": {"jina": {"mode": "search", "params": {"num": 99}}},
}


@pytest.fixture
async def environment(stack: EmbeddedStack, database: str, caller: Caller) -> AsyncIterator[Mapping[str, str]]:
    """Return settings of an executor that could serve; its durable exists."""
    jetstream = caller.client.jetstream()
    filter_subject = "cg.v1r4.*.*.cmd.tool.jina.>"
    await jetstream.add_consumer(STREAM, ConsumerConfig(durable_name=DURABLE, filter_subject=filter_subject))
    yield {
        "PG_DSN": stack.postgres.dsn(database),
        "NATS_SERVERS": stack.nats.url,
        "OPENAPI_TOOL__NATS__DURABLE": DURABLE,
        "JINA_API_KEY": "a-key-of-the-test",
    }
    await jetstream.delete_consumer(STREAM, DURABLE)


async def checked(environment: Mapping[str, str], *flags: str) -> Result:
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, ["check", *flags], env=environment))


@requirement("cli.check")
async def test_usable_dependencies_are_described(environment: Mapping[str, str]) -> None:
    result = await checked(environment)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "settings: ok",
        "postgres: ok; without TLS",
        f"nats: ok; without TLS; stream {STREAM}; durable {DURABLE}, 0 pending",
        "JINA_API_KEY: ok",
    ]
    output = json.loads((await checked({**environment, "OPENAPI_TOOL__NATS__DURABLE": "new"}, "--json")).stdout)
    assert output["ok"]
    assert output["details"]["nats"][-1] == "durable new is created at the start"


@requirement("cli.check")
async def test_a_durable_that_delivers_nothing_is_named(environment: Mapping[str, str], caller: Caller) -> None:
    pause = orjson.dumps({"pause_until": "2099-01-01T00:00:00Z"})
    await caller.client.request(f"$JS.API.CONSUMER.PAUSE.{STREAM}.{DURABLE}", pause)
    result = await checked(environment)
    assert result.exit_code == 1
    assert f"nats: durable {DURABLE} is paused until 2099-01-01T00:00:00Z; resume it" in result.stdout


@requirement("cli.check")
async def test_definitions_whose_calls_go_to_other_executors_are_listed(
    environment: Mapping[str, str], caller: Caller
) -> None:
    subject = "cg.v1r4.{project_id}.{channel_id}.cmd.tool.jinna.search"
    await caller.add_tool("proj_c", {**TOOL, "target_subject": subject})
    result = await checked(environment, "--project", "proj_c")
    assert f"definitions of proj_c: ok; 0 definitions; of other executors: {TOOL['tool_name']}\n" in result.stdout


@requirement("cli.check")
async def test_a_definition_whose_calls_would_fail_is_named(environment: Mapping[str, str], caller: Caller) -> None:
    await caller.add_tool("proj_a", TOOL)
    await caller.add_tool("proj_b", {**TOOL, "options": {"jina": {"mode": "search"}}})
    assert (await checked(environment)).exit_code == 0  # no project is named
    result = await checked(environment, "--project", "proj_a", "--project", "proj_b")
    assert result.exit_code == 1
    assert "definitions of proj_b: ok; 1 definition" in result.stdout
    problem = "bad_search: options.jina.params.num: must be an integer from 1 to 20"
    assert f"definitions of proj_a: {problem}" in result.stdout
    own = {"OPENAPI_TOOL__PROTOCOL__PROJECT": "proj_a"}
    assert f"definitions of proj_a: {problem}" in (await checked({**environment, **own})).stdout


@requirement("cli.check")
@pytest.mark.parametrize(("trusted", "port"), [(True, None), (False, None), (True, 1)])
async def test_the_upstream_option_connects_as_calls_do(
    stack: EmbeddedStack,
    environment: Mapping[str, str],
    monkeypatch: pytest.MonkeyPatch,
    trusted: bool,  # noqa: FBT001
    port: int | None,
) -> None:
    def transport(bootstrap: Any, _: None) -> Any:
        return upstream_transport(bootstrap, LoopbackResolver(port or stack.upstream.port))

    monkeypatch.setattr(check, "upstream_transport", transport)
    stack.upstream.clear_requests()
    trust = {"SSL_CERT_FILE": str(stack.certificates.ca)} if trusted else {}
    result = await checked({**environment, **trust}, "--upstream")
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("upstream: ")]
    if trusted and port is None:
        assert (result.exit_code, line) == (0, "upstream: ok; r.jina.ai; s.jina.ai")
        assert {request["headers"].get("authorization") for request in stack.upstream.requests()} <= {None}
    else:
        kind, remedy = ("connection refused", "DNS") if port else ("certificate", "egress.ca_file (SSL_CERT_FILE)")
        assert result.exit_code == 1
        assert f".jina.ai cannot be reached ({kind}); check {remedy}" in line


NAMES = ("jina_search_of_the_documents", "jina_search_of_the_products", "x")
NUMBERS = ("20,006", "1", "126,000")
WHY = "options.jina.params.num: must be at most 20"
REPLICA = {
    "instance": "vm-19346",
    "rate": 12.5,
    "p50_ms": 96,
    "p95_ms": 126,
    "failed": 0,
    "running": 3,
    "waiting": 0,
    "held": 0,
    "oldest_held_s": 0.0,
}


def drawn(rows: Rows, width: int) -> str:
    written = io.StringIO()
    Console(file=written, width=width).print(rows)
    return written.getvalue()


def table() -> Rows:
    rows = Rows("tool", "tokens", "cache_hits", "what is wrong", title="calls", numbers=0, footed=True)
    for name, number in zip(NAMES, NUMBERS, strict=True):
        rows.add(name, number, number, WHY)
    return rows


def without_folds(text: str) -> str:
    """Return the joined text of each column: the cell parts between the same two bars."""
    lines = [line.split("│") for line in text.splitlines() if line.startswith("│")]
    return " ".join("".join(cell.strip() for cell in column) for column in zip(*lines, strict=True))


@pytest.mark.parametrize("width", [30, 40, 50, 60, 70, 80, 100, 120, 200])
@requirement("cli.help")
def test_no_width_truncates_a_cell(width: int) -> None:
    text = drawn(table(), width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert all(number in text for number in NUMBERS)
    whole = without_folds(text) if "│" in text else text.replace("\n", "")
    assert all(name in whole for name in NAMES)
    assert WHY.replace(" ", "") in whole.replace(" ", "")


@requirement("cli.help")
def test_a_very_narrow_terminal_gets_a_line_for_each_cell() -> None:
    lines = drawn(table(), 40).splitlines()
    assert lines[:4] == ["calls", f"tool: {NAMES[0]}", "tokens: 20,006", "cache_hits: 20,006"]


@requirement("cli.help")
def test_output_to_a_file_is_not_folded_unless_columns_is_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    output().print(table())
    natural = capsys.readouterr().out
    assert all(f" {name} " in natural for name in NAMES)
    assert len(natural.splitlines()) == 9
    monkeypatch.setenv("COLUMNS", "40")
    output().print(table())
    assert capsys.readouterr().out == drawn(table(), 40)


@pytest.mark.parametrize("width", [40, 80, 120])
@requirement("cli.top")
def test_top_folds_no_number_and_no_short_name(width: int) -> None:
    written = io.StringIO()
    Console(file=written, width=width).print(top.shown([REPLICA]))
    words = re.split(r"[\s│┃:]+", written.getvalue())
    assert {"vm-19346", "126", "12.5", "running"} <= set(words)


FULL = {"pending": 7, "unacknowledged": 100, "max_unacknowledged": 100}


@requirement("cli.top")
def test_top_shows_the_durable_once_for_all_replicas() -> None:
    replica = {**REPLICA, "tools": [{"project": "p", "tool": "t", "calls": 3}], **FULL}
    written = io.StringIO()
    Console(file=written, width=120).print(top.shown([replica, {**replica, "instance": "vm-2"}]))
    shown = written.getvalue()
    rows = [line.split() for line in shown.replace("│", " ").splitlines() if " p " in line]
    assert rows == [["p", "t", "6", "0"]]
    assert shown.count("durable: 7 commands not delivered, 100 not settled") == 1
    assert found_problems([replica]).now == [
        "the durable has 100 unsettled commands, its maximum: see durable.full in the log"
    ]


@requirement("cli.limits")
def test_problems_name_the_limits_for_which_calls_wait() -> None:
    limit = {"variable": "KEY", "endpoint": "search", "waiting": 2, "paused_s": 3.5, "offline": True}
    warning = {"action": "hook.failed", "count": 1, "message": "it failed", "ago_s": 21.0}
    assert found_problems([{**REPLICA, "upstream_limits": [limit], "warnings": [warning]}]).now == [
        "vm-19346: the search limit of KEY cannot be shared: see limits.not_shared in the log",
        "vm-19346: the upstream answered 429: search requests with KEY pause for 3.5 s",
        "vm-19346: 2 calls wait for the search limit of KEY: see openapi-tool limits",
        "vm-19346: hook.failed, 1 time, last 21 s ago: it failed",
    ]


def paused(instance: str, paused_s: float, ago_s: float) -> dict[str, Any]:
    message = f"the upstream answered 429: search requests with the key of KEY wait for {ago_s} s"
    warning = {"action": "limits.paused", "count": 3, "message": message, "ago_s": ago_s, "variable": "KEY"}
    limit = {"variable": "KEY", "endpoint": "search", "waiting": 2 if paused_s else 0, "paused_s": paused_s}
    return {**REPLICA, "instance": instance, "upstream_limits": [limit], "warnings": [warning]}


@requirement("cli.top")
def test_what_several_replicas_report_is_one_problem() -> None:
    found = found_problems([paused("vm-1", 3.5, 2.0), paused("vm-2", 3.0, 9.0)])
    assert found.now == [
        "vm-1, vm-2: the upstream answered 429: search requests with KEY pause for 3.5 s",
        "vm-1, vm-2: 4 calls wait for the search limit of KEY: see openapi-tool limits",
    ], "and no warning repeats the present state"
    assert found.earlier == []
    many = found_problems([paused(f"vm-{number}", 3.0, 9.0) for number in range(9)]).now
    assert many[0].startswith("all 9 replicas: ")
    some = found_problems([*(paused(f"vm-{number}", 3.0, 9.0) for number in range(8)), REPLICA]).now
    assert some[0].startswith("vm-0, vm-1, vm-2 and 5 others: ")


@requirement("cli.top")
def test_what_has_recovered_is_listed_apart_as_recovered() -> None:
    found = found_problems([paused("vm-1", 0, 12.0), paused("vm-2", 0, 9.0)])
    assert found.now == []
    message = "the upstream answered 429: search requests with the key of KEY wait for 9.0 s"
    assert found.earlier == [f"recovered: vm-1, vm-2: limits.paused, 6 times, last 9 s ago: {message}"]


_OVER: dict[str, dict[str, Any]] = {
    "limits.not_shared": {"upstream_limits": [{"variable": "KEY", "endpoint": "search", "offline": True}]},
    "key.blocked": {"upstream_keys": [{"variable": "KEY", "endpoint": "search", "state": "exhausted", "status": 402}]},
    "budgets.not_shared": {"health": {"budgets_by_last_known_state": "bucket is full"}},
    "clock.offset": {"health": {"clock_offset_s": -28.0}},
    "durable.full": FULL,
    "nats.silent": {"health": {"dependencies": {"nats": {"ok": False, "reason": "silent"}}}},
    "consumer.lost": {"health": {"dependencies": {"consumer": {"ok": False, "reason": "paused"}}}},
    "health.changed": {"health": {"dependencies": {"postgres": {"ok": False, "reason": "read-only"}}}},
}


@pytest.mark.parametrize("action", _OVER)
@requirement("cli.top")
def test_a_warning_about_a_state_counts_as_recovered_exactly_if_that_state_is_over(action: str) -> None:
    warning = {"action": action, "count": 1, "message": "why", "ago_s": 1.0, "variable": "KEY"} | {
        "dependency": "postgres"
    }
    during = found_problems([{**REPLICA, **_OVER[action], "warnings": [warning]}])
    assert (len(during.now), during.earlier) == (1, [])
    assert action not in during.now[0] or "see" in during.now[0], "the state itself, not the warning"
    after = found_problems([{**REPLICA, "warnings": [warning]}])
    assert (after.now, after.earlier) == ([], [f"recovered: vm-19346: {action}, 1 time, last 1 s ago: why"])


@requirement("cli.top")
@pytest.mark.parametrize(("ok", "for_s", "over"), [(True, 5.0, True), (True, 90.0, False), (False, 5.0, False)])
def test_a_warning_from_an_outage_of_nats_is_over_once_nats_is_available_again(
    ok: bool,  # noqa: FBT001 - a parameter of the test
    for_s: float,
    over: bool,  # noqa: FBT001 - the same
) -> None:
    health = {"dependencies": {"nats": {"ok": ok, "for_s": for_s, "reason": "why"}}}
    warning = {"action": "nats.error", "count": 1, "message": "why", "ago_s": 20.0}
    found = found_problems([{**REPLICA, "health": health, "warnings": [warning]}])
    line = "vm-19346: nats.error, 1 time, last 20 s ago: why"
    assert (f"recovered: {line}" in found.earlier, line in found.now) == (over, not over)


@requirement("cli.top")
def test_warnings_are_listed_newest_first_and_those_before_the_last_minute_apart() -> None:
    def warned(action: str, ago_s: float) -> dict[str, Any]:
        return {"action": action, "count": 1, "message": "why", "ago_s": ago_s}

    ages = {"a": 59.0, "b": 300.0, "c": 3.0, "d": 90.0}
    found = found_problems([{**REPLICA, "warnings": [warned(name, ages[name]) for name in ages]}])
    assert [line.split()[1] for line in found.now] == ["c,", "a,"]
    assert [line.split()[1] for line in found.earlier] == ["d,", "b,"]


@requirement("cli.top")
def test_a_warning_of_several_projects_is_one_line_that_names_them() -> None:
    warnings = [
        {
            "action": "intake.full",
            "count": 2,
            "message": f"full of p{number}",
            "ago_s": number,
            "project_id": f"p{number}",
        }
        for number in range(5)
    ]
    found = found_problems([{**REPLICA, "warnings": warnings}])
    often = "vm-19346: intake.full, 10 times, last 0 s ago"
    assert found.now == [f"{often} (projects p0, p1, p2 and 2 others): full of p0"]
    assert "(project p0)" in found_problems([{**REPLICA, "warnings": warnings[:1]}]).now[0]


@requirement("cli.top")
def test_less_replicas_than_expected_are_the_first_problem() -> None:
    assert found_problems([REPLICA], 3).now[0].startswith("1 of 3 replicas answer: ")
    assert found_problems([REPLICA], 1).now == []
    written = io.StringIO()
    Console(file=written, width=120).print(top.shown([REPLICA], expect=2))
    assert written.getvalue().startswith("! 1 of 2 replicas answer")


@requirement("cli.top")
def test_top_begins_with_the_problems_and_names_the_errors_of_each_tool() -> None:
    row = {"project": "p", "tool": "t"}
    errors = [{**row, "error_code": code, "calls": calls} for code, calls in (("rate_limited", 3), ("bad_request", 1))]
    replica = {**paused("vm-1", 3.5, 2.0), "tools": [{**row, "calls": 7}], "errors": errors}
    written = io.StringIO()
    Console(file=written, width=120).print(top.shown([replica, REPLICA]))
    lines = written.getvalue().splitlines()
    assert lines[0] == "! vm-1: the upstream answered 429: search requests with KEY pause for 3.5 s"
    [line] = [line for line in lines if "rate_limited" in line]
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        "p", "t", "7", "4", "3 rate_limited, 1 bad_request",
    ]  # fmt: skip
    quiet = io.StringIO()
    Console(file=quiet, width=120).print(top.shown([REPLICA]))
    assert quiet.getvalue().splitlines()[0] == "no problem is known now"
    failing = io.StringIO()
    Console(file=failing, width=120).print(top.shown([{**REPLICA, "calls": 3, "failed": 2}, REPLICA]))
    assert failing.getvalue().startswith("no problem is known now, but 2 of 3 calls of the last minute failed\n")


@requirement("cli.top")
def test_a_host_of_the_upstream_that_does_not_answer_is_a_problem_of_all_that_wait_for_it() -> None:
    def waiting(silent_s: float, oldest_s: float) -> dict[str, Any]:
        return {"upstream_waits": [{"host": "s.jina.ai", "open": 2, "oldest_s": oldest_s, "silent_s": silent_s}]}

    executor = {**REPLICA, "durable": "d"}
    replicas = [{**executor, "instance": f"vm-{number}", **waiting(20.0 + number, 9.0)} for number in range(2)]
    [line] = found_problems([*replicas, {**REPLICA, **waiting(19.9, 19.9)}]).now
    assert line == (
        "vm-0, vm-1: requests to s.jina.ai have had no answer for 21 s: "
        "openapi-tool check --upstream tries it from here"
    )
    [of_gateway] = found_problems([{**REPLICA, **waiting(21.0, 9.0)}]).now
    assert of_gateway == (
        "vm-19346: requests to s.jina.ai have had no answer for 21 s: "
        "see whether `curl https://s.jina.ai` connects from there; if it does, the host hangs"
    ), "a gateway has no database, which `check` needs"
    answered = [{**REPLICA, **waiting(1.0, 33.0), "oldest_held_s": 35.0}, {**REPLICA, **waiting(1.0, 19.0)}]
    assert found_problems(answered).now == [], "others are answered, so one page takes long"
    assert but_noticed(answered) == ", but a command is held for 35 s and a request to s.jina.ai waits for 33 s"


@requirement("cli.top")
def test_a_command_that_is_held_for_long_is_noticed_though_no_state_names_a_cause() -> None:
    replicas = [{**REPLICA, "oldest_held_s": 34.6}, {**REPLICA, "oldest_held_s": 3.0}]
    assert but_noticed(replicas) == ", but a command is held for 35 s"
    failed = ", but 2 of 3 calls of the last minute failed and a command is held for 35 s"
    assert but_noticed([{**replicas[0], "calls": 3, "failed": 2}, replicas[1]]) == failed
    assert not but_noticed([{**REPLICA, "oldest_held_s": 19.9}])


@requirement("cli.limits")
def test_without_limits_and_budgets_the_commands_say_how_to_set_one(capsys: pytest.CaptureFixture[str]) -> None:
    written = io.StringIO()
    Console(file=written, width=200).print(limits.shown([REPLICA]))
    assert "━" not in written.getvalue(), "no empty table"
    assert "[limits]\nsearch_requests_per_minute = 100\n" in written.getvalue()
    assert "docs/tools.md#rate-limits" in written.getvalue()
    with pytest.raises(typer.Exit):
        budgets.shown([REPLICA])
    said = capsys.readouterr().err
    assert "[budgets]\n  project_day_requests = 2_000\n" in said
    assert "docs/tools.md#budgets" in said


@requirement("gateway.commands")
def test_of_a_project_without_an_account_budgets_says_which_projects_have_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def said(projects: list[str], project: str | None) -> str:
        with pytest.raises(typer.Exit) as exited:
            budgets.shown([{**REPLICA, "budgets": [{"project": name, "share": 0.5} for name in projects]}], project)
        assert exited.value.exit_code == 0
        return " ".join(capsys.readouterr().err.split())

    started = "was used since the processes started"
    none_of_x = f"no account of project 'x' {started}; there are accounts of the projects:"
    assert said(["q", "p", "p"], "x") == f"{none_of_x} p, q"
    many = [f"p{number:02}" for number in range(12)]
    assert said(many, "x") == f"{none_of_x} {', '.join(many[:10])} and 2 more"
    assert said([], "x").startswith(f"no account {started}: no budget is set")
    shown = io.StringIO()
    Console(file=shown, width=200).print(
        budgets.shown([{**REPLICA, "budgets": [{"project": "p", "share": 0.5}, {"project": "q"}]}], "p")
    )
    assert "50%" in shown.getvalue()


LIMIT: dict[str, Any] = {
    "endpoint": "search",
    "requests_per_minute": 100,
    "tokens_per_minute": None,
    "concurrent": None,
}


@requirement("cli.limits")
def test_limits_that_no_key_has_used_are_shown_as_configured() -> None:
    configured = [{"variable": None, **LIMIT, "dry_run": True}]
    replicas = [{**REPLICA, "configured_limits": configured}, {**REPLICA, "configured_limits": configured}]
    written = io.StringIO()
    Console(file=written, width=200).print(limits.shown(replicas))
    assert "no limit is set" not in written.getvalue()
    said = " ".join(written.getvalue().split())
    assert "no key with a limit was used since the processes started; these limits are set" in said
    (row,) = [line.split() for line in written.getvalue().replace("│", " ").splitlines() if " 100 " in line]
    assert row == ["each", "search", "100", "-", "-", "yes"]
    assert limits.configured_limits(replicas) == configured


@requirement("cli.limits")
def test_a_dry_run_shows_how_many_requests_would_have_waited() -> None:
    limit = {"variable": "KEY", **LIMIT, "used": 7, "dry_run": True, "would_have_waited": 4}
    replica = {**REPLICA, "upstream_limits": [limit]}
    for dry_run in (True, False):
        written = io.StringIO()
        Console(file=written, width=300).print(
            limits.shown([{**REPLICA, "upstream_limits": [{**limit, "dry_run": dry_run}]}])
        )
        assert ("dry run: would have waited" in written.getvalue()) is dry_run
    assert limits.limits_in_use([replica, replica])[0]["would_have_waited"] == 8


@requirement("cli.limits", "cli.top")
async def test_updates_are_printed_one_after_the_other_into_a_file_until_sigterm() -> None:
    file, drawn = io.StringIO(), iter(["second", "third"])

    async def draw() -> str:
        if (text := next(drawn, None)) is None:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(9)
        return str(text)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a background job of a shell
    try:
        with pytest.raises(KeyboardInterrupt):
            await redraw(Console(file=file), "first", draw, 0.01)
    finally:
        signal.signal(signal.SIGINT, before)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    assert file.getvalue().split() == ["first", "second", "third"]


@requirement("cli.help")
def test_help_all_prints_the_help_of_every_command() -> None:
    shown = CliRunner().invoke(app, ["--help-all"])
    assert shown.exit_code == 0
    for words in ("serve", "tools lint", "config show", "deadletters"):
        assert f"Usage: openapi-tool {words} " in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80


@pytest.mark.parametrize(("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
@requirement("definition.lint")
def test_lint_marks_errors_by_colour_on_a_terminal_unless_no_color_is_set(
    environment: dict[str, str],
    coloured: bool,  # noqa: FBT001 - a parameter of the test
    tmp_path: Path,
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("tool_name: a\n", encoding="utf-8")
    command = shlex.join([sys.executable, "-m", "openapi_tool", "tools", "lint", str(file)])
    variables = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    in_terminal = subprocess.run(  # noqa: S603 - our own program
        ["script", "--quiet", "--return", "--command", command, "/dev/null"],  # noqa: S607 - util-linux
        env={**variables, "TERM": "xterm", **environment}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert "error: " in in_terminal.stdout
    assert ("\x1b[31m" in in_terminal.stdout) == coloured
    assert ("\x1b" in in_terminal.stdout) == coloured, "no other control sequence, either"
    piped = CliRunner().invoke(app, ["tools", "lint", str(file)])
    assert f"{file}:1:1: error: " in piped.stdout
    assert "\x1b" not in piped.stdout


@requirement("settings.sources")
def test_config_show_names_the_source_of_each_setting_and_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[executor]\nconcurrency = 8\n[cache]\nttl_s = 7\n", encoding="utf-8")
    environment = {
        "PG_DSN": "postgresql://user:the-word@127.0.0.1/kernel",
        "NATS_SERVERS": "nats://u:another-word@127.0.0.1",
        "OPENAPI_TOOL__CACHE__TTL_S": "9",
        CONFIG_VARIABLE: None,
    }
    shown = CliRunner().invoke(app, ["config", "show", "--config", str(file), "--json"], env=environment)
    rows = {row["setting"]: (row["value"], row["from"]) for row in json.loads(shown.stdout)["settings"]}
    assert rows["executor.concurrency"] == (8, str(file))
    assert rows["cache.ttl_s"] == (9.0, "OPENAPI_TOOL__CACHE__TTL_S")
    assert rows["postgres.dsn"][1] == "PG_DSN"
    assert rows["nats.servers"][1] == "NATS_SERVERS"
    assert "executor.max_held" not in rows
    assert "word" not in shown.output
    everything = CliRunner().invoke(app, ["config", "show", "--all"], env={**environment, "PG_DSN": None})
    assert everything.exit_code == 0
    assert "executor.max_held" in everything.stdout
    assert "default" in everything.stdout
    assert "postgres.dsn" not in everything.stdout
    wrong = CliRunner().invoke(app, ["config", "show"], env={**environment, "OPENAPI_TOOL__CACHE__TTL_S": "x"})
    assert (wrong.exit_code, "cache.ttl_s" in wrong.stderr) == (2, True)
