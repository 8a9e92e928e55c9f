"""The one door to the internet: exact hosts, https, 443, headers from an allow-list, no redirects."""

from __future__ import annotations

import re
import ssl

import certifi
import httpx

from openapi_tool.jina.parameters import OUTGOING_HEADERS
from openapi_tool.tools.definition import HOSTS

ALLOWED_HOSTS = frozenset(HOSTS.values())
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
_HTTPS_PORT = 443
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")


class EgressRefused(Exception):
    """A request that this executor never sends; a defect wherever it is raised."""


class EgressTransport(httpx.AsyncBaseTransport):
    """Checks every request before the inner transport sees it; tests put their double below it."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send an allowed request. Raises EgressRefused for any other, httpx.TransportError for failures."""
        check_url(request.url)
        headers = [(name.decode("latin-1"), value) for name, value in request.headers.raw]
        unknown = [name for name, _ in headers if name.lower() not in ALLOWED_HEADERS]
        hosts = [value.decode("latin-1") for name, value in headers if name.lower() == "host"]
        if unknown or len(hosts) != 1 or hosts[0] not in ALLOWED_HOSTS:
            raise EgressRefused(f"headers that may not leave: {unknown or 'host'}")
        split = [name for name, value in headers if _CONTROL.search(value)]
        if split:
            raise EgressRefused(f"headers that hold a line break or another control character: {split}")
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        """Close the inner transport and its connections."""
        await self._inner.aclose()


def check_url(url: httpx.URL) -> None:
    """Raises EgressRefused unless `url` is https on port 443 of an allowed host, without user info."""
    if url.scheme != "https" or url.host not in ALLOWED_HOSTS or url.userinfo:
        raise EgressRefused(f"{url.scheme}://{url.host} is not an allowed destination")
    if url.port not in (None, _HTTPS_PORT):
        raise EgressRefused(f"port {url.port} is not an allowed destination")


def tls_context(extra_ca_file: str | None) -> ssl.SSLContext:
    """Verify against the bundled public roots and, where given, one more CA file (PEM).

    Raises OSError or ssl.SSLError when the file cannot be read or holds no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(certifi.where())
    if extra_ca_file:
        context.load_verify_locations(extra_ca_file)
    return context
