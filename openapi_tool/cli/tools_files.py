"""Definitions from files: parsed and linted, problems with line and column."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NoReturn

import typer

from openapi_tool.bootstrap import lint_limits
from openapi_tool.cli.common import USAGE, fail, print_status
from openapi_tool.jina.definition_checks import source_problems
from openapi_tool.settings import CONFIG_VARIABLE, Settings, SettingsError, load_settings
from openapi_tool.telemetry.redact import MASK
from openapi_tool.tools.definition import ToolDefinition, parse_definition, stored_record
from openapi_tool.tools.exports import complete
from openapi_tool.tools.placeholders import PREFIXED_KEY
from openapi_tool.tools.problems import MAX_BYTES, Problem, Source, read_sources

LINT_FAILED = 1
_SUFFIXES = (".yaml", ".yml")
_STANDARD_INPUT = "-"

Files = Annotated[
    list[Path],
    typer.Argument(help="YAML files with definitions, folders of them, or - for stdin."),
]


@dataclass(frozen=True, slots=True)
class LocatedProblem:
    """Problem at a line and column of a file."""

    file: str
    line: int
    column: int
    problem: Problem

    def __str__(self) -> str:
        shown = self.as_object()
        return f"{self.file}:{self.line}:{self.column}: {shown['severity']}: {shown['path']}: {shown['message']}"

    def as_object(self) -> dict[str, Any]:
        """Return the JSON form, with likely keys masked: one may stand in the place of a name."""
        severity = "warning" if self.problem.warning else "error"
        place = {"file": self.file, "line": self.line, "column": self.column}
        texts = {"path": self.problem.where, "message": self.problem.message}
        return {**place, "severity": severity} | {name: PREFIXED_KEY.sub(MASK, text) for name, text in texts.items()}


@dataclass(frozen=True, slots=True)
class Definition:
    """Definition without errors: its stored row, and the parsed form."""

    row: dict[str, Any]
    parsed: ToolDefinition


def settings_without_database() -> Settings:
    """Return the settings for commands without a connection. Exits with 2 if they are invalid."""
    try:
        return load_settings({"postgres": {"dsn": "postgresql://"}})
    except SettingsError as error:
        settings_failed(error)


def settings_failed(error: SettingsError) -> NoReturn:
    """Print every mistake of the settings, and exit with 2."""
    for problem in error.problems:
        print_status(f"openapi-tool: {problem}")
    raise typer.Exit(USAGE) from None


def lint_files(files: Sequence[Path], config: Path | None = None) -> list[LocatedProblem]:
    """Return all problems of all definitions in files, folders and standard input, in the order of the text.

    `config` is the executor's TOML file; without it this machine's settings are read, which may differ. Exits with 2
    if a file cannot be read.
    """
    with _config_variable(config):
        settings = settings_without_database()
    return _lint(_sources(files), settings, configured=config is not None)


@contextmanager
def _config_variable(config: Path | None) -> Iterator[None]:
    before = os.environ.get(CONFIG_VARIABLE)
    if config is not None:
        os.environ[CONFIG_VARIABLE] = str(config)
    try:
        yield
    finally:
        if config is not None:
            os.environ.pop(CONFIG_VARIABLE)
            os.environ.update({CONFIG_VARIABLE: before} if before is not None else {})


def load_definitions(files: Sequence[Path]) -> list[Definition]:
    """Return the definitions of files. Prints all problems; exits with 1 if one is an error."""
    sources = _sources(files)
    problems = _lint(sources, settings_without_database())
    for problem in problems:
        print_status(str(problem))
    if any(not problem.problem.warning for problem in problems):
        raise typer.Exit(LINT_FAILED)
    return [_definition(source.document) for _, source in sources]


def _lint(
    sources: Sequence[tuple[str, Source]], settings: Settings, *, configured: bool = False
) -> list[LocatedProblem]:
    limits, located = lint_limits(settings, configured=configured), _duplicate_names(sources)
    for name, source in sources:
        problems = source_problems(source, limits, settings.url_policy)
        located += (LocatedProblem(name, *source.position(problem.path), problem) for problem in problems)
    order = {name: place for place, (name, _) in enumerate(sources)}
    return sorted(located, key=lambda item: (order[item.file], item.line, item.column, item.problem.warning))


def _duplicate_names(sources: Sequence[tuple[str, Source]]) -> list[LocatedProblem]:
    first: dict[str, str] = {}
    located = []
    for file, source in sources:
        document = source.document if isinstance(source.document, dict) else {}
        key = "tool_name" if "tool_name" in document else "name"
        line, column = source.position((key,))
        name = document.get(key)
        if isinstance(name, str) and name in first:
            message = f"is the name of the definition at {first[name]}, too; a project has each name once"
            located.append(LocatedProblem(file, line, column, Problem((key,), message)))
        elif isinstance(name, str):
            first[name] = f"{file}:{line}"
    return located


def _definition(document: Any) -> Definition:
    parsed = parse_definition(stored_record(document))
    return Definition(complete(document, parsed.built_in), parsed)


def _sources(paths: Sequence[Path]) -> list[tuple[str, Source]]:
    """Return the documents of files, of the YAML files in folders, and of standard input (`-`), with their names."""
    return [(str(file), source) for path in paths for file in _files(path) for source in _read(file)]


def file_count(paths: Sequence[Path]) -> int:
    """Return the number of definition files at the paths. Exits with 2 for a folder without one."""
    return sum(len(_files(path)) for path in paths)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
    return files or fail(f"{path}: holds no file whose name ends in {' or '.join(_SUFFIXES)}; name a folder with one")


def _read(file: Path) -> list[Source]:
    try:
        content = _read_bounded(sys.stdin.buffer) if str(file) == _STANDARD_INPUT else _read_file(file)
    except OSError as error:
        fail(f"{file}: cannot be read: {error.strerror}")
    if len(content) > MAX_BYTES:
        return [Source(None, [Problem((), f"is larger than {MAX_BYTES:,} bytes; split it, or shorten its texts")], {})]
    try:
        return read_sources(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return [Source(None, [Problem((), "is not UTF-8 text; save it as UTF-8")], {})]


def _read_file(file: Path) -> bytes:
    with file.open("rb") as stream:
        return _read_bounded(stream)


def _read_bounded(stream: BinaryIO) -> bytes:
    return stream.read(MAX_BYTES + 1)
