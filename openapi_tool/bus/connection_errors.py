"""Messages about failed NATS connections, and checks of the files that nats-py reads only when it connects.

A wrong seed would then end the process, and a credentials file without a token make nats-py loop forever.
"""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path

import nats.errors
import nkeys
from nats.js.errors import NoStreamResponseError, ServiceUnavailableError

from openapi_tool.files import MAX_SECRET_BYTES, read_regular_file
from openapi_tool.open_files import OUT_OF_FILES, is_out_of_files

_CLOSED = (ConnectionResetError, BrokenPipeError, asyncio.IncompleteReadError, nats.errors.UnexpectedEOF)
_FIRST_REPEAT_S, _MAX_REPEAT_S = 5.0, 300.0


class LogBackoff:
    """Back-off for a repeated log line: the second one after 5 s, the next after 10 s, … up to 5 minutes.

    The client reconnects twice a second, so an outage of an hour would log 7,000 lines.
    """

    def __init__(self) -> None:
        self._last = ""
        self._wait_s = _FIRST_REPEAT_S
        self._next_at = 0.0

    def should_log(self, text: str, now: float) -> bool:
        """Return whether to log `text` at `now`, in seconds on the monotonic clock."""
        if text == self._last and now < self._next_at:
            return False
        # After a longer pause the same text is a new outage.
        repeated = text == self._last and now - self._next_at < _MAX_REPEAT_S
        self._wait_s = min(2 * self._wait_s, _MAX_REPEAT_S) if repeated else _FIRST_REPEAT_S
        self._last, self._next_at = text, now + self._wait_s
        return True


def cause_of(error: Exception, previous: Exception | None) -> Exception:
    """Return `previous` if that refused the login and `error` only reports that the server then closed the socket."""
    return previous if isinstance(error, _CLOSED) and previous and _refuses_login(previous) else error


def _refuses_login(error: Exception) -> bool:
    return "auth" in str(error).lower()


def describe_connection_error(error: Exception, where: str, setting: str) -> str:
    """Return why no connection to `where` (hosts and ports) can be made, and what to check in `setting`'s section."""
    return f"{_at(where)}: {_cause(error, setting)}"


def _at(where: str) -> str:
    return f"NATS at {where}" if where else "NATS"


def _reason(error: Exception) -> str:
    return str(error).removeprefix("nats: ").strip("'\" ")


def _cause(error: Exception, setting: str) -> str:
    reason = _reason(error)
    if _refuses_login(error):
        section = setting.partition(".servers (")[0]
        return (
            f"the login is refused ({reason}); check {section}.user, {section}.token, a login in {setting} (sent as it "
            "is written there), or the file that holds the login"
        )
    if is_out_of_files(error):
        return OUT_OF_FILES
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in reason:
        cause = "connection refused;"
    elif isinstance(error, socket.gaierror):
        cause = "the host's name cannot be resolved;"
    elif isinstance(error, _CLOSED):
        cause = "the server closed the connection before the login was accepted: is it a NATS server?"
    elif isinstance(error, TimeoutError):
        cause = "no answer in time: is it a NATS server?"
    else:
        cause = f"{reason or type(error).__name__};"
    return f"{cause} check {setting}"


def describe_jetstream_error(error: Exception, where: str) -> str:
    """Return why a JetStream request to `where` failed although the connection works."""
    # Without a code: nobody responds to JetStream requests.
    if isinstance(error, NoStreamResponseError) or (isinstance(error, ServiceUnavailableError) and error.code is None):
        at = f" on {where}" if where else ""
        return f"NATS: JetStream is not enabled{at}, or not for this account: start the server with -js"
    return ": ".join(filter(None, (_at(where), type(error).__name__, _reason(error))))


_TOKEN_HEADING, _SEED_HEADING = b"BEGIN NATS USER JWT", b"BEGIN USER NKEY SEED"
_TOKEN = re.compile(rb"[\w-]+\.[\w-]+\.[\w-]+")


def credentials_problem(file: Path) -> str | None:
    """Return why a `.creds` file cannot be used, without quoting it; None if it can."""
    try:
        lines = read_regular_file(file, MAX_SECRET_BYTES).split(b"\n")
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not _TOKEN.fullmatch(_line_after(_TOKEN_HEADING, lines)):
        return f"no user token (JWT) on the line after {_TOKEN_HEADING.decode()}, alone and without blanks"
    seed = _line_after(_SEED_HEADING, lines)
    return None if _is_seed(seed) else f"no seed of a user on the line after {_SEED_HEADING.decode()}: {_SEED_FORM}"


def seed_problem(file: Path) -> str | None:
    """Return why an nkey seed file cannot be used, without quoting it; None if it can."""
    try:
        seed = read_regular_file(file, MAX_SECRET_BYTES).strip()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if _is_seed(seed) else f"holds no seed of a user: {_SEED_FORM}"


_SEED_FORM = "a seed begins with SU, has 58 characters with a valid checksum, and is alone on its line"


def _line_after(heading: bytes, lines: list[bytes]) -> bytes:
    at = next((number for number, line in enumerate(lines) if heading in line), len(lines))
    return lines[at + 1] if at + 1 < len(lines) else b""


def _is_seed(text: bytes) -> bool:
    try:
        prefix, seed = nkeys.decode_seed(text)  # does not verify the checksum
        return bool(prefix == nkeys.PREFIX_BYTE_USER and nkeys.encode_seed(bytes(seed), prefix) == text)
    except (nkeys.NkeysError, ValueError):
        return False
