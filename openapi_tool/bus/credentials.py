"""Checks of credentials and nkey seed files.

nats-py reads them only when it connects. A wrong seed then ends the process, and a credentials file without a token
makes nats-py loop forever.
"""

from __future__ import annotations

import re
from pathlib import Path

import nkeys

_MAX_FILE_BYTES = 64 * 1024
_TOKEN_HEADING, _SEED_HEADING = b"BEGIN NATS USER JWT", b"BEGIN USER NKEY SEED"
_TOKEN = re.compile(rb"[\w-]+\.[\w-]+\.[\w-]+")


def credentials_problem(file: Path) -> str | None:
    """Return why a `.creds` file cannot be used, without quoting it; None if it can."""
    try:
        lines = _content(file).split(b"\n")
    except OSError as error:
        return _unreadable(error)
    if not _TOKEN.fullmatch(_line_after(_TOKEN_HEADING, lines)):
        return f"no user token (JWT) on the line after {_TOKEN_HEADING.decode()}, alone and without blanks"
    seed = _line_after(_SEED_HEADING, lines)
    return None if _is_seed(seed) else f"no seed of a user on the line after {_SEED_HEADING.decode()}: {_SEED_FORM}"


def seed_problem(file: Path) -> str | None:
    """Return why an nkey seed file cannot be used, without quoting it; None if it can."""
    try:
        seed = _content(file).strip()
    except OSError as error:
        return _unreadable(error)
    return None if _is_seed(seed) else f"holds no seed of a user: {_SEED_FORM}"


_SEED_FORM = "it begins with SU, has 58 characters, and nothing else is on its line"


def _content(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(_MAX_FILE_BYTES)


def _line_after(heading: bytes, lines: list[bytes]) -> bytes:
    at = next((number for number, line in enumerate(lines) if heading in line), len(lines))
    return lines[at + 1] if at + 1 < len(lines) else b""


def _is_seed(text: bytes) -> bool:
    """Return whether a text is a user's seed. Compares the encoding: nkeys does not verify the checksum."""
    try:
        prefix, seed = nkeys.decode_seed(text)
        return bool(prefix == nkeys.PREFIX_BYTE_USER and nkeys.encode_seed(bytes(seed), prefix) == text)
    except (nkeys.NkeysError, ValueError):
        return False


def _unreadable(error: OSError) -> str:
    return f"cannot be read: {error.strerror}"
