"""The result of a call in the form in which it is committed or parked."""

from __future__ import annotations

from dataclasses import dataclass

from openapi_tool.protocol.cards import ArtifactCard
from openapi_tool.tools.result import ResultFields


@dataclass(frozen=True, slots=True)
class ResultToCommit:
    """Fields of the result card, and an artifact card with the whole text if the model is shown only a part of it.

    `was_parked` means that an earlier run made the result and paid for its requests, but could not commit it. It stored
    the result in NATS instead (`parked_results.py`).
    """

    fields: ResultFields
    artifact: ArtifactCard | None = None
    was_parked: bool = False
