"""What clients of an external issuer are told: the metadata of the protected resource (RFC 9728).

The resource is this gateway. The metadata are a JSON document that names the issuer, from which clients get tokens.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import orjson
from starlette.responses import Response
from starlette.types import Scope

from openapi_tool.options.oauth import OauthOptions

_WELL_KNOWN = "/.well-known/oauth-protected-resource"


class ResourceMetadata:
    """The document, its paths, and the header that names it."""

    def __init__(self, options: OauthOptions) -> None:
        resource = urlsplit(options.resource)
        path = _WELL_KNOWN + resource.path.rstrip("/")  # of the resource `https://HOST/mcp` it ends with `/mcp`
        self._paths = frozenset({_WELL_KNOWN, path})
        self._url = f"{resource.scheme}://{resource.netloc}{path}"
        self._document = orjson.dumps(
            {
                "resource": options.resource,
                "authorization_servers": [options.issuer],
                "bearer_methods_supported": ["header"],
                "resource_name": "openapi-tool",
            }
        )

    def is_requested(self, scope: Scope) -> bool:
        """Return whether a request is for the document."""
        return scope["path"] in self._paths and scope["method"] in ("GET", "HEAD")

    @property
    def response(self) -> Response:
        """The document."""
        return Response(self._document, media_type="application/json", headers={"Cache-Control": "max-age=3600"})

    def challenge(self, error: str) -> str:
        """Return the value of WWW-Authenticate, with an error code if it is not empty."""
        challenge = f'Bearer resource_metadata="{self._url}"'
        return f'{challenge}, error="{error}"' if error else challenge
