"""Files that settings name: anything but a regular file is refused at once, as its reading might never end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import certifi
import pytest

from openapi_tool.files import read_regular_file
from tests.requirements import requirement
from tests.support import each

LIMIT_S = 30  # for the start of an interpreter on a busy machine; the check itself takes no time
LARGE = 64 * 2**20

SOURCES = {
    "OPENAPI_TOOL_CONFIG": "OPENAPI_TOOL_CONFIG",
    "CG_CONFIG_TOML": "CG_CONFIG_TOML",
    "JINA_API_KEY_FILE": "JINA_API_KEY_FILE",
    "SSL_CERT_FILE": "SSL_CERT_FILE",
    "OPENAPI_TOOL__EGRESS__CA_FILE": "egress.ca_file",
    "OPENAPI_TOOL__NATS__CA_FILE": "nats.ca_file",
    "OPENAPI_TOOL__NATS__CREDENTIALS_FILE": "nats.credentials_file",
    "OPENAPI_TOOL__NATS__NKEY_SEED_FILE": "nats.nkey_seed_file",
    "PGSERVICEFILE": "the service file",
    "PGSSLROOTCERT": "PGSSLROOTCERT",
    "PGSSLCERT": "PGSSLCERT",
    "PGSSLKEY": "PGSSLKEY",
}
"""Variable that names a file, and how the error names the setting."""

CASES = [(variable, "pipe") for variable in SOURCES]
CASES += [
    (variable, kind)
    for variable in ("OPENAPI_TOOL_CONFIG", "JINA_API_KEY_FILE", "SSL_CERT_FILE", "PGSERVICEFILE")
    for kind in ("device", "large")
]


def started(folder: Path, variable: str, kind: str) -> subprocess.CompletedProcess[str]:
    path = folder / kind
    if kind == "pipe" and not path.exists():
        os.mkfifo(path)
    elif kind == "large" and not path.exists():
        with path.open("wb") as file:
            file.truncate(LARGE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "NATS", "OPENAPI"))}
    environment |= {
        "PG_DSN": "postgresql://u@127.0.0.1:1/x?sslmode=verify-ca&service=s",
        "NATS_SERVERS": "tls://127.0.0.1:1",
        "JINA_API_KEY": "",
        "PGSSLROOTCERT": str(folder / "ca.pem"),
        variable: "/dev/zero" if kind == "device" else str(path),
    }
    if variable == "PGSSLKEY":
        environment["PGSSLCERT"] = certifi.where()  # a regular file; the key is checked before it is used
    words = [sys.executable, "-m", "openapi_tool", "check"]
    return subprocess.run(  # noqa: S603 - our own command
        words, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@each(("variable", "kind"), CASES)
@requirement("settings.errors", "secrets.files")
def test_what_is_no_regular_file_of_a_sensible_size_is_refused_at_once_with_its_setting(
    variable: str, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    done = started(tmp_path_factory.mktemp("files"), variable, kind)
    assert done.returncode == 2, done.stderr
    assert SOURCES[variable] in done.stderr
    assert "Traceback" not in done.stderr


@requirement("settings.errors")
def test_a_regular_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"x" * 10)
    link.symlink_to(file)  # as Kubernetes mounts secrets
    assert read_regular_file(link, 10) == b"x" * 10
    with pytest.raises(OSError, match="larger than 9 bytes"):
        read_regular_file(file, 9)
    with pytest.raises(IsADirectoryError):
        read_regular_file(tmp_path, 9)
    with pytest.raises(FileNotFoundError):
        read_regular_file(tmp_path / "nowhere", 9)


@requirement("settings.errors")
def test_a_file_that_claims_to_be_regular_and_has_nothing_to_read_yet_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /proc/kmsg: a read that does not block returns nothing."""
    file = tmp_path / "kmsg"
    file.write_bytes(b"")
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(tmp_path / "fifo", os.O_WRONLY | os.O_NONBLOCK)
    regular = file.stat()
    monkeypatch.setattr("openapi_tool.files.os.open", lambda *_: reader)
    monkeypatch.setattr("openapi_tool.files.os.fstat", lambda _: regular)
    with pytest.raises(OSError, match="not a regular file"):
        read_regular_file(file, 9)
    os.close(writer)
