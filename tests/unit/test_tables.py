"""Tables of commands: nothing is cut, however narrow the terminal."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
from typing import Any

import pytest
from rich.console import Console

from openapi_tool.cli import top
from openapi_tool.cli.tables import Rows, output, redraw
from tests.requirements import requirement

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


def of_kernel(protocol: str, unacknowledged: int) -> dict[str, Any]:
    return {"protocol": protocol, "pending": 7, "unacknowledged": unacknowledged, "max_unacknowledged": 100}


@requirement("cli.top", "dialects.isolated")
def test_top_shows_each_kernel_of_a_process() -> None:
    calls = [{"protocol": protocol, "project": "p", "tool": "t", "calls": 3} for protocol in ("v1r3", "v1r4")]
    replica = {**REPLICA, "tools": calls, "kernels": [of_kernel("v1r3", 100), of_kernel("v1r4", 2)]}
    written = io.StringIO()
    Console(file=written, width=120).print(top.shown([replica, {**replica, "instance": "vm-2"}]))
    shown = written.getvalue()
    rows = [line.split() for line in shown.replace("│", " ").splitlines() if " p " in line]
    assert rows == [["v1r3", "p", "t", "6"], ["v1r4", "p", "t", "6"]]
    assert "durable of v1r3: 7 commands not delivered, 100 not settled" in shown
    assert "durable of v1r4: 7 commands not delivered, 2 not settled" in shown
    assert top.problems([replica]) == [
        "the durable of v1r3 has 100 unsettled commands, its maximum: see durable.full in the log"
    ]


@requirement("cli.limits")
def test_problems_name_the_limits_for_which_calls_wait() -> None:
    limit = {"variable": "KEY", "endpoint": "search", "waiting": 2, "paused_s": 3.5, "offline": True}
    warning = {"action": "key.blocked", "count": 1, "message": "blocked", "ago_s": 61.0}
    assert top.problems([{**REPLICA, "upstream_limits": [limit], "warnings": [warning]}]) == [
        "vm-19346: the search limit of KEY cannot be shared: see limits.not_shared in the log",
        "vm-19346: the upstream answered 429: search requests with KEY pause for 3.5 s",
        "vm-19346: 2 calls wait for the search limit of KEY: see openapi-tool limits",
        "vm-19346: key.blocked, 1 time, last 61 s ago: blocked",
    ]


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
