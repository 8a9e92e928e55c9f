"""Login of a NATS connection: password, token, credentials file or nkey, as fields of the message CONNECT.

A *seed* is the private key of a user; the server sends a nonce, which the client signs with it. A credentials file has
a seed, and a token (JWT) that names the user.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import nkeys

from openapi_tool.nats_client.options import NatsConnection
from openapi_tool.nats_client.setting_files import FileUnusable, SettingFiles
from openapi_tool.nats_client.tls import tls_context
from openapi_tool.tools.secret_variables import Secret

_TOKEN_HEADING = b"BEGIN NATS USER JWT"
_SEED_HEADING = b"BEGIN USER NKEY SEED"
_TOKEN = re.compile(rb"[\w-]+\.[\w-]+\.[\w-]+")  # a JWT: eyJ0….eyJq….Zx…
_SEED_FORM = "a seed begins with SU, has 58 characters with a valid checksum, and is alone on its line"


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
    files = SettingFiles(section)
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


def _credentials(files: SettingFiles, file: Path) -> tuple[bytes, bytes]:
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


def _nkey_seed(files: SettingFiles, file: Path) -> bytes:
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


def _secret_word(files: SettingFiles, name: str, in_settings: Secret | None, file: Path | None) -> str:
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
