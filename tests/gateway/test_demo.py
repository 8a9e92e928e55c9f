"""The demos of the doors without a kernel."""

from __future__ import annotations

import json
import os
import socket
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


_SERVE_MCP = ["-m", "openapi_tool", "demo", "--door", "mcp", "--serve"]


@requirement("mcp.eras")
async def test_a_client_of_ones_own_is_served_without_a_key(tmp_path: Path) -> None:
    (tmp_path / "docs.yaml").write_text(CUSTOM)
    arguments = [*_SERVE_MCP, "--tools", str(tmp_path)]
    server = StdioServerParameters(command=sys.executable, args=arguments, env={"PATH": os.environ["PATH"]})
    async with Client(server, read_timeout_seconds=60) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["docs__search"]
        assert "Untrusted web content" in text_of(await client.call_tool("docs__search", {"query": "hello"}))


def _serve(door: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - the interpreter
        [sys.executable, "-m", "openapi_tool", "demo", "--door", door, "--serve"],
        env={"PATH": os.environ["PATH"], **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@requirement("gateway.http")
def test_a_port_in_use_is_an_error_that_names_the_variable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = _serve("http", OPENAPI_TOOL__GATEWAY__PORT=str(port))
    where = f"openapi-tool: gateway.host, gateway.port: cannot listen on 127.0.0.1:{port}: Address already in use"
    assert refused.stderr == f"{where}; set OPENAPI_TOOL__GATEWAY__PORT, 0 for any free port\n"
    assert (refused.returncode, refused.stdout) == (2, "")


@requirement("gateway.http", "mcp.eras")
@pytest.mark.parametrize("door", ["mcp", "http"])
def test_a_wrong_setting_is_an_error_of_usage(door: str) -> None:
    refused = _serve(door, OPENAPI_TOOL__CACHE__TTL_S="long")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("openapi-tool: cache.ttl_s (OPENAPI_TOOL__CACHE__TTL_S): ")


@requirement("gateway.access")
def test_the_demo_says_how_others_may_reach_it() -> None:
    refused = _serve("http", OPENAPI_TOOL__GATEWAY__HOST="0.0.0.0", OPENAPI_TOOL__GATEWAY__PORT="0")  # noqa: S104
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1] == (
        "openapi-tool: gateway.host: without tokens anyone who reaches 0.0.0.0 could spend the key: create a token "
        "(openapi-tool tokens create --project local --file tokens.json) and name its file in gateway.tokens_file "
        "(OPENAPI_TOOL__GATEWAY__TOKENS_FILE=tokens.json), or listen on 127.0.0.1"
    )


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
