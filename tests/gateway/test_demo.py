"""The demos of the doors without a kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

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
