"""Every regular expression of the package: how long its input may be, and why that takes linear time.

Python's engine tries every way to match, so two repeats that can share a text make the time quadratic or worse: 150 kB
in one such pattern once held the event loop for 40 s. A new pattern needs a line here; a changed one, a second look.
"""

from __future__ import annotations

import ast
import importlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import openapi_tool
from tests.promises import requirement

PACKAGE = Path(openapi_tool.__file__).parent
WAYS = {"search", "match", "fullmatch", "split", "findall", "finditer", "sub", "subn"}
FUNCTIONS = {f"re.{name}" for name in ("compile", *WAYS)}
ONCE = "every part is tried once: neighbours share no character"
ONE_CLASS = "one class of characters"
LITERALS = "literal texts only"
RUST = "pydantic's engine is linear for any pattern"


@dataclass(frozen=True)
class Bound:
    """`chars`: most characters that it is given, None where its engine is linear; `why`: what makes it linear."""

    chars: int | None
    why: str


# fmt: off
TABLE: dict[str, Bound] = {
    "bus/client.py _DENIAL": Bound(8_192, '`[^"]*` ends at the quotation mark; NATS bounds its errors'),
    "bus/pull.py _NUMBER": Bound(65_536, ONE_CLASS),
    "cli/call.py _CONTROL": Bound(10_000_000, ONE_CLASS),
    "cli/nats.py _STREAM": Bound(1_000, ONE_CLASS),
    "confidential.py _LONG_LINE": Bound(1_000_000, "one class between line ends; a credentials file"),
    "confidential.py _TELLING_NAME": Bound(10_000, LITERALS),
    "jina/answer_json.py _HIGH_SURROGATE": Bound(6, "fixed lengths"),
    "jina/answer_json.py _SURROGATE": Bound(65_536, "fixed lengths; in slices of 64 kB"),
    "jina/content.py _JOINED_PAIR": Bound(18_000, "a scheme holds no comma, so each comma is tried once"),
    "jina/egress.py _CONTROL": Bound(16_000, ONE_CLASS),
    "jina/failures.py _CHANCE": Bound(4_000, "`\\w*` begins behind a literal text that it does not hold"),
    "jina/failures.py _ERROR_NAME": Bound(4_000, "`\\b` lets a word begin once; `[^()]*` ends at the next bracket"),
    "jina/failures.py _NOT_THE_CAUSE": Bound(4_000, "`\\b` lets a word begin once, `++` gives nothing back"),
    "jina/parameters.py _DIGITS": Bound(4_300, ONE_CLASS),
    "jina/targets.py _ASCII_OF_LABEL": Bound(1, ONE_CLASS),
    "jina/targets.py _ENCODED_SCHEME": Bound(16_000, LITERALS),
    "jina/targets.py _FORBIDDEN": Bound(16_000, ONE_CLASS),
    "jina/targets.py _IGNORED": Bound(16_000, ONE_CLASS),
    "jina/targets.py _LAST_IS_NUMBER": Bound(16_000, "`.*\\.` is tried from the last dot back, none stands behind"),
    "jina/targets.py _LINK": Bound(16_000, "only where `](` stands once, so `.*` ends in one place"),
    "jina/targets.py _NUMBER": Bound(16_000, ONCE),
    "jina/targets.py _OTHER_SCHEME": Bound(16_000, ONCE),
    "jina/targets.py _PLACE": Bound(16_000, ONCE),
    "jina/targets.py _READER": Bound(1_024, "`.+\\.` is tried from the last dot back, what follows holds none"),
    "jina/targets.py _SCHEME": Bound(16_000, "each repeat begins with http, which no other part holds"),
    "jina/targets.py _SEARCH": Bound(1_024, "as `_READER`"),
    "jina/targets.py _URL": Bound(16_000, ONCE),
    "local/dev.py _SUBJECT": Bound(1_000, ONCE),
    "protocol/subject.py _NO_TEXT": Bound(65_536, ONE_CLASS),
    "protocol/subject.py _TOKEN": Bound(65_536, ONE_CLASS),
    "protocol/trace.py _TRACEPARENT": Bound(65_536, "fixed lengths, then the rest"),
    "settings/model.py _NATS_URL": Bound(None, RUST),
    "settings/model.py _PROXY_URL": Bound(10_000, ONCE),
    "settings/model.py _TOKEN": Bound(None, RUST),
    "settings/model.py ^[A-Za-z0-9_-]+$": Bound(None, RUST),
    "settings/model.py ^https?://": Bound(None, RUST),
    "settings/model.py ^tool\\.\\S+$": Bound(None, RUST),
    "settings/secrets.py _PARAMETER": Bound(10_000, ONCE),
    "settings/secrets.py _VARIABLE": Bound(None, RUST),
    "settings/targets.py _LABELS": Bound(10_000, "`\\.` ends each repeat"),
    "telemetry/logs.py _CREDENTIALS": Bound(100_000, "every repeat begins behind a literal text and is tried once"),
    "telemetry/logs.py _QUERY": Bound(100_000, ONE_CLASS),
    "telemetry/logs.py _USER_INFO": Bound(100_000, "the scheme has 21 characters at most, the rest ends at a slash"),
    "telemetry/spellings.py _HEX": Bound(10_000, ONE_CLASS),
    "telemetry/spellings.py self.source": Bound(65_536, "repeats of 8 at most; in slices of 64 kB (test_secrets.py)"),
    "tools/catalogue.py _NOT_BLANK": Bound(None, RUST),
    "tools/definition.py _BASE_URL": Bound(16_000, LITERALS),
    "tools/definition.py _URL_TEMPLATE": Bound(16_000, LITERALS),
    "tools/lint.py \\{[^{}]*\\}?": Bound(10_000, ONCE),
    "tools/lint.py [^A-Za-z0-9]": Bound(100_000, ONE_CLASS),
    "tools/lint.py _KEY_CHUNK": Bound(10_000, "two looks ahead of one class each, from the start only"),
    "tools/lint.py _KEY_PREFIX": Bound(100_000, "every repeat begins behind a literal text and is tried once"),
    "tools/lint.py _PLACEHOLDER": Bound(100_000, ONCE),
    "tools/lint.py _REPORTED": Bound(10_000, ONCE),
    "tools/lint.py _TOKEN": Bound(10_000, ONE_CLASS),
    "tools/lint.py _VARIABLE": Bound(10_000, ONCE),
    "tools/naming.py _ALLOWED": Bound(10_000, ONCE),
    "tools/naming.py _WORD_END": Bound(10_000, ONCE),
    "tools/result.py _LOOK_ALIKE": Bound(65_632, "repeats of 8 at most, which give nothing back; in slices of 64 kB"),
    "tools/result.py _WEB_CONTENT": Bound(65_632, "one repeat of 8 at most; in slices of 64 kB"),
    "tools/schema_lint.py _NAME": Bound(10_000, ONE_CLASS),
    "tools/template.py _PLACEHOLDER": Bound(65_536, ONCE),
}
# fmt: on


def patterns() -> Iterator[str]:
    """`file name` of every pattern; an unnamed one stands for itself."""
    for path in sorted(PACKAGE.rglob("*.py")):
        names = _patterns(path.read_text(encoding="utf-8"))
        yield from (f"{path.relative_to(PACKAGE).as_posix()} {name}" for name in names)


def _patterns(source: str) -> Iterator[str]:
    nodes = list(ast.walk(ast.parse(source)))
    assigned = {id(node.value): node.targets[0] for node in nodes if isinstance(node, ast.Assign)}
    for node in nodes:
        if isinstance(node, ast.Call):
            yield from _names(node, assigned)


def _names(call: ast.Call, assigned: dict[int, ast.expr]) -> Iterator[str]:
    function = call.func
    if ast.unparse(function) in FUNCTIONS:
        yield _name(assigned.get(id(call), call.args[0]))
    yield from (_name(keyword.value) for keyword in call.keywords if keyword.arg == "pattern")


def _name(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)


@requirement("patterns.bounded")
def test_every_pattern_has_its_line_and_every_line_its_pattern() -> None:
    assert sorted({*patterns()}) == sorted(TABLE)


@requirement("patterns.bounded")
def test_a_pattern_is_found_however_it_is_used() -> None:
    source = 'import re\n_A = re.compile("a")\nre.sub(r"b+", "", x)\nField(pattern="c")\nx.split("d")\n'
    assert sorted(_patterns(source)) == ["_A", "b+", "c"]


NAMED = [where for where, bound in TABLE.items() if bound.chars and re.fullmatch(r"\S+ _[A-Z_]+", where)]


@pytest.mark.parametrize("where", NAMED)
@requirement("patterns.bounded")
def test_no_pattern_takes_long_for_the_longest_text_that_it_is_given(where: str) -> None:
    """Texts that repeat the pattern's own letters and words; not a proof, but what was found was found like this."""
    file, name = where.split(" ")
    pattern = getattr(importlib.import_module(f"openapi_tool.{file[:-3].replace('/', '.')}"), name)
    binary = isinstance(pattern.pattern, bytes)
    chars = min(TABLE[where].chars or 0, 100_000)
    ways = [getattr(pattern, way) for way in _ways(file, name)]
    assert ways
    for pump in _pumps(pattern.pattern.decode("latin-1") if binary else pattern.pattern):
        text: Any = (pump * chars)[:chars].encode() if binary else (pump * chars)[:chars]
        began = time.process_time()
        for way in ways:
            way(*([b"" if binary else ""] if way.__name__ == "sub" else []), text)
        assert time.process_time() - began < 0.5, pump  # a few ms; wide, because coverage and load lengthen it


def _ways(file: str, name: str) -> list[str]:
    """How the module uses its pattern: `sub`, `fullmatch`, …"""
    text = (PACKAGE / file).read_text(encoding="utf-8")
    return sorted({way for way in re.findall(rf"\b{name}\.(\w+)", text) if way in WAYS})


def _pumps(source: str) -> set[str]:
    words = {word for word in re.split(r"[^A-Za-z0-9:/_-]+", source) if word}
    plain = {*words, *(word.lower() for word in words), *"aA0 .:/,'\"?=@[](){}%\\_-<\n"}
    return plain | {word + mark for word in words for mark in " :(=/.'"} | {"a ", "a.", "a:", "](", "[(", "(a"}
