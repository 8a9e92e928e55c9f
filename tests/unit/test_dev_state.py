"""State files of `dev` that are damaged or hostile: no command may crash because of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openapi_tool.local.dev_state import DevError, SeveralStacks, running_dev, running_stacks, state_path
from tests.requirements import requirement
from tests.support import each

Write = Callable[[str, Any], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes the state file of a name."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def write_one(name: str, content: Any) -> Path:
        path = state_path(name)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write_one


def address(**changes: Any) -> dict[str, Any]:
    return {"pid": os.getpid(), "pg_dsn": "postgresql://h/d", "nats_servers": "nats://h", "protocol": "v1r4"} | changes


DAMAGED = {
    "pid text": address(pid="x"),
    "pid fraction": address(pid=1.5),
    "pid null": address(pid=None),
    "pid negative": address(pid=-1),
    "pid zero": address(pid=0),
    "pid huge": address(pid=10**30),
    "folder huge": address(folder="A" * 50_000),
    "keys huge": address(keys="JINA_API_KEY" * 10_000),
    "dsn null": address(pg_dsn=None),
    "list": [],
    "empty": {},
    "nested": "[" * 60_000,
    "zeros": "\x00" * 100_000,
}


@each("name", DAMAGED)
@requirement("cli.dev")
def test_a_damaged_state_file_is_named_with_the_remedy(name: str, write: Write) -> None:
    path = write("dev", DAMAGED[name])
    with pytest.raises(DevError, match="no state file of a dev stack; delete it") as refused:
        running_dev()
    assert str(path) in str(refused.value)
    assert running_stacks() == []


@requirement("cli.dev", "errors.bounded")
def test_a_damaged_state_file_crashes_no_command_and_hides_no_other_stack(write: Write) -> None:
    write("a", address(pid="x"))
    write("two", address(pg_dsn="postgresql://u:pw@[::1:bad/x"))
    command = [sys.executable, "-m", "openapi_tool", "call", "jina_read", "--args", "{}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - the interpreter
    assert done.returncode != 0
    assert "the state of the dev stack 'two' has no usable database" in done.stderr
    assert "Traceback" not in done.stderr


@requirement("cli.dev")
def test_a_file_with_a_hostile_name_is_no_state_file(write: Write) -> None:
    for name in ("a;touch pwned", "b$(id)"):
        write(name, address())
    assert running_stacks() == []
    for number in range(30):
        write(f"dev{number}", address())
    with pytest.raises(SeveralStacks, match=r"30 dev stacks are running: dev0, .* and 20 more; name one") as refused:
        running_dev()
    assert len(str(refused.value)) < 300


@requirement("cli.dev", "errors.bounded")
def test_a_runtime_folder_whose_name_is_too_long_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/" + "A" * 5_000)
    assert len(str(state_path())) < 200
