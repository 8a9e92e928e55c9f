"""Messages about failed NATS connections and JetStream requests: what is wrong, and which setting or file to check."""

from __future__ import annotations

import asyncio
import socket
import ssl

import nats.errors
from nats.js.errors import APIError, NoStreamResponseError, ServiceUnavailableError

from openapi_tool.nats_client.options import BusOptions, NatsConnection
from openapi_tool.nats_client.setting_files import FileUnusable
from openapi_tool.open_files import OUT_OF_FILES, is_out_of_files

_CLOSED = (ConnectionResetError, BrokenPipeError, asyncio.IncompleteReadError, nats.errors.UnexpectedEOF)
_WRONG_HOST = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_WRONG_TIME = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED


class Denied(nats.errors.Error):
    """The server denies permission for `subject`."""

    def __init__(self, subject: str, remedy: str) -> None:
        super().__init__(f"permission for {subject} is denied; {remedy}")
        self.subject = subject


class ClientCertificateMissing(nats.errors.Error):
    """The server requires a client certificate and none is configured."""


class ClosedAfterHandshake(nats.errors.Error):
    """The server, which requires client certificates, closed the connection before it accepted the login.

    It does so if it refuses the certificate. Its alert, which says so, may be lost: with TLS 1.3 it follows the
    handshake, so that the login may meet a closed connection first.
    """


def is_closure(error: BaseException) -> bool:
    """Return whether an error only reports that the server closed the connection."""
    return isinstance(error, (*_CLOSED, ClosedAfterHandshake)) and _tls_error(error) is None


def cause_of(error: Exception, previous: Exception | None) -> Exception:
    """Return which of two successive errors says why the connection fails.

    A server that refuses a login or certificate says so, and then closes the socket, which is an error, too.
    """
    if previous is None or not is_closure(error):
        return error
    says_more = _tls_error(previous) is not None or _refuses_login(previous)
    return previous if says_more else error


def _refuses_login(error: Exception) -> bool:
    return type(error) is nats.errors.Error and "auth" in str(error).lower()


def _tls_error(error: BaseException) -> ssl.SSLError | None:
    """Return the error of the TLS handshake, which aiohttp (for WebSockets) wraps."""
    for cause in (error, error.__cause__, error.__context__):
        if isinstance(cause, ssl.SSLError) and hasattr(cause, "reason"):
            return cause
    return None


def describe_connection_error(error: Exception, bus: BusOptions, *, was_greeted: bool = False) -> str:
    """Return why no connection can be made, and which setting or file to check.

    `was_greeted`: an earlier attempt reached a NATS server, so that the address is right.
    """
    return f"{_at(bus.where)}: {_cause(error, bus, was_greeted=was_greeted)}"


def _at(where: str) -> str:
    return f"NATS at {where}" if where else "NATS"


def _reason(error: Exception) -> str:
    """Return the message of an error, without what nats-py puts around it."""
    return str(error).removeprefix("nats: ").strip("'\" ")


def _cause(error: Exception, bus: BusOptions, *, was_greeted: bool) -> str:
    if isinstance(error, FileUnusable):
        return _reason(error)
    if (tls := _tls_error(error)) is not None:
        return _tls_cause(tls, bus)
    if isinstance(error, ClientCertificateMissing):
        return f"the server requires a client certificate; set {bus.section}.cert_file and {bus.section}.key_file"
    if isinstance(error, ClosedAfterHandshake):
        closed = "the server closed the connection after the TLS handshake, as if it refuses the client certificate"
        return f"{closed}; check {_client_certificate(bus)}"
    if _refuses_login(error):
        return f"the login is refused ({_reason(error)}); check {_login_settings(bus)}"
    return _network_cause(error, bus, was_greeted=was_greeted)


def _network_cause(error: Exception, bus: BusOptions, *, was_greeted: bool) -> str:
    if is_out_of_files(error):
        return OUT_OF_FILES
    doubt = ";" if was_greeted else ": is it a NATS server?"
    reason = _reason(error)
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in reason:
        cause = "connection refused;"
    elif isinstance(error, socket.gaierror):
        cause = "the host's name cannot be resolved;"
    elif isinstance(error, _CLOSED):
        if was_greeted:
            return "the server closed the connection"
        cause = f"the server closed the connection before the login was accepted{doubt}"
    elif isinstance(error, TimeoutError):
        cause = f"no answer in time{doubt}"
    else:
        cause = f"{reason or type(error).__name__};"
    return f"{cause} check {bus.setting}"


def _tls_cause(error: ssl.SSLError, bus: BusOptions) -> str:
    section, options = bus.section, bus.nats
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message
        if error.verify_code in _WRONG_HOST:
            return f"the server's certificate is of another host ({why}); check {bus.setting}"
        if error.verify_code in _WRONG_TIME:
            return f"the server's certificate cannot be used now ({why}); renew it, and check the clocks"
        ca = f"check {_named(section, options, 'ca_file')}" if options.ca_file else f"set {section}.ca_file"
        return f"the server's certificate cannot be verified ({why}); {ca}"
    what = (error.reason or "").replace("_", " ").lower()
    if "CERTIFICATE" in (error.reason or "") or "UNKNOWN_CA" in (error.reason or ""):  # an alert of the server
        return f"the server refuses the client certificate ({what}); check {_client_certificate(bus)}"
    return f"the TLS handshake fails ({what}); check {bus.setting}"


def _client_certificate(bus: BusOptions) -> str:
    return " and ".join(_named(bus.section, bus.nats, name) for name in ("cert_file", "key_file"))


def _named(section: str, options: NatsConnection, name: str) -> str:
    """Return the name of a setting, with its value if there is one: `nats.ca_file (/etc/ca.pem)`."""
    value = getattr(options, name)
    return f"{section}.{name} ({value})" if value else f"{section}.{name}"


def _login_settings(bus: BusOptions) -> str:
    """Return what to check if the login is refused; a server's URL may have a login, too."""
    section, options = bus.section, bus.nats
    if options.user is not None:
        password = "password_file" if options.password_file else "password"
        names = [f"{section}.user", f"{section}.{password}"]
    else:
        ways = ("token", "token_file", "credentials_file", "nkey_seed_file")
        names = [f"{section}.{name}" for name in ways if getattr(options, name) is not None]
    if not names:
        return f"a login in {bus.setting} (sent as it is written there), or set {section}.user or another login"
    return f"{' and '.join(names)}"


_FREE = "free its disk or raise the limit"
NOT_STORED = {
    **dict.fromkeys((10002, 10023, 10047, 10077), _FREE),  # a limit of account, server (its disk) or stream
    10109: "delete the stream, which is sealed, so that it is created again",
}
"""What to do, by JetStream's error code; some have the status 400. Source: nats-server, server/errors.json."""


def describe_refusal(error: APIError) -> str:
    """Return why JetStream refused a request, and what to do if it stores nothing."""
    why = error.description or type(error).__name__
    remedy = NOT_STORED.get(error.err_code or 0)
    return f"{why}; {remedy}" if remedy else why


def describe_jetstream_error(error: Exception, where: str) -> str:
    """Return why a JetStream request to `where` failed although the connection works."""
    # Without a code: nobody responds to JetStream requests.
    if isinstance(error, NoStreamResponseError) or (isinstance(error, ServiceUnavailableError) and error.code is None):
        at = f" on {where}" if where else ""
        return f"NATS: JetStream is not enabled{at}, or not for this account: start the server with -js"
    if isinstance(error, APIError):
        return f"{_at(where)}: {describe_refusal(error)}"
    if isinstance(error, Denied):
        return f"{_at(where)}: {error}"
    return ": ".join(filter(None, (_at(where), type(error).__name__, _reason(error))))
