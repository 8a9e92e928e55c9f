"""TLS context and login of a NATS connection, from files that are read for each attempt to connect.

They are replaced while the service runs: cert-manager renews certificates, and operators rotate keys and passwords.
nats-py would use CA, certificates and public nkey as they were at the start, and read a credentials file without a
token forever.
"""

from __future__ import annotations

import base64
import re
import ssl
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

import nats.errors
import nkeys

from openapi_tool.files import MAX_CERTIFICATES_BYTES, MAX_SECRET_BYTES, read_regular_file
from openapi_tool.nats_client.options import NatsConnection
from openapi_tool.tools.secret_variables import Secret

T = TypeVar("T")

_TLS_SETTINGS = ("ca_file", "cert_file", "key_file")
_TOKEN_HEADING = b"BEGIN NATS USER JWT"
_SEED_HEADING = b"BEGIN USER NKEY SEED"
_TOKEN = re.compile(rb"[\w-]+\.[\w-]+\.[\w-]+")  # a JWT: eyJ0….eyJq….Zx…
_SEED_FORM = "a seed begins with SU, has 58 characters with a valid checksum, and is alone on its line"
_CERTIFICATE = "holds no certificate (PEM)"


class FileUnusable(nats.errors.Error):
    """A file cannot be used; the message contains its setting and path, never its content."""


class _Files:
    """Reads the files that the settings of a section name; errors name setting and file, as `nats.ca_file (/x.pem)`."""

    def __init__(self, section: str) -> None:
        self._section = section

    def unusable(self, name: str, file: Path, problem: str) -> FileUnusable:
        return FileUnusable(f"{self._section}.{name} ({file}): {problem}")

    def read(self, name: str, file: Path) -> bytes:
        max_bytes = MAX_CERTIFICATES_BYTES if name in _TLS_SETTINGS else MAX_SECRET_BYTES
        try:
            return read_regular_file(file, max_bytes)
        except OSError as error:
            raise self.unusable(name, file, f"cannot be read: {error.strerror}") from error


def tls_context(options: NatsConnection, section: str = "nats") -> ssl.SSLContext:
    """Return the context for a connection. Raises FileUnusable.

    Without `ca_file` it takes 20 ms, to read the public CAs.
    """
    files = _Files(section)
    if options.ca_file is None:
        context = ssl.create_default_context()
    else:
        files.read("ca_file", options.ca_file)
        context = _loaded(lambda: ssl.create_default_context(cafile=options.ca_file), files, "ca_file", options.ca_file)
    context.check_hostname = options.tls_check_hostname
    if options.cert_file is not None and options.key_file is not None:
        _load_client_certificate(context, files, options.cert_file, options.key_file)
    return context


def _loaded(load: Callable[[], T], files: _Files, name: str, file: Path) -> T:
    """Return what `load` makes of a file of certificates. Raises FileUnusable."""
    try:
        return load()
    except (ssl.SSLError, OSError) as error:
        raise files.unusable(name, file, _CERTIFICATE) from error


def _load_client_certificate(context: ssl.SSLContext, files: _Files, certificate: Path, key: Path) -> None:
    for name, file in (("cert_file", certificate), ("key_file", key)):
        files.read(name, file)
    # OpenSSL's error does not say which of the two files is broken.
    probe = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _loaded(lambda: probe.load_verify_locations(certificate), files, "cert_file", certificate)
    try:
        # For an encrypted key OpenSSL calls this function; without one it would ask on the terminal.
        context.load_cert_chain(certificate, key, lambda: "")
    except (ssl.SSLError, OSError) as error:
        mismatch = getattr(error, "reason", None) == "KEY_VALUES_MISMATCH"
        problem = f"is not the key of {certificate}" if mismatch else "holds no unencrypted private key (PEM)"
        raise files.unusable("key_file", key, problem) from error


class Login(NamedTuple):
    """Login as fields of the message CONNECT, and its secrets, which must be masked.

    Source: NATS client protocol, docs.nats.io/reference/reference-protocols/nats-protocol#connect.
    """

    fields: Mapping[str, str]
    secrets: Collection[str] = ()


def login(options: NatsConnection, nonce: str | None, section: str = "nats") -> Login:
    """Return the login, without fields if none is configured. Raises FileUnusable.

    `nonce`, from the server's greeting, is signed by the user's key; a server that uses no keys sends none.
    """
    files = _Files(section)
    if options.credentials_file is not None:
        token, seed = _credentials(files, options.credentials_file)
        fields = {"jwt": token.decode(), "sig": _signature(seed, nonce)} if nonce else {}
        return Login(fields, (token.decode(), seed.decode()))
    if options.nkey_seed_file is not None:
        seed = _nkey_seed(files, options.nkey_seed_file)
        fields = {"nkey": _public_key(seed), "sig": _signature(seed, nonce)} if nonce else {}
        return Login(fields, (seed.decode(),))
    if options.user is not None:
        password = _secret_word(files, "password", options.password, options.password_file)
        return Login({"user": options.user, "pass": password}, (password,))
    if options.token is not None or options.token_file is not None:
        auth_token = _secret_word(files, "token", options.token, options.token_file)
        return Login({"auth_token": auth_token}, (auth_token,))
    return Login({})


def file_problems(options: NatsConnection, section: str = "nats") -> Iterator[str]:
    """Yield why files of the TLS context or the login cannot be used."""
    checks: list[Callable[[], object]] = [lambda: login(options, None, section)]
    if options.requires_tls or options.cert_file is not None:
        checks.append(lambda: tls_context(options, section))
    for check in checks:
        try:
            check()
        except FileUnusable as problem:
            yield str(problem)


def _credentials(files: _Files, file: Path) -> tuple[bytes, bytes]:
    """Return token (JWT) and seed of a `.creds` file."""
    lines = files.read("credentials_file", file).split(b"\n")
    token, seed = _line_after(_TOKEN_HEADING, lines), _line_after(_SEED_HEADING, lines)
    if not _TOKEN.fullmatch(token):
        problem = f"no user token (JWT) on the line after {_TOKEN_HEADING.decode()}, alone and without blanks"
    elif not _is_seed(seed):
        problem = f"no seed of a user on the line after {_SEED_HEADING.decode()}: {_SEED_FORM}"
    else:
        return token, seed
    raise files.unusable("credentials_file", file, problem)


def _line_after(heading: bytes, lines: list[bytes]) -> bytes:
    """Return the line after the first one that contains a heading; empty if there is none."""
    for line, next_line in pairwise(lines):
        if heading in line:
            return next_line
    return b""


def _nkey_seed(files: _Files, file: Path) -> bytes:
    seed = files.read("nkey_seed_file", file).strip()
    if not _is_seed(seed):
        raise files.unusable("nkey_seed_file", file, f"holds no seed of a user: {_SEED_FORM}")
    return seed


def _is_seed(text: bytes) -> bool:
    """Return whether a text is the seed of a user's key, and its checksum is right."""
    try:
        prefix, seed = nkeys.decode_seed(text)  # does not verify the checksum, which encoding computes
        return bool(prefix == nkeys.PREFIX_BYTE_USER and nkeys.encode_seed(bytes(seed), prefix) == text)
    except (nkeys.NkeysError, ValueError):
        return False


def _public_key(seed: bytes) -> str:
    return str(nkeys.from_seed(bytearray(seed)).public_key.decode())


def _signature(seed: bytes, nonce: str) -> str:
    return base64.b64encode(nkeys.from_seed(bytearray(seed)).sign(nonce.encode())).decode()


def _secret_word(files: _Files, name: str, in_settings: Secret | None, file: Path | None) -> str:
    """Return a password or token, from its file without the white space around it."""
    if file is None:
        return in_settings.get_secret_value() if in_settings else ""
    try:
        word = files.read(f"{name}_file", file).decode().strip()
    except UnicodeDecodeError as error:
        raise files.unusable(f"{name}_file", file, "is no text in UTF-8") from error
    if not word or not word.isprintable():
        raise files.unusable(f"{name}_file", file, f"must hold the {name} in one line")
    return word
