"""Section `isolation` of the settings: the worker processes of this program (`isolation/`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as validated

from openapi_tool.options.section import Options


@validated(frozen=True)
class IsolationOptions(Options):
    """Worker processes for what a tenant can make costly, such as a large schema."""

    workers: Annotated[
        int,
        Field(
            ge=1,
            le=16,
            description="Worker processes, of at most 271 MiB each (by egress.max_response_bytes); of two, one is "
            "always left to other projects.",
        ),
    ] = 2
