"""The demos of the doors without a kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mcp import Client, StdioServerParameters

from tests.gateway.test_mcp import CUSTOM, text_of
from tests.requirements import requirement


@requirement("mcp.eras", "gateway.http")
@pytest.mark.parametrize("door", ["mcp", "http"])
def test_the_demo_shows_a_search_a_batch_and_a_long_page_in_two_parts_without_a_key(door: str) -> None:
    done = subprocess.run(  # noqa: S603 - the interpreter
        [sys.executable, "-m", "openapi_tool", "demo", "--door", door, "--json"],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    calls = [json.loads(line) for line in done.stdout.splitlines()]
    assert [call["tool"] for call in calls] == ["jina_search", "jina_read_many", "jina_read", "jina_read"]
    assert "cursor" in calls[3]["arguments"]
    assert all("Untrusted web content" in call["text"] for call in calls)


_SERVE = ["-m", "openapi_tool", "demo", "--door", "mcp", "--serve"]


@requirement("mcp.eras")
async def test_a_client_of_ones_own_is_served_without_a_key(tmp_path: Path) -> None:
    (tmp_path / "docs.yaml").write_text(CUSTOM)
    arguments = [*_SERVE, "--tools", str(tmp_path)]
    server = StdioServerParameters(command=sys.executable, args=arguments, env={"PATH": os.environ["PATH"]})
    async with Client(server, read_timeout_seconds=60) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["docs__search"]
        assert "Untrusted web content" in text_of(await client.call_tool("docs__search", {"query": "hello"}))


@requirement("mcp.tools")
@pytest.mark.parametrize("door", ["mcp", "http"])
def test_an_invalid_folder_is_an_error_with_its_place(tmp_path: Path, door: str) -> None:
    (tmp_path / "docs.yaml").write_text("tool_name: 1")
    done = subprocess.run(  # noqa: S603 - the interpreter
        [sys.executable, "-m", "openapi_tool", "demo", "--door", door, "--serve", "--tools", str(tmp_path)],
        env={"PATH": os.environ["PATH"]},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert "docs.yaml" in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()
