"""`openapi-tool tools lint`, `render` and `export`: definitions of tools in files, without a server."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from openapi_tool.cli.definition_files import LINT_FAILED, LocatedProblem, file_count, lint_files, load_definitions
from openapi_tool.cli.given_names import check_given
from openapi_tool.cli.options import ExportFormat
from openapi_tool.cli.output import USAGE, fail, print_json, print_line, print_status
from openapi_tool.cli.tables import cell, output
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.exports import FORMATS, specification
from openapi_tool.tools.shown_tools import DuplicateName, all_built_in, defined, without_duplicates
from openapi_tool.tools.stored_rows import as_yaml, registration
from openapi_tool.tools.wording import counted

_MAX_PROBLEMS_SHOWN = 1_000


def lint(files: list[Path], *, strict: bool, config: Path | None, as_json: bool) -> None:
    """Print every problem of definitions as FILE:LINE:COLUMN."""
    problems = lint_files(files, config)
    for located in problems[:_MAX_PROBLEMS_SHOWN]:
        if as_json:
            print_json(located.as_object())
        else:
            output().print(_coloured(located), soft_wrap=True)
    if len(problems) > _MAX_PROBLEMS_SHOWN:
        print_status(f"only the first {_MAX_PROBLEMS_SHOWN:,} are shown")
    errors = sum(not located.problem.warning for located in problems)
    warnings = len(problems) - errors
    summary = f"{counted(file_count(files), 'file')}, {counted(errors, 'error')}, {counted(warnings, 'warning')}"
    print_status(summary, quiet=as_json)
    if errors or (strict and problems):
        raise typer.Exit(LINT_FAILED)


def _coloured(located: LocatedProblem) -> Text:
    line = cell(located)
    level, colour = ("warning", "yellow") if located.problem.warning else ("error", "red")
    line.highlight_words([f": {level}: "], colour)
    return line


def render(file: Path, *, project: str, as_json: bool) -> None:
    """Print the row that will be stored for a project, and the schema that a model will see."""
    check_given("--project", project, "project id")
    definition, *others = load_definitions([file])
    if others:
        fail(f"{file} holds {1 + len(others)} definitions; give a file with one", LINT_FAILED)
    shown = specification(defined(definition.row, definition.parsed))
    stored = {"project_id": project, **definition.row}
    if as_json:
        subject = definition.row["target_subject"].replace("{project_id}", project)
        built_in = definition.parsed.built_in.name
        print_json({"stored": stored, "subject": subject, "built_in": built_in, "model_sees": shown})
        return
    print_line(f"# stored in project {project}, a {definition.parsed.built_in.name}")
    sys.stdout.write(f"{as_yaml(stored)}\n# a model sees\n{as_yaml(shown)}")


def export(files: list[Path] | None, *, form: ExportFormat, output_dir: Path | None) -> None:
    """Print tools in the form of a model provider, or write them to `output_dir`."""
    if output_dir is not None and form != "kernel":
        fail("--output-dir: only --format kernel writes files; leave it out, or add --format kernel")
    if files:
        definitions = load_definitions(files)
        rows = [definition.row for definition in definitions]
        tools = [defined(definition.row, definition.parsed) for definition in definitions]
    else:
        rows = [*map(registration, CATALOGUE.values())]
        tools = all_built_in()
    if form == "kernel" and output_dir is not None:
        _write_definitions(rows, output_dir)
        return
    if form == "kernel":
        sys.stdout.write("---\n".join(as_yaml(row) for row in rows))
        return
    try:
        tools = without_duplicates(tools)
    except DuplicateName as duplicate:
        fail(str(duplicate), LINT_FAILED)
    print_json(FORMATS[form](tools), indent=2)


def _write_definitions(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write a file for each definition, and print its path; an existing file is replaced."""
    names = Counter(row["tool_name"] for row in rows)
    for name, count in names.items():
        if count > 1:
            fail(f"{name}: two definitions have this name", LINT_FAILED)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for row in rows:
            file = folder / f"{row['tool_name']}.yaml"
            file.write_text(as_yaml(row), encoding="utf-8")
            print_line(str(file))
    except OSError as error:
        why = "is a file, not a folder" if isinstance(error, FileExistsError) else error.strerror or error
        fail(f"--output-dir: {error.filename or folder}: {why}", USAGE)
