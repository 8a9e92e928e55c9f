"""Make clusters of PostgreSQL by copying one: `initdb` takes a second, and what it makes is always the same."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

from openapi_tool.local.servers import USER, PostgresServer, _environment


def copy_clusters(model: Path) -> None:
    """Fill the clusters of this process from the folder `model`, which the first one makes; passwords differ."""
    initialize = PostgresServer._initialize  # noqa: SLF001 - taking its place is the purpose

    def fill(self: PostgresServer, data: Path, password: Path) -> None:
        if model.exists():
            _copy(model, data)
            _set_password(self, data, password.read_text(encoding="ascii"))
        else:
            initialize(self, data, password)
            part = model.with_name(f"{model.name}-{os.getpid()}-{id(self)}")
            part.mkdir()
            _copy(data, part)
            with suppress(OSError):  # another one was first
                part.rename(model)

    PostgresServer._initialize = fill  # type: ignore[method-assign]  # noqa: SLF001 - as above


def _copy(source: Path, target: Path) -> None:
    """Copy what a folder holds, with owners and modes."""
    subprocess.run(["cp", "-a", f"{source}/.", target], check=True)  # noqa: S603, S607 - a standard program


def _set_password(server: PostgresServer, data: Path, password: str) -> None:
    """Change the password of a cluster that does not run."""
    subprocess.run(  # noqa: S603 - the server's own program
        [server._bin / "postgres", "--single", "-D", data, "-c", "fsync=off", "-j", "postgres"],  # noqa: SLF001 - its own
        input=f"alter role {USER} password '{password}';\n\n".encode(),
        stdout=subprocess.DEVNULL,
        check=True,
        env=_environment(),
        **server._identity,  # noqa: SLF001 - as above
    )
