"""Reads one document from one https URL that the settings name, such as the keys of an OAuth issuer.

A client is made for that URL alone, so it can send nothing else.
"""

from __future__ import annotations

import asyncio
import ssl

import httpx

from openapi_tool.jina.egress import EgressRefused
from openapi_tool.protocol.errors import Unavailable

MAX_BYTES = 256 * 1024  # of a document; it has a few kilobytes
_TIMEOUT_S = 5.0  # for the whole document


class DocumentTransport(httpx.AsyncBaseTransport):
    """Sends only GET requests without a body for one URL."""

    def __init__(self, url: str, inner: httpx.AsyncBaseTransport) -> None:
        self._url = httpx.URL(url)
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send an allowed request. Raises EgressRefused for any other."""
        if request.method != "GET" or request.url != self._url or request.url.scheme != "https":
            raise EgressRefused(f"{request.method} {request.url.scheme}://{request.url.host} is not an allowed request")
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        """Close every connection."""
        await self._inner.aclose()


async def read_document(url: str, tls: ssl.SSLContext, proxy: str | None = None) -> bytes:
    """Return the document, within 5 s and of at most 256 KiB; redirects are not followed. Raises Unavailable."""
    transport = DocumentTransport(url, httpx.AsyncHTTPTransport(verify=tls, trust_env=False, proxy=proxy))
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    try:
        async with (
            asyncio.timeout(_TIMEOUT_S),
            httpx.AsyncClient(transport=transport, follow_redirects=False, timeout=_TIMEOUT_S) as client,
            client.stream("GET", url, headers=headers) as response,
        ):
            if response.status_code != httpx.codes.OK:
                raise Unavailable(f"{url} answers with status {response.status_code}")
            found = bytearray()
            async for part in response.aiter_raw():
                found += part
                if len(found) > MAX_BYTES:
                    raise Unavailable(f"{url} answers with more than {MAX_BYTES:,} bytes")
            return bytes(found)
    except (httpx.HTTPError, TimeoutError) as error:
        raise Unavailable(f"{url} cannot be read: {type(error).__name__}") from error
