"""The connection to an OTLP/HTTP collector, and how this process names itself to it.

Both exporters use them: `otlp_spans.py` and `otlp_metrics.py`. The service imports these modules only if an endpoint is
configured, since the OpenTelemetry SDK takes 30 MB of memory.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import requests
from opentelemetry.sdk.resources import Resource

from openapi_tool import __version__

SCOPE = "openapi_tool"
"""Name of the instrumentation scope, OpenTelemetry's word for the library that records spans and metrics."""

_MAX_BODY_BYTES = 4_096  # of a response; a longer body is not read


class CollectorSession(requests.Session):
    """HTTP session that trusts the collector with as little as possible.

    It uses no proxy and no .netrc, reads no long body, and follows no redirect. The exporters of the SDK would take a
    redirect for a success, although nothing was stored, so it becomes an error status.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trust_env = False

    def request(self, method: str, url: str, *args: Any, **options: Any) -> requests.Response:  # type: ignore[override]
        """Send a request; return the status and headers of its response. Raises requests.RequestException."""
        options |= {"allow_redirects": False, "stream": True}
        received = super().request(method, url, *args, **options)
        without_body = requests.Response()
        without_body.status_code = received.status_code
        without_body.reason = received.reason
        without_body.headers = received.headers
        if received.is_redirect:
            without_body.status_code = HTTPStatus.MISDIRECTED_REQUEST
            without_body.reason = "the collector redirects"
        length = received.headers.get("Content-Length", "")
        if length.isdigit() and int(length) <= _MAX_BODY_BYTES:
            received.content  # noqa: B018 - read and ignore the body, so that the next export can reuse the connection
        received.close()
        return without_body


def resource(instance: str) -> Resource:
    """Return the attributes that name this process; `instance` is the replica's name, or empty."""
    attributes = {"service.name": "openapi-tool", "service.version": __version__}
    if instance:
        attributes["service.instance.id"] = instance
    return Resource.create(attributes)
