"""TLS context of a NATS connection, from the files that its settings name."""

from __future__ import annotations

import ssl
from pathlib import Path

from openapi_tool.nats_client.options import NatsConnection
from openapi_tool.nats_client.setting_files import SettingFiles

_NO_CERTIFICATE = "holds no certificate (PEM)"


def tls_context(options: NatsConnection, section: str = "nats") -> ssl.SSLContext:
    """Return the context for a connection. Raises FileUnusable.

    Without `ca_file` it takes 20 ms, to read the public CAs.
    """
    files = SettingFiles(section)
    if options.ca_file is None:
        context = ssl.create_default_context()
    else:
        files.read("ca_file", options.ca_file)  # first: OpenSSL would also read a pipe, and wait for it
        try:
            context = ssl.create_default_context(cafile=options.ca_file)
        except (ssl.SSLError, OSError) as error:
            raise files.unusable("ca_file", options.ca_file, _NO_CERTIFICATE) from error
    context.check_hostname = options.tls_check_hostname
    if options.cert_file is not None and options.key_file is not None:
        _load_client_certificate(context, files, options.cert_file, options.key_file)
    return context


def _load_client_certificate(context: ssl.SSLContext, files: SettingFiles, certificate: Path, key: Path) -> None:
    files.read("cert_file", certificate)
    files.read("key_file", key)
    # OpenSSL's error does not say which of the two files is broken, so try the certificate alone first.
    probe = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        probe.load_verify_locations(certificate)
    except (ssl.SSLError, OSError) as error:
        raise files.unusable("cert_file", certificate, _NO_CERTIFICATE) from error
    try:
        # For an encrypted key OpenSSL calls this function; without one it would ask on the terminal.
        context.load_cert_chain(certificate, key, lambda: "")
    except (ssl.SSLError, OSError) as error:
        is_other_key = getattr(error, "reason", None) == "KEY_VALUES_MISMATCH"
        problem = f"is not the key of {certificate}" if is_other_key else "holds no unencrypted private key (PEM)"
        raise files.unusable("key_file", key, problem) from error
