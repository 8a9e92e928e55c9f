"""Definitions from files: parsed and linted, problems with line and column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import typer

from openapi_tool.bootstrap import operator_envs
from openapi_tool.cli.common import USAGE, fail, say
from openapi_tool.jina.definition_lint import definition_problems
from openapi_tool.settings import Settings, SettingsError, load_settings
from openapi_tool.tools.definition import ToolDefinition, parse_definition, stored_record
from openapi_tool.tools.exports import complete
from openapi_tool.tools.lint import LintLimits
from openapi_tool.tools.problems import Problem
from openapi_tool.tools.source import Source, read_source

LINT_FAILED = 1


@dataclass(frozen=True, slots=True)
class Found:
    """Problem of a file."""

    file: str
    line: int
    column: int
    problem: Problem

    def __str__(self) -> str:
        kind = "warning" if self.problem.warning else "error"
        return f"{self.file}:{self.line}:{self.column}: {kind}: {self.problem.where}: {self.problem.message}"

    def as_object(self) -> dict[str, Any]:
        """Return the JSON form."""
        severity = "warning" if self.problem.warning else "error"
        place = {"file": self.file, "line": self.line, "column": self.column}
        return {**place, "severity": severity, "path": self.problem.where, "message": self.problem.message}


@dataclass(frozen=True, slots=True)
class Definition:
    """Definition without errors: its stored row, and the parsed form."""

    row: dict[str, Any]
    parsed: ToolDefinition


def lint_limits() -> LintLimits:
    """Return the limits of the executor's configuration on this machine, or the defaults."""
    settings = settings_without_database()
    return LintLimits(
        executor=settings.executor,
        tools=settings.tools,
        targets=frozenset({settings.protocol.target, *settings.tools.jina.services}),
        env_parameters=operator_envs(settings).parameters,
    )


def settings_without_database() -> Settings:
    """Return the settings for commands without a connection. Exits with 2 where they are invalid."""
    try:
        return load_settings({"postgres": {"dsn": "postgresql://"}})
    except SettingsError as error:
        settings_failed(error)


def settings_failed(error: SettingsError) -> NoReturn:
    """Print every mistake of the settings, and exit with 2."""
    for problem in error.problems:
        say(f"openapi-tool: {problem}")
    raise typer.Exit(USAGE) from None


def lint_files(files: Sequence[Path]) -> list[Found]:
    """Return all problems of all files, in the order of the text."""
    limits = lint_limits()
    return [found for file in files for found in _problems(str(file), _read(file), limits)]


def load_definitions(files: Sequence[Path]) -> list[Definition]:
    """Return the definitions of files. Prints all errors and exits with 1 where there is one."""
    problems = lint_files(files)
    for found in problems:
        say(str(found))
    if any(not found.problem.warning for found in problems):
        raise typer.Exit(LINT_FAILED)
    definitions = [_definition(_read(file).document) for file in files]
    names = [definition.row["tool_name"] for definition in definitions]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        fail(f"more than one file defines {', '.join(twice)}", LINT_FAILED)
    return definitions


def _definition(document: Any) -> Definition:
    parsed = parse_definition(stored_record(document))
    return Definition(complete(document, parsed.built_in), parsed)


def _problems(name: str, source: Source, limits: LintLimits) -> Iterator[Found]:
    broken = {problem.path for problem in source.problems}
    problems = list(source.problems)
    if source.document is not None or not broken:
        problems += [problem for problem in definition_problems(source.document, limits) if problem.path not in broken]
    found = [Found(name, *source.position(problem.path), problem) for problem in problems]
    yield from sorted(found, key=lambda item: (item.line, item.column, item.problem.warning))


def _read(file: Path) -> Source:
    try:
        return read_source(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return Source(None, [Problem((), "is not UTF-8 text")], {})
    except OSError as error:
        fail(f"{file}: cannot be read: {error.strerror}")
