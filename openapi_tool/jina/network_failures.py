"""Failures of requests that got no response which could be read: the connection failed, or what came was refused.

For each, the model gets an error. If a connection failed, the log tells the operator the cause, in plain words. Neither
quotes the exception, whose text may contain addresses.
"""

from __future__ import annotations

import logging
import socket
import ssl

import httpx

from openapi_tool.jina.failure_rules import ONCE, SOME
from openapi_tool.jina.transport import CertificateRefused, OwnResponseRefused, ResponseRefused
from openapi_tool.open_files import OUT_OF_FILES
from openapi_tool.protocol.errors import ToolError, ToolTimeout, UpstreamUnavailable

log = logging.getLogger(__name__)

_CAUSES: tuple[tuple[type[BaseException], str], ...] = (
    (socket.gaierror, "the host's name cannot be resolved"),
    (ConnectionRefusedError, "connection refused"),
    (ssl.SSLError, "the TLS handshake failed"),
    (ConnectionResetError, "the connection was reset"),
    (httpx.ConnectTimeout, "no connection in time"),
    (httpx.ReadTimeout, "no response in time"),
    (httpx.ConnectError, "no connection"),
)
"""Causes by exception. The first whose exception is in the chain of causes counts, so precise ones come first."""


def network_failure(error: httpx.TransportError, host: str) -> ToolError:
    """Return the error for the model; log why a connection to `host` failed."""
    if isinstance(error, CertificateRefused):
        return _certificate_refused(error, host)
    if isinstance(error, ResponseRefused):
        return _response_refused(error)
    return _unreachable(error, host)


def _certificate_refused(error: CertificateRefused, host: str) -> UpstreamUnavailable:
    # aiohttp's exception has that of `ssl` in `certificate_error`. `verify_message` is OpenSSL's reason without names.
    refusal = getattr(error.__cause__, "certificate_error", error.__cause__)
    reason = getattr(refusal, "verify_message", type(refusal).__name__)
    log.error(
        "cannot verify the certificate of %s: %s; check the clock, TLS-intercepting proxies and egress.ca_file",
        host,
        reason,
        extra={"action": "egress.certificate_refused", "host": host, "reason": reason},
    )
    return UpstreamUnavailable(
        "The service's certificate could not be verified, so nothing was sent; an operator must act first.",
        detail={"kind": "certificate"},
        retryable=False,
    )


def _response_refused(error: ResponseRefused) -> UpstreamUnavailable:
    return UpstreamUnavailable(
        "The service's response was refused: its headers or framing are malformed or too large; try again, ask for "
        "less or use another source.",
        detail={"kind": type(error).__name__},
        max_retries=0 if isinstance(error, OwnResponseRefused) else ONCE,
    )


def _unreachable(error: httpx.TransportError, host: str) -> UpstreamUnavailable:
    cause = network_cause(error)
    has_no_connection = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
    log.log(
        # Without a connection nothing works until somebody acts; if one broke, a retry mostly succeeds.
        logging.WARNING if has_no_connection else logging.INFO,
        "a request to %s failed: %s",
        host,
        cause,
        extra={"action": "upstream.unreachable", "host": host, "cause": cause},
    )
    return UpstreamUnavailable(
        "The service could not be reached, or the connection broke; try again in a moment.",
        detail={"kind": type(error).__name__, "cause": cause},
        max_retries=SOME,
    )


def network_cause(error: BaseException) -> str:
    """Return the cause of an httpx.TransportError in plain words, such as `connection refused`."""
    chain = _causes_of(error)
    for kind, text in _CAUSES:
        if any(isinstance(cause, kind) for cause in chain):
            return text
    return "the connection ended before the response"


def _causes_of(error: BaseException) -> list[BaseException]:
    """Return an error and what caused it, the outermost first. aiohttp has the innermost one in `os_error`."""
    chain = [error]
    while True:
        cause = chain[-1].__cause__ or getattr(chain[-1], "os_error", chain[-1].__context__)
        if cause is None or cause in chain:
            return chain
        chain.append(cause)


def no_free_file() -> ToolTimeout:
    """Return the error for a request that was not sent, because the process could open no connection in time."""
    return ToolTimeout(
        "Nothing was sent within the time of this call, because this service has too many connections open; try again "
        "later, or ask an operator to raise its limit.",
        detail={"cause": OUT_OF_FILES},
    )
