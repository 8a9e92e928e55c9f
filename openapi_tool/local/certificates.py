"""Temporary CA and a certificate for the upstream's hosts; both end with the stack."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme

from openapi_tool.tools.catalogue import OPERATIONS


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files: the CA to trust, and the double's chain with its key."""

    ca: Path
    server: Path


def make_certificates(folder: Path) -> Certificates:
    """Write both files into `folder`."""
    authority = trustme.CA()
    server = authority.issue_cert(*(operation.host for operation in OPERATIONS))
    files = Certificates(folder / "ca.pem", folder / "server.pem")
    authority.cert_pem.write_to_path(str(files.ca))
    server.private_key_and_cert_chain_pem.write_to_path(str(files.server))
    files.server.chmod(0o600)
    return files
