"""Tools of a gateway: the built-in ones, or those that the files of a folder define; the folder is watched.

A *definition* describes a tool: its name, the built-in tool behind it, the schema of its arguments, and options. It has
the form in which a kernel (an agent platform) registers tools.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from openapi_tool.files import read_regular_file
from openapi_tool.jina.definition_checks import source_problems
from openapi_tool.jina.url_policy import UrlPolicy
from openapi_tool.protocol.errors import ExecutorError
from openapi_tool.protocol.jsontext import JsonValue
from openapi_tool.reloading import POLL_S, FileWatcher
from openapi_tool.telemetry.recent_warnings import RECENT_WARNINGS
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.definition import ToolDefinition, stored_record
from openapi_tool.tools.definition_parser import parse_definition
from openapi_tool.tools.lint import LintLimits
from openapi_tool.tools.problems import listed
from openapi_tool.tools.shown_tools import DuplicateName, ShownTool, defined, without_duplicates
from openapi_tool.tools.stored_rows import complete, registration
from openapi_tool.tools.tool_names import mangled
from openapi_tool.tools.yaml_source import MAX_BYTES, read_sources

log = logging.getLogger(__name__)

_SUFFIXES = (".yaml", ".yml")
_MAX_FILES = 1_000


class ToolsInvalid(ExecutorError):
    """The folder has no usable set of tools; the message lists the mistakes with their places."""


@dataclass(frozen=True, slots=True)
class GatewayTool:
    """A tool as a client is shown it, and its definition.

    A client knows it by a name without dots, which some clients refuse: `news__search` for `news.search`.
    """

    shown: ShownTool
    definition: ToolDefinition

    @property
    def name(self) -> str:
        """Name for clients; `tool_names.unmangled` returns the definition's name for it."""
        return self.shown.name


Tools = Mapping[str, GatewayTool]
"""Tools by their names for clients."""


def built_in_tools() -> Tools:
    """Return the built-in tools, as they are registered with a kernel."""
    return _by_name([_tool(registration(tool)) for tool in CATALOGUE.values()])


@dataclass(frozen=True, slots=True)
class ToolFolder:
    """Folder with definitions in YAML, also in folders below it; they are checked against `limits` and `url_policy`.

    Files and folders with a dot in front are skipped: a mounted ConfigMap has each file twice, as a link and in a
    hidden folder to which the link leads.
    """

    path: Path
    limits: LintLimits
    url_policy: UrlPolicy

    def __iter__(self) -> Iterator[Path]:
        """Iterate over the files with definitions, in the order of their names, as `FileWatcher` does.

        Raises ToolsInvalid if they cannot be listed, for example while the folder is being deleted.
        """
        try:
            files = [file for file in self.path.rglob("*") if self._is_definition(file)]
        except OSError as error:
            raise ToolsInvalid(f"{error.filename or self.path}: cannot be listed: {error.strerror or error}") from error
        return iter(sorted(files))

    def _is_definition(self, file: Path) -> bool:
        is_hidden = any(name.startswith(".") for name in file.relative_to(self.path).parts)
        return file.suffix in _SUFFIXES and not is_hidden and file.is_file()

    def load(self) -> Tools:
        """Return the tools. Raises ToolsInvalid, which lists every mistake."""
        files = list(self)
        if not files or len(files) > _MAX_FILES:
            suffixes = " or ".join(_SUFFIXES)
            raise ToolsInvalid(f"{self.path}: must be a folder with 1 to {_MAX_FILES:,} files that end in {suffixes}")
        tools: list[GatewayTool] = []
        problems: list[str] = []
        for file in files:
            tools.extend(self._read(file, problems))
        if problems:
            raise ToolsInvalid("; ".join(listed(problems)))
        return _by_name(tools)

    def _read(self, file: Path, problems: list[str]) -> Iterator[GatewayTool]:
        """Yield the tools of a file; append its mistakes to `problems`."""
        try:
            text = read_regular_file(file, MAX_BYTES).decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            problems.append(f"{file}: cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}")
            return
        for source in read_sources(text):
            found = source_problems(source, self.limits, self.url_policy)
            mistakes = [problem for problem in found if not problem.warning]
            for mistake in mistakes:
                line, column = source.position(mistake.path)
                problems.append(f"{file}:{line}:{column}: {mistake.where}: {mistake.message}")
            if not mistakes and isinstance(source.document, dict):
                yield _tool(source.document)


def _tool(document: Mapping[str, JsonValue]) -> GatewayTool:
    """Return the tool of a definition."""
    built_in = parse_definition(stored_record(document)).built_in
    row = complete(document, built_in)  # the built-in tool fills what the document omits
    # With the format `object` the size of the result's state is bounded, too. A gateway needs that, as a client may
    # show a model the whole structure of a result.
    definition = replace(parse_definition(stored_record(row)), result_format="object")
    shown = defined(row, definition)
    name = mangled(shown.name)
    return GatewayTool(replace(shown, name=name, api_name=name), definition)


def _by_name(tools: list[GatewayTool]) -> Tools:
    """Return tools by name. Raises ToolsInvalid if two have the same."""
    try:
        without_duplicates(tool.shown for tool in tools)
    except DuplicateName as error:
        raise ToolsInvalid(f"{error}; rename one of them") from None
    return {tool.name: tool for tool in tools}


async def watch(folder: ToolFolder, use: Callable[[Tools], Awaitable[None]]) -> None:
    """Pass the tools to `use` whenever they have changed and are valid; invalid ones change nothing.

    No error ends this task, as no further change would take effect.
    """
    watcher: FileWatcher | None = None
    last_scan_failed = False
    while True:
        try:
            must_reload = last_scan_failed  # what has changed since is unknown
            last_scan_failed = True  # until this scan succeeds
            if watcher is None:
                watcher = await asyncio.to_thread(FileWatcher, folder)  # its first scan
            elif await asyncio.to_thread(watcher.changed):
                must_reload = True
            last_scan_failed = False
            if must_reload:
                await _reload(folder, use)
        except ToolsInvalid as invalid:
            log.error(  # noqa: TRY400 - an operator's mistake, not a defect
                "cannot reload the tools; the old ones stay in use: %s",
                invalid,
                extra={"action": "tools.reload_failed"},
            )
        except Exception:  # a defect
            log.exception("internal error in the reload of the tools", extra={"action": "tools.reload_failed"})
        await asyncio.sleep(POLL_S)


async def _reload(folder: ToolFolder, use: Callable[[Tools], Awaitable[None]]) -> None:
    tools = await asyncio.to_thread(folder.load)
    await use(tools)
    RECENT_WARNINGS.solve("tools.reload_failed")
    log.info("reloaded the tools", extra={"action": "tools.reloaded", "tools": sorted(tools)})
