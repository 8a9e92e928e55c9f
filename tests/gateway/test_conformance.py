"""The official conformance suite of MCP against the HTTP door, where it is installed (`make clients`)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from openapi_tool.local.stack import UpstreamDouble
from tests.gateway.clients import script_of_node
from tests.gateway.conftest import PAGE, Serve
from tests.requirements import requirement

EXPECTED = Path(__file__).parent / "conformance.yaml"

DEFINITION = """
tool_name: {name}
target_subject: cg.v1r4.{{project_id}}.{{channel_id}}.cmd.tool.jina.read
after_execution: suspend
description: Reads one page.
parameters: {{type: object, additionalProperties: false, properties: {{}}}}
options:
  jina: {{mode: reader, auth_env: JINA_API_KEY}}
  args: {{fixed: {{url: "{url}"}}}}
  suspend_timeout_seconds: 60
"""
"""Tool without arguments, as the suite calls it."""

MODERN_SCENARIOS = (
    "caching",
    "dns-rebinding-protection",
    "http-header-validation",
    "input-required-result-ignore-extra-params",
    "server-sse-multiple-streams",
    "server-stateless",
    "tools-call-error",
    "tools-call-simple-text",
    "tools-call-with-progress",
    "tools-list",
)
"""Scenarios in the form of 2026-07-28, which so far only an early version of the suite has."""

INAPPLICABLE_CHECKS = {
    "sep-2549-prompts-list-caching-hints",  # there are no prompts and no resources
    "sep-2549-resources-list-caching-hints",
    "sep-2549-resources-templates-list-caching-hints",
    "sep-2575-server-rejects-undeclared-capability",  # no tool needs a capability of the client
    "sep-2575-missing-capability-http-400",
}


RULES: tuple[dict[str, Any], ...] = (
    {"match": "slow", "delay_s": 3.5},  # for three reports of progress
    {"match": "refused", "statuses": [422] * 10},
)


def tools(folder: Path) -> Path:
    """Return a folder with the tools that the suite calls, and that this server can offer."""
    for name, url in {
        "test_simple_text": PAGE,
        "test_tool_with_progress": f"{PAGE}?slow",
        "test_error_handling": f"{PAGE}?refused",
    }.items():
        (folder / f"{name}.yaml").write_text(DEFINITION.format(name=name, url=url))
    return folder


async def run(*command: str) -> tuple[int | None, str]:
    """Return the exit code of a command and what it prints."""
    running = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(200):
        output, _ = await running.communicate()
    return running.returncode, output.decode()


@pytest.mark.long
@requirement("gateway.mcp")
@pytest.mark.parametrize("version", ["2025-06-18", "2025-11-25"])
async def test_the_suite_passes_but_for_what_is_not_offered(
    serve: Serve, double: UpstreamDouble, tmp_path: Path, version: str
) -> None:
    suite = script_of_node("@modelcontextprotocol/conformance/dist/index.js")
    double.rules(*RULES)
    async with serve(tools=tools(tmp_path)) as served:
        address = f"{served.url}/mcp"
        code, output = await run(
            *suite, "server", "--url", address, "--spec-version", version, "--expected-failures", str(EXPECTED)
        )
    assert code == 0, output


@pytest.mark.long
@requirement("gateway.mcp")
@pytest.mark.parametrize("scenario", MODERN_SCENARIOS)
async def test_the_early_suite_of_2026_passes_but_for_what_is_not_offered(
    serve: Serve, double: UpstreamDouble, tmp_path: Path, scenario: str
) -> None:
    suite = script_of_node("conformance-2026/dist/index.js")
    double.rules(*RULES)
    async with serve(tools=tools(tmp_path)) as served:
        options = ["--url", f"{served.url}/mcp", "--scenario", scenario, "--spec-version", "2026-07-28"]
        _, output = await run(*suite, "server", *options)
    lines = [line for line in output.splitlines() if "FAILURE" in line or "SUCCESS" in line]
    assert any("SUCCESS" in line for line in lines), output
    wrong = [line for line in lines if "FAILURE" in line and not any(name in line for name in INAPPLICABLE_CHECKS)]
    assert not wrong, output
