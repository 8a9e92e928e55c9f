"""Process of the double, its certificate, and clients of its two ports."""

from __future__ import annotations

import json
import os
import secrets
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme

from openapi_tool.local.double import KEYS_VARIABLE
from openapi_tool.local.guard import Guard
from openapi_tool.local.server import ServerProcess
from openapi_tool.tools.catalogue import OPERATIONS

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files: the CA to trust, and the double's chain with its key."""

    ca: Path
    server: Path


def make_certificates(folder: Path) -> Certificates:
    """Write both files into `folder`: a temporary CA, and a certificate for the upstream's hosts."""
    authority = trustme.CA()
    server = authority.issue_cert(*(operation.host for operation in OPERATIONS))
    files = Certificates(folder / "ca.pem", folder / "server.pem")
    authority.cert_pem.write_to_path(str(files.ca))
    server.private_key_and_cert_chain_pem.write_to_path(str(files.server))
    files.server.chmod(0o600)
    return files


class UpstreamDouble:
    """Starts the double, sets its rules, reads the requests that it received. `keys` maps names to accepted keys."""

    def __init__(self, folder: Path, certificates: Certificates, guard: Guard, key_names: Sequence[str]) -> None:
        self._log = folder / "double.log"
        self._certificates = certificates
        self._guard = guard
        self.keys = {name: f"double-{secrets.token_hex(12)}" for name in key_names}
        self.port = 0
        self.admin_port = 0
        self.process: ServerProcess | None = None

    def start(self) -> None:
        """Start it; a restart keeps its ports. Raises ServerFailed."""
        self._log.unlink(missing_ok=True)
        command: list[str | Path] = [
            *(sys.executable, "-m", "openapi_tool.local.double"),
            *("--certificate", self._certificates.server),
            *("--port", str(self.port), "--admin-port", str(self.admin_port)),
        ]
        environment = {"PATH": os.environ.get("PATH", ""), KEYS_VARIABLE: json.dumps(self.keys)}
        self.process = ServerProcess("the Jina double", command, self._guard, self._log, environment=environment)
        self.process.start(self._is_ready)

    def _is_ready(self) -> bool:
        line = self._log.read_text(errors="replace").partition("\n")
        if not line[1] or not line[0].startswith("{"):
            return False
        ports = json.loads(line[0])
        self.port, self.admin_port = ports["port"], ports["admin_port"]
        return True

    def stop(self) -> None:
        """Stop it."""
        if self.process is not None:
            self.process.stop()

    def rules(self, *rules: Mapping[str, Any]) -> None:
        """Replace all rules (`openapi_tool.local.double.Rule`); none means: answer from recordings only."""
        self._admin("PUT", "/rules", list(rules))

    def fallbacks(self, *rules: Mapping[str, Any]) -> None:
        """Replace the rules for requests that neither a recording nor another rule answers."""
        self._admin("PUT", "/fallbacks", list(rules))

    def requests(self, at_least: int = 0) -> list[dict[str, Any]]:
        """Return received requests, oldest first, with `body` as text. Waits for `at_least`; raises TimeoutError."""
        received: list[dict[str, Any]] = self._admin("GET", f"/requests?at_least={at_least}")
        return received

    def clear_requests(self) -> None:
        """Clear the log of received requests."""
        self._admin("DELETE", "/requests")

    def _admin(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.admin_port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            return json.load(response)
