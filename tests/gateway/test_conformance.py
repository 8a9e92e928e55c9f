"""The official conformance suite of MCP against the HTTP door, where it is installed (`npm install -g`)."""

from __future__ import annotations

import asyncio
import re
import shutil

import pytest

from tests.gateway.conftest import Serve
from tests.requirements import requirement

SUITE = shutil.which("conformance")
"""Program of the npm package @modelcontextprotocol/conformance, which needs Node.js 22."""

APPLICABLE = ("server-initialize", "ping", "tools-list", "server-sse-multiple-streams", "dns-rebinding-protection")
"""The other scenarios call tools of a server made for the suite (`test_simple_text`, `test_image_content`, …), or need
resources, prompts, completion, logging levels, sampling or elicitation, which this server does not have."""


@requirement("gateway.mcp")
@pytest.mark.skipif(SUITE is None, reason="the program `conformance` is not in PATH")
@pytest.mark.parametrize("scenario", APPLICABLE)
async def test_the_suite_passes(serve: Serve, scenario: str) -> None:
    assert SUITE is not None
    async with serve() as served:
        running = await asyncio.create_subprocess_exec(
            SUITE, "server", "--url", f"{served.url}/mcp", "--scenario", scenario, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await running.communicate()
    assert running.returncode == 0, output.decode()
    assert re.search(rb"0 failed", output), output.decode()
