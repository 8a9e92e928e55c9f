"""Real clients of other projects, each in an environment of its own: `make clients` installs them.

The variable CLIENTS names another folder than `.clients`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("CLIENTS", ".clients")).absolute()


def program(name: str) -> Path:
    """Return the path of a program in the folder of clients. Skips the test if it is not there."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"there is no {path}: run `make clients`, or name its folder in the variable CLIENTS")
    return path


def script_of_node(name: str) -> list[str]:
    """Return the command of a script of npm, which needs a Node.js of its own. Skips the test if it is not there."""
    return [str(program("node/node_modules/.bin/node")), str(program(f"node/node_modules/{name}"))]
