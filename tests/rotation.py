"""A NATS server that requires client certificates, and the files of its executors, all of which can be replaced."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import nkeys
import trustme

from openapi_tool.local.servers import NatsServer, free_port
from openapi_tool.local.stack import EmbeddedStack
from tests.support import another_nats

_FILES = {
    "CA_FILE": "ca.crt",
    "CERT_FILE": "tls.crt",
    "KEY_FILE": "tls.key",
}
_CONFIG = """
include "users.conf"
tls {{ cert_file: {server}, key_file: {server}, ca_file: {clients}, verify: true }}
allow_non_tls: true
no_auth_user: kernel
"""


class Mount:
    """Folder whose files the kubelet replaces together: they are links through `..data`, which changes by a rename."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, bytes] = {}
        self._version = 0

    def replace(self, changes: Mapping[str, bytes | None]) -> None:
        """Replace files; None removes one."""
        self.files = {name: data for name, data in {**self.files, **changes}.items() if data is not None}
        self._version += 1
        version = self.folder / f"..{self._version}"
        version.mkdir(parents=True)
        for name, data in self.files.items():
            (version / name).write_bytes(data)
            link = self.folder / name
            if not link.is_symlink():
                link.symlink_to(f"..data/{name}")
        link = self.folder / "..new"
        link.symlink_to(version.name)
        link.rename(self.folder / "..data")


class GuardedNats:
    """The server, its files, and the files of executors in `mount`; the kernel needs neither TLS nor login.

    The methods `new_…` change the server's files, which it reads at its next start, and return those of executors.
    """

    def __init__(self, stack: EmbeddedStack, name: str, mount: Mount) -> None:
        self.mount = mount
        self.port = free_port()
        folder = stack.folder / name
        paths = {part: folder / f"{part}.pem" for part in ("server", "clients")}
        self._server_file, self._clients_file, self._users_file = *paths.values(), folder / "users.conf"
        self._users = {"kernel": 'user: kernel, password: "kernel"'}
        more = _CONFIG.format(**{part: json.dumps(str(path)) for part, path in paths.items()})
        self.server: NatsServer = another_nats(stack, name, more, self.port)
        mount.replace({**self.new_ca(), **self.new_client_certificate(), **self.new_nkey(), **self.new_password()})

    def settings(self, login: str) -> dict[str, str]:
        """Return the environment variables of an executor that logs in by nkey or password."""
        logins = {
            "nkey": {"NKEY_SEED_FILE": str(self.mount.folder / "user.nk")},
            "password": {"USER": "executor", "PASSWORD_FILE": str(self.mount.folder / "password")},
        }
        files = {setting: str(self.mount.folder / name) for setting, name in _FILES.items()}
        own = {f"OPENAPI_TOOL__NATS__{setting}": value for setting, value in (files | logins[login]).items()}
        return {"NATS_SERVERS": f"tls://localhost:{self.port}", **own}

    def restart(self) -> None:
        """Restart the server."""
        self.server.stop()
        self.server.start()

    def new_ca(self) -> dict[str, bytes]:
        """Give the server a certificate of a new CA."""
        authority = trustme.CA()
        certificate = authority.issue_cert("localhost")
        self._server_file.write_bytes(certificate.private_key_and_cert_chain_pem.bytes())
        return {"ca.crt": authority.cert_pem.bytes()}

    def new_client_certificate(self) -> dict[str, bytes]:
        """Make the server trust client certificates of a new CA only."""
        authority = trustme.CA()
        self._clients_file.write_bytes(authority.cert_pem.bytes())
        certificate = authority.issue_cert("executor")
        return {"tls.crt": certificate.cert_chain_pems[0].bytes(), "tls.key": certificate.private_key_pem.bytes()}

    def new_nkey(self) -> dict[str, bytes]:
        """Make the server accept a new nkey only."""
        seed = bytes(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER))
        self._accept("nkey", f"nkey: {nkeys.from_seed(bytearray(seed)).public_key.decode()}")
        return {"user.nk": seed + b"\n"}

    def new_password(self) -> dict[str, bytes]:
        """Make the server accept a new password only."""
        password = os.urandom(12).hex()
        self._accept("password", f'user: executor, password: "{password}"')
        return {"password": f"{password}\n".encode()}

    def _accept(self, login: str, user: str) -> None:
        self._users[login] = user
        users = ", ".join(f"{{ {user} }}" for user in self._users.values())
        self._users_file.write_text(f"authorization {{ users: [ {users} ] }}\n")
