"""Definitions from YAML files, folders of them or standard input, with the line and column of every problem.

A *source* is the text of one definition; a file may have several.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from openapi_tool.bootstrap import lint_limits
from openapi_tool.cli.kernel import NO_DATABASE
from openapi_tool.cli.output import fail, print_status
from openapi_tool.files import read_regular_file
from openapi_tool.jina.definition_checks import source_problems
from openapi_tool.settings import Settings, load_settings
from openapi_tool.settings.sources import settings_file
from openapi_tool.telemetry.redact import MASK
from openapi_tool.tools.definition import ToolDefinition, stored_record
from openapi_tool.tools.definition_parser import parse_definition
from openapi_tool.tools.key_shapes import PREFIXED_KEY
from openapi_tool.tools.problems import Problem
from openapi_tool.tools.stored_rows import complete
from openapi_tool.tools.yaml_source import MAX_BYTES, Source, read_sources

LINT_FAILED = 1

_SUFFIXES = (".yaml", ".yml")
_STANDARD_INPUT = "-"


@dataclass(frozen=True, slots=True)
class LocatedProblem:
    """Problem of a file."""

    file: str
    line: int
    column: int
    problem: Problem

    def __str__(self) -> str:
        shown = self.as_object()
        return f"{self.file}:{self.line}:{self.column}: {shown['severity']}: {shown['path']}: {shown['message']}"

    def as_object(self) -> dict[str, Any]:
        """Return the JSON form; likely API keys are masked, because authors paste them in place of names."""
        return {
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "severity": "warning" if self.problem.warning else "error",
            "path": PREFIXED_KEY.sub(MASK, self.problem.where),
            "message": PREFIXED_KEY.sub(MASK, self.problem.message),
        }


@dataclass(frozen=True, slots=True)
class LoadedDefinition:
    """Stored row and parsed form of a definition."""

    row: dict[str, Any]
    parsed: ToolDefinition


def lint_files(files: Sequence[Path], config: Path | None = None) -> list[LocatedProblem]:
    """Return all problems of all definitions, in the order of the text. Exits with 2 if a file cannot be read.

    `config` is the TOML file of the executor that will run the tools. Without it this machine's settings are read,
    which may differ from the executor's: so a variable that they do not allow is only a warning.
    """
    with settings_file(config):
        settings = load_settings(NO_DATABASE)
    return _lint(_sources(files), settings, known_to_be_serving=config is not None)


def load_definitions(files: Sequence[Path]) -> list[LoadedDefinition]:
    """Return definitions. Prints all problems; exits with 1 if one is an error."""
    sources = _sources(files)
    problems = _lint(sources, load_settings(NO_DATABASE))
    for problem in problems:
        print_status(str(problem))
    if any(not problem.problem.warning for problem in problems):
        raise typer.Exit(LINT_FAILED)
    return [_definition(source.document) for _, source in sources]


def _lint(
    sources: Sequence[tuple[str, Source]], settings: Settings, *, known_to_be_serving: bool = False
) -> list[LocatedProblem]:
    limits = lint_limits(settings, known_to_be_serving=known_to_be_serving)
    located = _duplicate_names(sources)
    for name, source in sources:
        problems = source_problems(source, limits, settings.url_policy)
        located += (LocatedProblem(name, *source.position(problem.path), problem) for problem in problems)
    order_of_files = {name: number for number, (name, _) in enumerate(sources)}
    return sorted(located, key=lambda each: (order_of_files[each.file], each.line, each.column, each.problem.warning))


def _duplicate_names(sources: Sequence[tuple[str, Source]]) -> list[LocatedProblem]:
    """Return a problem for each definition whose name an earlier one has."""
    place_of_name: dict[str, str] = {}
    located = []
    for file, source in sources:
        document = source.document if isinstance(source.document, dict) else {}
        key = "tool_name" if "tool_name" in document else "name"  # a file may use either
        name = document.get(key)
        if not isinstance(name, str):
            continue
        line, column = source.position((key,))
        if name in place_of_name:
            message = f"is the name of the definition at {place_of_name[name]}, too; a project has each name once"
            located.append(LocatedProblem(file, line, column, Problem((key,), message)))
        else:
            place_of_name[name] = f"{file}:{line}"
    return located


def _sources(paths: Sequence[Path]) -> list[tuple[str, Source]]:
    """Return the sources in all files, each with the name of its file."""
    sources = []
    for path in paths:
        for file in _files(path):
            sources += [(str(file), source) for source in _read(file)]
    return sources


def _definition(document: Any) -> LoadedDefinition:
    parsed = parse_definition(stored_record(document))
    return LoadedDefinition(complete(document, parsed.built_in), parsed)


def file_count(paths: Sequence[Path]) -> int:
    """Return the number of definition files. Exits with 2 for a folder without one."""
    return sum(len(_files(path)) for path in paths)


def _files(path: Path) -> list[Path]:
    try:
        is_folder = path.is_dir()
    except OSError:  # such as a name that is too long: `_read` says what is wrong
        is_folder = False
    if not is_folder:
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
    return files or fail(f"{path}: holds no file whose name ends in {' or '.join(_SUFFIXES)}; name a folder with one")


def _read(file: Path) -> list[Source]:
    """Return the sources in a file; for a file that is too large or no text, one that has only this problem."""
    try:
        content = _content(file)
    except OSError as error:
        if error.errno != errno.EFBIG:
            fail(f"{file}: cannot be read: {error.strerror}; for standard input name {_STANDARD_INPUT}")
        return _unreadable(f"is larger than {MAX_BYTES:,} bytes; split it, or shorten its texts")
    try:
        return read_sources(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return _unreadable("is not UTF-8 text; save it as UTF-8")


def _unreadable(problem: str) -> list[Source]:
    return [Source(None, [Problem((), problem)], {})]


def _content(file: Path) -> bytes:
    """Return the content of a file. Raises OSError, with EFBIG for more than `MAX_BYTES`."""
    if str(file) != _STANDARD_INPUT:
        return read_regular_file(file, MAX_BYTES)
    content = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return content
