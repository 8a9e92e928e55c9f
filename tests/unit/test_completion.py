"""Completion of commands in a shell."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.requirements import requirement


def _run(option: str, shell: str, home: Path) -> str:
    program = Path(sys.executable).with_name("openapi-tool")
    # The program looks at the process that started it; as the last command of `-c` it would replace the shell.
    command = [shell, "-c", f"'{program}' {option} && true"]
    environment = {"PATH": str(program.parent), "HOME": str(home)}
    done = subprocess.run(  # noqa: S603 - our own command
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@requirement("cli.help")
def test_completion_is_shown_and_installed_for_a_shell(shell: str, tmp_path: Path) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    assert "complete" in _run("--show-completion", path, tmp_path)
    assert not list(tmp_path.iterdir())
    assert shell in _run("--install-completion", path, tmp_path)
    assert any(file.is_file() and "complet" in file.read_text(encoding="utf-8") for file in tmp_path.rglob("*"))
