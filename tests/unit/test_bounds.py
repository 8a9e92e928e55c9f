"""What definitions and compiled schemas take in memory, and that what is kept of them is bounded in bytes."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openapi_tool.protocol.errors import ToolMisconfigured
from openapi_tool.protocol.records import ToolRecord
from openapi_tool.tools import bounds, definition, schema
from openapi_tool.tools.bounds import MAX_PARTS, MAX_ROW_BYTES, memory_bytes, parts, row_bytes, row_problems
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.definition import parse_definition
from openapi_tool.tools.exports import registration
from openapi_tool.tools.schema import schema_problems
from tests.memory import resident_bytes
from tests.promises import requirement

TOOLS = 40
SLACK_BYTES = 8_000_000
"""What the process may take for itself while it measures: buffers, arenas of the allocator, imports."""


def filled(value: dict[str, Any]) -> dict[str, Any]:
    """A schema with a description that takes the rest of what a row may hold."""
    room = MAX_ROW_BYTES - row_bytes({**value, "description": ""}, OPTIONS)
    return {**value, "description": "é" * (room // 2)}


def of_members(make: Callable[[int], Any], weight: int) -> dict[str, Any]:
    """Branches, as many as there may be, each of so many parts."""
    return {"anyOf": [make(n) for n in range((MAX_PARTS - 40) // weight)]}


OPTIONS: dict[str, Any] = {"jina": {"mode": "search"}}
ORDINARY: dict[str, Callable[[int], dict[str, Any]]] = {
    name: lambda n, tool=tool: {**tool.schema(), "title": f"tool {n}"}  # type: ignore[misc]
    for name, tool in CATALOGUE.items()
}
LARGEST: dict[str, Callable[[int], dict[str, Any]]] = {
    "texts": lambda n: filled({"title": str(n)}),
    "branches": lambda n: {"title": str(n), **of_members(lambda _: {"type": "integer"}, 2)},
    "nested branches": lambda n: {"title": str(n), **of_members(lambda _: {"not": {"not": {"type": "null"}}}, 4)},
    "items": lambda n: {"title": str(n), **of_members(lambda _: {"items": {"type": "null"}}, 3)},
    "properties": lambda n: {"title": str(n), **of_members(lambda m: {"properties": {f"p{m}": {}}}, 3)},
    "objects to choose": lambda n: {"title": str(n), "anyOf": [{"enum": [{"a": m} for m in range(450)]}] * 2},
    "patterns": lambda n: {
        "title": str(n),
        "properties": {f"p{m}": {"pattern": f"1[01]{{{150 + m}}}[^01]"} for m in range(20)},
    },
}


def record(parameters: Any, options: Any = OPTIONS) -> ToolRecord:
    return ToolRecord("a_tool", "suspend", parameters, options)


@pytest.fixture(scope="module")
def measured() -> dict[str, tuple[float, float]]:
    """What each kind of compiled schema took, and what was counted for it, in bytes.

    In a process of its own: Rust's memory shows only in the resident size, where this one's own noise is larger.
    """
    done = subprocess.run(  # noqa: S603 - our own code
        [sys.executable, "-m", __name__], capture_output=True, text=True, check=True, timeout=60
    )
    found: dict[str, tuple[float, float]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("case", [*ORDINARY, *LARGEST])
@requirement("definition.memory")
def test_a_compiled_schema_takes_no_more_than_is_counted_for_it(
    case: str, measured: dict[str, tuple[float, float]]
) -> None:
    taken, counted = measured[case]
    assert taken < counted * 1.25 + SLACK_BYTES / TOOLS
    if case in ORDINARY:
        assert counted < taken * 6, "so few ordinary ones would be kept that each call compiles anew"


def measure(make: Callable[[int], dict[str, Any]], kept: list[Any]) -> tuple[float, float]:
    """Compile many schemas of a kind, use and keep them; what each took, and what was counted for it."""
    texts = [json.dumps(make(n)) for n in range(TOOLS)]
    gc.collect()
    before = resident_bytes()
    for text in texts:
        compiled = schema._compile(json.loads(text), len(text))  # noqa: SLF001 - what it counts is the point
        kept.append(compiled)
        compiled.validator.is_valid({f"p{m}": f"{m * 7919:b}" * 150 for m in range(20)})
    gc.collect()
    return (resident_bytes() - before) / TOOLS, kept[-1].memory


@pytest.mark.parametrize("case", [*ORDINARY, *LARGEST])
@requirement("definition.memory")
def test_a_definition_takes_no_more_than_is_counted_for_it(case: str) -> None:
    rows = [json.dumps((ORDINARY | LARGEST)[case](n)) for n in range(TOOLS)]
    tracemalloc.start()
    kept = [json.loads(row) for row in rows]
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken <= sum(map(memory_bytes, kept)) * 1.1
    assert sum(map(memory_bytes, kept)) < taken * 3


@requirement("definition.memory")
def test_forty_of_the_largest_tools_take_no_more_than_the_caches_may() -> None:
    gc.collect()
    before = resident_bytes()
    for number in range(TOOLS):
        for case in ("texts", "nested branches", "patterns"):
            found = parse_definition(record(LARGEST[case](number)))
            schema_problems(found.parameters, {"query": "x"})
    gc.collect()
    assert schema._compiled.currsize <= schema.MAX_CACHE_BYTES  # noqa: SLF001
    assert resident_bytes() - before < schema.MAX_CACHE_BYTES + definition.MAX_CACHE_BYTES + 3 * SLACK_BYTES


@requirement("definition.memory")
def test_what_is_kept_of_definitions_is_bounded_in_bytes() -> None:
    readings = definition._known  # noqa: SLF001
    for number in range(200):
        parse_definition(record(filled({"title": f"one of many {number}"})))
        with pytest.raises(ToolMisconfigured):
            parse_definition(record({"$ref": f"#{number}"}))
    kept = sum(memory_bytes(reading.definition.parameters) for reading in readings.values() if reading.definition)
    assert kept <= readings.currsize <= definition.MAX_CACHE_BYTES
    assert len(readings) > 20


@requirement("definition.memory")
def test_a_definition_is_read_once_and_refused_with_a_new_error_each_time() -> None:
    row = registration(CATALOGUE["jina.search"])
    good = record(row["parameters"], row["options"])
    assert parse_definition(good) is parse_definition(good)
    raised = []
    for _ in range(2):
        with pytest.raises(ToolMisconfigured) as refused:
            parse_definition(record({"$ref": "#"}))
        raised.append(refused.value)
    assert raised[0] is not raised[1]
    assert raised[0].as_error() == raised[1].as_error()


@requirement("definition.bounds")
def test_the_largest_row_that_is_allowed_is_measured_as_the_database_does() -> None:
    largest = filled({"type": "object"})
    assert row_problems(largest, OPTIONS) == []
    assert MAX_ROW_BYTES - 2 <= row_bytes(largest, OPTIONS) <= MAX_ROW_BYTES
    (problem,) = row_problems({**largest, "a": 1}, OPTIONS)
    assert "262,144 bytes" in problem.message


@requirement("definition.bounds")
def test_a_hostile_row_costs_no_more_to_refuse_than_an_allowed_one_to_read() -> None:
    """Members are counted before they are looked at: the walk ends where there are too many."""
    seen = 0

    class Counted(dict[str, Any]):
        def items(self) -> Any:
            nonlocal seen
            seen += len(self)
            return super().items()

    row = Counted({f"a{n}": Counted({f"b{m}": Counted() for m in range(1_000)}) for n in range(100)})
    (problem,) = row_problems(row, OPTIONS)
    assert "holds more than 2,000 values" in problem.message
    assert seen <= MAX_PARTS


@requirement("definition.bounds")
def test_the_documented_bounds_are_those_of_the_code() -> None:
    text = (Path(__file__).parent.parent.parent / "docs" / "registering-tools.md").read_text(encoding="utf-8")
    section = text.partition("## Bounds of stored rows")[2].partition("\n## ")[0]
    documented = re.findall(r"\| ([0-9][0-9,]*)(?:, ([0-9]+))?(?: bytes)? \|", section)
    assert [int(number.replace(",", "")) for pair in documented for number in pair if number] == [
        *(bounds.MAX_ROW_BYTES, bounds.MAX_PARTS, bounds.MAX_DEPTH, bounds.MAX_PROPERTIES, bounds.MAX_ENUM_VALUES),
        *(bounds.MAX_PATTERNS, bounds.MAX_PATTERN_CHARS, bounds.MAX_MULTIPLES, bounds.MAX_NAMES),
    ]
    assert all(f"`{word}`" in section for word in bounds._REFUSED)  # noqa: SLF001


@requirement("definition.bounds")
def test_built_in_tools_are_far_within_the_bounds() -> None:
    for tool in CATALOGUE.values():
        row = registration(tool)
        assert row_problems(row["parameters"], row["options"]) == []
        assert parts(row["parameters"]) < MAX_PARTS / 10


if __name__ == "__main__":
    everything: list[Any] = []
    for make_warm in ORDINARY.values():
        measure(make_warm, everything)
    sys.stdout.write(json.dumps({case: measure(make, everything) for case, make in (ORDINARY | LARGEST).items()}))
