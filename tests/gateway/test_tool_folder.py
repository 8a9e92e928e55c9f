"""The watch of a folder with definitions: no error of a scan, a parse or a client ends it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from openapi_tool.bootstrap import lint_limits
from openapi_tool.cli.kernel import NO_DATABASE
from openapi_tool.gateway import tools as gateway_tools
from openapi_tool.gateway.tools import ToolFolder, Tools, ToolsInvalid, watch
from openapi_tool.settings import Settings
from openapi_tool.telemetry.recent_warnings import RECENT_WARNINGS
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.telemetry.replica_problems import found_problems
from openapi_tool.tools.yaml_source import read_sources
from tests.gateway.test_mcp import CUSTOM
from tests.requirements import requirement
from tests.waiting import WAIT_S, until


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToolFolder:
    monkeypatch.setattr(gateway_tools, "POLL_S", 0.02)
    (tmp_path / "docs.yaml").write_text(CUSTOM)
    values: dict[str, Any] = {**NO_DATABASE}
    settings = Settings(**values)
    return ToolFolder(tmp_path, lint_limits(settings), settings.url_policy)


@asynccontextmanager
async def watched(folder: ToolFolder, use: Callable[[Tools], None]) -> AsyncIterator[None]:
    async def used(tools: Tools) -> None:
        use(tools)

    task = asyncio.create_task(watch(folder, used))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def change_until_used(folder: ToolFolder, used: list[Tools]) -> None:
    async with asyncio.timeout(WAIT_S):
        for number in count():
            if used:
                return
            (folder.path / "docs.yaml").write_text(CUSTOM.replace("docs.search", f"notes_{number}"))
            await asyncio.sleep(0.5)


def failing(times: int, error: Exception, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises an error so often, and then is the real one."""
    left = [error] * times

    def call(*arguments: Any, **named: Any) -> Any:
        if left:
            raise left.pop()
        return real(*arguments, **named)

    return call


@requirement("mcp.tools")
def test_a_mounted_config_map_has_each_tool_once(folder: ToolFolder) -> None:
    hidden = folder.path / "..2026_11_27"
    hidden.mkdir()
    (folder.path / "docs.yaml").rename(hidden / "docs.yaml")
    (folder.path / "..data").symlink_to(hidden.name)
    (folder.path / "docs.yaml").symlink_to("..data/docs.yaml")
    assert [file.name for file in folder] == ["docs.yaml"]
    assert len(folder.load()) == 1


@requirement("mcp.tools")
@pytest.mark.parametrize("moment", ["start", "later"])
async def test_a_folder_that_vanishes_during_a_scan_is_watched_on(
    folder: ToolFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    used: list[Tools] = []
    vanished = failing(3, FileNotFoundError(2, "No such file or directory", "sub"), Path.rglob)
    if moment == "start":
        monkeypatch.setattr(Path, "rglob", vanished)
    async with watched(folder, used.append):
        if moment == "later":
            await change_until_used(folder, used)
            used.clear()
            monkeypatch.setattr(Path, "rglob", vanished)
        await until(lambda: "sub: cannot be listed" in caplog.text)
        await change_until_used(folder, used)
    assert "sub: cannot be listed: No such file or directory" in caplog.text


@requirement("mcp.tools", "cli.top")
@pytest.mark.parametrize("mistake", ["in a file", "in a scan"])
async def test_top_shows_a_failed_reload_until_one_succeeds(
    folder: ToolFolder, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    """After a failed scan no file needs to change."""

    def problems(of: str) -> list[str]:
        return getattr(found_problems([{"instance": "r", "warnings": RECENT_WARNINGS.snapshot()}]), of)  # type: ignore[no-any-return]

    used: list[Tools] = []
    RECENT_WARNINGS.install(Redactor())
    try:
        async with watched(folder, used.append):
            await change_until_used(folder, used)
            used.clear()
            if mistake == "in a scan":
                monkeypatch.setattr(Path, "rglob", failing(1, FileNotFoundError(2, "gone", "sub"), Path.rglob))
            else:
                (folder.path / "docs.yaml").write_text("tool_name: [")
            await until(lambda: "tools.reload_failed" in str([*problems("now"), *problems("earlier")]))
            if mistake == "in a file":
                assert RECENT_WARNINGS.snapshot()[0]["lasts"] is True
                await change_until_used(folder, used)
            await until(lambda: problems("earlier") != [])
        assert problems("now") == []
    finally:
        logging.getLogger("openapi_tool").removeHandler(RECENT_WARNINGS)


@requirement("mcp.tools")
async def test_an_unexpected_error_of_a_parse_or_a_client_does_not_end_the_watch(
    folder: ToolFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    used: list[Tools] = []
    monkeypatch.setattr(gateway_tools, "read_sources", failing(1, ValueError("parse"), read_sources))
    async with watched(folder, failing(1, ConnectionError("client"), used.append)):
        await change_until_used(folder, used)
    errors = [record.exc_info[1] for record in caplog.records if record.levelno == logging.ERROR and record.exc_info]
    assert [str(error) for error in errors] == ["parse", "client"]


@requirement("mcp.tools")
def test_a_folder_that_cannot_be_listed_at_the_start_is_named(
    folder: ToolFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "rglob", failing(1, PermissionError(13, "Permission denied", "sub"), Path.rglob))
    with pytest.raises(ToolsInvalid, match="sub: cannot be listed: Permission denied"):
        folder.load()
