"""The result of a call, ready to be committed."""

from __future__ import annotations

from dataclasses import dataclass

from openapi_tool.protocol.cards import ArtifactCard
from openapi_tool.tools.result import ResultFields


@dataclass(frozen=True, slots=True)
class CallResult:
    """Fields of the result card, and the artifact card if the output was truncated."""

    fields: ResultFields
    artifact: ArtifactCard | None = None
    parked: bool = False
