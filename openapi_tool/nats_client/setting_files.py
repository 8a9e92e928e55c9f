"""The files that the settings of a NATS connection name: certificates, keys and logins.

They are read again for each attempt to connect, as they are replaced while the service runs: cert-manager renews
certificates, and operators rotate keys and passwords. nats-py would use CA, certificates and public nkey as they were
at the start, and read a credentials file without a token forever.
"""

from __future__ import annotations

from pathlib import Path

import nats.errors

from openapi_tool.files import MAX_CERTIFICATES_BYTES, MAX_SECRET_BYTES, read_regular_file

_TLS_SETTINGS = ("ca_file", "cert_file", "key_file")


class FileUnusable(nats.errors.Error):
    """A file cannot be used; the message contains its setting and path, never its content."""


class SettingFiles:
    """Reads the files that the settings of a section name, such as `nats`."""

    def __init__(self, section: str) -> None:
        self._section = section

    def unusable(self, name: str, file: Path, problem: str) -> FileUnusable:
        """Return the error of a file that the setting `name` names: "nats.ca_file (/etc/ca.pem): PROBLEM"."""
        return FileUnusable(f"{self._section}.{name} ({file}): {problem}")

    def read(self, name: str, file: Path) -> bytes:
        """Return the content of a file that the setting `name` names. Raises FileUnusable."""
        max_bytes = MAX_CERTIFICATES_BYTES if name in _TLS_SETTINGS else MAX_SECRET_BYTES
        try:
            return read_regular_file(file, max_bytes)
        except OSError as error:
            raise self.unusable(name, file, f"cannot be read: {error.strerror}") from error
