"""Why NATS cannot be reached or used, in words: what, where, and the remedy."""

from __future__ import annotations

import asyncio
import socket

import nats.errors
from nats.js.errors import NoStreamResponseError, ServiceUnavailableError

_SERVERS = "check nats.servers (NATS_SERVERS)"
_LOGIN = "check nats.user, nats.token or the file that holds the login"


def connection_obstacle(error: Exception, where: str) -> str:
    """Return why no connection to `where` (hosts and ports) can be made, with the setting to check."""
    return f"NATS at {where}: {_cause(error)}" if where else f"NATS: {_cause(error)}"


def _cause(error: Exception) -> str:
    told = str(error).removeprefix("nats: ").strip("'\" ")
    if "auth" in told.lower():
        return f"the login is refused ({told}); {_LOGIN}"
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in told:
        return f"connection refused; {_SERVERS}"
    if isinstance(error, socket.gaierror):
        return f"the host's name cannot be resolved; {_SERVERS}"
    if isinstance(error, TimeoutError | asyncio.TimeoutError | nats.errors.TimeoutError):
        return f"no answer in time: is it a NATS server? {_SERVERS}"
    return f"{told or type(error).__name__}; {_SERVERS}"


def use_obstacle(error: Exception, where: str) -> str:
    """Return why NATS cannot be used although it can be reached."""
    if isinstance(error, NoStreamResponseError) or (isinstance(error, ServiceUnavailableError) and error.code is None):
        at = f" on {where}" if where else ""
        return f"NATS: JetStream is not enabled{at}, or not for this account: start the server with -js"
    return f"NATS: {type(error).__name__}: {error}"
