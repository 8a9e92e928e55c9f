"""Egress filter: a request leaves only for the hosts that are listed here, and only with these headers. TLS settings.

The other modules build only allowed requests. The filter checks each of them once more, so that no defect there can
send another one.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Sequence

import certifi
import httpx

from openapi_tool.files import MAX_CERTIFICATES_BYTES, read_regular_file
from openapi_tool.jina.parameters import OUTGOING_HEADERS
from openapi_tool.tools.operations import OPERATIONS

ALLOWED_HOSTS = frozenset(operation.host for operation in OPERATIONS)
ALLOWED_HEADERS = OUTGOING_HEADERS | {
    "accept",
    "accept-encoding",
    "authorization",
    "connection",
    "content-length",
    "content-type",
    "host",
    "user-agent",
}
_ALLOWED_NAMES = frozenset(name.encode() for name in ALLOWED_HEADERS)
_HTTPS_PORT = 443
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")


class EgressRefused(Exception):
    """A request must not be sent. Some other module has a defect, as it built that request."""


class EgressTransport(httpx.AsyncBaseTransport):
    """Checks every request before `inner` sends it."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send an allowed request. Raises EgressRefused for any other."""
        check_url(request.url)
        _check_headers(request.headers.raw)
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        """Close every connection."""
        await self._inner.aclose()


def _check_headers(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise EgressRefused if a header is not allowed, or has a value that could end it and begin another one."""
    names = [name.lower() for name, _ in headers]
    if not _ALLOWED_NAMES.issuperset(names):
        unknown = [name.decode("latin-1") for name in names if name not in _ALLOWED_NAMES]
        raise EgressRefused(f"headers that are not allowed: {unknown}")
    # One Host header, as a second could name another destination.
    if names.count(b"host") != 1 or headers[names.index(b"host")][1].decode("latin-1") not in ALLOWED_HOSTS:
        raise EgressRefused("headers that are not allowed: host")
    if _CONTROL.search(b"".join([value for _, value in headers])):
        unsafe = [name.decode("latin-1").lower() for name, value in headers if _CONTROL.search(value)]
        raise EgressRefused(f"headers with a line break or another control character: {unsafe}")


def check_url(url: httpx.URL) -> None:
    """Raise EgressRefused unless `url` is https on port 443 of an allowed host, without user info."""
    if url.scheme != "https" or url.host not in ALLOWED_HOSTS or url.userinfo:
        raise EgressRefused(f"{url.scheme}://{url.host} is not an allowed destination")
    if url.port not in (None, _HTTPS_PORT):
        raise EgressRefused(f"port {url.port} is not an allowed destination")


def tls_context(extra_ca_file: str | None) -> ssl.SSLContext:
    """Return a context that trusts the bundled public roots and, if given, one more CA file (PEM).

    Raises OSError or ssl.SSLError if the file cannot be read or contains no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(certifi.where())
    if extra_ca_file:
        # Not read by OpenSSL, which would wait for ever for the end of a file such as /proc/kmsg.
        certificates = read_regular_file(extra_ca_file, MAX_CERTIFICATES_BYTES)
        try:
            context.load_verify_locations(cadata=certificates.decode("ascii", "ignore"))  # comments may have any bytes
        except ValueError as error:
            raise ssl.SSLError(str(error)) from error  # OpenSSL's ValueError for an empty text
    return context
