"""The pytest plugin in suites of other projects: pytest loads it wherever the package is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.requirements import requirement

WITHOUT_RESPX = """
from functools import partial
from importlib.machinery import PathFinder
def without(find, name, *more):
    return None if name == "respx" else find(name, *more)
PathFinder.find_spec = partial(without, PathFinder.find_spec)
"""
SUITE = "def test_of_another_project(jina):\n    pass\n"


def python(folder: Path, program: str) -> str:
    words = [sys.executable, "-c", program]
    done = subprocess.run(  # noqa: S603 - our own program
        words, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout + done.stderr


@requirement("testing.plugin")
def test_without_the_extra_a_fixture_is_unknown_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(SUITE)
    run = "import pytest; pytest.main(['-q', '-p', 'no:cacheprovider', {}])"
    without = run.format("'-p', 'no:respx'")  # respx has a plugin, too
    output = python(tmp_path, WITHOUT_RESPX + without)
    assert "fixture 'jina' not found" in output
    assert "ImportError" not in output
    assert "ModuleNotFoundError" not in output
    assert "1 passed" in python(tmp_path, run.format(""))


@requirement("testing.plugin")
def test_loading_the_plugin_imports_nothing_else(tmp_path: Path) -> None:
    """A suite that does not use it should not start more slowly."""
    program = (
        "import sys, pytest, importlib.util; before = set(sys.modules); import openapi_tool.pytest_plugin; "
        "print(sorted(set(sys.modules) - before))"
    )
    assert python(tmp_path, program).strip() == "['openapi_tool', 'openapi_tool.pytest_plugin']"
