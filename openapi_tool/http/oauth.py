"""What clients of an external issuer are told: the metadata of the protected resource (RFC 9728)."""

from __future__ import annotations

from urllib.parse import urlsplit

import orjson
from starlette.responses import Response

from openapi_tool.options.oauth import OauthOptions

_WELL_KNOWN = "/.well-known/oauth-protected-resource"


class ResourceMetadata:
    """The document, its paths, and the header that names it."""

    def __init__(self, options: OauthOptions) -> None:
        parts = urlsplit(options.resource)
        path = _WELL_KNOWN + parts.path.rstrip("/")
        self.paths = frozenset({_WELL_KNOWN, path})
        self._url = f"{parts.scheme}://{parts.netloc}{path}"
        self._document = orjson.dumps(
            {
                "resource": options.resource,
                "authorization_servers": [options.issuer],
                "bearer_methods_supported": ["header"],
                "resource_name": "openapi-tool",
            }
        )

    @property
    def response(self) -> Response:
        """The document."""
        return Response(self._document, media_type="application/json", headers={"Cache-Control": "max-age=3600"})

    def challenge(self, error: str = "") -> str:
        """Return the value of WWW-Authenticate."""
        named = f', error="{error}"' if error else ""
        return f'Bearer resource_metadata="{self._url}"{named}'
